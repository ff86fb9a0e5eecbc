"""Rational functions that stand for the usual activations: from the table `fits.json`, or solved for on request."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.polynomial.polynomial import polyval

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, require

from .op import rational
from .reference import FORMS, KIND, activation

KINDS = tuple(dict.fromkeys(KIND.values()))
"""Functions that have fits."""
TABLE = Path(__file__).with_name("fits.json")
"""Fits of degrees (5, 4) on [-3, 3] and [-10, 10], made by `tools/fit_rational.py`."""
MAX_DEGREE = 9


@dataclass(frozen=True)
class RationalFit:
    """A rational function that stands for an activation."""

    kind: str
    """One of `KINDS`."""
    form: str
    """Form of the denominator; in the other form the same coefficients are another function."""
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
        formula: an activation, one of `reference.FORMULAS`.
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
    return _table().get(wanted) or solve(*wanted)


@functools.cache
def _table() -> dict[tuple[Any, ...], RationalFit]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    fits = [RationalFit(kind, form, tuple(ends), tuple(p), tuple(q), error) for kind, form, ends, p, q, error in rows]
    return {(fit.kind, fit.form, fit.degrees, fit.fit_range): fit for fit in fits}


def check_degrees(degrees: Sequence[int]) -> tuple[int, int]:
    """Return (m, n); raise UserError if they cannot be degrees."""
    given = tuple(degrees) if isinstance(degrees, list | tuple) else ()
    if len(given) != 2 or not all(type(each) is int and 1 <= each <= MAX_DEGREE for each in given):
        raise UserError(
            f"degrees must be two integers from 1 to {MAX_DEGREE}, of numerator and denominator, got {degrees!r}"
        )
    return given[0], given[1]


def check_range(fit_range: float | Sequence[float]) -> tuple[float, float]:
    """Return (low, high) around 0; raise UserError if it is not."""
    given = (-fit_range, fit_range) if isinstance(fit_range, int | float) else tuple(fit_range)
    numbers = [float(each) for each in given if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(given) != 2 or len(numbers) != 2 or not -1e4 <= numbers[0] < 0 < numbers[1] <= 1e4:
        raise UserError(f"fit_range must be a number above 0 or (low, high) with low < 0 < high, got {fit_range!r}")
    return numbers[0], numbers[1]


# The solver.
#
# Best uniform fits: max |R(x) - f(x)| over the range is as small as the degrees and the form allow.
#
# By the differential correction algorithm (Barrodale, Powell and Roberts 1972), which converges from any start. A step
# is a linear programme, so that the form's conditions on the denominator are simply further inequalities.
#
# Every activation here but a one-sided one is c + d x + (an even or odd function): gelu(x) - x / 2 is even,
# sigmoid(x) - 1 / 2 is odd. On a symmetric range only that part is fitted, with an even denominator, and
# R(x) - c - d x has the symmetry to the bit. An even denominator is positive with coefficients of at least 0, so that
# its two forms (`op`) are the same function and R has no pole anywhere:
#
#     sum_of_abs    Q = 1 + q2 x^2 + q4 x^4           b = (0, q2, 0, q4)
#     abs_of_sum    2 Q = 1 + |1 + 2 q2 x^2 + ...|    b = (1, 0, 2 q2, 0, 2 q4), the numerator doubled too
#
# In "abs_of_sum" what stands inside |.| is at least 1: a shift of coefficients does not meet the kink at 0.

# What remains is even (0) or odd (1) when c + d x is taken away: kind -> (c, d, parity).
_SYMMETRY = {
    **dict.fromkeys(("gelu", "gelu_tanh", "quick_gelu", "silu", "relu"), (0.0, 0.5, 0)),
    "tanh": (0.0, 0.0, 1),
    "sigmoid": (0.5, 0.0, 1),
}
_POINTS = 400  # of the range in a linear programme
_CHECKED = 20_001  # of the range when the error is measured

Polynomials = tuple[tuple[float, ...], tuple[float, ...], float]
"""p, q (q0 = 1 included) and max |P / Q - f|."""


@functools.cache
def solve(kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float]) -> RationalFit:
    """Return the best fit, its error measured in float32 through the operator; about a second."""
    symmetric = fit_range[0] == -fit_range[1]  # both forms then have one answer
    p, q, exact = _compute(kind, form, degrees, fit_range, symmetric=symmetric)
    if symmetric and degrees[0] <= degrees[1] and _SYMMETRY[kind][1]:
        # The numerator has no room for x times a whole denominator.
        other = _compute(kind, form, degrees, fit_range, symmetric=False)
        p, q, exact = min((p, q, exact), other, key=lambda each: each[2])
    fit = RationalFit(kind, form, fit_range, *_in_form(p, q, form, fit_range), exact)
    x = torch.linspace(*fit_range, _CHECKED, dtype=torch.float64, device="cpu").float()
    numerator, denominator = (torch.tensor([each], device="cpu") for each in (fit.numerator, fit.denominator))
    with torch.no_grad():
        y = rational(x[:, None], numerator, denominator, form)[:, 0]
    measured = (y.double() - activation(x.double(), kind)).abs().max().item()
    # Only float32 rounding may add error: coefficients of the other form would fail here.
    assert measured <= exact * (1 + 1e-3) + 1e-6 * max(1.0, *map(abs, fit_range)), (fit, measured)
    return replace(fit, error=max(measured, exact))


def _compute(
    kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float], *, symmetric: bool
) -> Polynomials:
    """Return plain P = p0 + p1 x + ... and Q = 1 + q1 x + ..., of |x| in the form "sum_of_abs"."""
    m, n = degrees
    low, high = fit_range
    size = max(-low, high)
    c, d, parity = _SYMMETRY[kind] if symmetric else (0.0, 0.0, None)
    # u = x / size, dense at both ends of the range and at 0, where the error of a fit changes fastest.
    arc = np.sin(np.linspace(0, np.pi / 2, _POINTS // 2))
    half = np.unique(np.concatenate([arc, np.linspace(0, 1, _POINTS // 2) ** 2]))
    u = half if symmetric else np.unique(np.concatenate([low / size * half, high / size * half]))
    f = activation(torch.from_numpy(u * size), kind).numpy() - c - d * u * size

    # P = (c + d x) Q + P_rest must keep to degree m.
    top = min(n, m - 1) if d else min(n, m) if c else n
    odd_allowed = not symmetric or (form == "sum_of_abs" and not c and not d)
    q_powers = [j for j in range(top + 1) if odd_allowed or j % 2 == 0]
    p_powers = [i for i in range(m + 1) if parity is None or i % 2 == parity]
    base_q = np.abs(u) if form == "sum_of_abs" else u
    a = np.stack([u**i for i in p_powers], 1)
    b = np.stack([base_q**j for j in q_powers], 1)
    positive_q = symmetric or form == "sum_of_abs"
    # Without a condition on its coefficients Q could have a zero soon after the range: keep it positive further out.
    outside = None if positive_q else np.stack([np.linspace(-3, 3, 241) ** j for j in q_powers], 1)
    rest, q_some = _differential_correction(f, a, b, nonnegative=positive_q, also_positive=outside)

    p, q = np.zeros(m + 1), np.zeros(n + 1)
    q[q_powers] = q_some
    p[p_powers] = rest
    for power in range(n + 1):
        if q[power] and (c or d):
            p[power] += c * q[power]
            if d:
                p[power + 1] += d * size * q[power]
    p, q = p / q[0], q / q[0]
    scale = float(size) ** np.arange(max(m, n) + 1)
    p, q = p / scale[: m + 1], q / scale[: n + 1]
    x = np.linspace(*fit_range, _CHECKED)
    ratio = polyval(x, p) / polyval(np.abs(x) if form == "sum_of_abs" else x, q)
    error = float(np.max(np.abs(ratio - activation(torch.from_numpy(x), kind).numpy())))
    return tuple(map(float, p)), tuple(map(float, q)), error


def _in_form(
    p: Sequence[float], q: Sequence[float], form: str, fit_range: tuple[float, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the coefficients of P / Q as the operator's form takes them."""
    if form == "sum_of_abs":
        return tuple(p), tuple(q[1:])
    factor = 2.0 / min(float(np.min(polyval(np.linspace(*fit_range, _CHECKED), q))), 1.0)
    return tuple(factor * each for each in p), (factor * q[0] - 1.0, *(factor * each for each in q[1:]))


def _differential_correction(
    f: np.ndarray, a: np.ndarray, b: np.ndarray, *, nonnegative: bool, also_positive: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return p, q that minimise max |f - (a p) / (b q)|, with b q > 0.

    From p_k / q_k with error e, the next is the p, q (|q| at most 1) with the smallest max of
    (|f b q - a p| - e b q) / (b q_k): a linear programme. f (N,) are values, a and b (N, .) the bases, b's first column
    constant; `also_positive` (M, .) has rows that b q must be at least 0 on as well.
    """
    optimize = require("lab", "scipy.optimize")
    n_p, n_q = a.shape[1], b.shape[1]
    q = np.zeros(n_q)
    q[0] = 1.0
    p = np.linalg.lstsq(a, f, rcond=None)[0]
    best, best_p, best_q = np.inf, p, q
    for _ in range(60):
        below = b @ q
        error = float(np.max(np.abs(f - a @ p / below))) if np.min(below) > 0 else np.inf
        if not error < best * (1 - 1e-9):
            break
        best, best_p, best_q = error, p, q
        rows = [
            np.hstack([-a, (f - error)[:, None] * b, -below[:, None]]),
            np.hstack([a, (-f - error)[:, None] * b, -below[:, None]]),
        ]
        if also_positive is not None:
            count = len(also_positive)
            rows.append(np.hstack([np.zeros((count, n_p)), -also_positive, np.zeros((count, 1))]))
        limits = np.vstack(rows)
        solved = optimize.linprog(
            np.eye(n_p + n_q + 1)[-1],
            A_ub=limits,
            b_ub=np.zeros(len(limits)),
            bounds=[(None, None)] * n_p + [(0 if nonnegative else -1, 1)] * n_q + [(None, None)],
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if solved.status != 0:
            break
        p, q = solved.x[:n_p], solved.x[n_p : n_p + n_q]
    return best_p, best_q
