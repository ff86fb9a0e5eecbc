"""One arm of a comparison of neural fields: a method with what is tuned of it, and its short form."""

import re
from dataclasses import dataclass, replace
from typing import get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_number

from .problem import FieldMethod, Init

_INITS: tuple[Init, ...] = get_args(Init)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class FieldArm:
    """One method of a comparison, with what is tuned of it.

    Raises:
        UserError: see `FieldMethod`; or unknown inits, a bad learning rate or name.
    """

    method: FieldMethod
    """With its first init."""
    inits: tuple[Init, ...] = _INITS
    """Inits of which the arm takes its best."""
    lr: float | None = None
    """The arm's learning rate; None: tuned, or the recipe's."""
    name: str = ""
    """Name in tables, pictures and folders; empty: made from the method."""

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        if not self.inits or len(set(self.inits)) < len(self.inits) or not set(self.inits) <= set(_INITS):
            raise UserError(f"inits must be one or more of {', '.join(_INITS)}, got {self.inits!r}")
        if not self.name:
            text = str(replace(self.method, init="kaiming_sqrt5"))
            for long, short in (("rank=", "k"), ("omega=", "w"), ("e+", "e")):
                text = text.replace(long, short)
            chosen = "" if len(self.inits) > 1 else f"-{self.inits[0]}"
            object.__setattr__(self, "name", re.sub(r"[^A-Za-z0-9._-]+", "-", text) + chosen)
        if not _NAME.fullmatch(self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    @classmethod
    def parse(cls, text: str) -> "FieldArm":
        """Read `FieldMethod`'s short form with `lr=` and `name=` beside it; without `init=` both inits are tried."""
        kind, _, rest = text.strip().partition(":")
        own: dict[str, str] = {}
        others = []
        for option in filter(None, rest.split(",")):
            key, _, value = (part.strip() for part in option.partition("="))
            if key not in ("lr", "name"):
                others.append(option)
            elif key in own:
                raise UserError(f"the arm {text!r} has {key} twice; omit one")
            else:
                own[key] = value
        method = FieldMethod.parse(":".join(filter(None, (kind, ",".join(others)))))
        inits = (method.init,) if any(each.partition("=")[0].strip() == "init" for each in others) else _INITS
        try:
            lr = float(own["lr"]) if "lr" in own else None
        except ValueError:
            raise UserError(f"lr must be a number, got {own['lr']!r}, in the arm {text!r}") from None
        return cls(method=replace(method, init=inits[0]), inits=inits, lr=lr, name=own.get("name", ""))
