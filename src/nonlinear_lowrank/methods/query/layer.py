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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, PlainCost, Role
from nonlinear_lowrank.methods.matrix import is_plain_linear

Kind = Literal["nonlinear", "linear", "identity"]

_RMS_EPS, _LAYER_EPS = 1e-6, 1e-5
SEPARATE = ("q_proj", "query", "query_proj", "q_lin", "q_linear", "linear_q", "to_q", "wq", "q", "q_attn")
"""Names of query projections."""
FUSED = ("c_attn", "qkv", "qkv_proj", "qkv_linear", "Wqkv")
"""Names of projections whose rows are q, k and v, one after another."""
MIXED = "mixes rows of q, k and v, without a block of queries; leave it out with exclude="
BY_HEAD = "query_key_value"
"""A fused projection whose rows are q, k and v of one head after another."""
_BY_DEVICE = ("CodeGenAttention",)


@dataclass(frozen=True, kw_only=True)
class NonlinearQueryConfig:
    """Settings of nonlinear queries.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    method: ClassVar[str] = "nonlinear-query"

    rank: int | None = None
    """r, the width of the bottleneck; None: d / 2, which costs as much as the linear query. The identity has none."""
    kind: Kind = "nonlinear"
    """"nonlinear": the method. Controls: "linear" leaves GELU out (the same parameters), "identity" is Q(x) = x."""
    scale: float = 0.5
    """Factor of x + f(x); the identity has none."""
    init_std: float = 0.02
    """Standard deviation of W1 and W2; the paper names none, this is GPT-2's and OPT's for all linears."""

    def __post_init__(self) -> None:
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        if self.rank is not None and not (whole and self.rank >= 1):
            raise UserError(f"rank must be a positive integer, or left out for d / 2, got {self.rank!r}")
        if self.kind not in ("nonlinear", "linear", "identity"):
            raise UserError(f"unknown kind {self.kind!r}; choose one of nonlinear, linear, identity")
        for name in ("scale", "init_std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise UserError(f"{name} must be a finite number above 0, got {value!r}")
        if self.kind == "identity":
            for name in ("rank", "scale"):
                if (value := getattr(self, name)) != type(self).__dict__[name]:
                    raise UserError(f"{name}={value} does nothing for the identity, Q(x) = x; leave it out")

    def rank_for(self, width: int) -> int:
        """r at a model width d."""
        return max(1, width // 2) if self.rank is None else self.rank


class NonlinearQuery(nn.Module):
    """The query of `Q(x) = (x + f(x)) / 2`: (..., d) -> (..., d).

    Its tensors are parameters of its own and no linears, so that neither a model's init nor an adapter for all
    linears touches them.

    Args:
        width: d.
        config: settings.
        device: of the parameters.
        dtype: of the parameters; norms are computed in float32 or wider all the same.

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
        """Draws the query's rows of this file's table; on the meta device nothing."""
        if self.query_config.kind == "identity":
            return
        init.ones_(self.query_norm_weight)
        init.normal_(self.query_down, std=self.query_config.init_std)
        init.normal_(self.query_up, std=self.query_config.init_std)
        init.ones_(self.query_out_weight)
        init.zeros_(self.query_out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d), in the type that a linear would give."""
        return self._query(x)

    def _query(self, x: Tensor) -> Tensor:
        config, wide = self.query_config, _wide(x)
        if config.kind == "identity":
            return x.to(_product_type(x))
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
        """Shown by print(model)."""
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
        self.weight = nn.Parameter(torch.empty(others, width, device=device, dtype=dtype))
        held = nn.Parameter(torch.empty(others, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", held)
        self.reset_parameters()

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keys' and values' rows as the model has them; the next `reset_parameters` leaves them as they are."""
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.has_model_values = not weight.is_meta

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws this file's table; keys and values only where the model's own init has not."""
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
        return torch.cat([self._query(x).to(others.dtype), others], dim=-1)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{super().extra_repr()}, keys and values {self.others}, bias={self.bias is not None}"


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _product_type(x: Tensor) -> torch.dtype:
    """Of a linear's output for x."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def _shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def _check(name: str, module: nn.Module, config: NonlinearQueryConfig) -> None:
    if (why := _refusal(name, *_shape(module), None)) is not None:
        raise UserError(f"{name} {why}")


def _check_parent(name: str, module: nn.Module, parent: nn.Module) -> None:
    """What only the attention around the projection knows: its heads, and which rows are queries."""
    if (why := _refusal(name, *_shape(module), parent)) is not None:
        raise UserError(f"{name} {why}")


def _refusal(name: str, d_in: int, d_out: int, parent: nn.Module | None) -> str | None:
    """Why the projection cannot have a nonlinear query, or None.

    Args:
        name: of the projection.
        d_in: the model's width.
        d_out: that of the query, or of q, k and v together.
        parent: the attention; None where it was asked before, when the model was augmented.
    """
    own = name.rpartition(".")[2]
    if mixes_rows(name, parent):
        return MIXED
    if d_out == d_in and own not in FUSED:
        return None
    if getattr(parent, "is_cross_attention", False):
        return "holds keys and values only, and the query is beside it; leave it out with exclude="
    width = d_out if own in SEPARATE else None if parent is None else _query_width(parent)
    if width is None and parent is not None and d_out != 3 * d_in:
        return (
            f"is {d_in} -> {d_out}, and {type(parent).__name__} does not say how many of it are queries; a fused "
            f"projection must then be {d_in} -> {3 * d_in}: leave it out with exclude="
        )
    if width in (None, d_in):
        width = d_in if d_out > d_in and (d_out - d_in) % 2 == 0 else d_out
    if width == d_in:
        return None
    return (
        f"has queries of width {width} (heads x head width) in a model of width {d_in}, and a nonlinear query adds x "
        "to itself: the two must be equal; leave it out with exclude="
    )


def mixes_rows(name: str, parent: nn.Module | None) -> bool:
    """Whether a projection's rows are q, k and v of each head, or device, in turn, not a block of each."""
    own, kind = name.rpartition(".")[2], type(parent).__name__
    if own == BY_HEAD or kind in _BY_DEVICE:
        return True
    by_head = kind == "GPTBigCodeAttention" and not getattr(parent, "multi_query", False)
    return by_head and own in FUSED and not getattr(parent, "is_cross_attention", False)


def attention_heads(parent: nn.Module) -> tuple[int | None, int | None]:
    """How many heads an attention has for queries, and how wide they are; None where neither it nor its config says."""
    sources = [parent, getattr(parent, "config", None)]

    def first(*names: str) -> int | None:
        found = (getattr(source, name, None) for source in sources for name in names)
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)

    heads = first("num_heads", "num_attention_heads", "n_heads", "n_head")
    head = first("head_dim", "attention_head_size", "head_size")
    width = first("embed_dim", "hidden_size", "d_model")
    if head is None and heads is not None and width is not None:
        head = width // heads
    return heads, head


def _query_width(parent: nn.Module) -> int | None:
    heads, head = attention_heads(parent)
    return None if heads is None or head is None else heads * head


def holds_keys_and_values(module: Any) -> bool:
    """GPT-2's cross-attention, whose queries are in a module beside it."""
    return hasattr(module, "nf") and module.nf == 2 * module.nx  # a Conv1D, or NOBLE's of one


def _build(module: nn.Module, config: NonlinearQueryConfig) -> nn.Module:
    """A query of its own, real and still undrawn where the plain layer is real; keys and values are the plain ones'."""
    assert isinstance(module, nn.Linear | Conv1D)
    (d_in, d_out), weight = _shape(module), module.weight
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


def _roles(module: nn.Module) -> Mapping[str, Role]:
    assert isinstance(module, NonlinearQuery)
    if module.query_config.kind == "identity":
        return {}
    norms = {name: Role("query.norm", decay=False) for name in ("query_norm_weight", "query_out_weight")}
    return {
        # They stand where a dense matrix stood, which Muon would take: arms must not differ in that too.
        "query_down": Role("query.down", muon=True),
        "query_up": Role("query.up", muon=True),
        **norms,
        "query_out_bias": Role("query.norm", decay=False),
    }


def _flops(module: nn.Module) -> int:
    """Of f, less those of the linear query."""
    assert isinstance(module, NonlinearQuery)
    config, d = module.query_config, module.width
    own = 0 if config.kind == "identity" else 4 * d * config.rank_for(d)
    return own - 2 * d * d


def _plain(module: nn.Module) -> PlainCost:
    """Of the linear projection."""
    assert isinstance(module, NonlinearQuery)
    d_in, d_out = module.width, module.width + (module.others if isinstance(module, NonlinearQKV) else 0)
    biases = d_out if module.replaced_bias else 0
    return PlainCost(parameters=d_in * d_out + biases, flops=2 * d_in * d_out)


METHOD = Method(
    name=NonlinearQueryConfig.method,
    config_class=NonlinearQueryConfig,
    layer_types=(NonlinearQuery, NonlinearQKV),
    is_target=is_plain_linear,
    check=_check,
    check_parent=_check_parent,
    build=lambda name, module, config: _build(module, config),
    roles=_roles,
    flops=_flops,
    plain=_plain,
    include=rf"(.*\.)?({'|'.join((*SEPARATE, *FUSED, BY_HEAD))})",
    leave=lambda module, config: "holds keys and values only" if holds_keys_and_values(module) else None,
    tensor_parallel=False,
)
