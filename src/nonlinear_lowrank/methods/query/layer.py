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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.ops.precision import autocast_input, wide_dtype

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

    def __init__(
        self,
        width: int,
        *,
        config: NonlinearQueryConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
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
        if config.kind != "identity":
            for name, shape in shapes.items():
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

    Args:
        width: d, also of the query.
        others: 2v, the width of keys and values together.
        bias: whether keys and values have one.
        config: settings of the query.
        device: of the parameters.
        dtype: of the parameters.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
