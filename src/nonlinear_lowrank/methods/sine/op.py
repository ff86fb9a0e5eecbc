"""Linear maps and embeddings whose weight is a function of a low-rank product (sine_lowrank.txt, (2) and (3)).

    lowrank_linear    W = phi(omega * up @ down) / gain        y = x W^T + bias
    sine_embedding    y[t] = (W + D1 + D2 + ...)[indices[t]]   D as in `ops.sine`

Shapes: x (..., d_in), up (d_out, r), down (r, d_in), bias (d_out) or None, y (..., d_out); an embedding's W is
(tokens, d), its up (tokens, r), its down (r, d), and sine-DoRA's magnitude (tokens), so that one row needs no other.

| phi                 | how it is computed                                                | saved for backward   |
|---------------------|-------------------------------------------------------------------|----------------------|
| identity            | x through down, then through up; W is never formed                | x, x down^T (r wide) |
| sine, sigmoid, relu | W is formed in float32 or wider, rounded once to x's type, and    | x                    |
|                     | formed again in backward; on a GPU the sine is `ops.sine`'s       |                      |
| an embedding        | looked-up rows only; the same bits alone or merged with all       | the indices          |

No d_out x d_in tensor is saved between forward and backward, eager or compiled. The compiler's partitioner would
find that both need `up @ down`, and save it. So a linear's product is an opaque op for it, and backward's has the
output's gradient as a third argument: forward cannot have made that value. The rest is
plain formulas, which the compiler fuses (with forward and backward opaque, a small field's step took some 4 % longer).
The plain formulas are in `reference`, and run where `ops.derivatives` says.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.derivatives import differentiated, formula_gradients, transformed
from nonlinear_lowrank.ops.kernels import as_one_op, custom_op, fake_gradients, filled, reshaped
from nonlinear_lowrank.ops.plain import autocast_input, wide_dtype
from nonlinear_lowrank.ops.precision import no_autocast, product
from nonlinear_lowrank.ops.sine import Delta, SineFactors, compute_type, delta_gradients, flatten, sine_layer, unflatten

from .reference import PHI, lowrank_linear_reference, lowrank_weight, sine_embedding_reference

__all__ = [
    "WEIGHT_ACTIVATIONS",
    "embedding_delta",
    "lowrank_linear",
    "lowrank_weight",
    "sine_embedding",
]

WEIGHT_ACTIVATIONS = tuple(PHI)
"""Names of phi."""


def lowrank_linear(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    """Return `x (phi(omega * up @ down) / gain)^T + bias`: (..., d_out), in x's type; shapes in this file's docstring.

    phi is one of `WEIGHT_ACTIVATIONS`. Under autocast x and the rounded weight are in the autocast type.

    Source: sine_lowrank.txt, section 3.2.1.
    """
    if activation == "sine" and x.is_cuda:
        return sine_layer(x, None, bias, [SineFactors(up, down, omega, gain)], base=False)
    x = autocast_input(x)
    bias = None if bias is None else bias.to(x.dtype)
    if activation == "identity":
        with no_autocast(x):
            narrow = F.linear(x, down.to(x.dtype))
            return F.linear(narrow if omega == gain else narrow * (omega / gain), up.to(x.dtype), bias)
    if transformed():
        return lowrank_linear_reference(x, up, down, bias, activation, omega, gain)
    run = _LowRankLinear.apply if torch.is_grad_enabled() else _run
    return run(x, up, down, bias, activation, float(omega), float(gain))


class _LowRankLinear(torch.autograd.Function):
    """Saves x and the factors."""

    @staticmethod
    def forward(ctx: Any, x: Any, up: Any, down: Any, bias: Any, *settings: Any) -> Any:
        ctx.settings = settings
        ctx.save_for_backward(x, up, down)
        return _run(x, up, down, bias, *settings)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        wanted = [bool(need) for need in ctx.needs_input_grad[:4]]
        x, up, down = ctx.saved_tensors
        activation, omega, gain = ctx.settings
        if differentiated(dy):
            # Gradients do not depend on the bias, which is not saved.
            inputs = x, up, down, dy.new_zeros(dy.shape[-1]) if wanted[3] else None, *ctx.settings
            return tuple(formula_gradients(lowrank_linear_reference, inputs, [*wanted, *[False] * 3], dy))
        return *_backward(dy, x, up, down, activation, omega, gain, wanted), None, None, None


def _run(*inputs: Any) -> Tensor:
    run = _forward_op if as_one_op() and not torch.compiler.is_compiling() else _forward
    return run(*inputs)


def _forward(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    with torch.no_grad(), no_autocast(x):
        weight = _formed(_product(up, down, omega, None), activation, gain, x.dtype)
        return reshaped(F.linear(x, weight, bias), (*x.shape[:-1], up.shape[0]))


def _backward(
    dy: Tensor, x: Tensor, up: Tensor, down: Tensor, activation: str, omega: float, gain: float, wanted: list[bool]
) -> list[Tensor | None]:
    """Return gradients of x, up, down, bias; None where `wanted` says no."""
    dx = dup = ddown = dbias = None
    with torch.no_grad(), no_autocast(x):
        phase = _product(up, down, omega, dy)
        dy_TO, x_TI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        if wanted[0]:
            dx = (dy_TO @ _formed(phase, activation, gain, x.dtype)).view(x.shape)
        if wanted[1] or wanted[2]:
            dphase, chain = PHI[activation].slope(phase).mul_(dy_TO.t() @ x_TI), omega / gain
            dup = _product(dphase, down.t(), 1.0, None).mul_(chain).to(up.dtype)
            ddown = _product(up.t(), dphase, 1.0, None).mul_(chain).to(down.dtype)
        if wanted[3]:
            dbias = dy_TO.sum(0)
    return [each if want else None for each, want in zip((dx, dup, ddown, dbias), wanted, strict=True)]


def _formed(phase: Tensor, activation: str, gain: float, dtype: torch.dtype) -> Tensor:
    """Return the weight by its phase, rounded once."""
    return PHI[activation].value(phase).mul_(1 / gain).to(dtype)


def _product(left: Tensor, right: Tensor, scale: float, after: Tensor | None) -> Tensor:
    """Return scale * left @ right in float32 or wider; to the compiler, one op that needs `after` too.

    Nothing has a default: with dynamic shapes dynamo takes a default float for an input, and fails in backward.
    """
    run = _product_op if torch.compiler.is_compiling() else _wide_product
    return run(left, right, scale, after)


def _wide_product(left: Tensor, right: Tensor, scale: float, after: Tensor | None) -> Tensor:
    dtype = wide_dtype(left, right)
    with no_autocast(left):
        return product(left.to(dtype) if scale == 1 else left.to(dtype) * scale, right.to(dtype))


# Embeddings.


def embedding_delta(weight: Tensor, factors: SineFactors) -> Tensor:
    """Return one delta of the whole table (tokens, d) in float32 or wider; no gradient."""
    with torch.no_grad(), no_autocast(weight):
        dtype = compute_type(weight, [factors])
        return Delta(weight, factors, transposed=False, dtype=dtype, multiply=_row_product).value()


def sine_embedding(
    indices: Tensor,
    weight: Tensor,
    factors: Sequence[SineFactors],
    *,
    padding_idx: int | None = None,
    base: bool = True,
) -> Tensor:
    """Return rows of a table with sine deltas: (*indices.shape, d) in its type, formed in float32, rounded once.

    Args:
        indices: integers of any shape.
        weight: (tokens, d), frozen or trained.
        factors: the deltas, at least one, added in this order.
        padding_idx: a token that gives no gradient, as in nn.Embedding.
        base: whether the table's own rows are part of the sum.
    """
    if transformed():
        return sine_embedding_reference(indices, weight, factors, padding_idx=padding_idx, base=base)
    flat, settings = flatten(factors)
    run = _SineEmbedding.apply if torch.is_grad_enabled() else _run_rows
    return run(indices, weight, settings, padding_idx, base, *flat)


class _SineEmbedding(torch.autograd.Function):
    """Saves indices and the parameters."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        indices, weight, ctx.settings, ctx.padding_idx, ctx.base, *flat = inputs
        ctx.save_for_backward(indices, weight, *flat)
        return _run_rows(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        indices, weight, *flat = ctx.saved_tensors
        wanted = [bool(need) for need in (ctx.needs_input_grad[1], *ctx.needs_input_grad[5:])]
        if differentiated(dy):
            settings, padding_idx, base = ctx.settings, ctx.padding_idx, ctx.base

            def formula(weight: Any, *flat: Any) -> Tensor:
                factors = unflatten(flat, settings)
                return sine_embedding_reference(indices, weight, factors, padding_idx=padding_idx, base=base)

            dweight, *others = formula_gradients(formula, [weight, *flat], wanted, dy)
            return None, dweight, None, None, None, *others
        run = _rows_backward_op if torch.compiler.is_compiling() else _rows_backward
        found = run(dy, indices, weight, flat, list(ctx.settings), ctx.padding_idx, ctx.base, wanted)
        dweight, *others = [each if want else None for each, want in zip(found, wanted, strict=True)]
        return None, dweight, None, None, None, *others


def _run_rows(indices: Any, weight: Any, settings: Any, _padding_idx: Any, base: Any, *flat: Any) -> Tensor:
    run = _rows_forward_op if as_one_op() else _rows_forward
    return run(indices, weight, list(flat), list(settings), base)


def _row_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, each element summed in the same order however many rows there are."""
    total = left[:, :1] * right[:1]
    for k in range(1, left.shape[1]):
        total.addcmul_(left[:, k : k + 1], right[k : k + 1])
    return total


def _row_deltas(rows: Tensor, weight: Tensor, weight_rows: Tensor, factors: Sequence[SineFactors]) -> Iterator[Delta]:
    """Yield the deltas of the rows alone."""
    dtype = compute_type(weight, factors)
    for each in factors:
        magnitude = None if each.magnitude is None else each.magnitude[rows]
        chosen = each._replace(up=each.up[rows], magnitude=magnitude)
        yield Delta(weight_rows, chosen, transposed=False, dtype=dtype, multiply=_row_product)


def _rows_forward(indices: Tensor, weight: Tensor, flat: Any, settings: Any, base: bool) -> Tensor:
    rows, factors = indices.reshape(-1), unflatten(flat, settings)
    with torch.no_grad(), no_autocast(weight):
        weight_rows = F.embedding(rows, weight)  # raises on indices out of range, as nn.Embedding does
        total: Tensor | None = None
        for delta in _row_deltas(rows, weight, weight_rows, factors):
            total = delta.added(total, weight_rows if base else None)
        assert total is not None
        return reshaped(total.to(weight.dtype), (*indices.shape, weight.shape[1]))


def _rows_backward(
    dy: Tensor, indices: Tensor, weight: Tensor, flat: Any, settings: Any, padding_idx: int | None, base: bool,
    wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return wanted gradients of the weight and the flat tensors."""
    rows, factors = indices.reshape(-1), unflatten(flat, settings)
    with torch.no_grad(), no_autocast(weight):
        gradient = dy.reshape(-1, dy.shape[-1]).to(compute_type(weight, factors))
        if padding_idx is not None:
            gradient = gradient.masked_fill((rows == padding_idx)[:, None], 0)
        weight_rows = F.embedding(rows, weight)
        deltas, base_rows = _row_deltas(rows, weight, weight_rows, factors), weight_rows if base else None
        found, slope, _ = delta_gradients(deltas, gradient, base_rows, wanted[1:], value=False)
        gradients = [gradient * slope if wanted[0] else None, *found]
        for place, (each, parameter) in enumerate(zip(gradients, (weight, *flat), strict=True)):
            if each is None or not wanted[place]:
                gradients[place] = None
                continue
            if place % 3 != 2:  # a down factor is whole; of the others these are sums by row
                each = torch.zeros(parameter.shape, dtype=each.dtype, device=each.device).index_add_(0, rows, each)
            gradients[place] = each.to(parameter.dtype)
    return gradients


def _rows_backward_body(dy: Tensor, *rest: Any) -> list[Tensor]:
    return filled(_rows_backward(dy, *rest), dy)


_ROWS = "Tensor indices, Tensor weight, Tensor?[] flat, float[] settings"
_forward_op = custom_op(
    "lowrank_forward(Tensor x, Tensor up, Tensor down, Tensor? bias, str phi, float omega, float gain) -> Tensor",
    _forward,
    lambda x, up, *rest: x.new_empty(*x.shape[:-1], up.shape[0]),
)
_product_op = custom_op(
    "wide_product(Tensor left, Tensor right, float scale, Tensor? after) -> Tensor",
    _wide_product,
    lambda left, right, *rest: left.new_empty(left.shape[0], right.shape[1], dtype=wide_dtype(left, right)),
)
_rows_forward_op = custom_op(
    f"sine_rows_forward({_ROWS}, bool base) -> Tensor",
    _rows_forward,
    lambda indices, weight, *rest: weight.new_empty(*indices.shape, weight.shape[1]),
)
_rows_backward_op = custom_op(
    f"sine_rows_backward(Tensor dy, {_ROWS}, int? padding_idx, bool base, bool[] wanted) -> Tensor[]",
    _rows_backward_body,
    lambda dy, indices, weight, flat, *rest: fake_gradients([weight, *flat], rest[-1], dy),
)
