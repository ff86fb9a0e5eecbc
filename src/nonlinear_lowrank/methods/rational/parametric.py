"""Activations with trained numbers that rational ones are compared with (nora.txt, Table 3).

| class | tensor | shape      | init | source                                |
|-------|--------|------------|------|---------------------------------------|
| PReLU | slope  | (channels) | 0.25 | He et al., arXiv:1502.01852           |
| AReLU | alpha  | (1)        | 0.9  | Chen et al., arXiv:2006.13858         |
|       | beta   | (1)        | 2    |                                       |
| ELU   | alpha  | (1)        | 1    | Clevert et al., arXiv:1511.07289 (theirs is not trained) |

Each takes any shape and returns the same; channels come last.
"""

import torch
from torch import Tensor, nn


class PReLU(nn.Module):
    """x for x >= 0, a slope of its channel times x below; `channels` 1: one for all."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((channels,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels) -> the same."""
        return x.relu() - (-x).relu() * self.slope


class AReLU(nn.Module):
    """(1 + sigmoid(beta)) x for x >= 0, clip(alpha, 0.01, 0.99) x below."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([0.90]))
        self.beta = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same."""
        return x.relu() * (1 + torch.sigmoid(self.beta)) - (-x).relu() * self.alpha.clamp(0.01, 0.99)


class ELU(nn.Module):
    """x for x > 0, alpha (exp(x) - 1) below."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same."""
        return x.relu() + self.alpha * torch.expm1(-(-x).relu())
