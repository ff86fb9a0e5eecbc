"""What a run is: an arm (the change to the model), how it trains, and both with a task as a recipe.

All are frozen dataclasses of plain fields, so that any field can be given on the command line and a recipe
survives JSON exactly.
"""

import dataclasses
import importlib
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import tyro
from torch import nn

from ..augment import augment
from ..errors import UserError
from ..layers import METHODS
from ..tasks.language_model import DenseInit, LanguageModelTask, check_dense_init

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One change to the model: nothing, a method with its settings, or a function of the user's own."""

    name: str = ""
    """Names the arm in tables, pictures and folders; empty: made from the settings."""
    method: str = "baseline"
    """"baseline", a method's name ("noble"), or "module:function" (model in, model out)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's config, or keyword arguments of the function."""
    dense_init: DenseInit | None = None
    """Overrides the backbone's dense init (methods that draw the dense weights anew override it in turn)."""
    lr: float | None = None
    """Overrides the recipe's learning rate."""

    def __post_init__(self) -> None:
        if self.dense_init is not None:
            check_dense_init(self.dense_init)
        if self.lr is not None:
            _check_number("lr", self.lr, above=0)
        if self.method in METHODS:
            self._config()
        elif self.method == "baseline":
            if self.settings:
                raise UserError(
                    f"a baseline has no setting {next(iter(self.settings))!r}; it takes init=, lr= and name="
                )
        elif not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.method):
            raise UserError(
                f"unknown arm {self.method!r}; choose baseline, {', '.join(METHODS)}, "
                "or a function of your own as module:function"
            )
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        if not _NAME.fullmatch(self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Reads an arm from its short form.

        `baseline`, `baseline:init=noble`, `noble:rank=64,activation=gelu,depth=1`, `pkg.mod:function`; each may
        add `,lr=3e-3`, `,name=...` and `,init=` (for `noble`, init is NobleConfig's; there the dense init before
        the swap is `dense_init=`). Tuples are written with slashes: `frequency_range=0.8/1.2`.

        Raises:
            UserError: an unknown method or setting, a bad value, or a function that cannot be imported.
        """
        head, *options = [part.strip() for part in text.strip().split(",")]
        method, _, rest = head.partition(":")
        if method == "baseline" or method in METHODS:
            if rest:
                options.insert(0, rest)
        elif rest:
            method = head
        fields: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for option in options:
            key, separator, value = option.partition("=")
            key, value = key.strip(), value.strip()
            if not separator or not key or not value:
                raise UserError(f"cannot read {option!r} in the arm {text!r}; settings are key=value, as in rank=64")
            if key == "init" and method not in METHODS:
                key = "dense_init"
            if key == "lr":
                fields["lr"] = _number(value, text)
            elif key in ("name", "dense_init"):
                fields[key] = value
            else:
                settings[key] = _value(value)
        arm = cls(method=method, settings=settings, **fields)
        if ":" in arm.method:
            arm.function()
        return arm

    def __str__(self) -> str:
        """The short form; `Arm.parse` reads it back."""
        options = [f"{key}={_text(value)}" for key, value in self.settings.items()]
        if self.dense_init is not None:
            options.append(f"{'dense_init' if self.method in METHODS else 'init'}={self.dense_init}")
        if self.lr is not None:
            options.append(f"lr={self.lr!r}")
        if self.name != self._default_name():
            options.append(f"name={self.name}")
        if not options:
            return self.method
        return f"{self.method}{',' if ':' in self.method else ':'}{','.join(options)}"

    def function(self) -> Callable[..., Any]:
        """The user's function of a "module:function" arm.

        Raises:
            UserError: it cannot be imported or called.
        """
        module_name, _, name = self.method.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the command's own path does not hold the user's folder
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UserError(f"cannot import {module_name!r} of the arm {self.method!r}: {_one_line(error)}") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"{module_name!r} has no function {name!r}; the arm {self.method!r} needs one")
        return function

    def apply(self, model: nn.Module, *, verbose: bool = False) -> nn.Module:
        """The changed model; methods and most functions change it in place.

        Raises:
            UserError: the method does not fit the model, or the function gives back no module.
        """
        if self.method == "baseline":
            return model
        if self.method in METHODS:
            augment(model, self._config(), verbose=verbose)
            return model
        changed = self.function()(model, **self.settings)
        if not isinstance(changed, nn.Module):
            raise UserError(f"{self.method} gave back {type(changed).__name__}, not a module; return the changed model")
        return changed

    def _config(self) -> Any:
        config_class = METHODS[self.method].config_class
        known = [each.name for each in dataclasses.fields(config_class)]
        for key in self.settings:
            if key not in known:
                raise UserError(f"{self.method} has no setting {key!r}; it has {', '.join(known)}")
        return config_class(**self.settings)

    def _default_name(self) -> str:
        parts = [self.method.replace(":", ".")]
        parts += [f"{_SHORT.get(key, key + '-')}{_text(value)}" for key, value in self.settings.items()]
        if self.dense_init is not None:
            parts.append(f"init-{self.dense_init}")
        return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts))


_SHORT = {"rank": "r", "activation": "", "depth": "d"}

# Read and shown on the command line as its short form.
_ArmOption = Annotated[
    Arm,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="ARM",
        instance_from_str=lambda args: Arm.parse(args[0]),
        is_instance=lambda instance: isinstance(instance, Arm),
        str_from_instance=lambda instance: [str(instance)],
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained. Nothing here depends on the number of processes."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences per optimizer step, over all processes and micro-batches."""
    gradient_accumulation: int = 1
    """Micro-batches that a process splits its share of the batch into; only memory and rounding change."""
    lr: float
    """Peak learning rate of multiplier 1."""
    weight_decay: float = 0.01
    """Of the roles that decay."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """After the warm-up; linear and cosine end at 0."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"muon": dense matrices by Muon, the rest by AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0: not clipped."""
    bf16: bool = False
    """Autocast to bfloat16; weights and optimizer stay float32."""
    compile: bool = False
    """torch.compile the model."""
    deterministic: bool = False
    """On a GPU, only deterministic kernels: runs then repeat bit by bit, more slowly. A CPU always does."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    save_every: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """How many of the newest complete checkpoints are kept."""
    log_every: int = 10
    """Steps between entries of the training curve (also written at every evaluation and checkpoint)."""
    seed: int = 0
    """Of the init, the order of the data, and dropout."""
    tracker: str = "tensorboard"
    """"tensorboard", "none", or any tracker that transformers knows ("wandb", "mlflow", ...)."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    eval_batch_size: int | None = None
    """Sequences per process in evaluation; None: as in training."""
    dataloader_workers: int = 0
    """Processes that read data ahead, for each training process."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON turns tuples into lists
        for name in (
            *("steps", "batch_size", "gradient_accumulation", "eval_every", "save_every"),
            *("keep_checkpoints", "log_every"),
        ):
            _check_whole(name, getattr(self, name), least=1)
        for name in ("warmup_steps", "seed", "dataloader_workers"):
            _check_whole(name, getattr(self, name), least=0)
        for name in ("threads", "eval_batch_size"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least=1)
        if self.seed >= 2**31:
            raise UserError(f"seed must be below 2**31, not {self.seed}")
        _check_number("lr", self.lr, above=0)
        _check_number("weight_decay", self.weight_decay, least=0)
        _check_number("max_grad_norm", self.max_grad_norm, least=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers of at least 0 and below 1, not {self.betas!r}")
        if self.warmup_steps > self.steps:
            raise UserError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        if self.batch_size % self.gradient_accumulation:
            raise UserError(
                f"batch_size {self.batch_size} does not split into gradient_accumulation "
                f"{self.gradient_accumulation} equal micro-batches"
            )
        for name, choices in (
            ("schedule", ("linear", "cosine", "constant")),
            ("optimizer", ("adamw", "muon")),
        ):
            if getattr(self, name) not in choices:
                raise UserError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task, an arm, how it trains, and what it is compared with."""

    name: str
    """Of the recipe."""
    description: str = ""
    """One line."""
    task: LanguageModelTask
    """What is trained on what."""
    arm: _ArmOption = field(default_factory=Arm)
    """The change to the model, as in "noble:rank=64", "baseline:init=kaiming" or "module:function"."""
    train: TrainConfig
    """How it trains."""
    arms: tuple[str, ...] = ("baseline",)
    """The arms of a comparison; the first is the baseline of all deltas."""
    seeds: int = 3
    """Seeds of a comparison."""
    tune_lr: tuple[float, ...] = ()
    """Learning rates of which each arm of a comparison takes its own best; empty: the recipe's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", tuple(self.arms))
        object.__setattr__(self, "tune_lr", tuple(self.tune_lr))
        _check_whole("seeds", self.seeds, least=1)
        for lr in self.tune_lr:
            _check_number("tune_lr", lr, above=0)

    @property
    def lr(self) -> float:
        """The learning rate that the arm trains at."""
        return self.train.lr if self.arm.lr is None else self.arm.lr

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Exact: `Recipe.from_json(recipe.to_json()) == recipe`."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """The reverse of `to_dict`.

        Raises:
            UserError: a field is missing, unknown, or of the wrong kind.
        """
        return _from_plain(cls, data, "recipe")

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """The reverse of `to_json`; also takes the contents of a run's recipe.json.

        Raises:
            UserError: not the JSON of a recipe.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UserError(f"not a recipe: {_one_line(error)}") from error
        if isinstance(data, dict) and isinstance(data.get("recipe"), dict):
            data = data["recipe"]
        return cls.from_dict(data)


def _from_plain(kind: Any, value: Any, where: str) -> Any:
    """Builds a value of the annotated kind from JSON's."""
    if typing.get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise UserError(f"{where} must be a JSON object, not {value!r}")
        hints = typing.get_type_hints(kind, include_extras=True)
        for name in value:
            if name not in hints:
                raise UserError(f"{where} has an unknown field {name!r}; it was written by another version")
        try:
            return kind(**{name: _from_plain(hints[name], item, f"{where}.{name}") for name, item in value.items()})
        except TypeError as error:
            raise UserError(f"{where} is incomplete: {_one_line(error)}") from error
    origin = typing.get_origin(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(value)
    if origin in (typing.Union, types.UnionType):
        for choice in get_args(kind):
            if dataclasses.is_dataclass(choice) and isinstance(value, Mapping):
                return _from_plain(choice, value, where)
    return value


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _check_number(name: str, value: object, *, above: float | None = None, least: float | None = None) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if fits and above is not None:
        fits = value > above  # type: ignore[operator]
    if fits and least is not None:
        fits = value >= least  # type: ignore[operator]
    if not fits:
        bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
        raise UserError(f"{name} must be a finite number {bound}, not {value!r}")


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise UserError(f"lr must be a number, not {value!r}, in the arm {text!r}") from error


def _value(text: str) -> Any:
    """A setting's value: whole number, number, true/false, slash-separated tuple, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if "/" in text:
        parts = [_value(part) for part in text.split("/")]
        if all(isinstance(part, int | float) for part in parts):
            return parts  # a list, as JSON would give it
    return text


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
