"""Rational functions and the activations that they stand for, as plain formulas; shapes in `op`.

A name of an activation is a formula, not only a function: "gelu", "gelu_python" are both the erf GELU, evaluated in a
different order of operations, because a network that must start bit-equal to the original needs the original's
rounding. `KIND` gives the function that a formula computes. The rational functions may be differentiated twice; at
b = 0 the slope of |b| is 1 here too.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.plain import wide_dtype
from nonlinear_lowrank.validation import check_choice

_QUICK = 1.702

_GELUS = ("gelu", "gelu_python", "gelu_tanh", "gelu_new", "gelu_fast", "quick_gelu")
FORMULAS = (*_GELUS, "silu", "relu", "tanh", "sigmoid")
"""Names that `activation` takes."""

_VALUES = {name: ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name] for name in FORMULAS}
_OTHER_FORMULAS = {"gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
KIND = {name: _OTHER_FORMULAS.get(name, name) for name in FORMULAS}
"""The function each formula computes: gelu, gelu_tanh, quick_gelu, silu, relu, tanh or sigmoid."""


def activation(x: Tensor, name: str) -> Tensor:
    """f(x) in the type of x, rounded as the module that uses this formula rounds it.

    Args:
        x: any shape.
        name: one of `FORMULAS`.
    """
    return _VALUES[name](x)


def activation_gradient(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """dy f'(x), in the type of both."""
    kind, aten = KIND[name], torch.ops.aten
    if kind in ("gelu", "gelu_tanh"):
        return aten.gelu_backward(dy, x, approximate="none" if kind == "gelu" else "tanh")
    if kind in ("silu", "quick_gelu"):  # x sigmoid(k x) has the slope of silu at k x
        return aten.silu_backward(dy, x if kind == "silu" else _QUICK * x)
    if kind == "relu":
        return aten.threshold_backward(dy, x, 0)
    if kind == "tanh":
        return aten.tanh_backward(dy, torch.tanh(x))
    return aten.sigmoid_backward(dy, torch.sigmoid(x))


Form = Literal["abs_of_sum", "sum_of_abs"]
FORMS = get_args(Form)


class LinearTails(NamedTuple):
    """Straight lines outside [low, high]: R(high) + high_slope * (x - high) above, likewise below."""

    low: float
    high: float
    low_slope: float
    high_slope: float


def denominator_size(degree: int, form: str) -> int:
    """Return the number of stored coefficients of a denominator of this degree."""
    return degree + 1 if form == "abs_of_sum" else degree


def check(x: Tensor, numerator: Tensor, denominator: Tensor, form: str) -> None:
    """Raise UserError where these are invalid arguments of `rational`."""
    check_choice("denominator form", form, FORMS)
    groups = numerator.shape[0]
    if numerator.ndim != 2 or denominator.ndim != 2 or groups != denominator.shape[0]:
        raise UserError(
            "coefficients must be (groups, terms) with as many groups above as below, got "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}"
        )
    if x.shape[-1] % groups:
        raise UserError(
            f"{x.shape[-1]} channels do not divide into {groups} groups; choose groups that divide the width"
        )


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
        b = torch.where(b < 0, -b, b)  # |b|, whose slope at 0 is 1
        q = 1 + sum(b[:, j] * inside.abs() ** (j + 1) for j in range(b.shape[1]))
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
    z = x.to(wide_dtype(x))
    flat = None if tails is None else tails._replace(low_slope=0.0, high_slope=0.0)
    base = base_numerator.expand_as(numerator), base_denominator.expand_as(denominator)
    shift = rational_reference(z, numerator, denominator, form, flat) - rational_reference(z, *base, form, flat)
    return (activation(x, formula).to(z.dtype) + shift).to(x.dtype)
