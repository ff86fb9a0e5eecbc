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

r (d + q) weights are those of the linear query, and d + 2 q more are norms. A fused projection's query rows are
dropped (unless the residual is linear), and its outputs stand where the model looks for them (`layout`).

The residual needs the query as wide as x. Where it is not, channel j of the query has channel j mod d of x: at q = d
that is the published method. It has no weights: a learned map would be the linear query again. The
out norm runs over all q, so the query cannot be split by heads over devices.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.methods.attention import holds_keys_and_values
from nonlinear_lowrank.methods.base import Method, Role, register
from nonlinear_lowrank.methods.matrix import linear_shape
from nonlinear_lowrank.methods.names import BY_HEAD, FUSED, LATENT, SEPARATE

from .config import NonlinearQueryConfig
from .formula import QKVFormula, QueryFormula, QueryLayout
from .layout import complete_layout, stated_layout


class NonlinearQuery(QueryFormula):
    """The query of `Q(x) = (x + f(x)) / 2`: (..., d) -> (..., q).

    `width` is d, `queries` is q (default: d), and `bias` says whether the linear residual has one. Its tensors are
    its own parameters, not linears, so that neither a model's init nor an adapter for all linears touches them.
    Norms are computed in float32 or wider.

    Source: nonlinear_queries.md, "Core Formula" and "Structure of f".
    """

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
        for name, shape in self.shapes(bias).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        config = self.query_config
        shape = f"width={self.width}" + (f", queries={self.queries}" if self.queries != self.width else "")
        rank = f", rank={config.rank_for(self.width, self.queries)}" if config.has_bottleneck else ""
        scale = "" if config.kind == "identity" else f", scale={config.scale:g}"
        return f"{shape}, {config.kind}{rank}{scale}" + (", linear residual" if config.residual == "linear" else "")


class NonlinearQKV(QKVFormula, NonlinearQuery):
    """A fused projection whose query is nonlinear: (..., d) -> (..., q + 2v), laid out as the model's own.

    `width` is d, `others` 2v, `queries` q (default: d) and `groups` that of the rows; `bias` says whether there is one.
    """

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
        self.layout = QueryLayout(self.queries, others, groups)
        self.linear_shape = (width, self.queries + others)
        self.weight = nn.Parameter(torch.empty(others, width, device=device, dtype=dtype))
        held = nn.Parameter(torch.empty(others, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", held)
        self.reset_parameters()

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

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        return "holds keys and values only" if holds_keys_and_values(module) else None

    def complete(self, model: nn.Module, config: Any, names: list[str]) -> Any:
        """Return the config with the places of queries among fused rows, as in the model's attention."""
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
        # The matrices replace a dense one, which Muon would take: arms must not differ in that too.
        table = {name: Role(f"query.{name[6:]}", muon=True) for name in ("query_down", "query_up", "query_weight")}
        vectors = ("query_norm_weight", "query_out_weight", "query_out_bias", "query_bias")
        table |= dict.fromkeys(vectors, Role("query.norm", decay=False))
        return {name: role for name, role in table.items() if name in layer._parameters}

    def flops(self, layer: nn.Module) -> int:
        """Return the FLOPs of f, less the linear query's."""
        assert isinstance(layer, NonlinearQuery)
        names = ("query_down", "query_up", "query_weight")
        own = sum(value.numel() for name, value in layer.named_parameters(recurse=False) if name in names)
        return 2 * (own - layer.width * layer.queries)
