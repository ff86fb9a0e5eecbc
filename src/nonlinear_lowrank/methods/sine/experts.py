"""Experts whose weights are functions of low-rank products: for each expert and each of its linears one of `layer.py`.

| tensor          | shape          |                                                     |
|-----------------|----------------|-----------------------------------------------------|
| sine_in_up      | (E, d_out, k)  | of gate and up, or up; init as in `layer.py`        |
| sine_in_down    | (E, k, d_in)   |                                                     |
| sine_out_up     | (E, d, k)      | of the down projection                              |
| sine_out_down   | (E, k, d_ff)   |                                                     |

Biases stay the experts' own. A weight is formed for the experts that have tokens, one after another.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.methods.expert_layouts import Projection, layout_of, remove_weights
from nonlinear_lowrank.methods.experts import by_expert, expert_count, projections, with_state
from nonlinear_lowrank.ops.plain import kept_float32
from nonlinear_lowrank.ops.precision import check_unrounded

from .op import lowrank_linear, lowrank_weight

_ENDS = ("in", "out")


class SineExperts(nn.Module):
    """Experts of low-rank weights: hidden states (T, d), experts (T, k) and weights (T, k) of each token -> (T, d).

    Holds no weight of an expert and saves none for backward. Factors stay float32 in a model of a 16-bit type.

    Source: sine_lowrank.txt, section 3.2.1, equation (3), for every expert.
    """

    sine_config: Any
    experts_class: Any
    """The class of the plain experts, whose gate it uses."""
    expert_projections: list[Projection]
    replaced: dict[str, torch.Size]
    """Shapes of the experts' parameters, by name."""

    @classmethod
    def replacing(cls, plain: Any, config: Any) -> Self:
        """Return the layer of these experts, undrawn: it shares nothing with them but their settings."""
        layer: Any = with_state(cls.__new__(cls), plain)
        layer.sine_config, layer.experts_class, layer.expert_projections = config, type(plain), projections(plain)
        layer.replaced, count = remove_weights(layer), expert_count(plain)
        like: Tensor = attrgetter(layer.expert_projections[0].name)(plain)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        for end, each in layer.ends():
            shapes = {"up": (each.d_out, config.rank), "down": (config.rank, each.d_in)}
            for side, shape in shapes.items():
                factor = torch.empty(count, *shape, device=like.device, dtype=wide)
                layer.register_parameter(f"sine_{end}_{side}", nn.Parameter(factor))
            if getattr(plain, "has_bias", False):
                bias = torch.empty(count, each.d_out, device=like.device, dtype=like.dtype)
                layer.register_parameter(f"{each.name}_bias", nn.Parameter(bias))
        return layer

    def ends(self) -> list[tuple[str, Projection]]:
        """Return "in" and "out" with their projections; "in" alone where there is one."""
        return list(zip(_ENDS, self.expert_projections, strict=False))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table; biases are zero."""
        for end, each in self.ends():
            up, down = self._factors(end)
            self.sine_config.draw(up, self.sine_config.rank)
            self.sine_config.draw(down, each.d_in)
            if (bias := getattr(self, f"{each.name}_bias", None)) is not None:
                init.zeros_(bias)

    def _factors(self, end: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"sine_{end}_up"), getattr(self, f"sine_{end}_down")

    def forward(self, *inputs: Any) -> Tensor:
        """See the class; raise UserError where FSDP has rounded the factors to 16 bits."""
        check_unrounded(self._factors("in")[0], "sine factors")
        ends, config = {each.name: (end, each.d_in) for end, each in self.ends()}, self.sine_config

        def linear(name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
            end, d_in = ends[name]

            def of_one(x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
                return lowrank_linear(x, up, down, bias, config.activation, float(config.omega), config.gain_for(d_in))

            biases = getattr(self, f"{name}_bias", None)
            return by_expert(of_one, x_SI, ends_E.tolist(), *self._factors(end), biases)

        return layout_of(self).forward(self, linear, *inputs)

    def _apply_gate(self, z: Tensor) -> Tensor:
        gated: Tensor = self.experts_class._apply_gate(self, z)
        return gated

    def dense(self, dtype: torch.dtype) -> nn.Module:
        """Return plain experts with the weights formed."""
        plain: Any = with_state(self.experts_class.__new__(self.experts_class), self)
        for name in ("expert_projections", "experts_class", "sine_config", "replaced"):
            vars(plain).pop(name)
        config, device = self.sine_config, self._factors("in")[0].device
        for name, shape in self.replaced.items():
            path, _, local = name.rpartition(".")
            own: Any = plain.get_submodule(path)
            if path and type(own) is nn.Module:
                child_class: Any = own.experts_class
                own = with_state(child_class.__new__(child_class), own)
                vars(own).pop("experts_class")
                plain.set_submodule(path, own)
            own.register_parameter(local, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        for end, each in self.ends():
            phi, omega, gain = config.activation, float(config.omega), config.gain_for(each.d_in)
            pairs = zip(*self._factors(end), strict=True)
            weight = torch.stack([lowrank_weight(up, down, phi, omega, gain) for up, down in pairs])
            views = layout_of(plain).matrices(plain, each.name)
            with torch.no_grad():
                for view, part in zip(views, weight.transpose(1, 2).chunk(len(views), -1), strict=True):
                    view.copy_(part)
            for side in ("up", "down"):
                del plain._parameters[f"sine_{end}_{side}"]
        return plain

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        keep = kept_float32(fn)
        return super()._apply(lambda tensor: keep(tensor) if tensor.ndim == 3 else fn(tensor), recurse)
