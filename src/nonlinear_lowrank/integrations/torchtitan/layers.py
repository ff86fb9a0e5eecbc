"""Layers of the methods as modules of torchtitan, built from configs."""

from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleLinear
from nonlinear_lowrank.methods.sine import SineLowRankLinear


class Layer(Module):
    """A mixin that makes one of our layers a module of torchtitan."""

    by_rows: tuple[str, ...] = ()  # own tensors whose rows are the layer's outputs, as those of a weight are

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features), the shape of the weight that it has or stands for."""
        return self.config.out_features, self.config.in_features

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """A linear's config and the method's. No `Linear.Config`, which later converters would take for a plain one."""

        in_features: int
        out_features: int
        bias: bool = False
        method: Any

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features); torchtitan's shardings know the argument by its name."""
        return super().forward(input)

    def _init_self_parameters(self) -> None:
        """Draw tensors by the method's init, and dense ones that it keeps by torchtitan's; called by `init_states`."""
        self.reset_parameters()
        if getattr(self.config.method, "init", "scratch") == "pretrained":
            for name in ("weight", "bias"):
                if (parameter := getattr(self, name)) is not None:
                    self._init_param(name, parameter)

    _sharding_config: Any

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelize as torchtitan does; tensors that a plain linear does not have are replicated."""
        if parallel_dims.tp_enabled:
            raise UserError(
                "layers with branches cannot be split by torchtitan's tensor parallelism; set "
                "--parallelism.tensor_parallel_degree 1 and shard by FSDP"
            )
        if (sharding := self._sharding_config) is not None:
            states = sharding.state_shardings
            whole = {name: dense_param_placement(tp=spmd.R) for name, _ in self.named_parameters(recurse=False)}
            own = {name: states.get(name, whole[name]) for name in whole}
            self._sharding_config = replace(sharding, state_shardings=own)
            for child in self.children():  # NOBLE's dense part
                child._sharding_config = ShardingConfig(state_shardings=states)
        super().parallelize(parallel_dims)


class TitanNobleLinear(Layer, NobleLinear):
    """`NobleLinear` as a module of torchtitan; its config's `method` is a `NobleConfig`."""

    by_rows = ("noble_up", "noble_up_bias")

    @dataclass(kw_only=True, slots=True)
    class Config(Layer.Config):
        """Builds this class."""

    def __init__(self, config: Any) -> None:
        sizes: dict[str, Any] = {name: getattr(config, name) for name in ("in_features", "out_features", "bias")}
        NobleLinear.__init__(self, **sizes, config=config.method)
        dense = Linear(Linear.Config(**sizes))  # a module of torchtitan too
        dense.reset_parameters, self.dense, self.config = self.dense.reset_parameters, dense, config


class TitanSineLowRankLinear(Layer, SineLowRankLinear):
    """`SineLowRankLinear` as a module of torchtitan; its config's `method` is a `SineLowRankConfig`."""

    by_rows = ("sine_up",)

    @dataclass(kw_only=True, slots=True)
    class Config(Layer.Config):
        """Builds this class."""

    def __init__(self, config: Any) -> None:
        sizes = config.in_features, config.out_features, config.bias
        SineLowRankLinear.__init__(self, *sizes, config=config.method, dtype=torch.get_default_dtype())
        self.config = config

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.sine_up.dtype in (torch.bfloat16, torch.float16):  # a phase of 30 rad would be off by 0.1 rad
            raise UserError(
                "FSDP has rounded the factors of sine low-rank weights to 16 bits, and their phases with them; set "
                "--training.mixed_precision_param float32"
            )
        return super().forward(input)


CLASSES: dict[str, type[Layer]] = {"noble": TitanNobleLinear, "sine-lowrank": TitanSineLowRankLinear}


def built(model_config: Any) -> Any:
    with torch.device("meta"):
        return model_config.build()
