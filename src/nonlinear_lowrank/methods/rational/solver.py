"""Best uniform fits: max |R(x) - f(x)| over the range is as small as the degrees and the form allow.

By the differential correction algorithm (Barrodale, Powell and Roberts 1972), which converges from any start. Each step
is a linear programme, so that the form's conditions on the denominator are simply further inequalities.

Every activation here but a one-sided one is c + d x + (an even or odd function): gelu(x) - x / 2 is even,
sigmoid(x) - 1 / 2 is odd. On a symmetric range only that part is fitted, with an even denominator, and
R(x) - c - d x has the symmetry to the bit. An even denominator is positive with coefficients of at least 0, so that
its two forms (`op`) are the same function and R has no pole anywhere:

    sum_of_abs    Q = 1 + q2 x^2 + q4 x^4           b = (0, q2, 0, q4)
    abs_of_sum    2 Q = 1 + |1 + 2 q2 x^2 + ...|    b = (1, 0, 2 q2, 0, 2 q4), the numerator doubled too

In "abs_of_sum" what stands inside |.| is at least 1: a shift of coefficients does not meet the kink at 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.polynomial.polynomial import polyval

from nonlinear_lowrank.validation import require

from .fit import RationalFit
from .formulas import activation
from .op import rational

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


def solve(kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float]) -> RationalFit:
    """Return the best fit, its error measured in float32 through the operator; about a second."""
    p, q, exact = compute(kind, form, degrees, fit_range)
    fit = RationalFit(kind, form, fit_range, *_in_form(p, q, form, fit_range), exact)
    measured = _measured(fit)
    # Rounding to float32 is all that may come on top: coefficients of the other form would not pass here.
    assert measured <= exact * (1 + 1e-3) + 1e-6 * max(1.0, *map(abs, fit_range)), (fit, measured)
    return replace(fit, error=max(measured, exact))


def compute(kind: str, form: str, degrees: tuple[int, int], fit_range: tuple[float, float]) -> Polynomials:
    """Return the fit as plain P = p0 + p1 x + ... and Q = 1 + q1 x + ..., of |x| in the form "sum_of_abs".

    On a symmetric range both forms have one answer.
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
) -> Polynomials:
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


@torch.no_grad()
def _measured(fit: RationalFit) -> float:
    """Return max |R - f| over the fit's range, R evaluated by the operator in float32, f in float64."""
    x = torch.linspace(*fit.fit_range, _CHECKED, dtype=torch.float64, device="cpu").float()
    numerator, denominator = (torch.tensor([each], device="cpu") for each in (fit.numerator, fit.denominator))
    y = rational(x[:, None], numerator, denominator, fit.form)[:, 0]
    return (y.double() - activation(x.double(), fit.kind)).abs().max().item()


def _differential_correction(
    f: np.ndarray, a: np.ndarray, b: np.ndarray, *, nonnegative: bool, also_positive: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return p, q that minimise max |f - (a p) / (b q)|, with b q > 0.

    From p_k / q_k with error e, the next is the p, q (|q| at most 1) with the smallest max of
    (|f b q - a p| - e b q) / (b q_k): a linear programme.

    Args:
        f: (N,) values.
        a: (N, .) basis of the numerator.
        b: (N, .) basis of the denominator; its first column is constant.
        nonnegative: whether the denominator's coefficients must be at least 0.
        also_positive: (M, .) rows that b q must be at least 0 on as well.
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
