"""Kinds of arms: nothing, a method built into the model before training (or several), a way to tune a pretrained
model, or a function of the user's own. The table at the end follows from the registry of methods.
"""

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.analysis.importance import PARTS, part_of
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, all_methods
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.surgery.budget import parse_budget
from nonlinear_lowrank.surgery.targets import dense_parts
from nonlinear_lowrank.validation import one_line

from .kinds import ArmContext, ArmKind, Composed, as_text, split_parts
from .tuning import TUNINGS
from .widening import WideMlp


class Unchanged(ArmKind):
    """The model as the task builds it."""

    name = "baseline"
    control = True

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        if settings:
            raise UserError(f"a baseline has no setting {next(iter(settings))!r}; it takes init=, lr= and name=")
        return {}

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        return model


# Arguments of `augment` beside the config. `select` names parts of a block here: a choice by scores needs data.
_PATTERNS = ("include", "exclude")
_OF_LINEARS = ("select", "budget")
_CHOICES = (*_PATTERNS, *_OF_LINEARS)
# How settings are written in the arm's name.
_SHORT = {
    "rank": "r",
    "activation": "",
    "depth": "d",
    "omega": "w",
    "include": "on-",
    "exclude": "not-",
    "select": "on-",
}


@dataclass(frozen=True)
class Augmented(ArmKind):
    """A method that swaps modules of the model, or a control made of one.

    Beside the fields of the method's config, an arm may say `include=` and `exclude=`, as in `augment`; one that takes
    linears also `budget=` (in place of the rank), and `select=query/feed_forward`: parts of a block by
    `analysis.part_of`.
    """

    method: Method
    name: str
    fixed: Mapping[str, Any] | None = None
    """The fields of the config that make a control what it is."""

    @property
    def control(self) -> bool:  # type: ignore[override]
        return self.fixed is not None

    @property
    def own_init(self) -> bool:  # type: ignore[override]
        return "init" in self._fields()

    @property
    def stage(self) -> int | None:  # type: ignore[override]
        if self.method.wraps:
            return 3
        return 2 if self.method.include is None else 1

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        known = (*self._fields(), *(_CHOICES if self.method.kind == "linear" else _PATTERNS))
        full = {"rank" if key == "r" and key not in known else key: value for key, value in settings.items()}
        for key in full:
            if key not in known:
                raise UserError(f"{self.name} has no setting {key!r}; it has {', '.join(known)}")
        if "budget" in full:
            parse_budget(full["budget"])
            if not self.method.budgeted:
                raise UserError(f"{self.name} cannot choose ranks for a budget; give the rank itself")
            if "rank" in full or "rank_ratio" in full:
                raise UserError(f"{self.name}: a budget chooses the ranks; give budget= or rank=, not both")
        if "rank" in full and "rank_ratio" in full:
            raise UserError(f"{self.name}: rank_ratio takes the place of rank; give one of them")
        if "select" in full:
            _read_parts(full["select"])
        for key in _PATTERNS:
            patterns = full.get(key, ())
            listed = patterns if isinstance(patterns, list | tuple) else [patterns]
            if not all(isinstance(each, str) for each in listed):
                raise UserError(f"{key} must be a pattern of names, or a list of them, got {patterns!r}")
        self._config(full)
        return full

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        return [self.name, *(f"{_SHORT.get(key, key + '-')}{_shown(key, value)}" for key, value in settings.items())]

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        choice = {key: settings[key] for key in _CHOICES if key in settings}
        if "select" in choice:
            choice["select"] = _select(model, self.name, choice["select"])
        augment(model, self._config(settings), verbose=context.verbose, **choice)
        return model

    def _fields(self) -> list[str]:
        return [
            each.name for each in dataclasses.fields(self.method.config_class) if each.name not in (self.fixed or ())
        ]

    def _config(self, settings: Mapping[str, Any]) -> Any:
        own = {key: value for key, value in settings.items() if key not in _CHOICES}
        return self.method.config_class(**(self.fixed or {}), **own)


def _shown(key: str, value: Any) -> str:
    """A setting in the arm's name."""
    if key in _CHOICES:
        return "-".join(re.findall(r"[\w.]+" if key == "budget" else r"\w+", str(value)))
    return as_text(value)


def _read_parts(text: Any) -> list[str]:
    parts = text.split("/") if isinstance(text, str) else []
    for part in parts or [text]:
        if part not in PARTS:
            raise UserError(f"select={text} names no part of a block; choose from {', '.join(PARTS)}, joined by '/'")
    return parts


def _select(model: nn.Module, method: str, text: str) -> list[str]:
    """Names of the plain linears that are such parts of a block."""
    inside, parts = dense_parts(model), _read_parts(text)
    chosen = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in inside and part_of(name) in parts
    ]
    if not chosen:
        raise UserError(f"{method}: no plain linear of this {type(model).__name__} is {text} by its name")
    return chosen


@dataclass(frozen=True)
class Function(ArmKind):
    """A user's own function, "module:function": model in, model out."""

    name: str

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        return [self.name.replace(":", "."), *(f"{key}-{as_text(value)}" for key, value in settings.items())]

    def function(self) -> Callable[..., Any]:
        """Return the function itself; raise UserError where it cannot be imported or called."""
        module_name, _, name = self.name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the command's own path does not hold the user's folder
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UserError(f"cannot import {module_name!r} of the arm {self.name!r}: {one_line(error)}") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"{module_name!r} has no function {name!r}; the arm {self.name!r} needs one")
        return function

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        changed = self.function()(model, **settings)
        if not isinstance(changed, nn.Module):
            raise UserError(f"{self.name} gave back {type(changed).__name__}, not a module; return the changed model")
        return changed


_KINDS: tuple[ArmKind, ...] = (
    Unchanged(),
    *(Augmented(method, name) for name, method in all_methods().items() if not method.wraps),
    *(Augmented(method, *control) for method in all_methods().values() for control in method.controls.items()),
    WideMlp(),
    *TUNINGS,
)
ARM_METHODS: dict[str, ArmKind] = {kind.name: kind for kind in _KINDS}
"""Every kind of arm by its name; functions of the user's own come on top."""


def find_method(name: str) -> ArmKind:
    """Return the kind of arm of that name, several joined by "+", or the function it names; raise UserError if none."""
    if name in ARM_METHODS:
        return ARM_METHODS[name]
    if len(parts := split_parts(name, ARM_METHODS)) > 1:
        return Composed(tuple(find_method(part) for part in parts))
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise UserError(
            f"unknown arm {name!r}; choose {', '.join(ARM_METHODS)}, or a function of your own as module:function"
        )
    return Function(name)
