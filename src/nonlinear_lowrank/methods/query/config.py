"""Settings of nonlinear queries."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.settings import QuerySettings
from nonlinear_lowrank.validation import check_choice, check_integer, check_number

Kind = Literal["nonlinear", "linear", "full_rank", "identity"]
Residual = Literal["identity", "linear"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "tanh"]
Norm = Literal["rms", "layer", "none"]

_CHOICES = {"kind": Kind, "residual": Residual, "activation": Activation, "in_norm": Norm, "out_norm": Norm}
_OF_BOTTLENECK = ("rank", "residual", "activation", "in_norm", "out_norm", "out_bias", "rms_eps")


@dataclass(frozen=True, kw_only=True)
class NonlinearQueryConfig(QuerySettings):
    """Settings of nonlinear queries.

    Raises:
        UserError: a value is out of range, or does nothing beside the others; the message names the field.
    """

    method: ClassVar[str] = "nonlinear-query"

    rank: int | None = None
    """r, the width of the bottleneck; None: d q / (d + q), d / 2 where queries are as wide as the model, which costs as
    much as the linear query. Only "nonlinear" and "linear" have one."""
    kind: Kind = "nonlinear"
    """"nonlinear": the method. Controls: "linear" leaves the activation out (the same parameters), "full_rank" has
    f(x) = x W, "identity" is Q(x) = x."""
    scale: float = 0.5
    """Factor of x + f(x); the identity has none."""
    residual: Residual = "identity"
    """The x in x + f(x). "identity": x itself; where queries are wider than the model its channels repeat, and
    where they are narrower the first ones are used. "linear": the model's own query, kept and trained, beside an f
    that starts at zero: the model starts at its own outputs, with the parameters of f added."""
    activation: Activation = "gelu"
    """In the bottleneck; "gelu_tanh" is its approximation."""
    in_norm: Norm = "rms"
    """Norm of x before W1; "layer" has no bias here."""
    out_norm: Norm = "layer"
    """Norm of f after W2."""
    out_bias: bool = True
    """The output's LayerNorm has a bias; the authors' code has none."""
    rms_eps: float = 1e-6
    """Epsilon of RMSNorms, 1e-5 in the authors' code; that of LayerNorms is 1e-5."""
    init_std: float = 0.02
    """Standard deviation of W1 and W2 (and W); the paper names none, this is GPT-2's and OPT's for all linears."""
    query_width: int | None = None
    """Width of the queries in a projection that holds keys and values, or a gate, too; None: as the attention says."""
    query_groups: int | None = None
    """Groups of rows in such a projection, each with its queries, keys and values: 1 is a block of each, the number of
    heads is head by head; None: as the model's attention says."""

    def __post_init__(self) -> None:
        for name in ("rank", "query_width", "query_groups"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(choices))
        for name in ("scale", "rms_eps", "init_std"):
            check_number(name, getattr(self, name), above=0)
        if not isinstance(self.out_bias, bool):
            raise UserError(f"out_bias must be true or false, got {self.out_bias!r}")
        if self.kind == "identity":
            self._check_unused("kind='identity', Q(x) = x", "scale", *_OF_BOTTLENECK)
        if self.kind == "full_rank":
            self._check_unused("kind='full_rank', which has no bottleneck", *_OF_BOTTLENECK)
        if self.kind == "linear":
            self._check_unused("kind='linear', which has none", "activation")
        if self.out_norm != "layer":
            self._check_unused(f"out_norm={self.out_norm!r}", "out_bias")
        if "rms" not in (self.in_norm, self.out_norm):
            self._check_unused("norms of which none is an RMSNorm", "rms_eps")

    def _check_unused(self, where: str, *names: str) -> None:
        defaults = {each.name: each.default for each in fields(self)}
        for name in names:
            if (value := getattr(self, name)) != defaults[name]:
                raise UserError(f"{name}={value} does nothing for {where}; omit it")
