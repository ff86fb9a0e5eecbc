"""Several methods in one arm: `nonlinear-query+noble:rank=64` has nonlinear queries, and NOBLE on what is left.

The settings of a composed arm are those of its parts by their names: {"nonlinear-query": {}, "noble": {"rank": 64}}.
Parts are applied by stage, whatever their order on the command line: a wider MLP first, since it draws plain linears;
then methods that take linears of certain names; then those that take every linear there is, which leave out what
another one has taken; and norms around projections last.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nonlinear_lowrank.errors import UserError

from .context import ArmContext, ArmKind


@dataclass(frozen=True)
class Composed(ArmKind):
    """Methods that change different parts of one model."""

    parts: tuple[ArmKind, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        for part in self.parts:
            if part.stage is None:
                raise UserError(f"{part.name} cannot be one of several methods in an arm; give it an arm of its own")
            if names.count(part.name) > 1:
                raise UserError(f"the arm {self.name!r} names {part.name} twice; one method has one set of settings")

    @property
    def name(self) -> str:  # type: ignore[override]
        return "+".join(part.name for part in self.parts)

    @property
    def control(self) -> bool:  # type: ignore[override]
        return all(part.control for part in self.parts)

    @property
    def own_init(self) -> bool:  # type: ignore[override]
        """Return whether `init=` behind the last part is that part's own."""
        return self.parts[-1].own_init

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        for name, own in settings.items():
            if name not in (part.name for part in self.parts) or not isinstance(own, Mapping):
                raise UserError(f"settings of {self.name} are those of its parts by name; {name!r} is none of them")
        return {part.name: part.read(settings.get(part.name, {})) for part in self.parts}

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        return [word for part in self.parts for word in part.label(settings[part.name])]

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        for part in sorted(self.parts, key=lambda part: part.stage or 0):
            model = part.apply(model, settings[part.name], context)
        return model


def split_parts(text: str, names: Iterable[str]) -> list[str]:
    """Cut an arm's short form at each "+" that a method's name follows; "nora++" and "1e+3" stay whole."""
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.split(rf"\+(?=\s*(?:{known})\s*(?:[:,+]|$))", text)
