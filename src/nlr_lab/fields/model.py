"""Coordinate networks: a multilayer perceptron from positions to values (sine_lowrank.txt, section 4.4, A.2.5).

Init table, for linears of n inputs; `FieldMethod.init` sets a (sqrt(5) or 0):

| tensor                      | init                                                                         |
|-----------------------------|------------------------------------------------------------------------------|
| dense weight                | Kaiming uniform, +-sqrt(6 / ((1 + a^2) n))                                   |
| factors U (m, k), V (k, n)  | Kaiming uniform with fans k and n                                            |
| bias                        | +-1 / sqrt(n), nn.Linear's                                                   |
| with "siren", first weight  | +-1 / n                                                                      |
| with "siren", other weights | as above with a = 0 for dense ones; the weight as a whole divided by omega_0 |

With activation "siren" and dense linears that is SIREN's own (Sitzmann et al. 2020, section 3.2).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear

from .problem import FieldMethod, dense_linear
from .settings import FieldConfig


class Field(nn.Module):
    """A function of position: (..., in_features) -> (..., out_features), linear at its output."""

    def __init__(self, config: FieldConfig, method: FieldMethod, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        siren = config.activation == "siren"

        def linear(d_in: int, d_out: int, *, hidden: bool) -> nn.Module:
            chosen = method if hidden or config.factored == "all" else FieldMethod(init=method.init)
            if siren:
                return _siren_linear(d_in, d_out, chosen, config.frequency, generator)
            return chosen.linear(d_in, d_out, generator=generator)

        width = config.width
        self.first = linear(config.encoded, width, hidden=False)
        if siren:
            _draw_first(self.first, config.encoded, generator)
        self.hidden = nn.ModuleList([linear(width, width, hidden=True) for _ in range(config.hidden_layers)])
        self.last = linear(width, config.out_features, hidden=False)
        self._activate = _activation(config)

    def forward(self, x: Tensor) -> Tensor:
        z = self._activate(self.first(encode(x, self.config.octaves)))
        for layer in self.hidden:
            z = self._activate(layer(z))
        return self.last(z)


def encode(x: Tensor, octaves: int) -> Tensor:
    """(..., d) -> (..., d (1 + 2 octaves)): x, and sin and cos of 2^i pi x. Source: Mildenhall et al. 2020, eq. (4)."""
    if not octaves:
        return x
    frequencies = math.pi * 2.0 ** torch.arange(octaves, dtype=x.dtype, device=x.device)
    phase = (x.unsqueeze(-1) * frequencies).flatten(-2)
    return torch.cat([x, phase.sin(), phase.cos()], dim=-1)


def gaussian(z: Tensor, spread: float) -> Tensor:
    """exp(-z^2 / (2 spread^2)). Source: Ramasinghe and Lucey 2022, table 1.

    One autograd function with its passes in place: eager, a third to two thirds of the plain formula's time.
    """
    return _Gaussian.apply(z, -0.5 / spread**2)


class _Gaussian(torch.autograd.Function):
    """exp(c z^2); keeps z and its value, as the plain formula does."""

    @staticmethod
    def forward(z, c):
        return z.square().mul_(c).exp_()

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, ctx.c = inputs
        ctx.save_for_backward(z, output)

    @staticmethod
    def backward(ctx, dy):
        z, y = ctx.saved_tensors
        return (dy * y).mul_(z).mul_(2 * ctx.c), None


def _activation(config: FieldConfig) -> Callable[[Tensor], Tensor]:
    if config.activation == "relu":
        return torch.relu
    if config.activation == "siren":
        return lambda z: torch.sin(config.frequency * z)
    return lambda z: gaussian(z, config.spread)


@torch.no_grad()
def _siren_linear(
    d_in: int, d_out: int, method: FieldMethod, frequency: float, generator: torch.Generator
) -> nn.Module:
    """A linear whose weight is 1 / omega_0 of the usual, since the activation multiplies by omega_0."""
    if not method.factors(d_in, d_out):
        layer = dense_linear(d_in, d_out, init="kaiming_zero", generator=generator)
        layer.weight.div_(frequency)
        return layer
    if method.kind == "sine":
        gain = d_in**0.5 if method.gain is None else method.gain
        return replace(method, gain=gain * frequency).linear(d_in, d_out, generator=generator)
    low = method.linear(d_in, d_out, generator=generator)
    assert isinstance(low, SineLowRankLinear)
    low.sine_up.div_(frequency)
    return low


@torch.no_grad()
def _draw_first(layer: nn.Module, d_in: int, generator: torch.Generator) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight.uniform_(-1 / d_in, 1 / d_in, generator=generator)
