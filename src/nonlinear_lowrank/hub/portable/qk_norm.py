"""QK-norm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.methods.names import FUSED, KEYS
from nonlinear_lowrank.ops.plain import wide

from .core import METHODS, Layer, replace, width_of


class QKNormProjection(Layer, nn.Module):
    """An RMSNorm over each head of queries and keys, behind their projection (arXiv:2010.04245, 2302.05442).

    `projection` is the plain one, or another method's layer; its output has queries first, then keys, then values.
    Tensors: qk_norm_query and qk_norm_key (head width).
    """

    def __init__(self, projection: Any, queries: int, keys: int, width: int) -> None:
        super().__init__()
        self.projection, self.queries, self.keys = projection, queries, keys
        self.shape = width_of(projection)
        like = next((each for each in projection.parameters() if each.is_floating_point()), torch.empty(0))
        for name, columns in (("query", queries), ("key", keys)):
            held = nn.Parameter(like.new_empty(width)) if columns else None
            self.register_parameter(f"qk_norm_{name}", held)

    def reset_parameters(self) -> None:
        """Norms start at 1."""
        for tensor in self.parameters(recurse=False):
            init.ones_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        y = self.projection(x)
        queries, keys, rest = y.split([self.queries, self.keys, y.shape[-1] - self.queries - self.keys], dim=-1)
        return torch.cat([_normed(queries, self.qk_norm_query), _normed(keys, self.qk_norm_key), rest], -1)


def _normed(y: Tensor, weight: Any) -> Tensor:
    if weight is None:
        return y
    width = weight.shape[0]
    heads = wide(y.unflatten(-1, (y.shape[-1] // width, width)))
    return F.rms_norm(heads, (width,), weight.to(heads.dtype), 1e-6).to(y.dtype).flatten(-2)


def put_qk_norm(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put a norm behind projections, by their names and shapes."""

    def build(name: str, module: Any) -> nn.Module:
        (d_in, d_out), own = width_of(module), name.rpartition(".")[2]
        if own in FUSED and hasattr(module, "nf") and d_out == 2 * d_in:  # GPT-2's cross-attention: keys and values
            queries, of_keys = 0, d_out // 2
        elif own in FUSED or getattr(module, "others", False):
            queries, of_keys = d_in, (d_out - d_in) // 2
        else:
            queries, of_keys = (0, d_out) if own in KEYS else (d_out, 0)
        return QKNormProjection(module, queries, of_keys, settings["head_width"])

    replace(model, names, build)


METHODS["qk-norm"] = put_qk_norm
