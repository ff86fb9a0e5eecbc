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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import encode, gaussian
from .problem import FieldMethod
from .settings import RadianceConfig


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
        """Return `RadianceNet`'s density (...) and colour (..., 3), of the coarse or of the fine field."""
        net = self.fine if fine else self.coarse
        assert net is not None
        return net(points, views)
