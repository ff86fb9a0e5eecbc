"""Sine-activated low-rank weights and deltas (sine_lowrank.txt, section 3.2.1 and appendix A.2.1).

    D = scale * sin(omega * up @ down) / gain                    the delta of sine-LoRA, equation (3)
    D = (m / |W + D'|) * (W + D') - W    with D' the line above   the delta of sine-DoRA; | | is detached
    y = x (W + D1 + D2 + ...)^T + bias                           one product: the merged path
    y = x (D1 + D2 + ...)^T                                      the delta alone: the second of two paths

Shapes, here and below: x (..., d_in), W (d_out, d_in), bias (d_out) or None, up (d_out, r), down (r, d_in),
magnitude m (d_out). | | is the norm of a row, over d_in. "transposed" weights (transformers' Conv1D) are stored
(d_in, d_out); those of 1x1 convolutions are (d_out, d_in, 1, 1).

Product, phase and sine are float32 or wider whatever autocast and TF32 settings say: at 30 rad a bfloat16 phase
is off by more than 0.1 rad. The sum of W and its deltas is rounded once, to W's type, and everything that uses the
sum (training, evaluation, merging) forms it by the same functions here, so that the bits agree.

Between forward and backward x is kept and nothing else; every d_out x d_in tensor is formed again. Under
torch.compile the whole forward and the whole backward are opaque ops: the compiler's partitioner would otherwise
find that both need `up @ down`, and keep it. On NVIDIA GPUs one delta is formed, rounded and differentiated by the
kernels of `triton/sine.py`, with no d_out x d_in tensor beside the sum and its gradient; several are PyTorch's.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import as_one_op, kernels, reshaped
from .sine_delta import (
    Delta,
    SineFactors,
    added,
    as_matrix,
    flatten,
    in_order,
    no_autocast,
    settings_of,
    sine_weight_reference,
    split,
    stochastic_bfloat16,
    unflatten,
    wide_dtype,
)

Weight = Tensor | Callable[[], Tensor] | None


def sine_layer_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, factors: Sequence[SineFactors], *, base: bool = True
) -> Tensor:
    """What `sine_layer` computes for a plain (d_out, d_in) weight, as differentiable formulas."""
    total = weight if base else None
    for each in factors:
        delta = each.scale * sine_weight_reference(each.up, each.down, each.omega, each.gain)
        if each.magnitude is not None:
            assert weight is not None
            direction = weight + delta
            norm = direction.detach().norm(dim=1)
            delta = (each.magnitude / norm)[:, None] * direction - weight
        total = delta if total is None else total + delta
    assert total is not None
    return F.linear(x, total.to(x.dtype), bias)


def sine_delta(weight: Tensor | None, factors: SineFactors, *, transposed: bool = False) -> Tensor:
    """The delta itself, in float32 or wider and in the weight's layout; no gradient.

    Args:
        weight: the plain weight in its own layout, of any shape; needed with a magnitude.
        factors: one delta.
        transposed: the layout is (d_in, d_out).

    Returns:
        A new tensor, shaped like the weight (a matrix without one).
    """
    with torch.no_grad(), no_autocast(factors.up):
        matrix = None if weight is None else as_matrix(weight, transposed)
        dtype = wide_dtype(factors.up, factors.down, matrix)
        omega, amplitude, _ = settings_of(factors)
        arguments = (matrix, factors.up, factors.down, factors.magnitude, omega, amplitude)
        value = Delta(*arguments, transposed=transposed, dtype=dtype).value()
        return value if weight is None else value.view(weight.shape)


def effective_weight(
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    omega: float,
    gain: float,
    scale: float = 1.0,
    *,
    magnitude: Tensor | None = None,
    transposed: bool = False,
    seed: int | None = None,
) -> Tensor:
    """The weight with one delta in it, formed in float32 and rounded once to the weight's type; no gradient."""
    factors = [SineFactors(up, down, omega, gain, scale, magnitude)]
    return effective_weights(weight, factors, transposed=transposed, seed=seed)


def effective_weights(
    weight: Tensor, factors: Sequence[SineFactors], *, transposed: bool = False, seed: int | None = None
) -> Tensor:
    """The weight with several deltas in it, added in the order given; otherwise like `effective_weight`.

    Args:
        weight: the plain weight in its own layout.
        factors: the deltas.
        transposed: the layout is (d_in, d_out).
        seed: rounds to bfloat16 up or down at random, in proportion: deltas below half a step are kept in the mean.
            None, and every other type: to nearest, the bits that training and evaluation use.
    """
    total = None
    with torch.no_grad():
        if len(factors) == 1 and (fast := _kernel(weight, *_lists(factors))) is not None:
            matrix, arguments = as_matrix(weight, transposed), [*unflatten(*_lists(factors), settings_of(factors[0]))]
            return _formed(fast, matrix, *arguments[0], weight.dtype, transposed, seed=seed)[0].view(weight.shape)
        for each in factors:
            total = added(total, sine_delta(weight, each, transposed=transposed), weight)
        if total is not None and seed is not None and weight.dtype == torch.bfloat16:
            return stochastic_bfloat16(total, seed)
        return weight.clone() if total is None else total.to(weight.dtype)


def _lists(factors: Sequence[SineFactors]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """ups, downs, magnitudes."""
    flat, settings = flatten(factors)
    return split(flat, settings)


def _kernel(
    weight: Tensor | None, ups: list[Tensor], downs: list[Tensor], magnitudes: list[Tensor], *others: Tensor
) -> ModuleType | None:
    """`triton/sine.py` where it is one delta, of a rank that it takes, and its numbers are a GPU's."""
    if len(ups) != 1 or ups[0].dtype != downs[0].dtype:
        return None
    given = [] if weight is None else [weight]
    fast = kernels("sine", *given, *ups, *downs, *magnitudes, *others)
    return fast if fast is not None and ups[0].shape[1] <= fast.RANK else None


def _formed(
    fast: ModuleType,
    matrix: Tensor | None,
    up: Tensor,
    down: Tensor,
    magnitude: Tensor | None,
    omega: float,
    amplitude: float,
    dtype: torch.dtype,
    transposed: bool,
    *,
    base: bool = True,
    seed: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The sum by the kernel, a new matrix in the weight's layout, and sine-DoRA's ratios and norms.

    Its memory is the caching allocator's: freed after the product that uses it, the next layer has the same.
    """
    shape = (down.shape[1], up.shape[0]) if transposed else (up.shape[0], down.shape[1])
    out = torch.empty(shape, dtype=dtype, device=up.device)
    plain = [each.t() if transposed and each is not None else each for each in (matrix, out)]
    return out, fast.form(plain[0], up, down, magnitude, omega, amplitude, base=base, out=plain[1], seed=seed)


def sine_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    up: Tensor,
    down: Tensor,
    omega: float,
    gain: float,
    scale: float = 1.0,
) -> Tensor:
    """`x (weight + scale * sin(omega * up @ down) / gain)^T + bias` in one product (..., d_out); see `sine_layer`."""
    return sine_layer(x, weight, bias, [SineFactors(up, down, omega, gain, scale)])


def sine_delta_linear(x: Tensor, up: Tensor, down: Tensor, omega: float, gain: float, scale: float = 1.0) -> Tensor:
    """`x (scale * sin(omega * up @ down) / gain)^T`, the delta alone (..., d_out); see `sine_layer`."""
    return sine_layer(x, None, None, [SineFactors(up, down, omega, gain, scale)], base=False)


def sine_dora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    up: Tensor,
    down: Tensor,
    magnitude: Tensor,
    omega: float,
    gain: float,
    scale: float = 1.0,
    *,
    base: bool = True,
) -> Tensor:
    """`x (m * (W + D) / |W + D|)^T + bias`, minus `x W^T` without base (..., d_out); see `sine_layer`."""
    return sine_layer(x, weight, bias, [SineFactors(up, down, omega, gain, scale, magnitude)], base=base)


def sine_layer(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    factors: Sequence[SineFactors],
    *,
    base: bool = True,
    transposed: bool = False,
    stride: tuple[int, int] | None = None,
) -> Tensor:
    """A linear map or 1x1 convolution whose weight carries sine deltas; keeps x only for backward.

    Under autocast x and the rounded sum are in the autocast type. Second derivatives are refused with a
    RuntimeError (use `sine_layer_reference`).

    Args:
        x: (..., d_in), or (N, d_in, H, W) with a stride.
        weight: plain weight in its own layout, frozen or trained. Without base it is needed for magnitudes
            only. A function that returns it (a quantized layer's dequantized, frozen weight) is called again
            in backward, so that the dequantized copy is not kept; under torch.compile it is.
        bias: (d_out) or None.
        factors: the deltas, at least one, added in this order.
        base: whether the weight itself is part of the sum (the merged path).
        transposed: the weight is (d_in, d_out).
        stride: (height, width) of a 1x1 convolution without padding and groups; None for a linear map.

    Returns:
        (..., d_out), or (N, d_out, H', W'), in x's type.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        # Cast once, out here: backward runs outside autocast.
        x = x.to(torch.get_autocast_dtype(device))
    if bias is not None:
        bias = bias.to(x.dtype)
    if not base and all(each.magnitude is None for each in factors):
        weight = None
    if callable(weight) and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        weight = weight()
    flat, settings = flatten(factors)
    how = [int(base), int(transposed), *(stride or ())]
    if torch.is_grad_enabled():
        return _SineLayer.apply(x, weight, bias, settings, tuple(how), *flat)
    run = _forward_op if as_one_op() else _forward
    assert weight is None or isinstance(weight, Tensor)
    return run(x, weight, bias, *split(flat, settings), list(settings), how)


class _SineLayer(torch.autograd.Function):
    """Saves x and the parameters; the variable rest, flat, is ups, downs, magnitudes."""

    @staticmethod
    def forward(x, weight, bias, settings, how, *flat):
        weight = weight() if callable(weight) else weight
        run = _forward_op if as_one_op() else _forward
        return run(x, weight, bias, *split(flat, settings), list(settings), list(how))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _bias, settings, how, *flat = inputs
        ctx.settings, ctx.how, ctx.source = settings, how, None
        if callable(weight):
            ctx.source, weight = weight, None
        ctx.save_for_backward(x, weight, *flat)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "second derivatives through sine_layer are not defined; use sine_layer_reference for them"
            )
        x, weight, *flat = ctx.saved_tensors
        weight = weight if ctx.source is None else ctx.source()
        needs = ctx.needs_input_grad
        wanted = [bool(need) for need in (*needs[:3], *needs[5:])]
        run = _backward_op if torch.compiler.is_compiling() else _backward
        gradients = run(dy, x, weight, *split(flat, ctx.settings), list(ctx.settings), list(ctx.how), wanted)
        dx, dweight, dbias, *others = [
            gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
        ]
        return dx, dweight, dbias, None, None, *others


def _rounded(total: Tensor, weight: Tensor | None, x: Tensor, how: Sequence[int]) -> Tensor:
    """The sum in the weight's type (so far as the weight is in it), then in x's, in the shape x meets it in."""
    if how[0]:
        assert weight is not None
        total = total.to(weight.dtype)
    return _shaped(total.to(x.dtype), how)


def _shaped(total: Tensor, how: Sequence[int]) -> Tensor:
    return total[:, :, None, None] if len(how) > 2 else total


def _sum_type(weight: Tensor | None, x: Tensor, base: bool) -> torch.dtype:
    """What the sum is rounded to first: x's type, unless a 16-bit weight's comes before it."""
    if base and weight is not None and weight.dtype != torch.float32:
        return weight.dtype
    return x.dtype


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    how: list[int],
) -> Tensor:
    """y of `sine_layer`. settings: three numbers a delta; how: base, transposed, and a convolution's stride."""
    base, transposed = bool(how[0]), bool(how[1])
    with torch.no_grad(), no_autocast(x):
        matrix = None if weight is None else as_matrix(weight, transposed)
        dtype = wide_dtype(matrix, *ups, *downs)
        total: Tensor | None = None
        deltas = unflatten(ups, downs, magnitudes, settings)
        if (fast := _kernel(weight, ups, downs, magnitudes, x)) is not None:
            total, _ = _formed(fast, matrix, *next(deltas), _sum_type(weight, x, base), transposed, base=base)
            total = _shaped(total.to(x.dtype), how)
        else:
            for each in deltas:
                delta = Delta(matrix, *each, transposed=transposed, dtype=dtype)
                total = added(total, delta.value(), matrix if base else None)
            assert total is not None
            total = _rounded(total, weight, x, how)
        if len(how) > 2:
            return F.conv2d(x, total, bias, how[2:])
        if not transposed:
            return reshaped(F.linear(x, total, bias), (*x.shape[:-1], total.shape[0]))
        x_TI = x.reshape(-1, x.shape[-1])
        # the same calls as Conv1D's own forward, for the same bits
        y_TO = torch.mm(x_TI, total) if bias is None else torch.addmm(bias, x_TI, total)
        return reshaped(y_TO, (*x.shape[:-1], total.shape[1]))


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    how: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of x, weight, bias, ups, downs, magnitudes; empty tensors where `wanted` says no."""
    base, transposed, n = bool(how[0]), bool(how[1]), len(ups)
    if (fast := _kernel(weight, ups, downs, magnitudes, x, dy)) is not None:
        return _backward_by_kernel(fast, dy, x, weight, ups, downs, magnitudes, settings, how, wanted)
    gradients: dict[int, Tensor] = {}  # by their place in `wanted`
    with torch.no_grad(), no_autocast(x):
        matrix = None if weight is None else as_matrix(weight, transposed)
        dtype = wide_dtype(matrix, *ups, *downs)
        # of the sum; tokens x d_out x d_in operations, so only where something needs it
        needs_sum = wanted[1] or any(wanted[3:])
        gradient = _sum_gradient(dy, x, how, (downs[0].shape[1], ups[0].shape[0])) if needs_sum else dy
        total: Tensor | None = None
        coefficient, dora = torch.tensor(float(base)), 3 + 2 * n
        for index, each in enumerate(unflatten(ups, downs, magnitudes, settings)):
            delta = Delta(matrix, *each, transposed=transposed, dtype=dtype)
            up, down = 3 + index, 3 + n + index
            if wanted[0]:
                value = delta.value(keep_phase=wanted[up] or wanted[down])
                total = added(total, value, matrix if base else None)
            if delta.dora is not None:
                if wanted[dora]:
                    gradients[dora] = delta.dora.magnitude_gradient(gradient)
                coefficient = coefficient + delta.rows(delta.dora.ratio - 1)
                dora += 1
            if wanted[up] or wanted[down]:
                gradients[up], gradients[down] = delta.factor_gradients(gradient)
        if weight is not None and wanted[1]:
            gradients[1] = (gradient * coefficient).view(weight.shape)
        if wanted[2]:
            gradients[2] = dy.sum((0, 2, 3)) if len(how) > 2 else dy.reshape(-1, dy.shape[-1]).sum(0)
        del gradient
        if total is not None:
            gradients[0] = _input_gradient(dy, x, _rounded(total, weight, x, how), how)
    return in_order(gradients, [x, weight, dy, *ups, *downs, *magnitudes], wanted)


def _backward_by_kernel(
    fast: ModuleType,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    how: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    """`_backward` of one delta: one d_out x d_in tensor at a time, first the sum, then its gradient."""
    base, transposed = bool(how[0]), bool(how[1])
    gradients: dict[int, Tensor] = {}
    with torch.no_grad(), no_autocast(x):
        matrix = None if weight is None else as_matrix(weight, transposed)
        (each,) = unflatten(ups, downs, magnitudes, settings)
        ratios: Tensor | None = None
        if wanted[0] or magnitudes:
            total, ratios = _formed(fast, matrix, *each, _sum_type(weight, x, base), transposed, base=base)
            if wanted[0]:
                gradients[0] = _input_gradient(dy, x, _shaped(total.to(x.dtype), how), how)
            del total
        if wanted[1] or any(wanted[3:]):
            gradient = _sum_gradient(dy, x, how, (downs[0].shape[1], ups[0].shape[0]))
            if any(wanted[3:]):
                up, down, _, omega, amplitude = each
                plain = [one.t() if transposed and one is not None else one for one in (gradient, matrix)]
                found = fast.factor_gradients(*plain, up, down, ratios, omega, amplitude)
                gradients |= {3 + index: one for index, one in enumerate(found) if one is not None}
            if weight is not None and wanted[1]:
                coefficient = float(base) if ratios is None else float(base) + (ratios[0] - 1)
                rows = coefficient if not isinstance(coefficient, Tensor) or transposed else coefficient[:, None]
                gradients[1] = (gradient * rows).view(weight.shape)
            del gradient
        if wanted[2]:
            gradients[2] = dy.sum((0, 2, 3)) if len(how) > 2 else dy.reshape(-1, dy.shape[-1]).sum(0)
    return in_order(gradients, [x, weight, dy, *ups, *downs, *magnitudes], wanted)


def _sum_gradient(dy: Tensor, x: Tensor, how: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Of the sum as a matrix in its layout, out of that of y; shape is (d_in, d_out)."""
    d_in, d_out = shape
    if len(how) > 2:
        kernel = x.new_empty(d_out, d_in, 1, 1)
        return _convolution_backward(dy, x, kernel, how, [False, True, False])[1].view(d_out, d_in)
    dy_TO, x_TI = dy.reshape(-1, d_out), x.reshape(-1, d_in)
    return x_TI.t() @ dy_TO if how[1] else dy_TO.t() @ x_TI


def _input_gradient(dy: Tensor, x: Tensor, applied: Tensor, how: Sequence[int]) -> Tensor:
    if len(how) > 2:
        return _convolution_backward(dy, x, applied, how, [True, False, False])[0]
    dy_TO = dy.reshape(-1, dy.shape[-1])
    return torch.mm(dy_TO, applied.t() if how[1] else applied).view(x.shape)


def _convolution_backward(dy: Tensor, x: Tensor, kernel: Tensor, how: Sequence[int], mask: list[bool]):
    return torch.ops.aten.convolution_backward(
        dy, x, kernel, None, list(how[2:]), [0, 0], [1, 1], False, [0, 0], 1, mask
    )


# Plain registrations, as in cosnet.py. CompositeExplicitAutograd is any device; autograd is `_SineLayer`'s.
_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_FACTORS = "Tensor[] ups, Tensor[] downs, Tensor[] magnitudes, float[] settings, int[] how"
_LIBRARY.define(f"sine_forward(Tensor x, Tensor? weight, Tensor? bias, {_FACTORS}) -> Tensor")
_LIBRARY.define(f"sine_backward(Tensor dy, Tensor x, Tensor? weight, {_FACTORS}, bool[] wanted) -> Tensor[]")
_LIBRARY.impl("sine_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("sine_backward", _backward, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.sine_forward.default
_backward_op = torch.ops.nonlinear_lowrank.sine_backward.default


@torch.library.register_fake("nonlinear_lowrank::sine_forward")
def _(x, weight, bias, ups, downs, magnitudes, settings, how):
    d_out = ups[0].shape[0]
    if len(how) > 2:
        return F.conv2d(x, x.new_empty(d_out, x.shape[1], 1, 1), None, how[2:])
    return x.new_empty(*x.shape[:-1], d_out)


@torch.library.register_fake("nonlinear_lowrank::sine_backward")
def _(dy, x, weight, ups, downs, magnitudes, settings, how, wanted):
    gradients = {}
    parameters = [x, weight, dy.new_empty(ups[0].shape[0]), *ups, *downs, *magnitudes]
    for index, (each, want) in enumerate(zip(parameters, wanted, strict=True)):
        if want and index == 0 and len(how) > 2:  # whose strides the kernel decides
            kernel = x.new_empty(ups[0].shape[0], x.shape[1], 1, 1)
            gradients[index] = _convolution_backward(dy, x, kernel, how, [True, False, False])[0]
        elif want:
            gradients[index] = each.new_empty(each.shape)
    return in_order(gradients, parameters, wanted)
