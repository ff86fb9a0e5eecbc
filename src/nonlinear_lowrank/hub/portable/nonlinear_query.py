"""Nonlinear queries."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.ops.plain import wide

from .core import METHODS, Layer, replace, width_of

QUERY_ACTIVATIONS: dict[str, Any] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


class NonlinearQuery(Layer, nn.Module):
    """A residual bottleneck in the place of the query projection (arXiv:2603.13381).

        Q(x) = (x + f(x)) / 2        f(x) = LayerNorm(GELU(RMSNorm(x) W1) W2)

    Tensors, of model width d and queries of width q: query_norm_weight (d), query_down W1 (r, d), query_up W2 (q, r),
    query_out_weight and query_out_bias (q); query_weight (q, d) of a full-rank f, or with query_bias of a linear
    residual. Where q differs from d, channel j of the residual is channel j mod d of x. A projection that holds
    keys and values too has their rows as `weight` and `bias`. Norms are in float32 or wider.
    """

    query_down: nn.Parameter
    query_up: nn.Parameter
    query_weight: nn.Parameter

    def __init__(self, plain: Any, settings: dict[str, Any], queries: int, others: int, groups: int) -> None:
        super().__init__()
        (d, _), q, biased = width_of(plain), queries, plain.bias is not None
        self.query, self.queries, self.others, self.groups = settings, queries, others, groups
        self.shape, self.kept = (d, q + others), frozenset[str]()
        shapes: dict[str, tuple[int, ...]] = {}
        if settings["kind"] in ("nonlinear", "linear"):
            r = settings["rank"] or max(1, d * q // (d + q))
            shapes |= {"query_norm_weight": (d,)} if settings["in_norm"] != "none" else {}
            shapes |= {"query_down": (r, d), "query_up": (q, r)}
            shapes |= {"query_out_weight": (q,)} if settings["out_norm"] != "none" else {}
            shapes |= {"query_out_bias": (q,)} if settings["out_norm"] == "layer" and settings["out_bias"] else {}
        linear = settings["residual"] == "linear"
        shapes |= {"query_weight": (q, d)} if linear or settings["kind"] == "full_rank" else {}
        shapes |= {"query_bias": (q,)} if linear and biased else {}
        shapes |= {"weight": (others, d)} if others else {}
        shapes |= {"bias": (others,)} if others and biased else {}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(plain.weight.new_empty(shape)))

    def reset_parameters(self) -> None:
        """Draw matrices from N(0, 0.02^2), norms 1, biases 0; beside a linear residual f starts at zero.

        Rows that were taken from the plain model stay, once.
        """
        kept, self.kept = self.kept, frozenset()
        settings = self.query
        linear, std = settings["residual"] == "linear", settings["init_std"]
        off = ("query_up" if settings["out_norm"] == "none" else "query_out_weight") if linear else ""
        for name, tensor in self.named_parameters(recurse=False):
            if name in kept:
                continue
            if name == off or name.endswith("bias"):
                init.zeros_(tensor)
            elif name in ("query_norm_weight", "query_out_weight"):
                init.ones_(tensor)
            else:
                init.normal_(tensor, std=std / settings["scale"] if linear and name == "query_weight" else std)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., q), or (..., q + keys and values) as the model's own rows lie."""
        query = self._query(x)
        if not self.others:
            return query
        others = F.linear(x, self._parameters["weight"], self._parameters.get("bias"))  # type: ignore[arg-type]
        parts = [each.unflatten(-1, (self.groups, -1)) for each in (query.to(others.dtype), others)]
        return torch.cat(parts, dim=-1).flatten(-2)

    def _query(self, x: Tensor) -> Tensor:
        settings, own = self.query, self._parameters
        if settings["kind"] == "identity":
            device = x.device.type
            cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
            return self._around(x.to(torch.get_autocast_dtype(device)) if cast else x)
        if settings["kind"] == "full_rank":
            mapped = F.linear(x, self.query_weight)
            f = wide(mapped)
        else:
            normed = self._normed(wide(x), settings["in_norm"], own.get("query_norm_weight"))
            hidden = F.linear(normed.to(x.dtype), self.query_down)
            if settings["kind"] == "nonlinear":
                hidden = QUERY_ACTIVATIONS[settings["activation"]](hidden)
            mapped = F.linear(hidden, self.query_up)
            f = self._normed(wide(mapped), settings["out_norm"], own.get("query_out_weight"), own.get("query_out_bias"))
        if settings["residual"] == "linear":
            residual = wide(F.linear(x, self.query_weight, own.get("query_bias")))
        else:
            residual = self._around(wide(x))
        return ((residual + f) * settings["scale"]).to(mapped.dtype)

    def _around(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if self.queries == width:
            return x
        return x.repeat(*[1] * (x.ndim - 1), -(-self.queries // width))[..., : self.queries]

    def _normed(self, x: Tensor, norm: str, scale: Any, shift: Any = None) -> Tensor:
        if norm == "none":
            return x
        if norm == "rms":
            return F.rms_norm(x, scale.shape, scale.to(x.dtype), self.query["rms_eps"])
        return F.layer_norm(x, scale.shape, scale.to(x.dtype), None if shift is None else shift.to(x.dtype), 1e-5)


_ONE_KIND = (
    *("q_proj", "query", "query_proj", "q_lin", "q_linear", "linear_q", "to_q", "wq", "q", "q_attn", "q_b_proj"),
    *("k_proj", "key", "key_proj", "k_lin", "k_linear", "linear_k", "to_k", "wk", "k"),
    *("v_proj", "value", "value_proj", "v_lin", "v_linear", "linear_v", "to_v", "wv", "v"),
)
_FUSED = ("c_attn", "qkv", "qkv_proj", "qkv_linear", "Wqkv", "query_key_value")


def put_nonlinear_query(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put nonlinear queries in the place of projections, by their names and shapes."""

    def build(name: str, module: Any) -> nn.Module:
        (d_in, d_out), own = width_of(module), name.rpartition(".")[2]
        whole = own in _ONE_KIND or (d_out <= d_in and settings["query_width"] is None and own not in _FUSED)
        queries = d_out if whole else settings["query_width"] or d_in
        layer = NonlinearQuery(module, settings, queries, d_out - queries, settings["query_groups"] or 1)
        if settings["residual"] == "linear" or d_out > queries:
            _take_rows(layer, module)
        return layer

    replace(model, names, build)


@torch.no_grad()
def _take_rows(layer: Any, plain: Any) -> None:
    """Take the plain rows that a layer keeps, as a linear residual (over the scale) or as keys and values."""
    rows = {"weight": plain.weight.t() if isinstance(plain, Conv1D) else plain.weight, "bias": plain.bias}
    for end, tensor in rows.items():
        if tensor is None or tensor.is_meta:
            continue
        grouped = tensor.unflatten(0, (layer.groups, -1))
        count = layer.queries // layer.groups
        for name, part in ((f"query_{end}", grouped[:, :count] / layer.query["scale"]), (end, grouped[:, count:])):
            if layer._parameters.get(name) is not None:
                layer._parameters[name].copy_(part.flatten(0, 1))
                layer.kept |= {name}


METHODS["nonlinear-query"] = put_nonlinear_query
