"""The rational operators as plain formulas, differentiable as often as asked; shapes in `op`."""

import torch
from torch import Tensor

from nonlinear_lowrank.ops.precision import wide_dtype

from .formulas import activation
from .ratio import LinearTails, anchor, check


def rational_reference(
    x: Tensor, numerator: Tensor, denominator: Tensor, form: str = "abs_of_sum", tails: LinearTails | None = None
) -> Tensor:
    """R(x), term by term: (..., C) in the type of x."""
    check(x, numerator, denominator, form)
    wide = wide_dtype(x)
    z = x.to(wide).unflatten(-1, (numerator.shape[0], -1))
    inside = z if tails is None else z.clamp(tails.low, tails.high)
    a, b = numerator.to(wide)[:, :, None], denominator.to(wide)[:, :, None]
    p = sum(a[:, i] * inside**i for i in range(a.shape[1]))
    if form == "abs_of_sum":
        q = 1 + sum(b[:, j] * inside**j for j in range(b.shape[1])).abs()
    else:
        q = 1 + sum(b[:, j].abs() * inside.abs() ** (j + 1) for j in range(b.shape[1]))
    y = p / q
    if tails is not None:
        # At a limit itself, which 16-bit inputs hit, the slope is R's alone: clamp() would add the line's to it.
        y = y + tails.low_slope * torch.where(z < tails.low, z - tails.low, 0)
        y = y + tails.high_slope * torch.where(z > tails.high, z - tails.high, 0)
    return y.flatten(-2).to(x.dtype)


def rational_anchored_reference(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    base_numerator: Tensor,
    base_denominator: Tensor,
    formula: str,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """f(x) + (R(x; numerator, denominator) - R(x; base)); beyond the tails' limits the difference stays as it is."""
    base, flat = anchor(numerator, denominator, base_numerator, base_denominator, formula, tails)
    z = x.to(wide_dtype(x))
    shift = rational_reference(z, numerator, denominator, form, flat) - rational_reference(z, *base, form, flat)
    return (activation(x, formula).to(z.dtype) + shift).to(x.dtype)


def rational_gated_reference(
    gate: Tensor,
    up: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """R(gate) * up."""
    return rational_reference(gate, numerator, denominator, form, tails) * up
