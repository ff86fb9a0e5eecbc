"""What an arm can be: nothing, a method built into the model before training, a way to tune a pretrained
model, or a function of the user's own. `Arm` knows them only through `ArmMethod`, by the table at the end."""

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ..augmentation import augment
from ..errors import UserError
from ..layers import METHODS, Method
from ..layers import qk_norm as qk_norm_layers
from ..layers import query as query_layers
from ..layers import sine as sine_layers
from ..tasks.task import AdapterSetup
from .tuning import TUNINGS
from .values import as_text, one_line
from .widening import WideMlp


class ArmMethod(Protocol):
    """One kind of change to a model."""

    @property
    def name(self) -> str:
        """On the command line."""
        ...

    @property
    def control(self) -> bool:
        """Whether it is there to be compared with: none of the methods of this library."""
        ...

    @property
    def own_init(self) -> bool:
        """Whether the method's settings have an `init` of their own; else `init=` is the dense init."""
        ...

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with their full names and JSON's types; raises UserError when they do not fit."""
        ...

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        """Parts of the arm's name."""
        ...

    def apply(
        self, model: nn.Module, settings: Mapping[str, Any], setup: AdapterSetup | None, verbose: bool
    ) -> nn.Module:
        """The changed model; UserError when the method does not fit it."""
        ...


@dataclass(frozen=True)
class Unchanged:
    """The model as the task builds it."""

    name: str = "baseline"
    control: bool = True
    own_init: bool = False

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        if settings:
            raise UserError(f"a baseline has no setting {next(iter(settings))!r}; it takes init=, lr= and name=")
        return {}

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        return [self.name]

    def apply(
        self, model: nn.Module, settings: Mapping[str, Any], setup: AdapterSetup | None, verbose: bool
    ) -> nn.Module:
        return model


@dataclass(frozen=True)
class Augmented:
    """A method that swaps modules of the model (`layers.METHODS`), or a control made of one.

    Beside the fields of the method's config, an arm may say `include=` and `exclude=`, as in `augment`.
    """

    method: Method
    alias: str = ""
    """Of a control; empty: the method's own name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that make the control what it is."""

    @property
    def name(self) -> str:
        return self.alias or self.method.name

    @property
    def control(self) -> bool:
        return bool(self.alias)

    @property
    def own_init(self) -> bool:
        return "init" in self._fields()

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._config(settings)
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        short = {"rank": "r", "activation": "", "depth": "d", "omega": "w", "include": "on-", "exclude": "not-"}
        shown = {
            key: "-".join(re.findall(r"\w+", str(value))) if key in _CHOICES else as_text(value)
            for key, value in settings.items()
        }
        return [self.name, *(f"{short.get(key, key + '-')}{value}" for key, value in shown.items())]

    def apply(
        self, model: nn.Module, settings: Mapping[str, Any], setup: AdapterSetup | None, verbose: bool
    ) -> nn.Module:
        choice = {key: settings[key] for key in _CHOICES if key in settings}
        augment(model, self._config(settings), verbose=verbose, **choice)
        return model

    def _fields(self) -> list[str]:
        return [each.name for each in dataclasses.fields(self.method.config_class) if each.name not in self.fixed]

    def _config(self, settings: Mapping[str, Any]) -> Any:
        known = self._fields()
        for key in settings:
            if key not in known and key not in _CHOICES:
                raise UserError(f"{self.name} has no setting {key!r}; it has {', '.join((*known, *_CHOICES))}")
        own = {key: value for key, value in settings.items() if key not in _CHOICES}
        return self.method.config_class(**self.fixed, **own)


_CHOICES = ("include", "exclude")


@dataclass(frozen=True)
class Function:
    """A user's own function, "module:function": model in, model out."""

    name: str
    control: bool = False
    own_init: bool = False

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        return [self.name.replace(":", "."), *(f"{key}-{as_text(value)}" for key, value in settings.items())]

    def function(self) -> Callable[..., Any]:
        """The function itself.

        Raises:
            UserError: it cannot be imported or called.
        """
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

    def apply(
        self, model: nn.Module, settings: Mapping[str, Any], setup: AdapterSetup | None, verbose: bool
    ) -> nn.Module:
        changed = self.function()(model, **settings)
        if not isinstance(changed, nn.Module):
            raise UserError(f"{self.name} gave back {type(changed).__name__}, not a module; return the changed model")
        return changed


# One factor is changed in each, and the rest kept.
_CONTROLS = (
    Augmented(sine_layers.METHOD, "low-rank", {"activation": "identity"}),
    Augmented(sine_layers.METHOD, "sigmoid-low-rank", {"activation": "sigmoid"}),
    Augmented(sine_layers.METHOD, "relu-low-rank", {"activation": "relu"}),
    Augmented(qk_norm_layers.METHOD, "qk-norm"),
    Augmented(query_layers.METHOD, "identity-query", {"kind": "identity"}),
    Augmented(query_layers.METHOD, "residual-linear-query", {"kind": "linear"}),
)

_OWN = [method for method in METHODS.values() if not method.wraps]
_ALL: tuple[ArmMethod, ...] = (Unchanged(), *map(Augmented, _OWN), *_CONTROLS, WideMlp(), *TUNINGS)
ARM_METHODS: dict[str, ArmMethod] = {method.name: method for method in _ALL}
"""Every kind of arm by its name; functions of the user's own come on top."""


def find_method(name: str) -> ArmMethod:
    """The kind of arm of that name, or the function it names.

    Raises:
        UserError: there is none.
    """
    if name in ARM_METHODS:
        return ARM_METHODS[name]
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise UserError(
            f"unknown arm {name!r}; choose {', '.join(ARM_METHODS)}, or a function of your own as module:function"
        )
    return Function(name)
