"""NOBLE branches beside experts."""

from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.methods.expert_layouts import Projection, grouped_product, layout_of
from nonlinear_lowrank.methods.noble.branch import BRANCH_ACTIVATIONS, draw_branch, joined
from nonlinear_lowrank.ops.plain import wide

from .core import Layer
from .experts import SortedExperts, subclass_of, take_experts
from .noble import NobleSettings


class NobleExperts(Layer, SortedExperts):
    """Experts with a branch for each of them and each of their linears; formula and settings of `NobleBranch`.

    Tensors, of E experts: noble_in_down (E, r, d_in), or (r, d_in) with expert_down="shared", noble_in_up
    (E, d_out, r), ... beside gate and up, noble_out_down, ... beside the down projection, where there are two.
    """

    noble: Any

    def ends(self) -> list[tuple[str, Projection]]:
        """Return "in" and "out" with their linears, or the first alone."""
        return list(zip(("in", "out"), layout_of(self).projections(self), strict=False))

    def take(self, settings: Any) -> None:
        """Take the settings and make the tensors."""
        experts: Any = self
        self.noble, count = settings, layout_of(self).count(experts)
        for end, (parameter, d_in, d_out, _) in self.ends():
            like: Tensor = attrgetter(parameter)(experts)
            for name, shape in settings.shapes_of_experts(count, d_in, d_out).items():
                self.register_parameter(f"noble_{end}_{name}", nn.Parameter(like.new_empty(shape)))

    def reset_parameters(self) -> None:
        """Draw as `NobleBranch` does, with the fans of one expert."""
        settings, own = self.noble, dict(self.named_parameters())
        for end, each in self.ends():
            if settings.init != "pretrained":
                for plain in each.parameters:
                    init.normal_(own[plain], std=settings.dense_scale / each.d_in**0.5)
                if (bias := own.get(f"{each.name}_bias")) is not None:
                    init.zeros_(bias)
            names = settings.shapes(each.d_in, each.d_out)
            draw_branch({name: own[f"noble_{end}_{name}"] for name in names}, settings, each.d_in)

    def forward(self, *inputs: Any) -> Tensor:
        """Return the output for the experts' inputs, mostly (T, d), (T, k), (T, k) -> (T, d)."""
        layout, ends = layout_of(self), {each.name: end for end, each in self.ends()}

        def linear(name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
            dense = layout.linear(self, name, x_SI, expert_S, ends_E)
            return self._joined(ends[name], dense, x_SI.to(dense.dtype), expert_S, ends_E)

        return layout.forward(self, linear, *inputs)

    def _joined(self, end: str, dense: Tensor, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        settings = self.noble

        def own(name: str) -> Tensor:
            tensor: Tensor = getattr(self, f"noble_{end}_{name}")
            return tensor

        def product(u: Tensor, matrices: Tensor) -> Tensor:
            return grouped_product(u, matrices.transpose(1, 2), ends_E)

        u = F.linear(x_SI, own("down")) if own("down").ndim == 2 else product(x_SI, own("down"))
        for k in range(1, settings.depth + 1):
            z = wide(product(u, own(f"mix{k - 1}")) if k > 1 else u)
            if settings.activation == "cosine":
                z = z + wide(own(f"bias{k}"))[expert_S] if settings.bottleneck_bias else z
                z = torch.addcmul(wide(own(f"phase{k}"))[expert_S], z, wide(own(f"frequency{k}"))[expert_S])
            u = BRANCH_ACTIVATIONS[settings.activation](z).to(dense.dtype)
        branch = product(F.dropout(u, settings.dropout, self.training), own("up"))
        if settings.up_bias:
            branch = branch + own("up_bias")[expert_S]
        gate = torch.sigmoid(own("fusion"))[expert_S, None] if settings.fusion == "gated" else None
        return joined(dense, branch, gate, settings.scale)


def noble_experts(experts: Any, settings: dict[str, Any]) -> nn.Module:
    """Return experts with branches."""
    layer: Any = subclass_of(NobleExperts, experts)
    layer.take(NobleSettings(**settings))
    return layer


take_experts("noble", noble_experts)
