"""A rational function by groups of channels as an operator takes it; shapes in `op`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice

from .formulas import FORMULAS

Form = Literal["abs_of_sum", "sum_of_abs"]
FORMS = get_args(Form)


class LinearTails(NamedTuple):
    """Straight lines outside [low, high]: R(high) + high_slope * (x - high) above, likewise below."""

    low: float
    high: float
    low_slope: float
    high_slope: float


class Ratio(NamedTuple):
    """A rational function, and with the last three what it is anchored to."""

    numerator: Tensor
    denominator: Tensor
    form: str
    limits: Sequence[float] | None
    """`LinearTails`."""
    base_numerator: Tensor | None = None
    base_denominator: Tensor | None = None
    formula: str | None = None
    """f."""


def denominator_size(degree: int, form: str) -> int:
    """Return the number of stored coefficients of a denominator of this degree."""
    return degree + 1 if form == "abs_of_sum" else degree


def check(x: Tensor, numerator: Tensor, denominator: Tensor, form: str) -> None:
    """Raise UserError; see `rational`."""
    check_choice("denominator form", form, FORMS)
    if numerator.ndim != 2 or denominator.ndim != 2 or numerator.shape[0] != denominator.shape[0]:
        raise UserError(
            "coefficients must be (groups, terms) with as many groups above as below, got "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}"
        )
    if x.shape[-1] % numerator.shape[0]:
        raise UserError(
            f"{x.shape[-1]} channels do not divide into {numerator.shape[0]} groups; "
            "choose groups that divide the width"
        )


def anchor(
    numerator: Tensor,
    denominator: Tensor,
    base_numerator: Tensor,
    base_denominator: Tensor,
    formula: str,
    tails: LinearTails | None,
) -> tuple[tuple[Tensor, Tensor], LinearTails | None]:
    """Return base coefficients and tails of `rational_anchored`; raise UserError where they do not fit.

    Base coefficients take part like the shifted ones, row by row, so that the two round alike.
    """
    check_choice("activation", formula, FORMULAS)
    for base, shifted in ((base_numerator, numerator), (base_denominator, denominator)):
        if base.ndim != 2 or base.shape[1] != shifted.shape[1] or base.shape[0] not in (1, shifted.shape[0]):
            raise UserError(
                f"base coefficients {tuple(base.shape)} do not fit the shifted ones, {tuple(shifted.shape)}"
            )
    base_rows = base_numerator.detach().expand_as(numerator), base_denominator.detach().expand_as(denominator)
    return base_rows, None if tails is None else LinearTails(tails.low, tails.high, 0.0, 0.0)
