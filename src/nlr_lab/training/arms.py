"""One arm: a change to the model, with its learning rates, and its short form on the command line."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit, check_dense_init
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.qk_norm import QKNormConfig
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.validation import check_choice, check_number

from .kinds import ArmContext, Composed, as_text, read_number, read_value, split_parts
from .methods import ARM_METHODS, Function, find_method
from .recipe import Optimizer

_TEXTS = ("include", "exclude", "match")  # settings that are names, also where they look like a number
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One change to the model: nothing, a method with its settings, or a function of the user's own."""

    name: str = ""
    """Names the arm in tables, pictures and folders; empty: made from the settings."""
    method: str = "baseline"
    """"baseline", a method's name ("noble", "lora", "sine-lora", ...), several joined by "+", or "module:function"
    (model in, model out)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's config, or keyword arguments of the function; of several methods, by their names."""
    dense_init: DenseInit | None = None
    """Overrides the backbone's dense init (methods that draw the dense weights anew override it in turn)."""
    lr: float | None = None
    """Overrides the recipe's learning rate."""
    qk_norm: bool = False
    """Norm queries and keys head by head on top of the method (`methods.qk_norm`)."""
    optimizer: Optimizer | None = None
    """Overrides the recipe's: "muon" for the dense matrices, with AdamW for the rest, or "adamw" for all."""
    grid: tuple[float, ...] = ()
    """Learning rates of which a comparison takes the arm's best; empty: the comparison's."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.method, str):
            raise UserError(f"an arm's name and method must be texts, got {self.name!r} and {self.method!r}")
        if not isinstance(self.settings, Mapping):
            raise UserError(f"settings of the arm {self.method!r} must be names with values, got {self.settings!r}")
        if self.dense_init is not None:
            check_dense_init(self.dense_init)
        if not isinstance(self.qk_norm, bool):
            raise UserError(f"qk_norm must be true or false, got {self.qk_norm!r}")
        if self.optimizer is not None:
            check_choice("optimizer", self.optimizer, get_args(Optimizer))
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        object.__setattr__(self, "grid", tuple(self.grid))  # JSON turns tuples into lists
        for rate in self.grid:
            check_number("grid", rate, above=0)
        if self.grid and (self.lr is not None or len(set(self.grid)) < 2):
            raise UserError(
                f"grid of the arm {self.method!r} needs at least two different learning rates, and no lr beside it"
            )
        kind = find_method(self.method)
        settings = kind.read(self.settings)
        parts = self.settings if isinstance(kind, Composed) else {"": self.settings}
        for name, given in parts.items():
            read = settings[name] if name else settings
            if twice := sorted(key for key in given if key not in read and len(read) < len(given)):
                raise UserError(f"{twice[0]} of the arm {self.method!r} is given twice, by two names; give it once")
        object.__setattr__(self, "settings", settings)
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        if not _NAME.fullmatch(self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Read an arm from its short form.

        `baseline`, `baseline:init=noble`, `noble:rank=64,activation=gelu,depth=1`, `sine-lora:r=4,omega=200`,
        `nonlinear-query+noble:rank=64` (several methods, each with its settings), `pkg.mod:function`; each may add
        `,lr=3e-3`, `,grid=1e-4/3e-4/1e-3`, `,optimizer=muon`, `,qk_norm=true`, `,name=...` and `,init=` (for `noble`,
        init is NobleConfig's; there the dense init before the swap is `dense_init=`). Tuples are written with slashes:
        `frequency_range=0.8/1.2`, `target_modules=query/value`.

        Raises:
            UserError: an unknown method or setting, a bad value, or a function that cannot be imported.
        """
        fields: dict[str, Any] = {}
        parts: list[tuple[str, dict[str, Any]]] = []
        for part in split_parts(text.strip(), list(ARM_METHODS)):
            method, settings, shared = _read_part(part, text)
            if twice := fields.keys() & shared.keys():
                raise UserError(f"{min(twice)} is of the whole arm and is given twice in {text!r}; give it once")
            fields |= shared
            parts.append((method, settings))
        method = "+".join(name for name, _ in parts)
        find_method(method)  # refuses a method that is named twice, before its settings become one
        arm = cls(method=method, settings=dict(parts) if len(parts) > 1 else parts[0][1], **fields)
        if ":" in arm.method:
            arm.function()
        return arm

    def __str__(self) -> str:
        """Return the short form; `Arm.parse` reads it back."""
        kind = find_method(self.method)
        of_parts = self.settings if isinstance(kind, Composed) else {self.method: self.settings}
        parts = [(name, [f"{key}={as_text(value)}" for key, value in own.items()]) for name, own in of_parts.items()]
        options = parts[-1][1]
        if self.dense_init is not None:
            options.append(f"{'dense_init' if kind.own_init else 'init'}={self.dense_init}")
        if self.optimizer is not None:
            options.append(f"optimizer={self.optimizer}")
        if self.qk_norm:
            options.append("qk_norm=true")
        if self.lr is not None:
            options.append(f"lr={self.lr!r}")
        if self.grid:
            options.append(f"grid={'/'.join(map(repr, self.grid))}")
        if self.name != self._default_name():
            options.append(f"name={self.name}")
        return "+".join(f"{name}{',' if ':' in name else ':'}{','.join(own)}" if own else name for name, own in parts)

    @property
    def control(self) -> bool:
        """Return whether the arm is there to be compared with."""
        return find_method(self.method).control

    def function(self) -> Callable[..., Any]:
        """Return the user's function of a "module:function" arm; raise UserError where it cannot be imported."""
        return Function(self.method).function()

    def apply(
        self,
        model: nn.Module,
        setup: AdapterSetup | None = None,
        *,
        dense_init: DenseInit | None = None,
        verbose: bool = False,
    ) -> nn.Module:
        """Return the changed model; methods and most functions change it in place.

        Args:
            model: as the task builds it.
            setup: what the task knows of a pretrained model; None where the model is trained from scratch.
            dense_init: how the model's linears were drawn where the arm does not say.
            verbose: print what was changed.

        Raises:
            UserError: the method does not fit the model, or the function gives back no module.
        """
        if self.qk_norm and setup is not None:
            raise UserError("qk_norm is for models that are trained from scratch; omit it")
        context = ArmContext(setup=setup, dense_init=self.dense_init or dense_init or "stock", verbose=verbose)
        changed = find_method(self.method).apply(model, self.settings, context)
        if self.qk_norm:
            augment(changed, QKNormConfig(), verbose=verbose)
        return changed

    def _default_name(self) -> str:
        parts = find_method(self.method).label(self.settings)
        if self.dense_init is not None:
            parts.append(f"init-{self.dense_init}")
        if self.optimizer is not None:
            parts.append(self.optimizer)
        if self.qk_norm:
            parts.append("qk-norm")
        return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts))


def _read_part(part: str, text: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """One method's short form, out of a whole one -> its name, its settings, and what it says of the whole arm."""
    head, *options = [each.strip() for each in part.strip().split(",")]
    method, _, rest = head.partition(":")
    if method in ARM_METHODS:
        if rest:
            options.insert(0, rest)
    elif rest:
        method = head
    own_init = find_method(method).own_init
    settings: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    read: set[str] = set()
    for option in options:
        key, separator, value = option.partition("=")
        key, value = key.strip(), value.strip()
        if not separator or not key or not value:
            raise UserError(f"cannot read {option!r} in the arm {text!r}; settings are key=value, as in rank=64")
        if key == "init" and not own_init:
            key = "dense_init"
        if key in read:
            raise UserError(f"{key} is given twice in the arm {text!r}; give it once")
        read.add(key)
        if key == "lr":
            shared["lr"] = read_number("lr", value, text)
        elif key == "grid":
            shared["grid"] = tuple(read_number("grid", each, text) for each in value.split("/"))
        elif key in ("name", "dense_init", "optimizer"):
            shared[key] = value
        elif key in _TEXTS and method in ARM_METHODS:
            settings[key] = value
        elif key == "qk_norm":
            shared[key] = read_value(value)
        else:
            settings[key] = read_value(value)
    return method, settings, shared
