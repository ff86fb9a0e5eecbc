"""LongCat-Flash's experts."""

from typing import Any

import torch
from torch import Tensor

from nonlinear_lowrank.methods.expert_layouts import LAYOUTS, Layout, Linear, Projection


class LongcatFlashLayout(Layout):
    """Experts behind those with weights are the identity, and `gate_up_proj` has rows for them too."""

    def count(self, module: Any) -> int:
        """Return the number of experts with weights."""
        number: int = module.num_routed_experts
        return number

    def active(self, module: Any, of_token: int) -> float:
        """Return how many experts with weights a token goes through on average, where all are as likely."""
        return of_token * module.num_routed_experts / module.total_experts

    def held(self, module: Any) -> list[Projection]:
        """Return the linears whose parameters the module holds."""
        weights = ((name, module._parameters[name]) for name in ("gate_up_proj", "down_proj"))
        return [Projection(name, *weight.shape[:0:-1]) for name, weight in weights if weight is not None]

    def matrices(self, module: Any, name: str) -> list[Tensor]:
        """Return views (E, I, O) of the parameters of a projection."""
        return [getattr(module, name)[: self.count(module)].transpose(1, 2)]

    def mlp(self, module: Any, linear: Linear, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the output of each row's expert, (S, d)."""
        if torch.compiler.is_compiling():  # no shape may depend on the routing: the last expert has the rest, as zeros
            last = self.count(module) - 1
            identity_S1 = expert_S[:, None] > last
            ends_E = torch.cat([ends_E[:-1], ends_E.new_full((1,), x_SI.shape[0])])
            rows_SI = x_SI.masked_fill(identity_S1, 0)
            y_SO = super().mlp(module, linear, rows_SI, expert_S.clamp(max=last), ends_E)
            return torch.where(identity_S1, x_SI.to(y_SO.dtype), y_SO)
        routed = int(ends_E[-1])
        y_SO = super().mlp(module, linear, x_SI[:routed], expert_S[:routed], ends_E)
        return torch.cat([y_SO, x_SI[routed:].to(y_SO.dtype)])


LAYOUTS["LongcatFlashExperts"] = LongcatFlashLayout()
