"""Nonlinear queries: a residual bottleneck in the place of the query projection (arXiv:2603.13381).

    Q(x) = (x + f(x)) / 2        f(x) = LayerNorm(GELU(RMSNorm(x) W1) W2)        W1: d x r, W2: r x d, r = d / 2

Init and learning-rate table; d is the model width.

| tensor            | shape   | init           | lr x | decay |
|-------------------|---------|----------------|------|-------|
| query_norm_weight | (d)     | 1              | 1    | no    |
| query_down (W1)   | (r, d)  | N(0, 0.02^2)   | 1    | yes   |
| query_up (W2)     | (d, r)  | N(0, 0.02^2)   | 1    | yes   |
| query_out_weight  | (d)     | 1              | 1    | no    |
| query_out_bias    | (d)     | 0              | 1    | no    |
| weight (k and v)  | (2v, d) | as the model's | 1    | yes   |
| bias (k and v)    | (2v)    | as the model's | 1    | no    |

2 d r weights are those of the linear query at r = d / 2, and 3 d more are norms. The last two rows are those of a
fused projection, whose rows are q, k and v one after another; its query rows are done away with.

The residual needs the query as wide as x. Keys and values may be narrower (grouped and multi-query attention). The
LayerNorm runs over all d, so the query cannot be split by heads over devices.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.precision import autocast_input, wide_dtype

from ..attention import (
    BY_HEAD,
    FUSED,
    MIXED,
    QUERY_BESIDE,
    SEPARATE,
    attention_heads,
    holds_keys_and_values,
    mixes_rows,
)
from ..base import Method, Role, register
from ..matrix import linear_shape
from .config import NonlinearQueryConfig

_RMS_EPS, _LAYER_EPS = 1e-6, 1e-5


class NonlinearQuery(nn.Module):
    """The query of `Q(x) = (x + f(x)) / 2`: (..., d) -> (..., d).

    Its tensors are parameters of its own and no linears, so that neither a model's init nor an adapter for all
    linears touches them. Norms are computed in float32 or wider.

    Source: nonlinear_queries.md, "Core Formula" and "Structure of f".
    """

    query_norm_weight: nn.Parameter
    query_down: nn.Parameter
    query_up: nn.Parameter
    query_out_weight: nn.Parameter
    query_out_bias: nn.Parameter

    def __init__(self, width: int, *, config: NonlinearQueryConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.width, self.query_config = width, config
        self.linear_shape = (width, width)
        self.replaced_bias = False  # of the linear query, for counts
        r = config.rank_for(width)
        shapes = {
            "query_norm_weight": (width,),
            "query_down": (r, width),
            "query_up": (width, r),
            "query_out_weight": (width,),
            "query_out_bias": (width,),
        }
        for name, shape in shapes.items() if config.kind != "identity" else ():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the query's rows of this file's table."""
        if self.query_config.kind == "identity":
            return
        init.ones_(self.query_norm_weight)
        init.normal_(self.query_down, std=self.query_config.init_std)
        init.normal_(self.query_up, std=self.query_config.init_std)
        init.ones_(self.query_out_weight)
        init.zeros_(self.query_out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d), in the type that a linear would give."""
        config, wide = self.query_config, x.to(wide_dtype(x))
        if config.kind == "identity":
            return autocast_input(x)
        shape = (self.width,)
        normed = F.rms_norm(wide, shape, self.query_norm_weight.to(wide.dtype), _RMS_EPS)
        hidden = F.linear(normed.to(x.dtype), self.query_down)
        if config.kind == "nonlinear":
            hidden = F.gelu(hidden)
        mapped = F.linear(hidden, self.query_up)
        weight, bias = (each.to(wide.dtype) for each in (self.query_out_weight, self.query_out_bias))
        out = F.layer_norm(mapped.to(wide.dtype), shape, weight, bias, _LAYER_EPS)
        return ((wide + out) * config.scale).to(mapped.dtype)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        config = self.query_config
        rank = "" if config.kind == "identity" else f", rank={config.rank_for(self.width)}, scale={config.scale:g}"
        return f"width={self.width}, {config.kind}{rank}"


class NonlinearQKV(NonlinearQuery):
    """A fused projection whose query is nonlinear: (..., d) -> (..., d + 2v), q, k and v one after another.

    `width` is d, `others` 2v, and `bias` says whether keys and values have one.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        others: int,
        bias: bool = True,
        *,
        config: NonlinearQueryConfig,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.others, self.has_model_values = others, False
        super().__init__(width, config=config, device=device, dtype=dtype)
        self.linear_shape = (width, width + others)
        self.weight = nn.Parameter(torch.empty(others, width, device=device, dtype=dtype))
        held = nn.Parameter(torch.empty(others, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", held)
        self.reset_parameters()

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the model's rows of keys and values; the next `reset_parameters` does not draw them."""
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.has_model_values = not weight.is_meta

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw this file's table; keys and values only where the model's own init has not."""
        super().reset_parameters()
        if "weight" not in self._parameters:
            return  # called by the base's constructor
        if not self.has_model_values:
            init.normal_(self.weight, std=self.query_config.init_std)
            if self.bias is not None:
                init.zeros_(self.bias)
        self.has_model_values = False

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d + 2v)."""
        others = F.linear(x, self.weight, self.bias)
        return torch.cat([super().forward(x).to(others.dtype), others], dim=-1)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{super().extra_repr()}, keys and values {self.others}, bias={self.bias is not None}"


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
        _check(name, *linear_shape(module), None)

    def check_parent(self, name: str, module: nn.Module, parent: nn.Module) -> None:
        """Check what only the attention around the projection knows: its heads, and which rows are queries."""
        _check(name, *linear_shape(module), parent)

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


def _check(name: str, d_in: int, d_out: int, parent: nn.Module | None) -> None:
    """Raise where a projection d_in -> d_out cannot have a nonlinear query; without its attention: less is known."""
    own = name.rpartition(".")[2]
    if mixes_rows(name, parent):
        raise UserError(f"{name} {MIXED}")
    if d_out == d_in and own not in FUSED:
        return
    if getattr(parent, "is_cross_attention", False):
        raise UserError(f"{name} {QUERY_BESIDE}")
    heads, head = (None, None) if parent is None else attention_heads(parent)
    width = d_out if own in SEPARATE else None if heads is None or head is None else heads * head
    if width is None and parent is not None and d_out != 3 * d_in:
        raise UserError(
            f"{name} is {d_in} -> {d_out}, and {type(parent).__name__} does not say how many of it are queries; a "
            f"fused projection must then be {d_in} -> {3 * d_in}: leave it out with exclude="
        )
    if width in (None, d_in):
        width = d_in if d_out > d_in and (d_out - d_in) % 2 == 0 else d_out
    if width != d_in:
        raise UserError(
            f"{name} has queries of width {width} (heads x head width) in a model of width {d_in}, and a nonlinear "
            "query adds x to itself: the two must be equal; leave it out with exclude="
        )
