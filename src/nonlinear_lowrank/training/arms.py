"""One arm: a change to the model, with its learning rates, and its short form on the command line."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torch import nn

from ..augmentation import augment
from ..errors import UserError
from ..layers import QKNormConfig
from ..tasks.language_model import DenseInit, check_dense_init
from ..tasks.task import AdapterSetup
from .methods import ARM_METHODS, Function, find_method
from .values import as_text, check_number, read_number, read_value

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One change to the model: nothing, a method with its settings, or a function of the user's own."""

    name: str = ""
    """Names the arm in tables, pictures and folders; empty: made from the settings."""
    method: str = "baseline"
    """"baseline", a method's name ("noble", "lora", "sine-lora", ...), or "module:function" (model in, model out)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's config, or keyword arguments of the function."""
    dense_init: DenseInit | None = None
    """Overrides the backbone's dense init (methods that draw the dense weights anew override it in turn)."""
    lr: float | None = None
    """Overrides the recipe's learning rate."""
    qk_norm: bool = False
    """Norm queries and keys head by head on top of the method (`layers.qk_norm`)."""
    grid: tuple[float, ...] = ()
    """Learning rates of which a comparison takes the arm's best; empty: the comparison's."""

    def __post_init__(self) -> None:
        if self.dense_init is not None:
            check_dense_init(self.dense_init)
        if not isinstance(self.qk_norm, bool):
            raise UserError(f"qk_norm must be true or false, not {self.qk_norm!r}")
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        object.__setattr__(self, "grid", tuple(self.grid))  # JSON turns tuples into lists
        for rate in self.grid:
            check_number("grid", rate, above=0)
        if self.grid and (self.lr is not None or len(set(self.grid)) < 2):
            raise UserError(f"grid of the arm {self.method!r} needs at least two different rates, and no lr beside it")
        object.__setattr__(self, "settings", find_method(self.method).read(self.settings))
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        if not _NAME.fullmatch(self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Reads an arm from its short form.

        `baseline`, `baseline:init=noble`, `noble:rank=64,activation=gelu,depth=1`, `sine-lora:r=4,omega=200`,
        `pkg.mod:function`; each may add `,lr=3e-3`, `,grid=1e-4/3e-4/1e-3`, `,qk_norm=true`, `,name=...` and
        `,init=` (for `noble`, init is NobleConfig's; there the dense init before the swap is `dense_init=`). Tuples are
        written with slashes: `frequency_range=0.8/1.2`, `target_modules=query/value`.

        Raises:
            UserError: an unknown method or setting, a bad value, or a function that cannot be imported.
        """
        head, *options = [part.strip() for part in text.strip().split(",")]
        method, _, rest = head.partition(":")
        if method in ARM_METHODS:
            if rest:
                options.insert(0, rest)
        elif rest:
            method = head
        own_init = find_method(method).own_init
        fields: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for option in options:
            key, separator, value = option.partition("=")
            key, value = key.strip(), value.strip()
            if not separator or not key or not value:
                raise UserError(f"cannot read {option!r} in the arm {text!r}; settings are key=value, as in rank=64")
            if key == "init" and not own_init:
                key = "dense_init"
            if key == "lr":
                fields["lr"] = read_number("lr", value, text)
            elif key == "grid":
                fields["grid"] = tuple(read_number("grid", part, text) for part in value.split("/"))
            elif key in ("name", "dense_init"):
                fields[key] = value
            elif key == "qk_norm":
                fields[key] = read_value(value)
            else:
                settings[key] = read_value(value)
        arm = cls(method=method, settings=settings, **fields)
        if ":" in arm.method:
            arm.function()
        return arm

    def __str__(self) -> str:
        """The short form; `Arm.parse` reads it back."""
        options = [f"{key}={as_text(value)}" for key, value in self.settings.items()]
        if self.dense_init is not None:
            options.append(f"{'dense_init' if find_method(self.method).own_init else 'init'}={self.dense_init}")
        if self.qk_norm:
            options.append("qk_norm=true")
        if self.lr is not None:
            options.append(f"lr={self.lr!r}")
        if self.grid:
            options.append(f"grid={'/'.join(map(repr, self.grid))}")
        if self.name != self._default_name():
            options.append(f"name={self.name}")
        if not options:
            return self.method
        return f"{self.method}{',' if ':' in self.method else ':'}{','.join(options)}"

    @property
    def control(self) -> bool:
        """Whether the arm is there to be compared with."""
        return find_method(self.method).control

    def function(self) -> Callable[..., Any]:
        """The user's function of a "module:function" arm.

        Raises:
            UserError: it cannot be imported or called.
        """
        return Function(self.method).function()

    def apply(self, model: nn.Module, setup: AdapterSetup | None = None, *, verbose: bool = False) -> nn.Module:
        """The changed model; methods and most functions change it in place.

        Args:
            model: as the task builds it.
            setup: what the task knows of a pretrained model; None where the model is trained from scratch.
            verbose: print what was changed.

        Raises:
            UserError: the method does not fit the model, or the function gives back no module.
        """
        if self.qk_norm and setup is not None:
            raise UserError("qk_norm is for models that are trained from scratch; leave it out of the arm")
        changed = find_method(self.method).apply(model, self.settings, setup, verbose)
        if self.qk_norm:
            augment(changed, QKNormConfig(), verbose=verbose)
        return changed

    def _default_name(self) -> str:
        parts = find_method(self.method).label(self.settings)
        if self.dense_init is not None:
            parts.append(f"init-{self.dense_init}")
        if self.qk_norm:
            parts.append("qk-norm")
        return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts))


ArmOption = Annotated[
    Arm,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="ARM",
        instance_from_str=lambda args: Arm.parse(args[0]),
        is_instance=lambda instance: isinstance(instance, Arm),
        str_from_instance=lambda instance: [str(instance)],
    ),
]
"""Read and shown on the command line as its short form."""
