"""Sine low-rank weights of experts."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.methods.expert_layouts import Projection, grouped_product, layout_of, remove_weights
from nonlinear_lowrank.ops.plain import kept_float32

from .core import Layer, with_state
from .experts import SortedExperts, take_experts
from .sine_lowrank import draw_sine_factor, sine_weight


class SineExperts(Layer, SortedExperts):
    """Experts whose weights are those of `SineLowRankLinear`, for each expert and each of its linears.

    Tensors, of E experts: sine_in_up (E, d_out, k) and sine_in_down (E, k, d_in) of gate and up together, sine_out_up
    and sine_out_down of the down projection, where there are two, and the experts' own biases.
    """

    float32 = ("sine_in_up", "sine_in_down", "sine_out_up", "sine_out_down")
    expert_projections: list[Projection]
    sine: dict[str, Any]
    experts_class: Any

    def take(self, settings: dict[str, Any], plain: Any) -> None:
        """Take settings, and factors in the place of the experts' weights."""
        self.sine, self.experts_class = settings, type(plain)
        self.expert_projections = layout_of(plain).projections(plain)
        like: Tensor = attrgetter(self.expert_projections[0].name)(plain)
        remove_weights(self)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        for end, (_, d_in, d_out, _) in self.ends():
            for side, shape in (("up", (d_out, settings["rank"])), ("down", (settings["rank"], d_in))):
                factor = torch.empty(layout_of(plain).count(plain), *shape, device=like.device, dtype=dtype)
                self.register_parameter(f"sine_{end}_{side}", nn.Parameter(factor))

    def ends(self) -> list[tuple[str, Projection]]:
        """Return "in" and "out" with their linears, or the first alone."""
        return list(zip(("in", "out"), self.expert_projections, strict=False))

    def reset_parameters(self) -> None:
        """Draw as `SineLowRankLinear` does."""
        for end, (parameter, d_in, *_) in self.ends():
            draw_sine_factor(getattr(self, f"sine_{end}_up"), self.sine["rank"], self.sine)
            draw_sine_factor(getattr(self, f"sine_{end}_down"), d_in, self.sine)
            if (bias := getattr(self, f"{parameter}_bias", None)) is not None:
                init.zeros_(bias)

    def forward(self, *inputs: Any) -> Tensor:
        """Return the output for the experts' inputs, mostly (T, d), (T, k), (T, k) -> (T, d)."""
        ends = {each.name: end for end, each in self.ends()}

        def linear(name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
            up, down = (getattr(self, f"sine_{ends[name]}_{side}") for side in ("up", "down"))
            weight_EOI = sine_weight(up, down, self.sine, down.shape[-1]).to(x_SI.dtype)
            y = grouped_product(x_SI, weight_EOI.transpose(1, 2), ends_E)
            bias = getattr(self, f"{name}_bias", None)
            return y if bias is None else y + bias[expert_S].to(y.dtype)

        return layout_of(self).forward(self, linear, *inputs)

    def _apply_gate(self, z: Tensor) -> Tensor:
        gated: Tensor = self.experts_class._apply_gate(self, z)
        return gated

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        keep = kept_float32(fn)
        return super()._apply(lambda tensor: keep(tensor) if tensor.ndim == 3 else fn(tensor), recurse)


def sine_experts(experts: Any, settings: dict[str, Any]) -> nn.Module:
    """Return experts of low-rank weights."""
    layer = with_state(SineExperts.__new__(SineExperts), experts)
    layer.take(settings, experts)
    return layer


take_experts("sine-lowrank", sine_experts)
