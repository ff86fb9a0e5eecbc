"""The sine operators as plain differentiable formulas; shapes in `ops.sine`."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.sine import SineFactors

from .op import lowrank_weight


def sine_layer_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, factors: Sequence[SineFactors], *, base: bool = True
) -> Tensor:
    """Compute what `sine_layer` does, for a plain (d_out, d_in) weight."""
    total = weight if base else None
    for each in factors:
        delta = _delta(weight, each)
        total = delta if total is None else total + delta
    assert total is not None
    return F.linear(x, total.to(x.dtype), bias)


def sine_embedding_reference(indices: Tensor, weight: Tensor, factors: Sequence[SineFactors]) -> Tensor:
    """Compute what `sine_embedding` does, over the whole table."""
    total = weight
    for each in factors:
        total = total + _delta(weight, each)
    return F.embedding(indices, total.to(weight.dtype))


def _delta(weight: Tensor | None, factors: SineFactors) -> Tensor:
    delta = factors.scale * lowrank_weight(factors.up, factors.down, "sine", factors.omega, factors.gain)
    if factors.magnitude is None:
        return delta
    assert weight is not None
    direction = weight + delta
    return (factors.magnitude / direction.detach().norm(dim=1))[:, None] * direction - weight


def lowrank_linear_reference(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    """Compute what `lowrank_linear` does."""
    return F.linear(x, lowrank_weight(up, down, activation, omega, gain).to(x.dtype), bias)
