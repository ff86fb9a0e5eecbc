"""Rational functions fitted to the usual activations, in the form in which they are evaluated.

Best uniform fits: max |R(x) - f(x)| over the stated range is as small as the degrees and the form allow, by the
differential correction algorithm (Barrodale, Powell and Roberts 1972), which converges from any start. Each step
is a linear programme, so that the form's conditions on the denominator are simply further inequalities.

Every activation here but a one-sided one is c + d x + (an even or odd function): gelu(x) - x / 2 is even,
sigmoid(x) - 1 / 2 is odd. On a symmetric range only that part is fitted, with an even denominator, and
R(x) - c - d x has the symmetry to the bit. An even denominator is positive with coefficients of at least 0, so that
its two forms (`ops.rational`) are the same function and R has no pole anywhere:

    sum_of_abs    Q = 1 + q2 x^2 + q4 x^4           b = (0, q2, 0, q4)
    abs_of_sum    2 Q = 1 + |1 + 2 q2 x^2 + ...|    b = (1, 0, 2 q2, 0, 2 q4), the numerator doubled too

In "abs_of_sum" what stands inside |.| is at least 1: a shift of coefficients does not meet the kink at 0.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.activations import KIND, activation

from .op import FORMS, LinearTails, rational
from .table import TABLE

# What is left is even (0) or odd (1) when c + d x is taken away: kind -> (c, d, parity).
_SYMMETRY = {
    "gelu": (0.0, 0.5, 0),
    "gelu_tanh": (0.0, 0.5, 0),
    "quick_gelu": (0.0, 0.5, 0),
    "silu": (0.0, 0.5, 0),
    "relu": (0.0, 0.5, 0),
    "tanh": (0.0, 0.0, 1),
    "sigmoid": (0.5, 0.0, 1),
}
# Slopes far to the left and to the right.
_TAIL_SLOPES = dict.fromkeys(_SYMMETRY, (0.0, 1.0)) | {"tanh": (0.0, 0.0), "sigmoid": (0.0, 0.0)}

KINDS = tuple(_SYMMETRY)
"""The functions there are fits for."""
MAX_DEGREE = 9

_POINTS = 400  # of the range in a linear programme
_CHECKED = 20_001  # of the range when the error is measured


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
        """Of numerator and denominator."""
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
    """The best rational function for an activation; the usual ones come from a table, others take about a second.

    Args:
        formula: an activation, one of `ops.activations.FORMULAS`.
        form: of the denominator, one of `ops.rational.FORMS`.
        degrees: of numerator and denominator.
        fit_range: (low, high) around 0, or L for (-L, L).

    Returns:
        The fit; its error was measured in float32 through the operator, in the form asked for.

    Raises:
        UserError: an unknown name, degrees or a range that cannot be.
    """
    if formula not in KIND:
        raise UserError(f"there is no rational fit for {formula!r}; there are fits for {', '.join(KINDS)}")
    if form not in FORMS:
        raise UserError(f"unknown denominator form {form!r}; choose one of {', '.join(FORMS)}")
    return _checked_fit(KIND[formula], form, check_degrees(degrees), check_range(fit_range))


def straight_tails(formula: str, fit_range: tuple[float, float]) -> LinearTails:
    """Straight lines beyond the range, with the activation's own slopes far out."""
    return LinearTails(*fit_range, *_TAIL_SLOPES[KIND[formula]])


def check_degrees(degrees: Sequence[int]) -> tuple[int, int]:
    """(m, n); UserError if they cannot be degrees."""
    given = tuple(degrees) if isinstance(degrees, list | tuple) else ()
    whole = [each for each in given if isinstance(each, int) and not isinstance(each, bool) and each >= 1]
    if len(given) != 2 or len(whole) != 2 or max(whole) > MAX_DEGREE:
        raise UserError(
            f"degrees must be two whole numbers from 1 to {MAX_DEGREE}, of numerator and denominator, got {degrees!r}"
        )
    return whole[0], whole[1]


def check_range(fit_range: float | Sequence[float]) -> tuple[float, float]:
    """(low, high) around 0; UserError if it is none."""
    given = (-fit_range, fit_range) if isinstance(fit_range, int | float) else tuple(fit_range)
    numbers = [float(each) for each in given if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(given) != 2 or len(numbers) != 2 or not -1e4 <= numbers[0] < 0 < numbers[1] <= 1e4:
        raise UserError(f"fit_range must be a number above 0 or (low, high) with low < 0 < high, got {fit_range!r}")
    return numbers[0], numbers[1]


@functools.cache
def _checked_fit(kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float]) -> RationalFit:
    known = TABLE.get((kind, form, fit_range[1])) if degrees == (5, 4) and fit_range[0] == -fit_range[1] else None
    p, q, exact = known or compute(kind, form, degrees, fit_range)
    numerator, denominator = _in_form(p, q, form, fit_range)
    fit = RationalFit(kind, form, fit_range, numerator, denominator, error=exact)
    measured = measure(fit)
    # Rounding to float32 is all that may come on top: coefficients of the other form, or of another range, would not
    # pass here.
    assert measured <= exact * (1 + 1e-3) + 1e-6 * max(1.0, *map(abs, fit_range)), (fit, measured)
    return replace(fit, error=max(measured, exact))


def measure(fit: RationalFit, dtype: torch.dtype = torch.float32) -> float:
    """max |R - f| over the fit's range, R evaluated by the operator in the fit's form.

    Args:
        fit: what to measure.
        dtype: in which R is evaluated; f is always float64.
    """
    x = torch.linspace(*fit.fit_range, _CHECKED, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        numerator, denominator = (
            torch.tensor([each], dtype=dtype, device="cpu") for each in (fit.numerator, fit.denominator)
        )
        y = rational(x.to(dtype)[:, None], numerator, denominator, fit.form)[:, 0]
        # f at the rounded x: where it was evaluated
        return (y.double() - activation(x.to(dtype).double(), fit.kind)).abs().max().item()


def compute(
    kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float]
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """The fit itself, without table, as plain P = p0 + p1 x + ... and Q = 1 + q1 x + ...; about a second.

    In the form "sum_of_abs" Q's powers are of |x|. On a symmetric range both forms have one answer.

    Returns:
        p, q (q0 = 1 included) and max |P / Q - f|.
    """
    if fit_range[0] != -fit_range[1]:
        return _compute(kind, form, degrees, fit_range, symmetric=False)
    best = _compute(kind, form, degrees, fit_range, symmetric=True)
    if degrees[0] <= degrees[1] and _SYMMETRY[kind][1]:
        # The numerator has no room for x times a whole denominator.
        best = min(best, _compute(kind, form, degrees, fit_range, symmetric=False), key=lambda each: each[2])
    return best


def _compute(
    kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float], *, symmetric: bool
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
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
    error = _error(p, q, form, kind, fit_range)
    return tuple(map(float, p)), tuple(map(float, q)), error


def _error(p: np.ndarray, q: np.ndarray, form: str, kind: str, fit_range: tuple[float, float]) -> float:
    x = np.linspace(*fit_range, _CHECKED)
    below = np.polynomial.polynomial.polyval(np.abs(x) if form == "sum_of_abs" else x, q)
    f = activation(torch.from_numpy(x), kind).numpy()
    return float(np.max(np.abs(np.polynomial.polynomial.polyval(x, p) / below - f)))


def _in_form(
    p: Sequence[float], q: Sequence[float], form: str, fit_range: tuple[float, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Coefficients of P / Q as the operator's form takes them."""
    if form == "sum_of_abs":
        return tuple(p), tuple(q[1:])
    lowest = float(np.min(np.polynomial.polynomial.polyval(np.linspace(*fit_range, _CHECKED), q)))
    factor = 2.0 / min(lowest, 1.0)
    return tuple(factor * each for each in p), (factor * q[0] - 1.0, *(factor * each for each in q[1:]))


def _differential_correction(
    f: np.ndarray, a: np.ndarray, b: np.ndarray, *, nonnegative: bool, also_positive: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """p, q that minimise max |f - (a p) / (b q)|, with b q > 0.

    From p_k / q_k with error e, the next is the p, q (|q| at most 1) with the smallest max of
    (|f b q - a p| - e b q) / (b q_k): a linear programme.

    Args:
        f: (N,) values.
        a: (N, .) basis of the numerator.
        b: (N, .) basis of the denominator; its first column is constant.
        nonnegative: whether the denominator's coefficients must be at least 0.
        also_positive: (M, .) rows that b q must be at least 0 on as well.
    """
    from scipy.optimize import linprog  # a third of a second to import, and seldom needed

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
        solved = linprog(
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
