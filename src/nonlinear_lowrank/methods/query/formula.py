"""The formula of nonlinear queries; in modeling files too, and so it imports torch and transformers alone."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.ops.plain import autocast_input, wide_dtype

_LAYER_EPS = 1e-5
QUERY_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


class QueryLayout(NamedTuple):
    """Rows of a projection: `groups` times a share of the queries, then of the others (keys and values, or a gate)."""

    queries: int
    others: int = 0
    groups: int = 1

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(q + others, ...) -> (q, ...), (others, ...)."""
        each = rows.unflatten(0, (self.groups, -1))
        queries = self.queries // self.groups
        return each[:, :queries].flatten(0, 1), each[:, queries:].flatten(0, 1)

    def join(self, queries: Tensor, others: Tensor) -> Tensor:
        """(..., q), (..., others) -> (..., q + others), where the model looks for them."""
        parts = [each.unflatten(-1, (self.groups, -1)) for each in (queries, others)]
        return torch.cat(parts, dim=-1).flatten(-2)


class QueryFormula(nn.Module):
    """Base of queries: of x (..., `width`), `queries` wide."""

    query_config: Any
    width: int
    queries: int
    has_model_values: bool
    query_down: nn.Parameter
    query_up: nn.Parameter
    query_weight: nn.Parameter
    query_bias: nn.Parameter

    def shapes(self, bias: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the query's tensors; `bias`: the linear residual has one."""
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
        """Draw the table of `layer`; what the layer took of the model stays, once."""
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
                hidden = QUERY_ACTIVATIONS[config.activation](hidden)
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


class QKVFormula(QueryFormula):
    """Base of fused projections with such a query."""

    layout: QueryLayout
    weight: nn.Parameter
    bias: nn.Parameter | None

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
