"""Ranks of a matrix (docs/theory.md), and what low-rank products gain by a sine.

Source: sine_lowrank.txt, section 3.2, equation (24), Figures 2 and 3.
"""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError

ACTIVATIONS = {"sine": torch.sin, "sigmoid": torch.sigmoid, "relu": torch.relu, "tanh": torch.tanh}
"""phi of Figure 3; tanh is here as a sigmoid without its constant."""

DIRECT, EXACT, LEADING = 512, 2048, 256
"""Numbers of singular values up to which an SVD, and a Gram matrix, is used; a sketch finds the leading ones."""
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
    """Descending, float64, on the CPU; all of them if `exact`, else a sketch's leading ones, at most the true ones."""
    frobenius: float
    """The norm of the whole matrix."""
    exact: bool

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
        """Return the number of singular values above `tolerance` times the largest; of a sketch a lower bound."""
        check_tolerance(tolerance)
        return int((self.values > tolerance * self.values[0]).sum())


def check_tolerance(tolerance: float) -> None:
    """Raise UserError unless singular values can be told apart by it."""
    if not LEAST_TOLERANCE <= tolerance < 1:
        raise UserError(f"a tolerance must be at least {LEAST_TOLERANCE:g} and below 1, got {tolerance:g}")


@torch.no_grad()
def spectrum(matrix: Tensor, *, exact_up_to: int = EXACT) -> Spectrum:
    """Return the singular values of a matrix (m, n) of any floating type, on its device.

    By an SVD in float64 where min(m, n) is at most `DIRECT`, by the eigenvalues of the float64 Gram matrix up to
    `exact_up_to`; above, the `LEADING` by a randomised range finder with power iterations in float32
    (Halko, Martinsson, Tropp, SIAM Review 53, 2011, algorithm 4.4). UserError where a number is not finite.
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
        values = _leading(tall.float()).double()
    return Spectrum(values.cpu(), math.sqrt(squares), exact)


@torch.no_grad()
def product_spectrum(up: Tensor, down: Tensor, scale: float = 1.0) -> Spectrum:
    """Return the singular values of scale * up (m, k) @ down (k, n) without forming it; as many as it can have."""
    if not (up.isfinite().all() and down.isfinite().all()):
        raise UserError("the factors have numbers that are not finite (NaN or infinite)")
    left = torch.linalg.qr(up.double(), mode="r")[1]
    right = torch.linalg.qr(down.double().T, mode="r")[1]
    values = torch.linalg.svdvals(left @ right.T).cpu() * abs(scale)
    return Spectrum(values, float(values.square().sum().sqrt()), True)


def kaiming_factors(
    shape: tuple[int, int], rank: int, generator: torch.Generator, *, init: str = "kaiming_sqrt5"
) -> tuple[Tensor, Tensor]:
    """Return U (m, k) and V (k, n) in float64 as sine layers draw them: Kaiming uniform with fans k and n."""
    m, n = shape
    return kaiming_uniform((m, rank), generator, init=init), kaiming_uniform((rank, n), generator, init=init)


def kaiming_uniform(shape: tuple[int, int], generator: torch.Generator, *, init: str = "kaiming_sqrt5") -> Tensor:
    """Return draws (m, n), float64, of U(-b, b) with b = sqrt(6 / ((1 + a^2) n)); a is sqrt 5 or, by "kaiming_zero",
    0."""
    bound = math.sqrt({"kaiming_sqrt5": 1.0, "kaiming_zero": 6.0}[init] / shape[1])
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


def random_stable_rank(shape: tuple[int, int]) -> float:
    """Return the stable rank m n / (sqrt m + sqrt n)^2 of a large matrix of independent entries (Marchenko-Pastur).

    About the most that a weight can have whose entries do not depend on each other; orthogonal matrices have more.
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


def _leading(tall: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
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
def guess_omega(shape: tuple[int, int], rank: int, target: float, *, init: str = "kaiming_sqrt5") -> OmegaGuess:
    """Return the omega at which sin(omega U V) (m, n) of rank k has a stable rank at its init: where to begin.

    Found by bisection, to 1 %, on draws of the layer's own shape and init: the stable rank rises with omega, from that
    of U V itself to about that of independent entries. It knows nothing of training (docs/theory.md).
    """
    generator = torch.Generator().manual_seed(0)
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
