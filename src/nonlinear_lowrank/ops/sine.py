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

For backward x is saved and nothing else; every d_out x d_in tensor is formed again. Under torch.compile the whole
forward and the whole backward are opaque ops: the compiler's partitioner would otherwise find that both need
`up @ down`, and save it. On NVIDIA GPUs one delta is formed, rounded and differentiated by `methods.sine.kernel`, with
no d_out x d_in tensor beside the sum and its gradient.

Neither autograd nor ops take lists of tuples: deltas pass as a flat list of up, down, magnitude (or None) of each, and
omega and amplitude of each as another (`flatten`).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .derivatives import differentiated, formula_gradients, transformed
from .kernels import as_one_op, custom_op, fake_gradients, filled, kernels, reshaped
from .native import native
from .plain import autocast_input, wide_dtype
from .precision import formula_product, no_autocast, product

Weight = Tensor | Callable[[], Tensor] | None
Flat = Sequence[Tensor | None]


class SineFactors(NamedTuple):
    """One delta: its factors and settings."""

    up: Tensor
    down: Tensor
    omega: float
    gain: float
    scale: float = 1.0
    magnitude: Tensor | None = None
    """Given: the delta of sine-DoRA."""

    @property
    def amplitude(self) -> float:
        """Amplitude of the sine."""
        return self.scale / self.gain


def flatten(factors: Sequence[SineFactors]) -> tuple[list[Tensor | None], tuple[float, ...]]:
    """Return the tensors of deltas, and their settings, as autograd and ops take them."""
    tensors = [tensor for each in factors for tensor in (each.up, each.down, each.magnitude)]
    return tensors, tuple(float(value) for each in factors for value in (each.omega, each.amplitude))


def unflatten(flat: Sequence[Any], settings: Sequence[float]) -> list[SineFactors]:
    """Return the deltas; their scale is the amplitude, their gain 1."""
    rows = zip(flat[::3], flat[1::3], flat[2::3], settings[::2], settings[1::2], strict=True)
    return [SineFactors(up, down, omega, 1.0, amplitude, magnitude) for up, down, magnitude, omega, amplitude in rows]


def dora_norm(weight: Tensor, *, transposed: bool = False) -> Tensor:
    """Return the norms (d_out) of a plain weight's rows in float32 or wider: a magnitude that changes nothing."""
    with torch.no_grad():
        matrix = _as_matrix(weight, transposed)
        return torch.linalg.vector_norm(matrix.to(wide_dtype(matrix)), dim=0 if transposed else 1)


def sine_delta(weight: Tensor | None, factors: SineFactors, *, transposed: bool = False) -> Tensor:
    """Return the delta itself, a new tensor in float32 or wider and in the weight's layout; no gradient.

    The plain weight is in its own layout, of any shape, and needed with a magnitude.
    """
    with torch.no_grad(), no_autocast(factors.up):
        matrix = None if weight is None else _as_matrix(weight, transposed)
        value = Delta(matrix, factors, transposed=transposed, dtype=compute_type(matrix, [factors])).value()
        return value if weight is None else value.view(weight.shape)


def effective_weights(weight: Tensor, factors: Sequence[SineFactors], *, transposed: bool = False) -> Tensor:
    """Return the weight, in its own layout, with the deltas added in this order; no gradient.

    It is formed in float32 and rounded once to the weight's type.
    """
    with torch.no_grad():
        if (fast := _kernel(weight, factors)) is not None:
            matrix, layout = _as_matrix(weight, transposed), Layout(base=True, transposed=transposed)
            return _formed(fast, matrix, factors[0], weight.dtype, layout)[0].view(weight.shape)
        total = None
        for each in factors:
            total = added(total, sine_delta(weight, each, transposed=transposed), weight)
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

    Under autocast x and the rounded sum are in the autocast type.

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
    if transformed():
        plain = weight() if callable(weight) else weight
        return sine_layer_reference(x, plain, bias, factors, base=base, transposed=transposed, stride=stride)
    if callable(weight) and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        weight = weight()
    flat, settings = flatten(factors)
    run = _SineLayer.apply if torch.is_grad_enabled() else _run
    return run(x, weight, bias, settings, (int(base), int(transposed), *(stride or ())), *flat)


def sine_layer_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    factors: Sequence[SineFactors],
    *,
    base: bool = True,
    transposed: bool = False,
    stride: Sequence[int] | None = None,
) -> Tensor:
    """Return the plain formula; arguments as in `sine_layer`."""
    matrix = None if weight is None else _as_matrix(weight, transposed)
    total = sine_sum_reference(matrix.t() if matrix is not None and transposed else matrix, factors, base=base)
    total = total.to(x.dtype)
    return F.linear(x, total, bias) if stride is None else F.conv2d(x, total[:, :, None, None], bias, tuple(stride))


def sine_sum_reference(weight: Tensor | None, factors: Sequence[SineFactors], *, base: bool = True) -> Tensor:
    """Return W + D1 + D2 + ... (..., d_out, d_in) by the plain formula, in W's type; float32 or wider without it."""
    total, dtype = weight if base else None, compute_type(weight, factors)
    for each in factors:
        with no_autocast(each.up):
            phase = formula_product(each.omega * each.up.to(dtype), each.down.to(dtype))
        delta = each.amplitude * phase.sin()
        if each.magnitude is not None:
            assert weight is not None
            direction = weight + delta
            norm = direction.detach().norm(dim=-1)
            # a row of zeros stays as it is; its own quotient would make every gradient NaN
            ratio = torch.where(norm > 0, each.magnitude / torch.where(norm > 0, norm, 1.0), 1.0)
            delta = ratio[..., None] * delta + (ratio - 1)[..., None] * weight
        total = delta if total is None else total + delta
    assert total is not None
    return total.to(weight.dtype) if base and weight is not None else total


class _SineLayer(torch.autograd.Function):
    """Saves x and the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, settings: Any, layout: Any, *flat: Any) -> Any:
        ctx.settings, ctx.layout = settings, layout
        ctx.source, saved = (weight, None) if callable(weight) else (None, weight)
        ctx.save_for_backward(x, saved, *flat)
        return _run(x, weight if ctx.source is None else weight(), bias, settings, layout, *flat)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, *flat = ctx.saved_tensors
        weight = weight if ctx.source is None else ctx.source()
        wanted = [bool(need) for need in (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5:])]
        if differentiated(dy):
            dx, dweight, dbias, *others = _formula_gradients(dy, x, weight, flat, ctx.settings, ctx.layout, wanted)
            return dx, dweight, dbias, None, None, *others
        run = _backward_op if torch.compiler.is_compiling() else _backward
        found = run(dy, x, weight, flat, list(ctx.settings), list(ctx.layout), wanted)
        dx, dweight, dbias, *others = [each if want else None for each, want in zip(found, wanted, strict=True)]
        return dx, dweight, dbias, None, None, *others


def _formula_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, flat: Flat, settings: Any, layout: Any, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return what `_backward` returns, differentiable."""
    d_out, how = flat[0].shape[0], Layout(bool(layout[0]), bool(layout[1]), layout[2:])  # type: ignore[union-attr]

    def formula(x: Any, weight: Any, bias: Any, *flat: Any) -> Tensor:
        factors, stride = unflatten(flat, settings), how.stride or None
        return sine_layer_reference(x, weight, bias, factors, base=how.base, transposed=how.transposed, stride=stride)

    # Gradients do not depend on the bias, which is not saved.
    return formula_gradients(formula, [x, weight, dy.new_zeros(d_out) if wanted[2] else None, *flat], wanted, dy)


def _run(x: Any, weight: Any, bias: Any, settings: Any, layout: Any, *flat: Any) -> Tensor:
    run = _forward_op if as_one_op() else _forward
    return run(x, weight, bias, list(flat), list(settings), list(layout))


# One delta and its gradients.


class Delta:
    """One delta and what its gradients need; recreated in forward and in backward, under no_grad.

    All d_out x d_in tensors are in the weight's layout, (d_in, d_out) where transposed, and in `dtype`, float32 or
    wider. The weight is needed with a magnitude. In C++ the phase is in no tensor; elsewhere `multiply` forms it,
    (d_out, r) @ (r, d_in).
    """

    def __init__(
        self,
        weight: Tensor | None,
        factors: SineFactors,
        *,
        transposed: bool,
        dtype: torch.dtype,
        multiply: Callable[[Tensor, Tensor], Tensor] = product,
    ) -> None:
        self.up, self.down = factors.up.to(dtype), factors.down.to(dtype)
        self.omega, self.amplitude, self.transposed = factors.omega, factors.amplitude, transposed
        scaled = self.up * self.omega  # on the narrow side: one pass over the wide one less
        self.sides = (self.down.t(), scaled.t()) if transposed else (scaled, self.down)
        self.fast = native(*self.sides)
        self.phase = multiply(*self.sides) if self.fast is None else None
        self.dora = factors.magnitude is not None
        if factors.magnitude is not None:
            assert weight is not None
            self.weight, self.dim = weight, 0 if transposed else 1
            self.direction = self.sine(weight)
            self.norm = torch.linalg.vector_norm(self.direction, dim=self.dim)
            # a row of zeros (a padding token's, a pruned one) has no direction and stays as it is
            self.ratio = torch.where(self.norm > 0, factors.magnitude.to(self.norm.dtype) / self.norm, 1.0)

    def rows(self, per_row: Tensor) -> Tensor:
        """Return (d_out) so that it multiplies rows in the layout."""
        return per_row if self.transposed else per_row[:, None]

    def sine(self, base: Tensor | None) -> Tensor:
        """Return amplitude * sin(phase), plus base, a new tensor."""
        sine: Tensor = self._pass(base, None)[0]
        return sine

    def value(self) -> Tensor:
        """Return the delta, a new tensor."""
        sine = self.sine(None)
        if not self.dora:
            return sine
        # ratio * (W + D') - W, written so that ratio = 1 and D' = 0 give an exact 0
        return sine.mul_(self.rows(self.ratio)).add_(self.weight * self.rows(self.ratio - 1))

    def added(self, total: Tensor | None, base: Tensor | None) -> Tensor:
        """Return `added` of this delta, in one pass where it is the first."""
        return self.sine(base) if total is None and not self.dora else added(total, self.value(), base)

    def factor_gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of up and down, by the gradient of the weight."""
        return self._products(self._pass(None, gradient, value=False)[1])

    def sum_and_gradients(self, gradient: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `sine` and `factor_gradients` from one pass."""
        sine, slope = self._pass(base, gradient)
        return sine, *self._products(slope)

    def _pass(self, base: Tensor | None, gradient: Tensor | None, *, value: bool = True) -> tuple[Any, Any]:
        """Return amplitude * sin(phase) + base, where `value`, and gradient * cos(phase), where it is given."""
        ours = sine = slope = None
        if self.phase is None:
            if value:
                ours = base if base is not None and base.is_contiguous() and native(base) is not None else None
                sine = self.up.new_empty(self.sides[0].shape[0], self.sides[1].shape[1])
            if gradient is not None:
                gradient = gradient.to(self.up.dtype).contiguous()
                slope = torch.empty_like(gradient)
            self.fast.sine(*self.sides, self.amplitude, ours, gradient, sine, slope)
        else:
            sine = self.phase.sin().mul_(self.amplitude) if value else None
            slope = self.phase.cos().mul_(gradient) if gradient is not None else None
        return sine if sine is None or base is None or base is ours else sine.add_(base), slope

    def _products(self, dphase: Tensor) -> tuple[Tensor, Tensor]:
        """Return `factor_gradients`, by cos(phase) * gradient, which is overwritten."""
        if self.dora:
            dphase.mul_(self.rows(self.ratio))
        if self.transposed:
            dphase = dphase.t()
        chain = self.omega * self.amplitude
        return product(dphase, self.down.t()).mul_(chain), product(self.up.t(), dphase).mul_(chain)

    def magnitude_gradient(self, gradient: Tensor) -> Tensor:
        """Return that of m (d_out), by the gradient of the weight; overwrites the direction.

        The norm is a constant (DoRA, arXiv:2402.09353, section 4.3).
        """
        projection = self.direction.mul_(gradient).sum(self.dim)
        return torch.where(self.norm > 0, projection / self.norm, 0.0)


def compute_type(weight: Tensor | None, factors: Sequence[SineFactors]) -> torch.dtype:
    """Return the type in which a weight with these deltas is formed."""
    return wide_dtype(weight, *(tensor for each in factors for tensor in (each.up, each.down)))


def added(total: Tensor | None, value: Tensor, base: Tensor | None) -> Tensor:
    """Return the running sum ((base + first) + second) + ..., in the first delta's memory."""
    if total is not None:
        return total.add_(value)
    return value if base is None else value.add_(base)


def delta_gradients(
    deltas: Iterable[Delta], gradient: Tensor, base: Tensor | None, wanted: Sequence[bool], *, value: bool
) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
    """Return wanted gradients in the order of `flatten`, the slope of base and deltas by the weight, and their sum.

    The gradient is that of the sum, which is formed with `value` only.
    """
    gradients, total = list[Tensor | None](), None
    slope = torch.tensor(float(base is not None))
    rows = zip(deltas, wanted[::3], wanted[1::3], wanted[2::3], strict=True)
    for delta, up_wanted, down_wanted, magnitude_wanted in rows:
        dup = ddown = dmagnitude = None
        if value and total is None and not delta.dora and (up_wanted or down_wanted):
            total, dup, ddown = delta.sum_and_gradients(gradient, base)
            gradients += [dup, ddown, None]
            continue
        if value:
            total = delta.added(total, base)
        if magnitude_wanted:
            dmagnitude = delta.magnitude_gradient(gradient)
        if delta.dora:
            slope = slope + delta.rows(delta.ratio - 1)
        if up_wanted or down_wanted:
            dup, ddown = delta.factor_gradients(gradient)
        gradients += [dup, ddown, dmagnitude]
    return gradients, slope, total


# Forward and backward of `sine_layer`.


class Layout(NamedTuple):
    """The layout in which x meets the weight."""

    base: bool
    """True: the weight itself is part of the sum."""
    transposed: bool
    """True: the weight is (d_in, d_out)."""
    stride: Sequence[int] = ()
    """Stride of a convolution."""

    def turned(self, *matrices: Tensor | None) -> list[Any]:
        """Return matrices in this layout as (d_out, d_in)."""
        return [each.t() if self.transposed and each is not None else each for each in matrices]

    def shaped(self, matrix: Tensor) -> Tensor:
        """Return a matrix as x meets it."""
        return matrix[:, :, None, None] if self.stride else matrix


def _as_matrix(weight: Tensor, transposed: bool) -> Tensor:
    """Return a weight of any shape as (d_out, d_in), or (d_in, d_out) where transposed."""
    return weight if transposed else weight.reshape(weight.shape[0], -1)


def _kernel(weight: Tensor | None, factors: Sequence[SineFactors], *others: Tensor) -> ModuleType | None:
    """Return the kernels where it is one delta, of a rank that they take, and its numbers are a GPU's."""
    if len(factors) != 1 or factors[0].up.dtype != factors[0].down.dtype:
        return None
    given = (weight, factors[0].up, factors[0].down, factors[0].magnitude)
    fast = kernels("sine", *(each for each in given if each is not None), *others)
    return fast if fast is not None and factors[0].up.shape[1] <= fast.RANK else None


def _formed(
    fast: ModuleType, matrix: Tensor | None, factors: SineFactors, dtype: torch.dtype, layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """Return the sum by the kernel, a new matrix in the weight's layout, and sine-DoRA's ratios and norms.

    Its memory is the caching allocator's: freed after the product that uses it, the next layer has the same.
    """
    d_out, d_in = factors.up.shape[0], factors.down.shape[1]
    out = torch.empty((d_in, d_out) if layout.transposed else (d_out, d_in), dtype=dtype, device=factors.up.device)
    plain, written = layout.turned(matrix, out)
    return out, fast.form(plain, factors, base=layout.base, out=written)


def _rounded(total: Tensor, weight: Tensor | None, x: Tensor, layout: Layout) -> Tensor:
    """Return the sum in the weight's type (so far as the weight is in it), then in x's, in the shape x meets it in."""
    if layout.base:
        assert weight is not None
        total = total.to(weight.dtype)
    return layout.shaped(total.to(x.dtype))


def _sum_type(weight: Tensor | None, x: Tensor, base: bool) -> torch.dtype:
    """Return what the sum is rounded to first: x's type, unless a 16-bit weight's comes before it."""
    return weight.dtype if base and weight is not None and weight.dtype != torch.float32 else x.dtype


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, flat: Any, settings: Any, layout: Any) -> Tensor:
    factors, layout = unflatten(flat, settings), Layout(bool(layout[0]), bool(layout[1]), layout[2:])
    with torch.no_grad(), no_autocast(x):
        matrix = None if weight is None else _as_matrix(weight, layout.transposed)
        if (fast := _kernel(weight, factors, x)) is not None:
            total, _ = _formed(fast, matrix, factors[0], _sum_type(weight, x, layout.base), layout)
            total = layout.shaped(total.to(x.dtype))
        else:
            total, dtype = None, compute_type(matrix, factors)
            for each in factors:
                delta = Delta(matrix, each, transposed=layout.transposed, dtype=dtype)
                total = delta.added(total, matrix if layout.base else None)
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
    dy: Tensor, x: Tensor, weight: Tensor | None, flat: Any, settings: Any, layout: Any, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return wanted gradients of x, weight, bias and the flat tensors, each in its tensor's type."""
    factors, layout = unflatten(flat, settings), Layout(bool(layout[0]), bool(layout[1]), layout[2:])
    matrix = None if weight is None else _as_matrix(weight, layout.transposed)
    with torch.no_grad(), no_autocast(x):
        fast = _kernel(weight, factors, x, dy)
        run = _by_torch if fast is None else functools.partial(_by_kernel, fast)
        dx, dmatrix, gradients = run(dy, x, weight, matrix, factors, layout, wanted)
        dweight = None if weight is None or dmatrix is None else dmatrix.view(weight.shape).to(weight.dtype)
        dbias = None
        if wanted[2]:
            dbias = dy.sum((0, 2, 3)) if layout.stride else dy.reshape(-1, dy.shape[-1]).sum(0)
        rows = zip(gradients, flat, wanted[3:], strict=True)
        dflat = [each.to(own.dtype) if each is not None and want else None for each, own, want in rows]
        return [dx, dweight, dbias, *dflat]


def _by_torch(
    dy: Tensor, x: Tensor, weight: Tensor | None, matrix: Tensor | None, factors: Sequence[SineFactors],
    layout: Layout, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Return wanted gradients of x, of the weight as a matrix, and of the flat tensors."""
    dtype = compute_type(matrix, factors)
    # of the sum; tokens x d_out x d_in operations, so only where something needs it
    gradient = _sum_gradient(dy, x, layout, factors[0]) if wanted[1] or any(wanted[3:]) else dy
    deltas = (Delta(matrix, each, transposed=layout.transposed, dtype=dtype) for each in factors)
    base = matrix if layout.base else None
    gradients, slope, total = delta_gradients(deltas, gradient, base, wanted[3:], value=wanted[0])
    dmatrix = gradient * slope if wanted[1] else None
    del gradient
    dx = None if total is None else _input_gradient(dy, x, _rounded(total, weight, x, layout), layout)
    return dx, dmatrix, gradients


def _by_kernel(
    fast: ModuleType, dy: Tensor, x: Tensor, weight: Tensor | None, matrix: Tensor | None,
    factors: Sequence[SineFactors], layout: Layout, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Do the same for one delta: one d_out x d_in tensor at a time, first the sum, then its gradient."""
    dx = dmatrix = ratios = None
    gradients = list[Tensor | None]([None] * 3)
    if wanted[0] or factors[0].magnitude is not None:
        total, ratios = _formed(fast, matrix, factors[0], _sum_type(weight, x, layout.base), layout)
        if wanted[0]:
            dx = _input_gradient(dy, x, layout.shaped(total.to(x.dtype)), layout)
        del total
    if wanted[1] or any(wanted[3:]):
        gradient = _sum_gradient(dy, x, layout, factors[0])
        if any(wanted[3:]):
            gradients = list(fast.factor_gradients(*layout.turned(gradient, matrix), factors[0], ratios))
        if wanted[1]:
            coefficient: float | Tensor = float(layout.base)
            if ratios is not None:
                by_row = coefficient + (ratios[0] - 1)
                coefficient = by_row if layout.transposed else by_row[:, None]
            dmatrix = gradient * coefficient
    return dx, dmatrix, gradients


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
    rest = list(stride), [0, 0], [1, 1], False, [0, 0], 1, mask
    return torch.ops.aten.convolution_backward(dy, x, kernel, None, *rest)


def _backward_body(dy: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    return filled(_backward(dy, x, *rest), x)


def _fake_forward(x: Any, weight: Any, bias: Any, flat: Any, settings: Any, layout: Any) -> Any:
    d_out = flat[0].shape[0]
    if len(layout) > 2:
        return F.conv2d(x, x.new_empty(d_out, x.shape[1], 1, 1), None, layout[2:])
    return x.new_empty(*x.shape[:-1], d_out)


def _fake_backward(dy: Any, x: Any, weight: Any, flat: Any, settings: Any, layout: Any, wanted: Any) -> Any:
    d_out = flat[0].shape[0]
    found = fake_gradients([x, weight, dy.new_empty(d_out), *flat], wanted, x)
    if wanted[0] and len(layout) > 2:  # whose strides the convolution's backward decides
        kernel = x.new_empty(d_out, x.shape[1], 1, 1)
        found[0] = _convolution_backward(dy, x, kernel, layout[2:], [True, False, False])[0]
    return found


_DELTAS = "Tensor?[] flat, float[] settings, int[] layout"
_forward_op = custom_op(
    f"sine_forward(Tensor x, Tensor? weight, Tensor? bias, {_DELTAS}) -> Tensor", _forward, _fake_forward
)
_backward_op = custom_op(
    f"sine_backward(Tensor dy, Tensor x, Tensor? weight, {_DELTAS}, bool[] wanted) -> Tensor[]",
    _backward_body,
    _fake_backward,
)
