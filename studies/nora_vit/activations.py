"""The learnable activations that Table 3 of nora.txt compares with, as arms of `nlr compare`: "activations:prelu".

Each freezes the model but its new head, and puts one activation with trained parameters of its own in every
block in the place of GELU.
"""

from collections.abc import Callable

import torch
from torch import nn


class PReLU(nn.Module):
    """x for x >= 0, a slope of its channel times x below, from 0.25: nn.PReLU for channels that come last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((channels,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() - (-x).relu() * self.slope


class AReLU(nn.Module):
    """(1 + sigmoid(beta)) x for x >= 0, clip(alpha, 0.01, 0.99) x below (arXiv 2006.13858): two numbers a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([0.90]))
        self.beta = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() * (1 + torch.sigmoid(self.beta)) - (-x).relu() * self.alpha.clamp(0.01, 0.99)


class LearnableELU(nn.Module):
    """x for x > 0, alpha (exp(x) - 1) below, with one trained alpha a layer, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + self.alpha * torch.expm1(-(-x).relu())


def prelu(model: nn.Module) -> nn.Module:
    """PReLU."""
    return _swap(model, PReLU)


def arelu(model: nn.Module) -> nn.Module:
    """AReLU."""
    return _swap(model, lambda width: AReLU())


def elu(model: nn.Module) -> nn.Module:
    """ELU."""
    return _swap(model, lambda width: LearnableELU())


def _swap(model: nn.Module, make: Callable[[int], nn.Module]) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("classifier").requires_grad_(True)
    swapped = 0
    for module in model.modules():
        if hasattr(module, "activation_fn") and isinstance(getattr(module, "fc1", None), nn.Linear):
            module.activation_fn = make(module.fc1.out_features).to(module.fc1.weight.device)
            swapped += 1
    if not swapped:
        raise ValueError("no block with fc1 and activation_fn was found")
    return model
