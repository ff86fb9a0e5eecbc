"""Ranks of a matrix, what low-rank products gain by a sine, and the paper's bounds on that.

A matrix (m, n) with singular values s_1 >= s_2 >= ... has

    rank at tolerance t    the number of s_i > t s_1; numpy's "numerical rank" with a stated tolerance
    stable rank            ||W||_F^2 / ||W||_op^2 = sum(s_i^2) / s_1^2, at least 1 and at most the rank
    normalised spectrum    s_i / s_1

The rank of exact arithmetic says nothing here: sin(omega U V) has full rank for almost all U and V at every omega
above 0, and so have tanh and the sigmoid (docs/theory.md). What omega changes is how fast the spectrum falls.

Source: sine_lowrank.txt, section 3.2, equation (24), Figures 2 and 3.
"""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_number

ACTIVATIONS = {"sine": torch.sin, "sigmoid": torch.sigmoid, "relu": torch.relu, "tanh": torch.tanh}
"""phi of Figure 3; tanh is here as a sigmoid without its constant."""

DIRECT = 512
"""Up to so many singular values come from an SVD in float64."""
EXACT = 2048
"""Up to so many from the float64 Gram matrix of the smaller side; above, only the leading ones."""
LEADING = 256
"""Singular values that a sketch finds."""
LEAST_TOLERANCE = 1e-7
"""Gram matrices square the singular values, so float64 tells them apart down to about 1e-8 of the largest."""

SATURATED = 0.95
"""Share of `random_stable_rank` that counts as all of it."""

_SPARE, _ROUNDS = 32, 4  # directions of a sketch beyond the LEADING, and its power iterations
_BLOCK = 2**24  # numbers that are held in float64 at a time


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a matrix, or its leading ones."""

    values: Tensor
    """Descending, float64, on the CPU; all of them if `exact`, else the leading ones."""
    frobenius: float
    """The norm of the whole matrix."""
    size: int
    """min(m, n)."""
    exact: bool
    """False: `values` are a randomised sketch's, each at most the true one."""

    @property
    def norm(self) -> float:
        """The operator norm, the largest singular value."""
        return float(self.values[0])

    @property
    def stable_rank(self) -> float:
        """||W||_F^2 / ||W||_op^2; NaN for the zero matrix. Source: sine_lowrank.txt, equation (24)."""
        return (self.frobenius / self.norm) ** 2 if self.norm else math.nan

    @property
    def normalised(self) -> Tensor:
        """s_i / s_1."""
        return self.values / self.values[0]

    def rank(self, tolerance: float) -> int:
        """Return the number of singular values above `tolerance` times the largest; of a sketch a lower bound.

        Raises:
            UserError: the tolerance is not between `LEAST_TOLERANCE` and 1.
        """
        check_tolerance(tolerance)
        return int((self.values > tolerance * self.values[0]).sum())


def check_tolerance(tolerance: float) -> None:
    """Raise UserError unless singular values can be told apart by it."""
    if not LEAST_TOLERANCE <= tolerance < 1:
        raise UserError(f"a tolerance must be at least {LEAST_TOLERANCE:g} and below 1, got {tolerance:g}")


@torch.no_grad()
def spectrum(matrix: Tensor, *, exact_up_to: int = EXACT, seed: int = 0) -> Spectrum:
    """Return the singular values of a matrix (m, n) of any floating type, on its device.

    By an SVD in float64 where min(m, n) is at most `DIRECT`, by the eigenvalues of the float64 Gram matrix up to
    `exact_up_to`; above, the `LEADING` by a randomised range finder with power iterations in float32, drawn by `seed`.

    Raises:
        UserError: a number that is not finite, no number at all, or not two dimensions.

    Source of the sketch: N. Halko, P. Martinsson, J. Tropp, SIAM Review 53, 2011, algorithm 4.4.
    """
    if matrix.ndim != 2 or matrix.numel() == 0:
        raise UserError(f"a spectrum needs a matrix with numbers in it, not shape {tuple(matrix.shape)}")
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    size = tall.shape[1]
    squares = sum(float(block.double().square().sum()) for block in _blocks(tall))
    if not math.isfinite(squares):
        raise UserError("the matrix has numbers that are not finite (NaN or infinite)")
    exact = size <= max(exact_up_to, DIRECT)
    if size <= DIRECT:
        values = torch.linalg.svdvals(tall.double())
    elif exact:
        gram = torch.zeros(size, size, dtype=torch.float64, device=tall.device)
        for block in _blocks(tall):
            gram.addmm_((wide := block.double()).T, wide)
        values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    else:
        values = _leading(tall.float(), seed).double()
    return Spectrum(values.cpu(), math.sqrt(squares), size, exact)


@torch.no_grad()
def product_spectrum(up: Tensor, down: Tensor, scale: float = 1.0) -> Spectrum:
    """Return the singular values of scale * up (m, k) @ down (k, n) without forming it; as many as it can have.

    Raises:
        UserError: a number that is not finite.
    """
    if not (up.isfinite().all() and down.isfinite().all()):
        raise UserError("the factors have numbers that are not finite (NaN or infinite)")
    left = torch.linalg.qr(up.double(), mode="r")[1]
    right = torch.linalg.qr(down.double().T, mode="r")[1]
    values = torch.linalg.svdvals(left @ right.T).cpu() * abs(scale)
    return Spectrum(values, float(values.square().sum().sqrt()), min(up.shape[0], down.shape[1]), True)


def kaiming_factors(
    shape: tuple[int, int], rank: int, generator: torch.Generator, *, init: str = "kaiming_sqrt5"
) -> tuple[Tensor, Tensor]:
    """Return U (m, k) and V (k, n) in float64 as sine layers draw them: Kaiming uniform with fans k and n.

    `init` is "kaiming_sqrt5" (a = sqrt 5) or "kaiming_zero" (a = 0).
    """
    m, n = shape
    return kaiming_uniform((m, rank), rank, generator, init=init), kaiming_uniform((rank, n), n, generator, init=init)


def kaiming_uniform(
    shape: tuple[int, int], fan: int, generator: torch.Generator, *, init: str = "kaiming_sqrt5"
) -> Tensor:
    """Return Kaiming uniform draws, float64: U(-b, b) with b = sqrt(6 / ((1 + a^2) fan))."""
    bound = math.sqrt({"kaiming_sqrt5": 1.0, "kaiming_zero": 6.0}[init] / fan)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


def random_stable_rank(shape: tuple[int, int]) -> float:
    """Return the stable rank of a large matrix of independent entries with mean 0: m n / (sqrt m + sqrt n)^2.

    About the most that a weight can have whose entries do not depend on each other; orthogonal matrices have more.
    Source: the Marchenko-Pastur law's edge.
    """
    m, n = shape
    return m * n / (math.sqrt(m) + math.sqrt(n)) ** 2


def curve_places(count: int, points: int = 64) -> list[int]:
    """Return at most `points` of 1, ..., count to draw a spectrum by, with both ends: half even, half by log."""
    half = points // 2 - 1
    even = {round(1 + (count - 1) * step / half) for step in range(half + 1)}
    return sorted(even | {round(count ** (step / half)) for step in range(half + 1)})


def _blocks(tall: Tensor) -> tuple[Tensor, ...]:
    return tall.split(max(1, _BLOCK // tall.shape[1]))


def _leading(tall: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(tall.shape[1], LEADING + _SPARE, generator=generator).to(tall.device)
    basis = torch.linalg.qr(tall @ draw)[0]
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(tall.T @ basis)[0]
        basis = torch.linalg.qr(tall @ basis)[0]
    return torch.linalg.svdvals(basis.T @ tall)[:LEADING]


@dataclass(frozen=True, kw_only=True)
class OmegaGuess:
    """Result of the rule for one shape and target."""

    omega: float | None
    """None where plain low rank has the target's stable rank already."""
    saturated: bool
    """True where the target was out of reach: cut to `SATURATED` of what independent entries have, or omega to 1e6."""
    target: float
    """The stable rank that was asked for."""
    low_rank: float
    """The stable rank of U V at the init."""


@torch.no_grad()
def guess_omega(
    shape: tuple[int, int], rank: int, target: float, *, init: str = "kaiming_sqrt5", seed: int = 0
) -> OmegaGuess:
    """Return the omega at which sin(omega U V) (m, n) of rank k has a stable rank at its init: where to begin.

    The stable rank rises with omega, from that of U V itself to about that of independent entries, so the omega is
    found by bisection, to 1 %, on draws of the layer's own shape and init. It equals a property of the init and knows
    nothing of training; docs/theory.md compares it with the published frequencies.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = 3 if shape[0] * shape[1] <= 2**18 else 1
    factors = [kaiming_factors(shape, rank, generator, init=init) for _ in range(draws)]
    products = [up.float() @ down.float() for up, down in factors]  # float32, as the layer's own
    plain = statistics.fmean([stable_rank(product) for product in products])
    most = SATURATED * random_stable_rank(shape)
    if target <= plain:
        return OmegaGuess(omega=None, saturated=False, target=target, low_rank=plain)
    wanted = min(target, most)
    low, high = math.log(1e-2), math.log(1e6)
    while high - low > 0.01:
        middle = (low + high) / 2
        reached = statistics.fmean([stable_rank(torch.sin(math.exp(middle) * product)) for product in products])
        low, high = (low, middle) if reached >= wanted else (middle, high)
    # Rank one needs an omega beyond any use to saturate: then it is the end of the range.
    beyond = high == math.log(1e6)
    return OmegaGuess(omega=math.exp(high), saturated=target > most or beyond, target=target, low_rank=plain)


def stable_rank(matrix: Tensor) -> float:
    """Return ||W||_F^2 / ||W||_op^2 by block power iterations, to about 1 %; much faster than a spectrum."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    if tall.shape[1] <= 64:
        norm = float(torch.linalg.matrix_norm(tall, 2))
    else:
        basis = torch.randn(tall.shape[1], 16, generator=torch.Generator().manual_seed(0), dtype=tall.dtype)
        for _ in range(12):
            basis = torch.linalg.qr(tall.T @ (tall @ basis))[0]
        norm = float(torch.linalg.svdvals(tall @ basis)[0])
    return (float(torch.linalg.vector_norm(matrix)) / norm) ** 2 if norm else math.nan


@dataclass(frozen=True, kw_only=True)
class SineBounds:
    """Both sides of the paper's inequalities for one matrix and one omega, as printed and as they hold.

    A is m x n and not zero; A_min is its smallest non-zero |entry|, |A| and sqrt are entry by entry, and everything is
    stated for 0 < omega <= pi / (3 A_min). docs/theory.md has the derivations.
    Source: sine_lowrank.txt, section 3.2.2 and appendix A.1.
    """

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
