"""NOBLE branches beside linears."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.methods.names import qkv_groups
from nonlinear_lowrank.methods.noble.branch import BRANCH_ACTIVATIONS, draw_branch, has_own_init, joined
from nonlinear_lowrank.methods.settings import BranchSettings
from nonlinear_lowrank.ops.plain import wide

from .core import METHODS, Layer, replace, width_of, with_state


class NobleSettings(BranchSettings, SimpleNamespace):
    """The settings in config.json."""


class NobleBranch(Layer):
    """A linear with a permanent nonlinear low-rank branch (Smith, "NOBLE", arXiv:2603.06492, section 3).

        h = x Wdown^T                        (..., r)
        c1 = cos(w1 * h + p1)                (with biases w1 * (h + b1) + p1, and so on)
        c2 = cos(w2 * (c1 M^T) + p2)
        y = x W^T + b + c2 Wup^T

    Tensors: weight and bias are the plain linear's; noble_down (r, d_in), noble_up (d_out, r), noble_mix1 (r, r),
    noble_frequency1 and 2, noble_phase1 and 2 (r). `depth` counts activations, of which `activation` may be another.
    With fusion="gated" the sum is w * (x W^T + b) + (1 - w) * (c2 Wup^T + noble_up_bias), w = sigmoid(noble_fusion).
    Phases are formed in float32 or wider.
    """

    noble: Any
    shape: tuple[int, int]
    owner: tuple[Any, ...]

    def take(self, settings: Any, own_init: set[str], first: Any) -> Any:
        """Take the settings; `first` is the layer whose down projection this one shares, or None."""
        module: Any = self
        self.noble, self.own_init = settings, own_init
        self.shape, self.owner = width_of(self), () if first is None else (first,)  # in a tuple it is not a child
        for name, shape in settings.shapes(*self.shape).items():
            if name != "down" or not self.owner:
                module.register_parameter(f"noble_{name}", nn.Parameter(module.weight.new_empty(shape)))
        return module

    def reset_parameters(self) -> None:
        """Draw the branch; from scratch W ~ N(0, (0.5 / sqrt(d_in))^2) too, except what keeps the model's init."""
        module: Any = self
        settings, d_in = self.noble, self.shape[0]
        scratch = settings.init != "pretrained"
        if scratch and "weight" not in self.own_init:
            init.normal_(module.weight, std=settings.dense_scale / d_in**0.5)
        if scratch and module.bias is not None and "bias" not in self.own_init:
            init.zeros_(module.bias)
        own = {name: module._parameters.get(f"noble_{name}") for name in settings.shapes(*self.shape)}
        draw_branch(own, settings, d_in)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        module: Any = self
        settings, dense = self.noble, super().forward(x)  # type: ignore[misc]
        u = F.linear(x, (self.owner[0] if self.owner else module).noble_down)
        dtype = u.dtype
        for k in range(1, settings.depth + 1):
            if k > 1:
                u = F.linear(u, getattr(module, f"noble_mix{k - 1}"))
            z = wide(u)
            if settings.activation == "cosine":
                z = z + wide(getattr(module, f"noble_bias{k}")) if settings.bottleneck_bias else z
                z = wide(getattr(module, f"noble_phase{k}")) + z * wide(getattr(module, f"noble_frequency{k}"))
            u = BRANCH_ACTIVATIONS[settings.activation](z).to(dtype)
        branch = F.linear(F.dropout(u, settings.dropout, module.training), module.noble_up)
        if settings.up_bias:
            branch = branch + module.noble_up_bias
        gate = torch.sigmoid(module.noble_fusion) if settings.fusion == "gated" else None
        return joined(dense, branch, gate, settings.scale)


class NobleLinear(NobleBranch, nn.Linear):
    """`NobleBranch` beside nn.Linear."""


class NobleConv1D(NobleBranch, Conv1D):
    """`NobleBranch` beside transformers' Conv1D, whose weight is (d_in, d_out)."""


def put_noble(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put branches beside linears."""
    configs = dict.fromkeys(names, NobleSettings(**settings))
    firsts: dict[str, str] = {}  # of each layer that shares a down projection, the layer that has it
    for group in qkv_groups(names) if settings["share_down"] == "qkv" else []:
        rank = min(configs[name].rank_of(*width_of(model.get_submodule(name))) for name in group)
        configs |= dict.fromkeys(group, NobleSettings(**{**settings, "rank": rank, "rank_ratio": None}))
        firsts |= dict.fromkeys(group[1:], group[0])
    built: dict[str, Any] = {}

    def build(name: str, module: Any) -> nn.Module:
        kind: Any = NobleConv1D if isinstance(module, Conv1D) else NobleLinear
        kept = {end for end in ("weight", "bias") if has_own_init(name, end, settings["own_init"] or ())}
        layer: Any = with_state(kind.__new__(kind), module)
        built[name] = layer.take(configs[name], kept, built.get(firsts.get(name, "")))
        return layer

    replace(model, sorted(names, key=lambda name: name in firsts), build)


METHODS["noble"] = put_noble
