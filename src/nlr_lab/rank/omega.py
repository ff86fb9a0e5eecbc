"""A first guess of omega for a sine low-rank weight that takes the place of a trained dense one.

The rule: at its init, W = sin(omega U V) / g shall have the stable rank of the weight it replaces. The stable rank
rises with omega, from that of U V itself to about that of independent entries (`measures.random_stable_rank`), so the
omega is found by bisection on draws of the layer's own shape and init. Where the trained weight has no more stable
rank than plain U V, no omega is needed for the rank's sake; where it has as much as independent entries, there is no
finite omega, and the one that reaches `SATURATED` of that is given.

It is where to begin a sweep: it equals a property of the init and knows nothing of training. How it compares with
the published frequencies is in docs/theory.md.
"""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from .measures import kaiming_factors, random_stable_rank

SATURATED = 0.95
"""Share of `random_stable_rank` that counts as all of it."""
_STEP = 0.01  # where the bisection stops: omega to 1 %, finer than draws differ
_RANGE = (1e-2, 1e6)
_DRAWS = 3
_SMALL = 2**18  # entries up to which several draws are averaged


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
    """Return the omega at which sin(omega U V) (m, n) of rank k has a stable rank, at an init of sine layers."""
    generator = torch.Generator().manual_seed(seed)
    draws = _DRAWS if shape[0] * shape[1] <= _SMALL else 1
    factors = [kaiming_factors(shape, rank, generator, init=init) for _ in range(draws)]
    products = [up.float() @ down.float() for up, down in factors]  # float32, as the layer's own
    plain = statistics.fmean([stable_rank(product) for product in products])
    most = SATURATED * random_stable_rank(shape)
    if target <= plain:
        return OmegaGuess(omega=None, saturated=False, target=target, low_rank=plain)
    wanted = min(target, most)
    low, high = (math.log(bound) for bound in _RANGE)
    while high - low > _STEP:
        middle = (low + high) / 2
        reached = statistics.fmean([stable_rank(torch.sin(math.exp(middle) * product)) for product in products])
        low, high = (low, middle) if reached >= wanted else (middle, high)
    # Rank one needs an omega beyond any use to saturate: then it is the end of the range.
    beyond = high == math.log(_RANGE[1])
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
