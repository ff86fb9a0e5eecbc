"""Low-rank factors that stand for a trained weight W: of least squared error, as far as a short descent finds it.

    identity    W ~ up @ down                the truncated singular value decomposition, which no other pair betters
    sine        W ~ sin(up @ down) / gain    begun at the identity's W_r: A sin(W_r / A) is near it for a large A

The gain is solved for at every step: the best amplitude is linear in W. Of two starts, with an amplitude A of the
weight's root mean square and of half of it, the better is kept: the first suits weights that are nearly of low rank
already, the second those whose singular values hardly fall.

A smaller weight error need not mean a smaller model error: singular value decomposition keeps the largest directions
whole, and these are where the inputs are (studies/compression).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.plain import wide_dtype

_STARTS = (1.0, 0.5)  # amplitude, over the weight's root mean square
_STEPS, _RATE = 100, 0.05


class Fitted(NamedTuple):
    """Factors up (d_out, r) and down (r, d_in) in float32 or wider, at omega = 1."""

    up: Tensor
    down: Tensor
    gain: float
    error: float
    """Norm of what is left of the weight, over the weight's."""


def fit_factors(weight: Tensor, rank: int, activation: str) -> Fitted:
    """Fit "sine" or "identity" factors to a weight (d_out, d_in). Draws nothing at random.

    Source of the formula: sine_lowrank.txt, section 3.2.1, equations (2) and (3); the fit is this library's.

    Raises:
        UserError: the weight has values that are not finite.
    """
    with torch.no_grad():
        target = weight.detach().to(wide_dtype(weight))
        if not target.isfinite().all():
            raise UserError("its weight has values that are not finite, which nothing can be fitted to")
        u, s, v = torch.linalg.svd(target, full_matrices=False)
        root = s[:rank].sqrt()
        up, down = u[:, :rank] * root, root[:, None] * v[:rank]
        spread = target.square().mean().sqrt().item()
        if activation == "identity" or not spread:
            return Fitted(up, down, 1.0, _error(target, up @ down))
    found = [_descend(target / spread, up / (c * spread) ** 0.5, down / (c * spread) ** 0.5) for c in _STARTS]
    best = min(found, key=lambda each: each.error)
    return best._replace(gain=best.gain / spread)


def _descend(target: Tensor, up: Tensor, down: Tensor) -> Fitted:
    """Return the factors after Adam's steps, whose learning rate falls linearly to zero."""
    up, down = (each.clone().requires_grad_() for each in (up, down))
    optimizer = torch.optim.Adam([up, down], lr=_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, _STEPS)
    for _ in range(_STEPS):
        with torch.enable_grad():
            sine = torch.sin(up @ down)
            loss = (target - _amplitude(target, sine) * sine).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        sine = torch.sin(up @ down)
        amplitude = _amplitude(target, sine)
        return Fitted(up.detach(), down.detach(), 1 / amplitude.item(), _error(target, amplitude * sine))


@torch.no_grad()
def _amplitude(target: Tensor, sine: Tensor) -> Tensor:
    """Return the factor of the sine of least squared error."""
    return (target * sine).sum() / sine.square().sum()


def _error(target: Tensor, found: Tensor) -> float:
    return float((target - found).norm() / target.norm()) if target.any() else 0.0
