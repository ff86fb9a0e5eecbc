"""The method that puts sine low-rank weights in the place of dense ones."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Method, PlainCost, Role, register
from nonlinear_lowrank.methods.matrix import linear_shape, replace_modules

from .layer import SineLowRankConfig, SineLowRankLinear

_SHOWN = ("r", "omega", "gain", "lora_alpha", "lora_dropout", "target_modules", "plus")


@register
class SineLowRankMethod(Method):
    """Sine low-rank weights."""

    name = SineLowRankConfig.method
    config_class = SineLowRankConfig
    layer_types = (SineLowRankLinear,)
    optimizable = True
    float32 = ("sine_up", "sine_down")
    adapter = "nonlinear_lowrank.methods.sine.adapter"
    adapter_arms: ClassVar = {
        "sine-lora": AdapterArm(config=(adapter, "SineLoraConfig"), fixed={"use_dora": False}, shown=_SHOWN),
        "sine-dora": AdapterArm(config=(adapter, "SineLoraConfig"), fixed={"use_dora": True}, shown=_SHOWN),
    }
    controls: ClassVar = {
        "low-rank": {"activation": "identity"},
        "sigmoid-low-rank": {"activation": "sigmoid"},
        "relu-low-rank": {"activation": "relu"},
    }
    replaces_weights = True
    tensor_parallel = False

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        reason: str | None = config.check_rank(*linear_shape(module))
        return reason

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        if (why := self.skip_reason(module, config)) is not None:
            raise UserError(f"{name}: {why}; choose a smaller rank or leave it out with exclude=")

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        """Build a layer that shares nothing with the plain one, undrawn."""
        weight: Any = module.weight
        has_bias = module.bias is not None
        layer = SineLowRankLinear(*linear_shape(module), has_bias, config=config, device="meta", dtype=weight.dtype)
        return layer.to_empty(device=weight.device).train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        return {"sine_up": Role("sine.up"), "sine_down": Role("sine.down")}

    def flops(self, layer: nn.Module) -> int:
        """Return those of a token; forming W (2 k m n, once a batch) is not among them."""
        assert isinstance(layer, SineLowRankLinear)
        if layer.sine_config.activation != "identity":
            return 0
        d_in, d_out = linear_shape(layer)
        return 2 * layer.sine_config.rank * (d_in + d_out) - 2 * d_in * d_out

    def plain(self, layer: nn.Module) -> PlainCost:
        d_in, d_out = linear_shape(layer)
        return PlainCost(parameters=d_in * d_out + (d_out if layer.bias is not None else 0), flops=2 * d_in * d_out)

    @torch.no_grad()
    def optimize(self, model: nn.Module, *, shared_inputs: bool, quantized: bool) -> bool:
        """Put a plain linear, faster and as large as the dense one was, in each layer's place."""
        formed: dict[nn.Module, nn.Module] = {
            each: _dense(each, model) for each in model.modules() if isinstance(each, SineLowRankLinear)
        }
        replace_modules(model, formed)
        return bool(formed)


def _dense(layer: SineLowRankLinear, model: Any) -> nn.Linear:
    """Return the plain linear of a layer, in the model's type."""
    dtype = layer.bias.dtype if layer.bias is not None else getattr(model, "dtype", layer.sine_up.dtype)
    made = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
    made.weight = nn.Parameter(layer.weight.to(dtype))
    made.register_parameter("bias", layer.bias)
    return made.train(layer.training)
