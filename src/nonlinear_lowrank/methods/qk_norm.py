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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.plain import wide_dtype
from nonlinear_lowrank.surgery.split import SplitLinear
from nonlinear_lowrank.validation import check_integer

from .attention import QUERY_BESIDE, attention_heads, holds_keys_and_values, query_is_beside, row_groups
from .base import Method, Role, method_of_layer, register
from .matrix import is_plain_linear, linear_shape
from .names import BY_HEAD, FUSED, KEYS, SEPARATE

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class QKNormConfig:
    """Settings of QK-norm.

    Raises:
        UserError: a value is out of range.
    """

    method: ClassVar[str] = "qk-norm"

    head_width: int | None = None
    """Width of a head of queries and keys; None: as the model's attention says."""

    def __post_init__(self) -> None:
        if self.head_width is not None:
            check_integer("head_width", self.head_width, minimum=1)


class QKNormProjection(nn.Module):
    """A projection whose queries or keys, or both, are normed head by head: (..., d_in) -> (..., d_out).

    The output of `projection` has `queries` columns of queries first (0: none), then `keys` of keys, then values.
    `config` has a head width.
    """

    def __init__(
        self,
        projection: nn.Module,
        queries: int,
        keys: int,
        *,
        config: QKNormConfig,
        device: Any = None,
        dtype: Any = None,
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


@register
class QKNormMethod(Method):
    """QK-norm."""

    name = QKNormConfig.method
    config_class = QKNormConfig
    layer_types = (QKNormProjection,)
    # As for nonlinear queries: an indexer gives no gradient.
    include = rf"(?!.*\bindexer\.)(.*\.)?({'|'.join((*SEPARATE, *KEYS, *FUSED))})"
    wraps = True
    controls: ClassVar = {"qk-norm": {}}

    def is_target(self, module: nn.Module) -> bool:
        if is_plain_linear(module):
            return True
        method = method_of_layer(module)
        return method is not None and method.kind == "linear" and not method.wraps

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        queries, keys = _widths(name, module)
        if config.head_width is not None and (queries % config.head_width or keys % config.head_width):
            raise UserError(
                f"{name}: queries of width {queries} and keys of width {keys} do not split into heads of "
                f"{config.head_width}; leave it out with exclude="
            )

    def check_parent(self, name: str, module: nn.Module, parent: nn.Module) -> None:
        d_in, d_out = linear_shape(module)
        heads, width = attention_heads(parent)
        own = name.rpartition(".")[2]
        if own == BY_HEAD or row_groups(name, parent) != 1:
            why = "mixes rows of q, k and v, without a block of queries"
            raise UserError(f"{name} {why}; leave it out with exclude=")
        fused = own in FUSED
        if query_is_beside(name, module, parent) and not holds_keys_and_values(module):
            # Its shape alone, which is all that a saved model tells, would read as queries and narrow keys.
            raise UserError(f"{name} {QUERY_BESIDE}")
        if fused and (d_out <= d_in or (heads is not None and width is not None and heads * width != d_in)):
            raise UserError(f"{name} does not hold queries as wide as the model, then keys; leave it out with exclude=")

    def complete(self, model: nn.Module, config: Any, names: list[str]) -> Any:
        """Return the config with the head width of the model's attention."""
        if config.head_width is not None:
            return config
        found = {attention_heads(_attention_of(model, name))[1] for name in names}
        if len(found) != 1 or None in found:
            raise UserError(
                "the model's attention does not say how wide its heads are; give QKNormConfig(head_width=...)"
            )
        return replace(config, head_width=found.pop())

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        like = next((each for each in module.parameters() if each.is_floating_point()), torch.empty(0))
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        return QKNormProjection(module, *_widths(name, module), config=config, **options).train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        norm = Role("qk-norm", decay=False)
        return {name: norm for name, _ in layer.named_parameters(recurse=False)}


def _attention_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module around a projection, or around the split one whose part it is."""
    path = name.rpartition(".")[0]
    parent = model.get_submodule(path)
    return model.get_submodule(path.rpartition(".")[0]) if isinstance(parent, SplitLinear) else parent


def _widths(name: str, module: nn.Module) -> tuple[int, int]:
    """Return the widths of the queries and the keys in a projection's output, by its name."""
    d_in, d_out = linear_shape(module)
    own = name.rpartition(".")[2]
    if own in FUSED and holds_keys_and_values(module):
        return 0, d_out // 2
    if own in FUSED or hasattr(module, "others"):  # a nonlinear query with keys and values, under any name
        return d_in, (d_out - d_in) // 2
    return (0, d_out) if own in KEYS else (d_out, 0)
