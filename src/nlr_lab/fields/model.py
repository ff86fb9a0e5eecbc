"""Coordinate networks: a multilayer perceptron from positions to values (sine_lowrank.txt, section 4.4, A.2.5), and a
radiance field.

Init table, for linears of n inputs; `FieldMethod.init` sets a (sqrt(5) or 0):

| tensor                      | init                                                                         |
|-----------------------------|------------------------------------------------------------------------------|
| dense weight                | Kaiming uniform, +-sqrt(6 / ((1 + a^2) n))                                   |
| factors U (m, k), V (k, n)  | Kaiming uniform with fans k and n                                            |
| bias                        | +-1 / sqrt(n), nn.Linear's                                                   |
| with "siren", first weight  | +-1 / n                                                                      |
| with "siren", other weights | as above with a = 0 for dense ones; the weight as a whole divided by omega_0 |

With activation "siren" and dense linears that is SIREN's own (Sitzmann et al. 2020, section 3.2).

The radiance field is the one whose parameter counts the paper prints (docs/fields.md). Every linear has a bias, and is
factored only where it gets smaller.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .problem import FieldMethod
from .settings import FieldConfig, RadianceConfig

_CHUNK = 1 << 15  # positions that are evaluated at once where no gradient is needed


class Field(nn.Module):
    """A function of position: (..., in_features) -> (..., out_features), linear at its output."""

    def __init__(self, config: FieldConfig, method: FieldMethod, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        width, siren = config.width, config.activation == "siren"

        def linear(d_in: int, d_out: int, *, hidden: bool) -> nn.Module:
            chosen = method if hidden or config.factored == "all" else FieldMethod(init=method.init)
            if siren:
                return _siren_linear(d_in, d_out, chosen, config.frequency, generator)
            return chosen.linear(d_in, d_out, generator=generator)

        self.first = linear(config.encoded, width, hidden=False)
        if siren and isinstance(self.first, nn.Linear):
            bound = 1 / config.encoded
            nn.init.uniform_(self.first.weight, -bound, bound, generator=generator)
        self.hidden = nn.ModuleList([linear(width, width, hidden=True) for _ in range(config.hidden_layers)])
        self.last = linear(width, config.out_features, hidden=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self._activate(self.first(encode(x, self.config.octaves)))
        for layer in self.hidden:
            z = self._activate(layer(z))
        return self.last(z)

    def _activate(self, z: Tensor) -> Tensor:
        siren = self.config.activation == "siren"
        return torch.sin(self.config.frequency * z) if siren else _activate(z, self.config)


class RadianceNet(nn.Module):
    """Points and unit viewing directions, (..., 3), to density (...) >= 0 and colour (..., 3) in [0, 1]."""

    def __init__(self, config: RadianceConfig, method: FieldMethod, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config

        def linear(d_in: int, d_out: int) -> nn.Module:
            return method.linear(d_in, d_out, generator=generator)

        width, first = config.width, 3 * (1 + 2 * config.octaves)
        self.layers = nn.ModuleList([linear(width if number else first, width) for number in range(config.layers)])
        self.alpha = linear(width, 1)
        self.feature = linear(width, width)
        self.view = linear(width + 3 * (1 + 2 * config.view_octaves), config.view_width)
        self.rgb = linear(config.view_width, 3)

    def forward(self, points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        hidden = encode(points, self.config.octaves)
        for layer in self.layers:
            hidden = _activate(layer(hidden), self.config)
        raw = self.alpha(hidden)[..., 0]
        density = F.relu(raw) if self.config.density == "relu" else F.softplus(raw)
        seen = torch.cat([self.feature(hidden), encode(views, self.config.view_octaves)], -1)
        return density, torch.sigmoid(self.rgb(_activate(self.view(seen), self.config)))


class Radiance(nn.Module):
    """One radiance field, or a coarse and a `fine` one of the same shape, as NeRF has."""

    def __init__(self, config: RadianceConfig, method: FieldMethod, fine: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.coarse = RadianceNet(config, method, generator)
        self.fine = RadianceNet(config, method, generator) if fine else None

    def forward(self, points: Tensor, views: Tensor, fine: bool = False) -> tuple[Tensor, Tensor]:
        net = self.fine if fine else self.coarse
        assert net is not None
        return net(points, views)


@torch.no_grad()
def values(model: nn.Module, positions: Tensor) -> Tensor:
    """A model's values at positions (N, d): (N, out_features) float32 on the CPU, some at a time."""
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)).float().cpu() for part in positions.split(_CHUNK)])


def _activate(z: Tensor, config: FieldConfig | RadianceConfig) -> Tensor:
    return torch.relu(z) if config.activation == "relu" else gaussian(z, config.spread)


def encode(x: Tensor, octaves: int) -> Tensor:
    """(..., d) -> (..., d (1 + 2 octaves)): x, and sin and cos of 2^i pi x. Source: Mildenhall et al. 2020, eq. (4)."""
    if not octaves:
        return x
    frequencies = math.pi * 2.0 ** torch.arange(octaves, dtype=x.dtype, device=x.device)
    phase = (x.unsqueeze(-1) * frequencies).flatten(-2)
    return torch.cat([x, phase.sin(), phase.cos()], dim=-1)


def gaussian(z: Tensor, spread: float) -> Tensor:
    """exp(-z^2 / (2 spread^2)). Source: Ramasinghe and Lucey 2022, table 1."""
    return _Gaussian.apply(z, -0.5 / spread**2)


class _Gaussian(torch.autograd.Function):
    """exp(c z^2), with its passes in place: eager, a third to two thirds of the plain formula's time."""

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


@torch.no_grad()
def _siren_linear(
    d_in: int, d_out: int, method: FieldMethod, frequency: float, generator: torch.Generator
) -> nn.Module:
    """A linear whose weight is 1 / omega_0 of the usual, since the activation multiplies by omega_0."""
    factored = method.factors(d_in, d_out)
    if factored and method.kind == "sine":
        gain = d_in**0.5 if method.gain is None else method.gain
        return replace(method, gain=gain * frequency).linear(d_in, d_out, generator=generator)
    chosen = method if factored else FieldMethod(init="kaiming_zero")
    layer: Any = chosen.linear(d_in, d_out, generator=generator)
    (layer.sine_up if factored else layer.weight).div_(frequency)
    return layer
