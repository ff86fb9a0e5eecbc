"""Kinds of changes to a model: what each has to define, several joined in one arm, and settings as text.

`nonlinear-query+noble:rank=64` has nonlinear queries, and NOBLE on the remaining linears. The settings of a composed
arm are those of its parts by their names: {"nonlinear-query": {}, "noble": {"rank": 64}}. Parts are applied by stage,
whatever their order on the command line: a wider MLP first, since it draws plain linears; then methods that take
linears of certain names; then those that take every linear there is, which leave out what another one has taken; and
norms around projections last.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit
from nonlinear_lowrank.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ArmContext:
    """The surroundings of an arm's change."""

    setup: AdapterSetup | None = None
    """The task's facts of a pretrained model; None where the model is trained from scratch."""
    dense_init: DenseInit = "stock"
    """Init that the model's linears were drawn by, for a change that draws more of them."""
    verbose: bool = False
    """Print what was changed."""


class ArmKind:
    """One kind of change to a model; the defaults are those of a way to tune a pretrained one."""

    name: str
    """Name on the command line."""
    control: bool = False
    """It is there to be compared with: none of the methods of this library."""
    own_init: bool = False
    """Its settings have an `init` of their own; else `init=` is the dense init."""
    stage: int | None = None
    """Order in which an arm of several applies them, the lowest first; None: it can only be alone."""

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with their full names and JSON's types; raise UserError where they do not fit."""
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the parts of the arm's name."""
        return [self.name]

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        """Return the changed model; raise UserError where the change does not fit it."""
        raise NotImplementedError


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


def read_number(name: str, value: str, where: str) -> float:
    """A number written by a user."""
    try:
        return float(value)
    except ValueError as error:
        raise UserError(f"{name} must be a number, got {value!r}, in the arm {where!r}") from error


def read_value(text: str) -> Any:
    """A setting's value: integer, number, true/false, slash-separated numbers (a list), or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if "/" in text:
        parts = [read_value(part) for part in text.split("/")]
        if all(isinstance(part, int | float) for part in parts):
            return parts  # a list, as JSON would give it
    return text


def as_text(value: Any) -> str:
    """The reverse of `read_value`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)
