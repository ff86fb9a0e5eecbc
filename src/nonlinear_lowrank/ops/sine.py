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

For backward x is saved and nothing else; every d_out x d_in tensor is formed again. Under
torch.compile the whole forward and the whole backward are opaque ops: the compiler's partitioner would otherwise
find that both need `up @ down`, and save it. On NVIDIA GPUs one delta is formed, rounded and differentiated by the
kernels of `methods.sine.kernel`, with no d_out x d_in tensor beside the sum and its gradient; several are PyTorch's.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import as_one_op, kernels, reshaped
from .precision import autocast_input, no_autocast
from .sine_delta import (
    Delta,
    SineFactors,
    added,
    as_matrix,
    compute_type,
    delta_gradients,
    flatten,
    in_order,
    split,
    stochastic_bfloat16,
    unflatten,
)

Weight = Tensor | Callable[[], Tensor] | None


def sine_delta(weight: Tensor | None, factors: SineFactors, *, transposed: bool = False) -> Tensor:
    """Return the delta itself, a new tensor in float32 or wider and in the weight's layout; no gradient.

    Args:
        weight: the plain weight in its own layout, of any shape; needed with a magnitude.
        factors: one delta.
        transposed: the layout is (d_in, d_out).
    """
    with torch.no_grad(), no_autocast(factors.up):
        matrix = None if weight is None else as_matrix(weight, transposed)
        value = Delta(matrix, factors, transposed=transposed, dtype=compute_type(matrix, [factors])).value()
        return value if weight is None else value.view(weight.shape)


def effective_weights(
    weight: Tensor, factors: Sequence[SineFactors], *, transposed: bool = False, seed: int | None = None
) -> Tensor:
    """Return the weight with deltas in it, formed in float32 and rounded once to the weight's type; no gradient.

    Args:
        weight: the plain weight in its own layout.
        factors: the deltas, added in this order.
        transposed: the layout is (d_in, d_out).
        seed: rounds to bfloat16 up or down at random, in proportion: deltas below half a step are kept in the mean.
            None, and every other type: to nearest, the bits that training and evaluation use.
    """
    total = None
    with torch.no_grad():
        if (fast := _kernel(weight, factors)) is not None:
            layout = Layout(base=True, transposed=transposed)
            matrix = as_matrix(weight, transposed)
            return _formed(fast, matrix, factors[0], weight.dtype, layout, seed)[0].view(weight.shape)
        for each in factors:
            total = added(total, sine_delta(weight, each, transposed=transposed), weight)
        if total is not None and seed is not None and weight.dtype == torch.bfloat16:
            return stochastic_bfloat16(total, seed)
        return weight.clone() if total is None else total.to(weight.dtype)


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
    """Apply a linear map or 1x1 convolution whose weight carries sine deltas; only x is saved for backward.

    Under autocast x and the rounded sum are in the autocast type. Second derivatives are refused with a
    RuntimeError (use `methods.sine.reference`).

    Args:
        x: (..., d_in), or (N, d_in, H, W) with a stride.
        weight: plain weight in its own layout, frozen or trained. Without base it is needed for magnitudes
            only. A function that returns it (a quantized layer's dequantized, frozen weight) is called again
            in backward, so that the dequantized copy is not saved; under torch.compile it is.
        bias: (d_out) or None.
        factors: the deltas, at least one, added in this order.
        base: whether the weight itself is part of the sum (the merged path).
        transposed: the weight is (d_in, d_out).
        stride: (height, width) of a 1x1 convolution without padding and groups; None for a linear map.

    Returns:
        (..., d_out), or (N, d_out, H', W'), in x's type.
    """
    x = autocast_input(x)
    if bias is not None:
        bias = bias.to(x.dtype)
    if not base and all(each.magnitude is None for each in factors):
        weight = None
    if callable(weight) and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        weight = weight()
    flat, settings = flatten(factors)
    layout = (int(base), int(transposed), *(stride or ()))
    if torch.is_grad_enabled():
        return _SineLayer.apply(x, weight, bias, settings, layout, *flat)
    return _run(x, weight, bias, settings, layout, *flat)


class Layout(NamedTuple):
    """The layout in which x meets the weight."""

    base: bool
    """Whether the weight itself is part of the sum."""
    transposed: bool
    """Whether it is (d_in, d_out)."""
    stride: Sequence[int] = ()
    """Of a convolution."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Layout":
        """Return that of an op's numbers: base, transposed, stride."""
        return cls(bool(numbers[0]), bool(numbers[1]), numbers[2:])

    def shaped(self, matrix: Tensor) -> Tensor:
        """Return a matrix as x meets it."""
        return matrix[:, :, None, None] if self.stride else matrix


class _SineLayer(torch.autograd.Function):
    """Saves x and the parameters; the variable rest, flat, is ups, downs, magnitudes."""

    @staticmethod
    def forward(x: Any, weight: Any, bias: Any, settings: Any, layout: Any, *flat: Any) -> Any:
        return _run(x, weight() if callable(weight) else weight, bias, settings, layout, *flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        x, weight, _bias, settings, layout, *flat = inputs
        ctx.settings, ctx.layout, ctx.source = settings, layout, None
        if callable(weight):
            ctx.source, weight = weight, None
        ctx.save_for_backward(x, weight, *flat)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "second derivatives through sine_layer are not defined; use methods.sine.reference for them"
            )
        x, weight, *flat = ctx.saved_tensors
        weight = weight if ctx.source is None else ctx.source()
        needs = ctx.needs_input_grad
        wanted = [bool(need) for need in (*needs[:3], *needs[5:])]
        run = _backward_op if torch.compiler.is_compiling() else _backward_body
        gradients = run(dy, x, weight, *split(flat, ctx.settings), list(ctx.settings), list(ctx.layout), wanted)
        dx, dweight, dbias, *others = [
            gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
        ]
        return dx, dweight, dbias, None, None, *others


def _run(x: Any, weight: Any, bias: Any, settings: Any, layout: Any, *flat: Any) -> Tensor:
    run = _forward_op if as_one_op() else _forward_body
    return run(x, weight, bias, *split(flat, settings), list(settings), list(layout))


def _kernel(weight: Tensor | None, factors: Sequence[SineFactors], *others: Tensor) -> ModuleType | None:
    """Return the kernels where it is one delta, of a rank that they take, and its numbers are a GPU's."""
    if len(factors) != 1 or factors[0].up.dtype != factors[0].down.dtype:
        return None
    given = (weight, factors[0].up, factors[0].down, factors[0].magnitude)
    fast = kernels("sine", *(each for each in given if each is not None), *others)
    return fast if fast is not None and factors[0].up.shape[1] <= fast.RANK else None


def _formed(
    fast: ModuleType,
    matrix: Tensor | None,
    factors: SineFactors,
    dtype: torch.dtype,
    layout: Layout,
    seed: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum by the kernel, a new matrix in the weight's layout, and sine-DoRA's ratios and norms.

    Its memory is the caching allocator's: freed after the product that uses it, the next layer has the same.
    """
    d_out, d_in = factors.up.shape[0], factors.down.shape[1]
    out = torch.empty((d_in, d_out) if layout.transposed else (d_out, d_in), dtype=dtype, device=factors.up.device)
    plain, written = (each.t() if layout.transposed and each is not None else each for each in (matrix, out))
    return out, fast.form(plain, factors, base=layout.base, out=written, seed=seed)


def _rounded(total: Tensor, weight: Tensor | None, x: Tensor, layout: Layout) -> Tensor:
    """Return the sum in the weight's type (so far as the weight is in it), then in x's, in the shape x meets it in."""
    if layout.base:
        assert weight is not None
        total = total.to(weight.dtype)
    return layout.shaped(total.to(x.dtype))


def _sum_type(weight: Tensor | None, x: Tensor, base: bool) -> torch.dtype:
    """Return what the sum is rounded to first: x's type, unless a 16-bit weight's comes before it."""
    if base and weight is not None and weight.dtype != torch.float32:
        return weight.dtype
    return x.dtype


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, factors: Sequence[SineFactors], layout: Layout
) -> Tensor:
    with torch.no_grad(), no_autocast(x):
        matrix = None if weight is None else as_matrix(weight, layout.transposed)
        if (fast := _kernel(weight, factors, x)) is not None:
            total, _ = _formed(fast, matrix, factors[0], _sum_type(weight, x, layout.base), layout)
            total = layout.shaped(total.to(x.dtype))
        else:
            total, dtype = None, compute_type(matrix, factors)
            for each in factors:
                delta = Delta(matrix, each, transposed=layout.transposed, dtype=dtype)
                total = added(total, delta.value(), matrix if layout.base else None)
            assert total is not None
            total = _rounded(total, weight, x, layout)
        if layout.stride:
            return F.conv2d(x, total, bias, layout.stride)
        if not layout.transposed:
            return reshaped(F.linear(x, total, bias), (*x.shape[:-1], total.shape[0]))
        x_TI = x.reshape(-1, x.shape[-1])
        # the same calls as Conv1D's own forward, for the same bits
        y_TO = torch.mm(x_TI, total) if bias is None else torch.addmm(bias, x_TI, total)
        return reshaped(y_TO, (*x.shape[:-1], total.shape[1]))


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, factors: Sequence[SineFactors], layout: Layout, wanted: Sequence[bool]
) -> dict[int, Tensor]:
    """Return wanted gradients by their place among x, weight, bias, ups, downs, magnitudes."""
    matrix = None if weight is None else as_matrix(weight, layout.transposed)
    dtype = compute_type(matrix, factors)
    # of the sum; tokens x d_out x d_in operations, so only where something needs it
    gradient = _sum_gradient(dy, x, layout, factors[0]) if wanted[1] or any(wanted[3:]) else dy
    deltas = (Delta(matrix, each, transposed=layout.transposed, dtype=dtype) for each in factors)
    base = matrix if layout.base else None
    found, slope, total = delta_gradients(deltas, len(factors), gradient, base, wanted[3:], value=wanted[0])
    gradients = {3 + place: each for place, each in found.items()}
    if weight is not None and wanted[1]:
        gradients[1] = (gradient * slope).view(weight.shape)
    del gradient
    if total is not None:
        gradients[0] = _input_gradient(dy, x, _rounded(total, weight, x, layout), layout)
    return gradients


def _backward_by_kernel(
    fast: ModuleType,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    factors: SineFactors,
    layout: Layout,
    wanted: Sequence[bool],
) -> dict[int, Tensor]:
    """Run `_backward` of one delta: one d_out x d_in tensor at a time, first the sum, then its gradient."""
    gradients = dict[int, Tensor]()
    matrix = None if weight is None else as_matrix(weight, layout.transposed)
    ratios: Tensor | None = None
    if wanted[0] or factors.magnitude is not None:
        total, ratios = _formed(fast, matrix, factors, _sum_type(weight, x, layout.base), layout)
        if wanted[0]:
            gradients[0] = _input_gradient(dy, x, layout.shaped(total.to(x.dtype)), layout)
        del total
    if wanted[1] or any(wanted[3:]):
        gradient = _sum_gradient(dy, x, layout, factors)
        if any(wanted[3:]):
            plain = [one.t() if layout.transposed and one is not None else one for one in (gradient, matrix)]
            found = fast.factor_gradients(*plain, factors, ratios)
            gradients |= {3 + index: one for index, one in enumerate(found) if one is not None}
        if weight is not None and wanted[1]:
            coefficient: float | Tensor = float(layout.base)
            if ratios is not None:
                by_row = coefficient + (ratios[0] - 1)
                coefficient = by_row if layout.transposed else by_row[:, None]
            gradients[1] = (gradient * coefficient).view(weight.shape)
    return gradients


def _sum_gradient(dy: Tensor, x: Tensor, layout: Layout, factors: SineFactors) -> Tensor:
    """Return that of the sum as a matrix in its layout, by that of y."""
    d_in, d_out = factors.down.shape[1], factors.up.shape[0]
    if layout.stride:
        kernel = x.new_empty(d_out, d_in, 1, 1)
        return _convolution_backward(dy, x, kernel, layout.stride, [False, True, False])[1].view(d_out, d_in)
    dy_TO, x_TI = dy.reshape(-1, d_out), x.reshape(-1, d_in)
    return x_TI.t() @ dy_TO if layout.transposed else dy_TO.t() @ x_TI


def _input_gradient(dy: Tensor, x: Tensor, applied: Tensor, layout: Layout) -> Tensor:
    if layout.stride:
        return _convolution_backward(dy, x, applied, layout.stride, [True, False, False])[0]
    dy_TO = dy.reshape(-1, dy.shape[-1])
    return torch.mm(dy_TO, applied.t() if layout.transposed else applied).view(x.shape)


def _convolution_backward(dy: Tensor, x: Tensor, kernel: Tensor, stride: Sequence[int], mask: list[bool]) -> Any:
    return torch.ops.aten.convolution_backward(
        dy, x, kernel, None, list(stride), [0, 0], [1, 1], False, [0, 0], 1, mask
    )


# Plain registrations, since `custom_op` checks every call. CompositeExplicitAutograd is any device; autograd is
# `_SineLayer`'s.


def _forward_body(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    layout: list[int],
) -> Tensor:
    return _forward(x, weight, bias, unflatten(ups, downs, magnitudes, settings), Layout.of(layout))


def _backward_body(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    layout: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    """Return gradients of x, weight, bias, ups, downs, magnitudes; empty tensors where `wanted` says no."""
    factors, how = unflatten(ups, downs, magnitudes, settings), Layout.of(layout)
    with torch.no_grad(), no_autocast(x):
        if (fast := _kernel(weight, factors, x, dy)) is not None:
            gradients = _backward_by_kernel(fast, dy, x, weight, factors[0], how, wanted)
        else:
            gradients = _backward(dy, x, weight, factors, how, wanted)
        if wanted[2]:
            gradients[2] = dy.sum((0, 2, 3)) if how.stride else dy.reshape(-1, dy.shape[-1]).sum(0)
    return in_order(gradients, [x, weight, dy, *ups, *downs, *magnitudes], wanted)


_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_FACTORS = "Tensor[] ups, Tensor[] downs, Tensor[] magnitudes, float[] settings, int[] layout"
_LIBRARY.define(f"sine_forward(Tensor x, Tensor? weight, Tensor? bias, {_FACTORS}) -> Tensor")
_LIBRARY.define(f"sine_backward(Tensor dy, Tensor x, Tensor? weight, {_FACTORS}, bool[] wanted) -> Tensor[]")
_LIBRARY.impl("sine_forward", _forward_body, "CompositeExplicitAutograd")
_LIBRARY.impl("sine_backward", _backward_body, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.sine_forward.default
_backward_op = torch.ops.nonlinear_lowrank.sine_backward.default


@torch.library.register_fake("nonlinear_lowrank::sine_forward")
def _(x: Any, weight: Any, bias: Any, ups: Any, downs: Any, magnitudes: Any, settings: Any, layout: Any) -> Any:
    d_out = ups[0].shape[0]
    if len(layout) > 2:
        return F.conv2d(x, x.new_empty(d_out, x.shape[1], 1, 1), None, layout[2:])
    return x.new_empty(*x.shape[:-1], d_out)


@torch.library.register_fake("nonlinear_lowrank::sine_backward")
def _(
    dy: Any, x: Any, weight: Any, ups: Any, downs: Any, magnitudes: Any, settings: Any, layout: Any, wanted: Any
) -> Any:
    gradients = {}
    parameters = [x, weight, dy.new_empty(ups[0].shape[0]), *ups, *downs, *magnitudes]
    for index, (each, want) in enumerate(zip(parameters, wanted, strict=True)):
        if want and index == 0 and len(layout) > 2:  # whose strides the kernel decides
            kernel = x.new_empty(ups[0].shape[0], x.shape[1], 1, 1)
            gradients[index] = _convolution_backward(dy, x, kernel, layout[2:], [True, False, False])[0]
        elif want:
            gradients[index] = each.new_empty(each.shape)
    return in_order(gradients, parameters, wanted)
