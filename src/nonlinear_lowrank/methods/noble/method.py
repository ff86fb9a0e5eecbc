"""The method that puts NOBLE branches beside linears."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Method, Role, register
from nonlinear_lowrank.methods.matrix import linear_shape

from .config import NobleConfig
from .layer import NobleConv1D, NobleLinear


@register
class NobleMethod(Method):
    """NOBLE branches."""

    name = NobleConfig.method
    config_class = NobleConfig
    layer_types = (NobleLinear, NobleConv1D)
    optimizable = True
    dense = "dense"
    draws_up = True
    budgeted = True
    adapter = "nonlinear_lowrank.methods.noble.adapter"
    adapter_arms: ClassVar = {
        "noble-adapter": AdapterArm(
            config=(adapter, "NobleAdapterConfig"),
            shown=("r", "activation", "depth", "target_modules", "plus"),
        )
    }

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        reason: str | None = config.check_rank(*linear_shape(module))
        return reason

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        d_in, d_out = linear_shape(module)
        if self.skip_reason(module, config) is not None:
            raise UserError(
                f"rank {config.rank_of(d_in, d_out)} is not low for {name} ({d_in} -> {d_out}); "
                f"choose a rank below {min(d_in, d_out)} or leave it out with exclude="
            )

    def converted(self, config: Any) -> Any:
        return replace(config, init="pretrained")

    @torch.no_grad()
    def draw_up(self, layer: Any) -> None:
        layer.draw_up()

    def initial(self, config: Any, *, pretrained: bool) -> Any:
        if config.init != "auto":
            return config
        return replace(config, init="pretrained" if pretrained else "scratch")

    def settings(self, config: Any) -> list[str]:
        found = [f"init: {config.init}"]
        if config.share_down != "none":
            found.append(f"one down projection for each {config.share_down}")
        if config.fuse_shared_inputs:
            found.append("layers of one input together")
        return found

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        return _layer(module, config)

    def build_all(self, modules: Mapping[str, nn.Module], config: Any) -> Mapping[str, nn.Module]:
        configs, groups = _resolved(modules, config)
        layers = {name: _layer(module, configs[name]) for name, module in modules.items()}
        if groups:
            from .sharing import SharedDown

            for names in groups:
                SharedDown([layers[name] for name in names])
        if config.fuse_shared_inputs:
            from .group import group

            group(layers)
        return layers

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        assert isinstance(layer, NobleLinear | NobleConv1D)
        config, ratio = layer.noble_config, min(layer.noble_shape) / layer.noble_rank
        roles = {"noble_up": Role("noble.up", lr=ratio**config.up_lr_power)}
        if layer.noble_down is not None:
            roles["noble_down"] = Role("noble.down")
        for k in range(1, config.depth):
            roles[f"noble_mix{k}"] = Role("noble.mix", lr=ratio**config.mix_lr_power)
        if config.activation == "cosine":
            for k in range(1, config.depth + 1):
                roles[f"noble_frequency{k}"] = Role("noble.frequency", lr=config.frequency_lr, decay=False)
                roles[f"noble_phase{k}"] = Role("noble.phase", lr=config.phase_lr, decay=False)
        if config.up_bias:
            roles["noble_up_bias"] = Role("noble.up_bias", decay=False)
        if config.fusion == "gated":
            roles["noble_fusion"] = Role("noble.fusion", decay=False)
        return roles

    def flops(self, layer: nn.Module) -> int:
        assert isinstance(layer, NobleLinear | NobleConv1D)
        return 2 * _products(*layer.noble_shape, layer.noble_config, layer.noble_down is not None)

    def added(self, modules: Mapping[str, nn.Module], config: Any) -> tuple[int, int]:
        configs, groups = _resolved(modules, config)
        without = {name for group in groups for name in group[1:]}
        parameters = flops = 0
        for name, module in modules.items():
            (d_in, d_out), own = linear_shape(module), configs[name]
            products = _products(d_in, d_out, own, name not in without)
            vectors = 2 * own.depth * own.rank_of(d_in, d_out) if own.activation == "cosine" else 0
            parameters += products + vectors + own.up_bias * d_out + (own.fusion == "gated")
            flops += 2 * products
        return parameters, flops

    def optimize(self, model: nn.Module, *, shared_inputs: bool, quantized: bool) -> bool:
        """Make one product of dense output and branch; layers stay where their dense part is quantized."""
        if quantized or not any(isinstance(each, NobleLinear | NobleConv1D) for each in model.modules()):
            return False
        from .fused import fuse

        fuse(model, shared_inputs=shared_inputs)
        return True


def _layer(module: nn.Module, config: NobleConfig) -> nn.Module:
    """Return a layer made on the meta device, then given real, still undrawn, branch tensors."""
    d_in, d_out = linear_shape(module)
    assert isinstance(module, nn.Linear | Conv1D)
    weight: Tensor = module.weight
    layer: NobleLinear | NobleConv1D
    if isinstance(module, Conv1D):
        layer = NobleConv1D(d_out, d_in, config=config, device="meta", dtype=weight.dtype)
    else:
        has_bias = module.bias is not None
        layer = NobleLinear(d_in, d_out, has_bias, config=config, device="meta", dtype=weight.dtype)
    layer.to_empty(device=weight.device)
    # From scratch too they are the module's own, drawn anew in place, so that whatever else holds them stays tied.
    layer.dense.weight, layer.dense.bias = module.weight, module.bias
    if config.init != "pretrained":
        for tensor in (layer.weight, layer.bias):
            if tensor is not None:
                vars(tensor).pop("_is_hf_initialized", None)  # transformers' mark of what is not to be drawn
    return layer.train(module.training)


def _resolved(modules: Mapping[str, nn.Module], config: NobleConfig) -> tuple[dict[str, NobleConfig], list[Any]]:
    """Return the config of each layer, with the rank of its group, and the groups that share."""
    configs = dict.fromkeys(modules, config)
    if config.share_down == "none":
        return configs, []
    from .sharing import shared_groups

    shapes = {name: linear_shape(module) for name, module in modules.items()}
    groups = shared_groups(shapes)
    for names in groups:
        rank = min(config.rank_of(*shapes[name]) for name in names)
        configs |= dict.fromkeys(names, replace(config, rank=rank, rank_ratio=None))
    return configs, groups


def _products(d_in: int, d_out: int, config: NobleConfig, has_down: bool) -> int:
    """Return the elements of the branch's matrices: a multiply-add each, for every token."""
    r = config.rank_of(d_in, d_out)
    return r * (has_down * d_in + d_out) + r * r * (config.depth - 1)
