"""The method that puts nonlinear queries in the place of query projections."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.attention import (
    BY_HEAD,
    FUSED,
    MIXED,
    QUERY_BESIDE,
    SEPARATE,
    attention_heads,
    holds_keys_and_values,
    mixes_rows,
)
from nonlinear_lowrank.methods.base import Method, PlainCost, Role, register
from nonlinear_lowrank.methods.matrix import linear_shape

from .config import NonlinearQueryConfig
from .layer import NonlinearQKV, NonlinearQuery


@register
class NonlinearQueryMethod(Method):
    """Nonlinear queries."""

    name = NonlinearQueryConfig.method
    config_class = NonlinearQueryConfig
    layer_types = (NonlinearQuery, NonlinearQKV)
    include = rf"(.*\.)?({'|'.join((*SEPARATE, *FUSED, BY_HEAD))})"
    controls: ClassVar = {"identity-query": {"kind": "identity"}, "residual-linear-query": {"kind": "linear"}}
    replaces_weights = True
    tensor_parallel = False

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        return "holds keys and values only" if holds_keys_and_values(module) else None

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        if (why := _refusal(name, *linear_shape(module), None)) is not None:
            raise UserError(f"{name} {why}")

    def check_parent(self, name: str, module: nn.Module, parent: nn.Module) -> None:
        """Check what only the attention around the projection knows: its heads, and which rows are queries."""
        if (why := _refusal(name, *linear_shape(module), parent)) is not None:
            raise UserError(f"{name} {why}")

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        """Build a query of its own, undrawn; keys and values are the plain layer's."""
        assert isinstance(module, nn.Linear | Conv1D)
        (d_in, d_out), weight = linear_shape(module), module.weight
        assert isinstance(weight, Tensor)
        bias: Tensor | None = module.bias
        options: dict[str, Any] = {"config": config, "device": "meta", "dtype": weight.dtype}
        if d_out == d_in:
            layer = NonlinearQuery(d_in, **options).to_empty(device=weight.device)
        else:
            layer = NonlinearQKV(d_in, d_out - d_in, bias is not None, **options).to_empty(device=weight.device)
            rows = weight.t() if isinstance(module, Conv1D) else weight
            layer.take(rows[d_in:], None if bias is None else bias[d_in:])
        layer.replaced_bias = bias is not None
        return layer.train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        assert isinstance(layer, NonlinearQuery)
        if layer.query_config.kind == "identity":
            return {}
        norms = ("query_norm_weight", "query_out_weight", "query_out_bias")
        return {
            # They stand where a dense matrix stood, which Muon would take: arms must not differ in that too.
            "query_down": Role("query.down", muon=True),
            "query_up": Role("query.up", muon=True),
            **dict.fromkeys(norms, Role("query.norm", decay=False)),
        }

    def flops(self, layer: nn.Module) -> int:
        """Return those of f, less those of the linear query."""
        assert isinstance(layer, NonlinearQuery)
        config, d = layer.query_config, layer.width
        own = 0 if config.kind == "identity" else 4 * d * config.rank_for(d)
        return own - 2 * d * d

    def plain(self, layer: nn.Module) -> PlainCost:
        assert isinstance(layer, NonlinearQuery)
        d_in, d_out = linear_shape(layer)
        biases = d_out if layer.replaced_bias else 0
        return PlainCost(parameters=d_in * d_out + biases, flops=2 * d_in * d_out)


def _refusal(name: str, d_in: int, d_out: int, parent: nn.Module | None) -> str | None:
    """Return why the projection cannot have a nonlinear query, or None.

    Args:
        name: of the projection.
        d_in: the model's width.
        d_out: that of the query, or of q, k and v together.
        parent: the attention; None where it was asked before, when the model was augmented.
    """
    own = name.rpartition(".")[2]
    if mixes_rows(name, parent):
        return MIXED
    if d_out == d_in and own not in FUSED:
        return None
    if getattr(parent, "is_cross_attention", False):
        return QUERY_BESIDE
    width = d_out if own in SEPARATE else None if parent is None else _query_width(parent)
    if width is None and parent is not None and d_out != 3 * d_in:
        return (
            f"is {d_in} -> {d_out}, and {type(parent).__name__} does not say how many of it are queries; a fused "
            f"projection must then be {d_in} -> {3 * d_in}: leave it out with exclude="
        )
    if width in (None, d_in):
        width = d_in if d_out > d_in and (d_out - d_in) % 2 == 0 else d_out
    if width == d_in:
        return None
    return (
        f"has queries of width {width} (heads x head width) in a model of width {d_in}, and a nonlinear query adds x "
        "to itself: the two must be equal; leave it out with exclude="
    )


def _query_width(parent: nn.Module) -> int | None:
    heads, head = attention_heads(parent)
    return None if heads is None or head is None else heads * head
