"""The radiance field of the sine low-rank paper, found by the parameter counts that it prints.

    position (3) -> layers x [linear 256, activation] -> alpha: linear 1 -> density
                                                      -> feature: linear 256, with direction (3) -> view: linear 128,
                                                         activation -> rgb: linear 3, sigmoid -> colour

Position and direction enter as they are, without an encoding, and no layer sees the position again. Every linear has
a bias; a linear m x n is factored only where k (m + n) < m n, which alpha's never is.

| linears | parameters | printed |
|---------|------------|---------|
| dense   | 561,284    | 100 %   |
| k = 1   | 7,565      | 1.3 %   |
| k = 5   | 26,259     | 4.7 %   |
| k = 10  | 48,674     | 8.7 %   |
| k = 30  | 138,334    | 24.6 %  |
| k = 60  | 272,824    | 48.6 %  |

Source: sine_lowrank.txt, section 4.3, Table 3 and appendix A.2.4.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.validation import check_choice, check_integer, check_number

from .model import encode, gaussian
from .problem import FieldMethod

Activation = Literal["gaussian", "relu"]
Density = Literal["relu", "softplus"]


@dataclass(frozen=True, kw_only=True)
class RadianceConfig:
    """Shape of a radiance field; the paper's by default."""

    width: int = 256
    """Of the layers that see the position."""
    layers: int = 8
    """How many there are."""
    view_width: int = 128
    """Of the layer that sees the direction."""
    activation: Activation = "gaussian"
    """exp(-z^2 / (2 s^2)), or max(z, 0), which without an encoding blurs."""
    spread: float = 0.2
    """s of the Gaussian. Eight layers as they are drawn vary by about 23,000 rad per unit of position at s = 0.05, 500
    at 0.1, 50 at 0.15, 12 at 0.2 and 3 at 0.3; pixels of a view 252 wide are told apart by up to 400."""
    density: Density = "softplus"
    """Of alpha's output: log(1 + exp(z)), or NeRF's max(z, 0), of which two draws in eight start all but empty (density
    at 2 % of the points or fewer) and then learn no depth: nothing passes a gradient there."""
    octaves: int = 0
    """Positional encoding of the position, as in NeRF (10 there). 0: none, as in the paper."""
    view_octaves: int = 0
    """The same for the direction (4 in NeRF)."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "view_width"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("octaves", "view_octaves"):
            check_integer(name, getattr(self, name), minimum=0)
        check_number("spread", self.spread, above=0)
        check_choice("activation", self.activation, get_args(Activation))
        check_choice("density", self.density, get_args(Density))


class RadianceNet(nn.Module):
    """Points and unit viewing directions, (..., 3), to density (...) >= 0 and colour (..., 3) in [0, 1]."""

    def __init__(self, config: RadianceConfig, method: FieldMethod, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config

        def linear(d_in: int, d_out: int) -> nn.Module:
            return method.linear(d_in, d_out, generator=generator)

        width = config.width
        first = 3 * (1 + 2 * config.octaves)
        self.layers = nn.ModuleList([linear(width if number else first, width) for number in range(config.layers)])
        self.alpha = linear(width, 1)
        self.feature = linear(width, width)
        self.view = linear(width + 3 * (1 + 2 * config.view_octaves), config.view_width)
        self.rgb = linear(config.view_width, 3)

    def forward(self, points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        hidden = encode(points, self.config.octaves)
        for layer in self.layers:
            hidden = self._activate(layer(hidden))
        raw = self.alpha(hidden)[..., 0]
        density = F.relu(raw) if self.config.density == "relu" else F.softplus(raw)
        seen = torch.cat([self.feature(hidden), encode(views, self.config.view_octaves)], -1)
        return density, torch.sigmoid(self.rgb(self._activate(self.view(seen))))

    def _activate(self, z: Tensor) -> Tensor:
        return F.relu(z) if self.config.activation == "relu" else gaussian(z, self.config.spread)


class Radiance(nn.Module):
    """One radiance field, or a coarse and a `fine` one of the same shape, as NeRF has."""

    def __init__(self, config: RadianceConfig, method: FieldMethod, fine: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.coarse = RadianceNet(config, method, generator)
        self.fine = RadianceNet(config, method, generator) if fine else None

    def forward(self, points: Tensor, views: Tensor, fine: bool = False) -> tuple[Tensor, Tensor]:
        """As `RadianceNet`, of the coarse or of the fine field."""
        net = self.fine if fine else self.coarse
        assert net is not None
        return net(points, views)
