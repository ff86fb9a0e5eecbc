"""The LoRA part of NoRA++: on linears, plain or with a sine, trained together with the activations.

| tensor             | shape      | init                               | lr x | decay |
|--------------------|------------|------------------------------------|------|-------|
| nlr_nora_lora_down | (r, d_in)  | U(-1, 1) / sqrt(d_in), as LoRA's A | 1    | yes   |
| nlr_nora_lora_up   | (d_out, r) | 0                                  | 1    | yes   |

r is the config's lora_r. Two PEFT methods cannot share a model, hence LoRA within this one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.adapters.weights import WeightLayer
from nonlinear_lowrank.methods.base import Role
from nonlinear_lowrank.methods.sine.adapter import SineLinear
from nonlinear_lowrank.ops.sine_delta import SineFactors

from .adapter_config import NoraConfig


class NoraLoraLinear(WeightLayer):
    """LoRA around nn.Linear, Conv1D and quantized linears: (..., d_in) -> (..., d_out)."""

    adapter_layer_names = ("nlr_nora_lora_down", "nlr_nora_lora_up")
    nlr_nora_lora_down: nn.ParameterDict
    nlr_nora_lora_up: nn.ParameterDict

    def add_parameters(self, name: str, config: NoraConfig) -> None:
        """Undrawn tensors of this file's table."""
        add_factors(self, name, config)

    def reset_adapter(self, name: str) -> None:
        """Draws the table; with init_weights=False the up factor too, N(0, 1 / r)."""
        config: NoraConfig = self.configs[name]
        draw_factors(self, name, up_std=0.0 if config.init_weights else config.lora_r**-0.5)

    def _scale(self, name: str) -> float:
        config: NoraConfig = self.configs[name]
        return 2.0 if config.lora_alpha is None else config.lora_alpha / config.lora_r

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        y = self.base_layer(x, *args, **kwargs)
        if self.quantization_backend is not None:
            y = self.quantization_backend.maybe_clone_base_result(y)
        for name in names:
            down, up = (each[name].to(x.dtype) for each in (self.nlr_nora_lora_down, self.nlr_nora_lora_up))
            h = F.linear(F.dropout(x, self.configs[name].lora_dropout, self.training), down)
            y = y + (self._scale(name) * F.linear(h, up)).to(y.dtype)
        return y

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """As in `WeightLayer`."""
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        total = weight.to(wide)
        for name in names:
            product = self.nlr_nora_lora_up[name].to(wide) @ self.nlr_nora_lora_down[name].to(wide)
            total = total + self._scale(name) * product
        return total.to(weight.dtype)

    def roles(self, name: str) -> Mapping[str, Role]:
        """This file's table."""
        return _ROLES


class NoraSineLinear(SineLinear):
    """Sine-LoRA (see `sine.SineLinear`) under this method's names and settings."""

    adapter_layer_names: tuple[str, ...] = ("nlr_nora_lora_down", "nlr_nora_lora_up")  # type: ignore[assignment]
    nlr_nora_lora_down: nn.ParameterDict
    nlr_nora_lora_up: nn.ParameterDict

    def add_parameters(self, name: str, config: Any) -> None:
        """Undrawn tensors of this file's table."""
        add_factors(self, name, config)

    def reset_adapter(self, name: str) -> None:
        """Draws the table; with init_weights=False the up factor too, for phases of about 1 rad."""
        config: NoraConfig = self.configs[name]
        std = (3 * self.d_in / config.lora_r) ** 0.5 / config.lora_omega
        draw_factors(self, name, up_std=0.0 if config.init_weights else std)

    def _factors(self, name: str) -> SineFactors:
        config: NoraConfig = self.configs[name]
        return SineFactors(
            self.nlr_nora_lora_up[name],
            self.nlr_nora_lora_down[name],
            config.lora_omega,
            gain=self.d_in**0.5 if config.lora_gain is None else config.lora_gain,
            scale=1.0 if config.lora_alpha is None else config.lora_alpha / config.lora_r,
            magnitude=None,
        )

    def _source(self, names: Sequence[str]) -> Tensor | Callable[[], Tensor] | None:
        return None  # only DoRA needs the weight

    def roles(self, name: str) -> Mapping[str, Role]:
        """This file's table."""
        return _ROLES

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: the activations of the same adapter are no LoRA."""
        return False


_ROLES = {"nlr_nora_lora_down": Role("nora.lora.down"), "nlr_nora_lora_up": Role("nora.lora.up")}


def add_factors(layer: Any, name: str, config: NoraConfig) -> None:
    """Undrawn factors of an adapter."""
    layer.nlr_nora_lora_down[name] = layer.parameter(config.lora_r, layer.d_in)
    layer.nlr_nora_lora_up[name] = layer.parameter(layer.d_out, config.lora_r)


def draw_factors(layer: Any, name: str, up_std: float) -> None:
    """The table's init."""
    nn.init.uniform_(layer.nlr_nora_lora_down[name], -(layer.d_in**-0.5), layer.d_in**-0.5)
    nn.init.normal_(layer.nlr_nora_lora_up[name], std=up_std)
