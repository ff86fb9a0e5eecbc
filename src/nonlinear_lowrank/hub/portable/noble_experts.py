"""NOBLE branches beside experts."""

from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.methods.expert_layouts import Projection, grouped_product, layout_of
from nonlinear_lowrank.ops.plain import wide

from .core import Layer
from .experts import SortedExperts, subclass_of, take_experts
from .noble import NOBLE_ACTIVATIONS, draw_bias, draw_mix, noble_rank, noble_scale


class NobleExperts(Layer, SortedExperts):
    """Experts with a branch for each of them and each of their linears; formula and settings of `NobleBranch`.

    Tensors, of E experts: noble_in_down (E, r, d_in), or (r, d_in) with expert_down="shared", noble_in_up
    (E, d_out, r), ... beside gate and up, noble_out_down, ... beside the down projection, where there are two.
    """

    noble: dict[str, Any]

    def ends(self) -> list[tuple[str, Projection]]:
        """Return "in" and "out" with their linears, or the first alone."""
        return list(zip(("in", "out"), layout_of(self).projections(self), strict=False))

    def take(self, settings: dict[str, Any]) -> None:
        """Take the settings and make the tensors."""
        experts: Any = self
        self.noble, count, depth = settings, layout_of(self).count(experts), settings["depth"]
        for end, (parameter, d_in, d_out, _) in self.ends():
            like: Tensor = attrgetter(parameter)(experts)
            r = noble_rank(settings, d_in, d_out)
            down = (r, d_in) if settings["expert_down"] == "shared" else (count, r, d_in)
            shapes: dict[str, tuple[int, ...]] = {"down": down, "up": (count, d_out, r)}
            shapes |= {f"mix{k}": (count, r, r) for k in range(1, depth)}
            for k in range(1, depth + 1) if settings["activation"] == "cosine" else ():
                shapes |= {f"frequency{k}": (count, r), f"phase{k}": (count, r)}
                shapes |= {f"bias{k}": (count, r)} if settings.get("bottleneck_bias") else {}
            shapes |= {"up_bias": (count, d_out)} if settings["up_bias"] else {}
            shapes |= {"fusion": (count,)} if settings["fusion"] == "gated" else {}
            for name, shape in shapes.items():
                self.register_parameter(f"noble_{end}_{name}", nn.Parameter(like.new_empty(shape)))

    def reset_parameters(self) -> None:
        """Draw as `NobleBranch` does, with the fans of one expert."""
        settings, scratch = self.noble, self.noble["init"] != "pretrained"
        for end, each in self.ends():
            parameter, d_in, d_out, _ = each
            r, own = noble_rank(settings, d_in, d_out), dict(self.named_parameters())
            if scratch:
                for plain in each.parameters:
                    init.normal_(own[plain], std=settings["dense_scale"] / d_in**0.5)
                if f"{parameter}_bias" in own:
                    init.zeros_(own[f"{parameter}_bias"])
            for name, tensor in own.items():
                kind = name.removeprefix(f"noble_{end}_").rstrip("0123456789")
                if kind == "down":
                    init.normal_(tensor, std=d_in**-0.5)
                elif kind == "up":
                    init.normal_(tensor, std=settings["up_scale"] / r**0.5 if scratch else 0.0)
                elif kind == "mix":
                    draw_mix(tensor, settings.get("mix_scale"))
                elif kind == "bias" and name.startswith("noble_"):
                    draw_bias(tensor, name)
                elif kind == "frequency":
                    init.uniform_(tensor, *settings["frequency_range"])
                elif kind == "phase":
                    init.normal_(tensor, std=settings["phase_std"])
                elif kind in ("up_bias", "fusion"):
                    init.zeros_(tensor)

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
        for k in range(1, settings["depth"] + 1):
            z = wide(product(u, own(f"mix{k - 1}")) if k > 1 else u)
            if settings["activation"] == "cosine":
                z = z + wide(own(f"bias{k}"))[expert_S] if settings.get("bottleneck_bias") else z
                z = torch.addcmul(wide(own(f"phase{k}"))[expert_S], z, wide(own(f"frequency{k}"))[expert_S])
            u = NOBLE_ACTIVATIONS[settings["activation"]](z).to(dense.dtype)
        branch = product(F.dropout(u, settings["dropout"], self.training), own("up"))
        if settings["up_bias"]:
            branch = branch + own("up_bias")[expert_S]
        if settings["fusion"] == "gated":
            gate = torch.sigmoid(own("fusion"))[expert_S, None].to(dense.dtype)
            y = gate * dense + (1 - gate) * branch
        else:
            y = dense + branch
        scale = noble_scale(settings)
        return y if scale == 1 else y * scale


def noble_experts(experts: Any, settings: dict[str, Any]) -> nn.Module:
    """Return experts with branches."""
    layer: Any = subclass_of(NobleExperts, experts)
    layer.take(settings)
    return layer


take_experts("noble", noble_experts)
