"""The paper's bounds on sin(omega A), as printed and as they hold; docs/theory.md has the derivations.

A is m x n and not zero; A_min is its smallest non-zero |entry|, |A| and sqrt are entry by entry, and everything is
stated for 0 < omega <= pi / (3 A_min).

Source: sine_lowrank.txt, section 3.2.2 and appendix A.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_number


@dataclass(frozen=True, kw_only=True)
class SineBounds:
    """Both sides of the paper's inequalities for one matrix and one omega."""

    a_min: float
    """A_min."""
    largest_omega: float
    """pi / (3 A_min), up to which the statements are made."""
    frobenius_squared: float
    """||sin(omega A)||_F^2, what Lemma 1 bounds from below."""
    lemma_1: float
    """omega^2 A_min^2 / 4."""
    lemma_1_printed: float
    """omega^2 A_min."""
    operator_squared: float
    """||sin(omega A)||_op^2, what Lemma 2 bounds from above."""
    lemma_2: float
    """omega ||sqrt|A|||_op^2."""
    stable_rank: float
    """Stable rank of sin(omega A); NaN where that is zero."""
    proposition_1: float
    """(omega / 4) (A_min / ||sqrt|A|||_op)^2."""
    proposition_1_printed: float
    """Without the 1/4."""
    equation_29: float
    """omega A_min / ||sqrt|A|||_op, printed; (30) claims that it reaches k."""


def sine_bounds(matrix: Tensor, omega: float) -> SineBounds:
    """Evaluate the bounds in float64.

    Args:
        matrix: A (m, n), not zero.
        omega: any number above 0; above `largest_omega` the lower bounds need not hold.

    Raises:
        UserError: the matrix is zero or not finite, or omega is not above 0.
    """
    if matrix.ndim != 2 or not matrix.isfinite().all() or not (matrix != 0).any():
        raise UserError("the bounds need a matrix that is finite and not zero")
    check_number("omega", omega, above=0)
    size = matrix.double().abs()
    a_min = float(size[size > 0].min())
    root = float(torch.linalg.matrix_norm(size.sqrt(), 2))
    sine = torch.sin(omega * matrix.double())
    frobenius, operator = float(sine.square().sum()), float(torch.linalg.matrix_norm(sine, 2)) ** 2
    return SineBounds(
        a_min=a_min,
        largest_omega=math.pi / (3 * a_min),
        frobenius_squared=frobenius,
        lemma_1=(omega * a_min) ** 2 / 4,
        lemma_1_printed=omega**2 * a_min,
        operator_squared=operator,
        lemma_2=omega * root**2,
        stable_rank=frobenius / operator if operator else math.nan,
        proposition_1=omega / 4 * (a_min / root) ** 2,
        proposition_1_printed=omega * (a_min / root) ** 2,
        equation_29=omega * a_min / root,
    )
