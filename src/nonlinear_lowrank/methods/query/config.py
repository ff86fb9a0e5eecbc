"""Settings of nonlinear queries."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_number

Kind = Literal["nonlinear", "linear", "identity"]


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
        if self.rank is not None:
            check_integer("rank", self.rank, minimum=1)
        check_choice("kind", self.kind, get_args(Kind))
        check_number("scale", self.scale, above=0)
        check_number("init_std", self.init_std, above=0)
        if self.kind == "identity":
            for name in ("rank", "scale"):
                if (value := getattr(self, name)) != type(self).__dict__[name]:
                    raise UserError(f"{name}={value} does nothing for the identity, Q(x) = x; leave it out")

    def rank_for(self, width: int) -> int:
        """Return r at a model width d."""
        return max(1, width // 2) if self.rank is None else self.rank
