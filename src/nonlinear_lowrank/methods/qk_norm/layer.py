"""QK-norm: an RMSNorm over each head of queries and keys, behind their projections (arXiv:2010.04245, 2302.05442).

    q = RMSNorm(W_q x), k = RMSNorm(W_k x), head by head; before rotary positions and before the scores are scaled

| tensor        | shape        | init | lr x | decay |
|---------------|--------------|------|------|-------|
| qk_norm_query | (head width) | 1    | 1    | no    |
| qk_norm_key   | (head width) | 1    | 1    | no    |

A separate projection has one of the two, a fused one both, and one of keys and values (GPT-2's cross-attention) that
of keys. The norm is put around whatever makes the projection, plain or a method's layer, which stays as it is, one
level deeper ("q_proj.projection"): so it comes last.

It is a control: an independent audit found that a linear query with QK-norm and a learning rate of its own closes the
gap to the nonlinear query.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.ops.precision import wide_dtype
from nonlinear_lowrank.validation import check_integer

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class QKNormConfig:
    """Settings of QK-norm.

    Raises:
        UserError: a value is out of range.
    """

    method: ClassVar[str] = "qk-norm"

    head_width: int | None = None
    """Of queries and keys; None: as the model's attention says."""

    def __post_init__(self) -> None:
        if self.head_width is not None:
            check_integer("head_width", self.head_width, minimum=1)


class QKNormProjection(nn.Module):
    """A projection whose queries or keys, or both, are normed head by head: (..., d_in) -> (..., d_out).

    Args:
        projection: what is normed; its output has queries first, then keys, then values.
        queries: width of the queries in the output; 0: none.
        keys: that of the keys.
        config: with a head width.
        dtype: of the norms.
    """

    def __init__(
        self,
        projection: nn.Module,
        queries: int,
        keys: int,
        *,
        config: QKNormConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert config.head_width is not None
        self.projection, self.qk_norm_config, self.queries, self.keys = projection, config, queries, keys
        for name, width in (("query", queries), ("key", keys)):
            held = nn.Parameter(torch.empty(config.head_width, device=device, dtype=dtype)) if width else None
            self.register_parameter(f"qk_norm_{name}", held)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Norms start at 1; the projection inside has an init of its own."""
        for parameter in self.parameters(recurse=False):
            init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        y = self.projection(x)
        queries, keys, rest = y.split([self.queries, self.keys, y.shape[-1] - self.queries - self.keys], dim=-1)
        return torch.cat([self._normed(queries, self.qk_norm_query), self._normed(keys, self.qk_norm_key), rest], -1)

    def _normed(self, y: Tensor, weight: Any) -> Tensor:
        if weight is None:
            return y
        width = weight.shape[0]
        heads = y.unflatten(-1, (y.shape[-1] // width, width))
        wide = heads.to(wide_dtype(heads))
        return F.rms_norm(wide, (width,), weight.to(wide.dtype), _EPS).to(y.dtype).flatten(-2)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"queries={self.queries}, keys={self.keys}, head_width={self.qk_norm_config.head_width}"
