"""Rational functions that stand for the usual activations: from the table `fits.json`, or solved for on request."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice

from .formulas import KIND
from .ratio import FORMS, LinearTails

KINDS = tuple(dict.fromkeys(KIND.values()))
"""The functions there are fits for."""
TABLE = Path(__file__).with_name("fits.json")
"""Fits of degrees (5, 4) on [-3, 3] and [-10, 10], made by `tools/fit_rational.py`."""
MAX_DEGREE = 9


@dataclass(frozen=True)
class RationalFit:
    """A rational function that stands for an activation."""

    kind: str
    """One of `KINDS`."""
    form: str
    """Of the denominator; in the other form the same coefficients are another function."""
    fit_range: tuple[float, float]
    numerator: tuple[float, ...]
    """a0 first."""
    denominator: tuple[float, ...]
    """b0 first in "abs_of_sum", b1 first in "sum_of_abs"."""
    error: float
    """max |R - f| over fit_range, R evaluated in float32."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Degrees of numerator and denominator."""
        return len(self.numerator) - 1, len(self.denominator) - (self.form == "abs_of_sum")

    def __str__(self) -> str:
        low, high = self.fit_range
        m, n = self.degrees
        return f"{self.kind} as degree {m}/{n}, {self.form}: max error {self.error:.1e} on [{low:g}, {high:g}]"


def fit_rational(
    formula: str,
    *,
    form: str = "abs_of_sum",
    degrees: Sequence[int] = (5, 4),
    fit_range: float | Sequence[float] = 10.0,
) -> RationalFit:
    """Return the best rational function for an activation; outside the table it takes about a second and scipy.

    Args:
        formula: an activation, one of `formulas.FORMULAS`.
        form: of the denominator, one of `op.FORMS`.
        degrees: of numerator and denominator.
        fit_range: (low, high) around 0, or L for (-L, L).

    Raises:
        UserError: an unknown name, degrees or a range that cannot be, or scipy is needed and not installed.
    """
    if formula not in KIND:
        raise UserError(f"there is no rational fit for {formula!r}; there are fits for {', '.join(KINDS)}")
    check_choice("denominator form", form, FORMS)
    wanted = KIND[formula], form, check_degrees(degrees), check_range(fit_range)
    return _table().get(wanted) or _solved(*wanted)


@functools.cache
def _table() -> dict[tuple[Any, ...], RationalFit]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    fits = [RationalFit(kind, form, tuple(ends), tuple(p), tuple(q), error) for kind, form, ends, p, q, error in rows]
    return {(fit.kind, fit.form, fit.degrees, fit.fit_range): fit for fit in fits}


@functools.cache
def _solved(kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float]) -> RationalFit:
    from .solver import solve

    return solve(kind, form, degrees, fit_range)


def straight_tails(formula: str, fit_range: tuple[float, float]) -> LinearTails:
    """Return straight lines beyond the range, with the activation's own slopes far out."""
    return LinearTails(*fit_range, 0.0, 0.0 if KIND[formula] in ("tanh", "sigmoid") else 1.0)


def check_degrees(degrees: Sequence[int]) -> tuple[int, int]:
    """Return (m, n); raise UserError if they cannot be degrees."""
    given = tuple(degrees) if isinstance(degrees, list | tuple) else ()
    if len(given) != 2 or not all(type(each) is int and 1 <= each <= MAX_DEGREE for each in given):
        raise UserError(
            f"degrees must be two integers from 1 to {MAX_DEGREE}, of numerator and denominator, got {degrees!r}"
        )
    return given[0], given[1]


def check_range(fit_range: float | Sequence[float]) -> tuple[float, float]:
    """Return (low, high) around 0; raise UserError if it is none."""
    given = (-fit_range, fit_range) if isinstance(fit_range, int | float) else tuple(fit_range)
    numbers = [float(each) for each in given if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(given) != 2 or len(numbers) != 2 or not -1e4 <= numbers[0] < 0 < numbers[1] <= 1e4:
        raise UserError(f"fit_range must be a number above 0 or (low, high) with low < 0 < high, got {fit_range!r}")
    return numbers[0], numbers[1]
