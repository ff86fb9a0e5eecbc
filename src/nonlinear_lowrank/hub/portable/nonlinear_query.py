"""Nonlinear queries."""

from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.methods.names import HOLDING, SINGLE
from nonlinear_lowrank.methods.query.formula import QKVFormula, QueryFormula, QueryLayout
from nonlinear_lowrank.methods.settings import QuerySettings

from .core import METHODS, Layer, replace, width_of


class SavedQuery(QuerySettings, SimpleNamespace):
    """The settings in config.json."""


class NonlinearQuery(Layer, QueryFormula):
    """A residual bottleneck in the place of the query projection (arXiv:2603.13381).

        Q(x) = (x + f(x)) / 2        f(x) = LayerNorm(GELU(RMSNorm(x) W1) W2)

    Tensors, of model width d and queries of width q: query_norm_weight (d), query_down W1 (r, d), query_up W2 (q, r),
    query_out_weight and query_out_bias (q); query_weight (q, d) of a full-rank f, or with query_bias of a linear
    residual. Where q differs from d, channel j of the residual is channel j mod d of x. A projection that holds
    keys and values too has their rows as `weight` and `bias`. Norms are in float32 or wider.
    """

    def __init__(self, plain: Any, settings: Any, layout: QueryLayout) -> None:
        super().__init__()
        self.query_config, self.layout, self.queries, self.others = settings, layout, layout.queries, layout.others
        self.shape, self.width, self.has_model_values = width_of(plain), width_of(plain)[0], False
        shapes, biased = self.shapes(plain.bias is not None), plain.bias is not None
        shapes |= {"weight": (self.others, self.width)} if self.others else {}
        shapes |= {"bias": (self.others,)} if self.others and biased else {}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(plain.weight.new_empty(shape)))


class NonlinearQKV(QKVFormula, NonlinearQuery):
    """The same in a projection that holds keys and values too, whose outputs are laid out as the model's own."""


def put_nonlinear_query(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put nonlinear queries in the place of projections, by their names and shapes."""

    def build(name: str, module: Any) -> nn.Module:
        (d_in, d_out), own = width_of(module), name.rpartition(".")[2]
        whole = own in SINGLE or (d_out <= d_in and settings["query_width"] is None and own not in HOLDING)
        queries = d_out if whole else settings["query_width"] or d_in
        layout = QueryLayout(queries, d_out - queries, settings["query_groups"] or 1)
        layer = (NonlinearQKV if layout.others else NonlinearQuery)(module, SavedQuery(**settings), layout)
        layer.take(module.weight.t() if isinstance(module, Conv1D) else module.weight, module.bias)
        return layer

    replace(model, names, build)


METHODS["nonlinear-query"] = put_nonlinear_query
