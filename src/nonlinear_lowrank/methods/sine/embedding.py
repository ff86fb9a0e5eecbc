"""Sine-activated low-rank deltas of an embedding table, computed for looked-up rows only.

    y[t] = (W + D1 + D2 + ...)[indices[t]]      D as in `ops.sine`; W (tokens, d), up (tokens, r), down (r, d)

The table is a weight like any other here: its rows are what sine-DoRA's magnitude (tokens) belongs to, so that
one row needs no other. For backward the indices are saved and nothing else. The product is summed over r in a fixed
order, element by element: a row has the same bits whether it is looked up alone or merged with all others.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.kernels import as_one_op, reshaped
from nonlinear_lowrank.ops.precision import no_autocast
from nonlinear_lowrank.ops.sine_delta import (
    Delta,
    SineFactors,
    added,
    compute_type,
    delta_gradients,
    flatten,
    in_order,
    split,
    unflatten,
)


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
    """Return rows of a table that carries sine deltas; only the indices are saved for backward.

    Second derivatives are refused with a RuntimeError (use `reference`).

    Args:
        indices: integers of any shape.
        weight: (tokens, d), frozen or trained.
        factors: the deltas, at least one, added in this order.
        padding_idx: a token that gives no gradient, as in nn.Embedding.
        base: whether the table's own rows are part of the sum.

    Returns:
        (*indices.shape, d) in the table's type; the sum is formed in float32 and rounded once.
    """
    flat, settings = flatten(factors)
    if torch.is_grad_enabled():
        return _SineEmbedding.apply(indices, weight, settings, padding_idx, base, *flat)
    return _run(indices, weight, settings, base, flat)


class _SineEmbedding(torch.autograd.Function):
    """Saves indices and the parameters; the variable rest, flat, is ups, downs, magnitudes."""

    @staticmethod
    def forward(indices: Any, weight: Any, settings: Any, padding_idx: Any, base: Any, *flat: Any) -> Any:
        return _run(indices, weight, settings, base, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        indices, weight, ctx.settings, ctx.padding_idx, ctx.base, *flat = inputs
        ctx.save_for_backward(indices, weight, *flat)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives through sine_embedding are not defined; use the reference for them")
        indices, weight, *flat = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [bool(need) for need in (needs[1], *needs[5:])]
        run = _backward_op if torch.compiler.is_compiling() else _backward
        gradients = run(
            dy, indices, weight, *split(flat, ctx.settings), list(ctx.settings), ctx.padding_idx, ctx.base, wanted
        )
        dweight, *others = [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]
        return None, dweight, None, None, None, *others


def _run(indices: Any, weight: Any, settings: Any, base: Any, flat: Any) -> Tensor:
    run = _forward_op if as_one_op() else _forward
    return run(indices, weight, *split(flat, settings), list(settings), base)


def _row_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, each element summed in the same order however many rows there are."""
    total = left[:, :1] * right[:1]
    for k in range(1, left.shape[1]):
        total.addcmul_(left[:, k : k + 1], right[k : k + 1])
    return total


def _deltas(rows: Tensor, weight: Tensor, factors: Sequence[SineFactors], weight_rows: Tensor) -> Iterator[Delta]:
    """Yield the deltas of the rows alone."""
    dtype = compute_type(weight, factors)
    for each in factors:
        magnitude = None if each.magnitude is None else each.magnitude[rows]
        chosen = each._replace(up=each.up[rows], magnitude=magnitude)
        yield Delta(weight_rows, chosen, transposed=False, dtype=dtype, multiply=_row_product)


def _forward(
    indices: Tensor,
    weight: Tensor,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    base: bool,
) -> Tensor:
    rows, factors = indices.reshape(-1), unflatten(ups, downs, magnitudes, settings)
    with torch.no_grad(), no_autocast(weight):
        weight_rows = F.embedding(rows, weight)  # raises on indices out of range, as nn.Embedding does
        total: Tensor | None = None
        for delta in _deltas(rows, weight, factors, weight_rows):
            total = added(total, delta.value(), weight_rows if base else None)
        assert total is not None
        return reshaped(total.to(weight.dtype), (*indices.shape, weight.shape[1]))


def _backward(
    dy: Tensor,
    indices: Tensor,
    weight: Tensor,
    ups: list[Tensor],
    downs: list[Tensor],
    magnitudes: list[Tensor],
    settings: list[float],
    padding_idx: int | None,
    base: bool,
    wanted: list[bool],
) -> list[Tensor]:
    """Return gradients of weight, ups, downs, magnitudes; empty tensors where `wanted` says no."""
    rows, factors = indices.reshape(-1), unflatten(ups, downs, magnitudes, settings)
    with torch.no_grad(), no_autocast(weight):
        gradient = dy.reshape(-1, dy.shape[-1]).to(compute_type(weight, factors))
        if padding_idx is not None:
            gradient = gradient.masked_fill((rows == padding_idx)[:, None], 0)
        weight_rows = F.embedding(rows, weight)
        deltas, base_rows = _deltas(rows, weight, factors, weight_rows), weight_rows if base else None
        found, slope, _ = delta_gradients(deltas, len(ups), gradient, base_rows, wanted[1:], value=False)
        parameters, whole = [*ups, *downs, *magnitudes], range(len(ups), 2 * len(ups))  # downs are no rows
        gradients = {
            1 + place: each if place in whole else _scattered(each, rows, parameters[place])
            for place, each in found.items()
        }
        if wanted[0]:
            gradients[0] = _scattered(gradient * slope, rows, weight)
    return in_order(gradients, [weight, *parameters], wanted)


def _scattered(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Return the sums of values that belong to one row, in a tensor like the parameter."""
    return torch.zeros(like.shape, dtype=values.dtype, device=like.device).index_add_(0, rows, values)


_FACTORS = "Tensor[] ups, Tensor[] downs, Tensor[] magnitudes, float[] settings"
_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_LIBRARY.define(f"sine_rows_forward(Tensor indices, Tensor weight, {_FACTORS}, bool base) -> Tensor")
_LIBRARY.define(
    f"sine_rows_backward(Tensor dy, Tensor indices, Tensor weight, {_FACTORS}, int? padding_idx, bool base, "
    "bool[] wanted) -> Tensor[]"
)
_LIBRARY.impl("sine_rows_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("sine_rows_backward", _backward, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.sine_rows_forward.default
_backward_op = torch.ops.nonlinear_lowrank.sine_rows_backward.default


@torch.library.register_fake("nonlinear_lowrank::sine_rows_forward")
def _(indices: Any, weight: Any, ups: Any, downs: Any, magnitudes: Any, settings: Any, base: Any) -> Any:
    return weight.new_empty(*indices.shape, weight.shape[1])


@torch.library.register_fake("nonlinear_lowrank::sine_rows_backward")
def _(
    dy: Any,
    indices: Any,
    weight: Any,
    ups: Any,
    downs: Any,
    magnitudes: Any,
    settings: Any,
    padding_idx: Any,
    base: Any,
    wanted: Any,
) -> Any:
    parameters = zip([weight, *ups, *downs, *magnitudes], wanted, strict=True)
    return [each.new_empty(each.shape) if want else torch.empty(0, device=dy.device) for each, want in parameters]
