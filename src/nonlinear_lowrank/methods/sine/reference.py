"""Weights that are a function of a low-rank product, as plain differentiable formulas; shapes in `op`.

Those of `ops.sine` stand beside their operator.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.plain import wide_dtype
from nonlinear_lowrank.ops.precision import formula_product, no_autocast
from nonlinear_lowrank.ops.sine import SineFactors, sine_sum_reference


class Phi(NamedTuple):
    """A function phi of the phase."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """The derivative at the phase."""


def _sigmoid_slope(phase: Tensor) -> Tensor:
    value = phase.sigmoid()
    return value * (1 - value)


PHI = {
    "identity": Phi(lambda phase: phase, torch.ones_like),
    "sine": Phi(torch.sin, torch.cos),
    "sigmoid": Phi(torch.sigmoid, _sigmoid_slope),
    "relu": Phi(torch.relu, lambda phase: (phase > 0).to(phase.dtype)),
}


def lowrank_weight(up: Tensor, down: Tensor, activation: str, omega: float, gain: float) -> Tensor:
    """Return the weight itself, differentiable: (d_out, d_in), float32 or wider."""
    dtype = wide_dtype(up, down)
    with no_autocast(up):
        return PHI[activation].value(omega * formula_product(up.to(dtype), down.to(dtype))) / gain


def lowrank_linear_reference(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    """Compute what `lowrank_linear` does."""
    return F.linear(x, lowrank_weight(up, down, activation, omega, gain).to(x.dtype), bias)


def sine_embedding_reference(
    indices: Tensor,
    weight: Tensor,
    factors: Sequence[SineFactors],
    *,
    padding_idx: int | None = None,
    base: bool = True,
) -> Tensor:
    """Compute what `sine_embedding` does, over the whole table."""
    return F.embedding(indices, sine_sum_reference(weight, factors, base=base).to(weight.dtype), padding_idx)
