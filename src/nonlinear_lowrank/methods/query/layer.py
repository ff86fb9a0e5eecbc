"""Nonlinear queries: a residual bottleneck in the place of the query projection (arXiv:2603.13381).

    Q(x) = (x + f(x)) / 2        f(x) = LayerNorm(GELU(RMSNorm(x) W1) W2)        W1: d x r, W2: r x q

Init and learning-rate table; d is the model width, q that of the queries, mostly the same, and r = d q / (d + q).

| tensor            | shape   | init           | lr x | decay | there                                |
|-------------------|---------|----------------|------|-------|--------------------------------------|
| query_norm_weight | (d)     | 1              | 1    | no    |                                      |
| query_down (W1)   | (r, d)  | N(0, 0.02^2)   | 1    | yes   |                                      |
| query_up (W2)     | (q, r)  | N(0, 0.02^2)   | 1    | yes   | 0 beside a linear residual, unnormed |
| query_out_weight  | (q)     | 1              | 1    | no    | 0 beside a linear residual           |
| query_out_bias    | (q)     | 0              | 1    | no    |                                      |
| query_weight      | (q, d)  | N(0, 0.02^2)   | 1    | yes   | full rank; linear residual: W_Q / s  |
| query_bias        | (q)     | 0              | 1    | no    | linear residual: the model's / s     |
| weight (k and v)  | (2v, d) | as the model's | 1    | yes   | fused projections                    |
| bias (k and v)    | (2v)    | as the model's | 1    | no    | fused projections                    |

r (d + q) weights are those of the linear query, and d + 2 q more are norms. A fused projection's query rows are done
away with (unless the residual is linear), and its outputs stand where the model looks for them (`layout`).

The residual needs the query as wide as x. Where it is not, channel j of the query has channel j mod d of x: at q = d
that is the published method, and it has no weights, where a learned map would be the linear query over again. The
out norm runs over all q, so the query cannot be split by heads over devices.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.methods.attention import BY_HEAD, FUSED, LATENT, SEPARATE, holds_keys_and_values
from nonlinear_lowrank.methods.base import Method, Role, register
from nonlinear_lowrank.methods.matrix import linear_shape
from nonlinear_lowrank.ops.plain import autocast_input, wide_dtype

from .config import NonlinearQueryConfig
from .layout import Layout, complete_layout, stated_layout

_LAYER_EPS = 1e-5
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


class NonlinearQuery(nn.Module):
    """The query of `Q(x) = (x + f(x)) / 2`: (..., d) -> (..., q).

    `width` is d, `queries` is q (default: d), and `bias` says whether the linear residual has one. Its tensors are
    parameters of its own and no linears, so that neither a model's init nor an adapter for all linears touches them.
    Norms are computed in float32 or wider.

    Source: nonlinear_queries.md, "Core Formula" and "Structure of f".
    """

    query_down: nn.Parameter
    query_up: nn.Parameter
    query_weight: nn.Parameter
    query_bias: nn.Parameter

    def __init__(
        self,
        width: int,
        queries: int | None = None,
        bias: bool = False,
        *,
        config: NonlinearQueryConfig,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.width, self.queries, self.query_config = width, width if queries is None else queries, config
        self.linear_shape = (width, self.queries)
        self.replaced_bias = self.has_model_values = False
        for name, shape in self._shapes(bias).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def _shapes(self, bias: bool) -> dict[str, tuple[int, ...]]:
        config, d, q = self.query_config, self.width, self.queries
        shapes: dict[str, tuple[int, ...]] = {}
        if config.has_bottleneck:
            r = config.rank_for(d, q)
            shapes = {"query_norm_weight": (d,)} if config.in_norm != "none" else {}
            shapes |= {"query_down": (r, d), "query_up": (q, r)}
            shapes |= {"query_out_weight": (q,)} if config.out_norm != "none" else {}
            shapes |= {"query_out_bias": (q,)} if config.out_norm == "layer" and config.out_bias else {}
        if config.kind == "full_rank" or config.residual == "linear":
            shapes["query_weight"] = (q, d)
        if config.residual == "linear" and bias:
            shapes["query_bias"] = (q,)
        return shapes

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the model's own rows, as far as the layer keeps them; the next `reset_parameters` does not draw those.

        With a linear residual these are (q, d) and (q): divided by the scale, they start at the model's own query.
        """
        self.has_model_values = not weight.is_meta
        if self.query_config.residual == "linear":
            self.query_weight = nn.Parameter(weight.detach() / self.query_config.scale)
            if bias is not None:
                self.query_bias = nn.Parameter(bias.detach() / self.query_config.scale)

    def reset_parameters(self) -> None:
        """Draw this file's table; what the layer took of the model stays, once."""
        kept, self.has_model_values = self.has_model_values, False
        self._draw(kept)

    @torch.no_grad()
    def _draw(self, kept: bool) -> None:
        config = self.query_config
        linear = config.residual == "linear"
        # Beside a linear residual f starts at zero.
        off = ("query_up" if config.out_norm == "none" else "query_out_weight") if linear else ""
        for name, parameter in self.named_parameters(recurse=False):
            if name in (off, "query_out_bias") or (name == "query_bias" and not kept):
                init.zeros_(parameter)
            elif name in ("query_norm_weight", "query_out_weight"):
                init.ones_(parameter)
            elif name in ("query_down", "query_up"):
                init.normal_(parameter, std=config.init_std)
            elif name == "query_weight" and not (linear and kept):
                init.normal_(parameter, std=config.init_std / (config.scale if linear else 1))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., q), in the type that a linear would give."""
        config = self.query_config
        if config.kind == "identity":
            return autocast_input(self._around(x))
        wide = x.to(wide_dtype(x))
        if config.kind == "full_rank":
            mapped = F.linear(x, self.query_weight)
            out = mapped.to(wide.dtype)
        else:
            normed = self._normed(wide, config.in_norm, "query_norm_weight")
            hidden = F.linear(normed.to(x.dtype), self.query_down)
            if config.kind == "nonlinear":
                hidden = _ACTIVATIONS[config.activation](hidden)
            mapped = F.linear(hidden, self.query_up)
            out = self._normed(mapped.to(wide.dtype), config.out_norm, "query_out_weight", "query_out_bias")
        if config.residual == "linear":
            residual = F.linear(x, self.query_weight, getattr(self, "query_bias", None)).to(wide.dtype)
        else:
            residual = self._around(wide)
        return ((residual + out) * config.scale).to(mapped.dtype)

    def _around(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., q): channel j is channel j mod d of x."""
        if self.queries == self.width:
            return x
        return x.repeat(*[1] * (x.ndim - 1), -(-self.queries // self.width))[..., : self.queries]

    def _normed(self, x: Tensor, norm: str, weight: str, bias: str = "") -> Tensor:
        """Norm the last dimension by parameters of these names, where the layer has them."""
        if norm == "none":
            return x
        scale: Tensor = getattr(self, weight)  # may be computed, as by a parametrization
        if norm == "rms":
            return F.rms_norm(x, scale.shape, scale.to(x.dtype), self.query_config.rms_eps)
        shift = getattr(self, bias, None)
        return F.layer_norm(x, scale.shape, scale.to(x.dtype), None if shift is None else shift.to(x.dtype), _LAYER_EPS)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        config = self.query_config
        shape = f"width={self.width}" + (f", queries={self.queries}" if self.queries != self.width else "")
        rank = f", rank={config.rank_for(self.width, self.queries)}" if config.has_bottleneck else ""
        scale = "" if config.kind == "identity" else f", scale={config.scale:g}"
        return f"{shape}, {config.kind}{rank}{scale}" + (", linear residual" if config.residual == "linear" else "")


class NonlinearQKV(NonlinearQuery):
    """A fused projection whose query is nonlinear: (..., d) -> (..., q + 2v), laid out as the model's own.

    `width` is d, `others` 2v, `queries` q (default: d) and `groups` that of the rows; `bias` says whether there is one.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        others: int,
        bias: bool = True,
        *,
        queries: int | None = None,
        groups: int = 1,
        config: NonlinearQueryConfig,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.others = others
        super().__init__(width, queries, bias, config=config, device=device, dtype=dtype)
        self.layout = Layout(self.queries, others, groups)
        self.linear_shape = (width, self.queries + others)
        self.weight = nn.Parameter(torch.empty(others, width, device=device, dtype=dtype))
        held = nn.Parameter(torch.empty(others, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", held)
        self.reset_parameters()

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the model's rows, (q + 2v, d) and (q + 2v), as far as the layer keeps them."""
        queries, others = self.layout.split(weight)
        query_bias, other_bias = (None, None) if bias is None else self.layout.split(bias)
        super().take(queries, query_bias)
        self.weight = nn.Parameter(others.detach().clone())
        self.bias = None if other_bias is None else nn.Parameter(other_bias.detach().clone())

    @torch.no_grad()
    def _draw(self, kept: bool) -> None:
        super()._draw(kept)
        if "weight" in self._parameters and not kept:  # not yet, called by the base's constructor
            init.normal_(self.weight, std=self.query_config.init_std)
            if self.bias is not None:
                init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., q + 2v)."""
        others = F.linear(x, self.weight, self.bias)
        return self.layout.join(super().forward(x).to(others.dtype), others)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        groups = f" in {self.layout.groups} groups" if self.layout.groups > 1 else ""
        return f"{super().extra_repr()}, keys and values {self.others}{groups}, bias={self.bias is not None}"


@register
class NonlinearQueryMethod(Method):
    """Nonlinear queries."""

    name = NonlinearQueryConfig.method
    config_class = NonlinearQueryConfig
    layer_types = (NonlinearQuery, NonlinearQKV)
    # An indexer chooses keys and gives no gradient: its queries are not those of the attention.
    include = rf"(?!.*\bindexer\.)(.*\.)?({'|'.join((*SEPARATE, *LATENT, *FUSED, BY_HEAD))})"
    controls: ClassVar = {
        "identity-query": {"kind": "identity"},
        "residual-query": {"kind": "full_rank"},
        "residual-linear-query": {"kind": "linear"},
    }
    replaces_weights = True
    keeps_weights_by: ClassVar = {"residual": "linear"}
    tensor_parallel = False

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        return "holds keys and values only" if holds_keys_and_values(module) else None

    def complete(self, model: nn.Module, config: Any, names: list[str]) -> Any:
        """Return the config with the places of queries among fused rows, as the model's attention has them."""
        modules = {name: model.get_submodule(name) for name in names}
        beside = {
            name: (module, model.get_submodule(name.rpartition(".")[0]))
            for name, module in modules.items()
            if self.is_target(module)
        }
        return complete_layout(beside, config)

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        stated_layout(name, module, config)

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        """Build a query of its own, undrawn; keys and values are the plain layer's."""
        assert isinstance(module, nn.Linear | Conv1D)
        (d_in, _), weight = linear_shape(module), module.weight
        assert isinstance(weight, Tensor)
        bias: Tensor | None = module.bias
        options: dict[str, Any] = {"config": config, "device": "meta", "dtype": weight.dtype}
        queries, others, groups = stated_layout(name, module, config)
        layer = (
            NonlinearQKV(d_in, others, bias is not None, queries=queries, groups=groups, **options)
            if others
            else NonlinearQuery(d_in, queries, bias is not None, **options)
        ).to_empty(device=weight.device)
        layer.take(weight.t() if isinstance(module, Conv1D) else weight, bias)
        layer.replaced_bias = bias is not None
        return layer.train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        # The matrices stand where a dense one stood, which Muon would take: arms must not differ in that too.
        table = {name: Role(f"query.{name[6:]}", muon=True) for name in ("query_down", "query_up", "query_weight")}
        vectors = ("query_norm_weight", "query_out_weight", "query_out_bias", "query_bias")
        table |= dict.fromkeys(vectors, Role("query.norm", decay=False))
        return {name: role for name, role in table.items() if name in layer._parameters}

    def flops(self, layer: nn.Module) -> int:
        """Return those of f, less those of the linear query."""
        assert isinstance(layer, NonlinearQuery)
        names = ("query_down", "query_up", "query_weight")
        own = sum(value.numel() for name, value in layer.named_parameters(recurse=False) if name in names)
        return 2 * (own - layer.width * layer.queries)
