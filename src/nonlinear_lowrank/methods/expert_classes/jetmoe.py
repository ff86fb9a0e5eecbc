"""JetMoe's experts."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nonlinear_lowrank.methods.expert_layouts import LAYOUTS, Layout, Linear, Projection


class JetMoeLayout(Layout):
    """A module for each linear, called with rows that are sorted by expert."""

    def held(self, module: Any) -> list[Projection]:
        """Return the one linear."""
        return [Projection("weight", module.input_size, module.output_size)]

    def matrices(self, module: Any, name: str) -> list[Tensor]:
        """Return a view (E, I, O) of its parameter."""
        return [getattr(module, name).transpose(1, 2)]

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """(S, I), and the number of rows of each expert -> (S, O)."""
        x_SI, sizes = inputs
        numbers_E = torch.arange(len(sizes), device=x_SI.device)
        expert_S = numbers_E.repeat_interleave(torch.tensor(sizes, device=x_SI.device), output_size=x_SI.shape[0])
        ends_E = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=x_SI.device)
        return linear("weight", x_SI, expert_S, ends_E)


LAYOUTS["JetMoeParallelExperts"] = JetMoeLayout()
