"""The method that puts QK-norm around the projections of queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.attention import (
    FUSED,
    KEYS,
    MIXED,
    QUERY_BESIDE,
    SEPARATE,
    attention_heads,
    holds_keys_and_values,
    mixes_rows,
)
from nonlinear_lowrank.methods.base import Method, PlainCost, Role, method_of_layer, register
from nonlinear_lowrank.methods.matrix import is_plain_linear, linear_shape

from .layer import QKNormConfig, QKNormProjection


@register
class QKNormMethod(Method):
    """QK-norm."""

    name = QKNormConfig.method
    config_class = QKNormConfig
    layer_types = (QKNormProjection,)
    include = rf"(.*\.)?({'|'.join((*SEPARATE, *KEYS, *FUSED))})"
    wraps = True
    controls: ClassVar = {"qk-norm": {}}
    tensor_parallel = False

    def is_target(self, module: nn.Module) -> bool:
        if is_plain_linear(module):
            return True
        method = method_of_layer(module)
        return method is not None and method.kind == "linear" and not method.wraps

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        queries, keys = _widths(name, module)
        if config.head_width is not None and (queries % config.head_width or keys % config.head_width):
            raise UserError(
                f"{name}: queries of width {queries} and keys of width {keys} do not split into heads of "
                f"{config.head_width}; leave it out with exclude="
            )

    def check_parent(self, name: str, module: nn.Module, parent: nn.Module) -> None:
        d_in, d_out = linear_shape(module)
        heads, width = attention_heads(parent)
        if mixes_rows(name, parent):
            raise UserError(f"{name} {MIXED}")
        fused = name.rpartition(".")[2] in FUSED
        if fused and getattr(parent, "is_cross_attention", False) and not holds_keys_and_values(module):
            # Its shape alone, which is all that a saved model tells, would read as queries and narrow keys.
            raise UserError(f"{name} {QUERY_BESIDE}")
        if fused and (d_out <= d_in or (heads is not None and width is not None and heads * width != d_in)):
            raise UserError(f"{name} does not hold queries as wide as the model, then keys; leave it out with exclude=")

    def complete(self, model: nn.Module, config: Any, names: list[str]) -> Any:
        """Return the config with the head width of the model's attention."""
        if config.head_width is not None:
            return config
        found = {attention_heads(model.get_submodule(name.rpartition(".")[0]))[1] for name in names}
        if len(found) != 1 or None in found:
            raise UserError(
                "the model's attention does not say how wide its heads are; give QKNormConfig(head_width=...)"
            )
        return replace(config, head_width=found.pop())

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        like = next((each for each in module.parameters() if each.is_floating_point()), torch.empty(0))
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        return QKNormProjection(module, *_widths(name, module), config=config, **options).train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        norm = Role("qk-norm", decay=False)
        return {name: norm for name, _ in layer.named_parameters(recurse=False)}

    def plain(self, layer: nn.Module) -> PlainCost:
        return PlainCost(parameters=0, flops=0)


def _widths(name: str, module: nn.Module) -> tuple[int, int]:
    """Return the widths of the queries and the keys in a projection's output, by its name."""
    d_in, d_out = linear_shape(module)
    own = name.rpartition(".")[2]
    if own in FUSED and holds_keys_and_values(module):
        return 0, d_out // 2
    if own in FUSED or hasattr(module, "others"):  # a nonlinear query with keys and values, under any name
        return d_in, (d_out - d_in) // 2
    return (0, d_out) if own in KEYS else (d_out, 0)
