"""Rational activations of experts."""

from typing import Any

import torch
from torch import Tensor, nn

from nonlinear_lowrank.methods.expert_layouts import layout_of

from .core import METHODS
from .experts import sort_rows
from .rational import RationalActivation, put_rational


class RationalOfExperts(RationalActivation):
    """`RationalActivation` with coefficients for each of E experts, (E, G, .): rows (S, channels), sorted by expert."""

    expert_ends: Any = None
    """Ends of each expert's rows, set by the experts for every call."""

    def __init__(self, settings: dict[str, Any], device: Any) -> None:
        super().__init__(settings, device)
        self.num_experts = settings["experts"]

    def forward(self, x: Tensor) -> Tensor:
        """(S, channels) -> the same."""
        ends_E = torch.tensor(self.expert_ends, device=x.device)
        expert_S = (torch.arange(x.shape[0], device=x.device)[:, None] >= ends_E).sum(1)
        return self.evaluate(x, self.rational_numerator[expert_S], self.rational_denominator[expert_S])


def put_rational_experts(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put rational functions in the place of activations, those of experts too."""
    put_rational(model, names, settings, RationalOfExperts if settings.get("experts") else RationalActivation)
    for name in names if settings.get("experts") else ():
        path = name.rpartition(".")[0]
        held = layout_of(module := model.get_submodule(path)).projections(module)
        sort_rows(model, path if held else path.rpartition(".")[0])  # DBRX's experts have it in a child


METHODS["rational"] = put_rational_experts
