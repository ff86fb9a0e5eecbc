"""Llama 4's experts."""

from typing import Any

import torch
from torch import Tensor

from nonlinear_lowrank.methods.expert_layouts import LAYOUTS, Layout, Linear, Projection


class Llama4Layout(Layout):
    """Every token comes to every expert, as zeros where the router does not send it there."""

    def held(self, module: Any) -> list[Projection]:
        """Return the linears whose parameters the module holds."""
        weights = ((name, module._parameters[name]) for name in ("gate_up_proj", "down_proj"))
        return [Projection(name, *weight.shape[1:]) for name, weight in weights]

    def matrices(self, module: Any, name: str) -> list[Tensor]:
        """Return views (E, I, O) of the parameters of a projection."""
        return [getattr(module, name)]

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """(E x T, d), expert by expert -> the same shape; rows of zeros stay, which no branch may fill."""
        (hidden_states,) = inputs
        rows_S = hidden_states.any(-1).nonzero()[:, 0]
        expert_S = rows_S // (hidden_states.shape[0] // self.count(module))
        y_SO = self.mlp(module, linear, hidden_states[rows_S], expert_S, self._ends(module, expert_S))
        return torch.zeros_like(hidden_states).index_copy(0, rows_S, y_SO.to(hidden_states.dtype))


LAYOUTS["Llama4TextExperts"] = Llama4Layout()
