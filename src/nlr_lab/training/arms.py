"""One arm: a change to the model, its short form on the command line, and the optimizer that trains it.

`nonlinear-query+noble:rank=64` has nonlinear queries, and NOBLE on the remaining linears. The settings of an arm of
several methods are those of its parts by their names: {"nonlinear-query": {}, "noble": {"rank": 64}}. Parts are applied
by stage, whatever their order: experts or a wider MLP first, which draw plain linears; then methods that take linears
of certain names; then those that take every linear that is left; and norms around projections last.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit, check_dense_init
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import all_methods
from nonlinear_lowrank.methods.qk_norm import QKNormConfig
from nonlinear_lowrank.optim import MuonAdamW, param_groups
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.validation import check_choice, check_number

from .experts import Experts
from .methods import TUNINGS, ArmKind, Augmented, Function, WideMlp, as_text, read_value
from .recipe import Optimizer, Recipe
from .rivals import Cola, Sltrain

# What a short form says of the whole arm, and what are names also where they look like a number.
_WHOLE = ("name", "dense_init", "lr", "qk_norm", "optimizer", "grid", "head_lr")
_TEXTS = ("include", "exclude", "match")
_UP = re.compile(r"lora_B|_up(?:\.|$)")

_KINDS: tuple[ArmKind, ...] = (
    ArmKind(),
    *(Augmented(method, name) for name, method in all_methods().items() if not method.wraps),
    *(Augmented(method, *control) for method in all_methods().values() for control in method.controls.items()),
    WideMlp(),
    Experts(),
    Cola(),
    Sltrain(),
    *TUNINGS,
)
ARM_METHODS: dict[str, ArmKind] = {kind.name: kind for kind in _KINDS}
"""Every kind of arm by its name; functions of the user's own come on top."""


_PLAIN = ("plain", "none", "vanilla", "base", "original")


def _split_parts(text: str) -> list[str]:
    """Cut an arm's short form at each "+" that a method's name follows; "nora++" and "1e+3" stay whole."""
    known = "|".join(re.escape(name) for name in sorted(ARM_METHODS, key=len, reverse=True))
    return re.split(rf"\+(?=\s*(?:{known})\s*(?:[:,+]|$))", text)


def _find_kinds(name: str) -> list[ArmKind]:
    """Return the kinds of arm that are joined by "+" in a name, or the function it names; raise UserError if none."""
    if name in ARM_METHODS:
        return [ARM_METHODS[name]]
    if len(names := _split_parts(name)) == 1:
        if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            return [Function(name)]
        own = name.partition(":")[0].lower()
        near = ["baseline"] if own in _PLAIN else difflib.get_close_matches(own, ARM_METHODS, n=1, cutoff=0.6)
        known = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(ARM_METHODS)}, or module:function"
        raise UserError(f"unknown arm {name!r}; {known}")
    kinds = [kind for each in names for kind in _find_kinds(each)]
    for kind in kinds:
        if kind.stage is None:
            raise UserError(f"{kind.name} cannot be one of several methods in an arm; give it an arm of its own")
        if names.count(kind.name) > 1:
            raise UserError(f"the arm {name!r} names {kind.name} twice; one method has one set of settings")
    return kinds


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
    """Overrides the backbone's dense init (methods that redraw the dense weights override it in turn)."""
    lr: float | None = None
    """Overrides the recipe's learning rate."""
    qk_norm: bool = False
    """Norm queries and keys head by head on top of the method (`methods.qk_norm`)."""
    optimizer: Optimizer | None = None
    """Overrides the recipe's: "muon" for the dense matrices, with AdamW for the rest, or "adamw" for all."""
    grid: tuple[float, ...] = ()
    """Learning rates of which a comparison takes the arm's best; empty: the comparison's."""
    head_lr: tuple[float, ...] = ()
    """The learning rate of the new head; of several a comparison takes the best, together with the arm's own. Empty:
    the recipe's."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.method, str):
            raise UserError(f"an arm's name and method must be strings, got {self.name!r} and {self.method!r}")
        if self.dense_init is not None:
            check_dense_init(self.dense_init)
        if not isinstance(self.qk_norm, bool):
            raise UserError(f"qk_norm must be true or false, got {self.qk_norm!r}")
        if self.optimizer is not None:
            check_choice("optimizer", self.optimizer, get_args(Optimizer))
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        for name in ("grid", "head_lr"):
            given = getattr(self, name)
            rates = tuple(given) if isinstance(given, list | tuple) else (given,)  # JSON turns tuples into lists
            for rate in rates:
                check_number(name, rate, above=0)
            object.__setattr__(self, name, rates)
        grid = self.grid
        if grid and (self.lr is not None or len(set(grid)) < 2):
            wanted = "at least two different learning rates, and no lr beside it"
            raise UserError(f"grid of the arm {self.method!r} needs {wanted}")
        if self.head_lr and self.method == "head":
            raise UserError("the arm head trains the new head alone; give it lr, or grid, instead of head_lr")
        object.__setattr__(self, "settings", self._read_settings())
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    def _read_settings(self) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for kind, given in self._parts():
            full = {kind.aliases.get(key, key): value for key, value in given.items()}
            if len(full) < len(given):
                raise UserError(f"a setting of the arm {self.method!r} is given twice, by two names; give it once")
            read[kind.name] = kind.read(full)
        return read if len(read) > 1 else read.popitem()[1]

    def _parts(self) -> list[tuple[ArmKind, Mapping[str, Any]]]:
        """The methods of the arm, each with its settings."""
        kinds = _find_kinds(self.method)
        of_kinds = {kinds[0].name: self.settings} if len(kinds) == 1 else self.settings
        if not isinstance(of_kinds, Mapping) or not all(isinstance(own, Mapping) for own in of_kinds.values()):
            raise UserError(f"settings of the arm {self.method!r} must be names with values, got {self.settings!r}")
        if odd := sorted(of_kinds.keys() - {kind.name for kind in kinds}):
            raise UserError(f"settings of {self.method} are those of its parts by name; {odd[0]!r} is not one of them")
        return [(kind, of_kinds.get(kind.name, {})) for kind in kinds]

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Read an arm from its short form.

        `baseline`, `baseline:init=noble`, `noble:rank=64,activation=gelu,depth=1`, `sine-lora:r=4,omega=200`,
        `nonlinear-query+noble:rank=64` (several methods, each with its settings), `pkg.mod:function`; each may add
        `,lr=3e-3`, `,grid=1e-4/3e-4/1e-3`, `,head_lr=1e-2`, `,optimizer=muon`, `,qk_norm=true`, `,name=...` and
        `,init=` (for `noble`, init is NobleConfig's; there the dense init before the swap is `dense_init=`). Tuples are
        written with slashes: `frequency_range=0.8/1.2`, `target_modules=query/value`. UserError for an unknown method
        or setting, a bad value, or a function that cannot be imported.
        """
        whole: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        names = []
        for part in _split_parts(text.strip()):
            head, *options = [each.strip() for each in part.split(",")]
            method, _, first = head.partition(":")
            if method not in ARM_METHODS:
                method = head  # a function
            elif first:
                options.insert(0, first)
            own_init = _find_kinds(method)[-1].own_init
            names.append(method)
            own = parts.setdefault(method, {})
            for option in options:
                key, _, value = (each.strip() for each in option.partition("="))
                if key.partition(":")[0] in ARM_METHODS:
                    raise UserError(f"the arm {text!r} contains another one, {option!r}; put a space between arms")
                if not key or not value:
                    raise UserError(
                        f"cannot read {option!r} in the arm {text!r}; settings are key=value, as in rank=64"
                    )
                if key == "init" and not own_init:
                    key = "dense_init"
                place = whole if key in _WHOLE else own
                if key in place:
                    raise UserError(f"{key} is given twice in the arm {text!r}; give it once")
                is_text = key == "name" or (key in _TEXTS and ":" not in method)
                place[key] = value if is_text else read_value(value)
        arm = cls(method="+".join(names), settings=parts if len(names) > 1 else parts[names[0]], **whole)
        if ":" in arm.method:
            arm.function()
        return arm

    def __str__(self) -> str:
        """Return the short form; `Arm.parse` reads it back."""
        parts = self._parts()
        whole = {
            "dense_init" if parts[-1][0].own_init else "init": self.dense_init,
            "optimizer": self.optimizer,
            "qk_norm": self.qk_norm or None,
            "lr": self.lr,
            "grid": self.grid or None,
            "head_lr": self.head_lr or None,
            "name": self.name if self.name != self._default_name() else None,
        }
        settings = [dict(own) for _, own in parts]
        settings[-1] |= {key: value for key, value in whole.items() if value is not None}
        forms = []
        for (kind, _), own in zip(parts, settings, strict=True):
            options = ",".join(f"{key}={as_text(value)}" for key, value in own.items())
            forms.append(f"{kind.name}{',' if ':' in kind.name else ':'}{options}" if options else kind.name)
        return "+".join(forms)

    @property
    def control(self) -> bool:
        """Return whether the arm is a control."""
        return all(kind.control for kind, _ in self._parts())

    def function(self) -> Callable[..., Any]:
        """Return the user's function of a "module:function" arm; raise UserError where it cannot be imported."""
        return Function(self.method).function()

    def apply(
        self,
        model: nn.Module,
        setup: AdapterSetup | None = None,
        *,
        dense_init: DenseInit | None = None,
        begun: bool = False,
        verbose: bool = False,
    ) -> nn.Module:
        """Return the task's model with the change; methods and most functions change it in place.

        `setup` has the task's facts of a pretrained model (None: none), `dense_init` drew its linears where the arm
        does not say; `begun`: its pretraining goes on. UserError where the method does not fit, or the function gives
        back no module.
        """
        if self.qk_norm and setup is not None:
            raise UserError("qk_norm is for models that are trained from scratch; omit it")
        if self.head_lr and not (setup and setup.head):
            raise UserError(f"{self.name}: the model has no new head, whose learning rate is head_lr; omit it")
        for kind, own in sorted(self._parts(), key=lambda part: part[0].stage or 0):
            if kind.redraws and (setup is not None or begun):
                raise UserError(f"{kind.name} is for models that are trained from scratch; omit it")
            model = kind.apply(model, own, setup, self.dense_init or dense_init or "stock", verbose)
        if self.qk_norm:
            augment(model, QKNormConfig(), verbose=verbose)
        if setup is not None and setup.frozen and not is_adapted(model):
            raise UserError(f"{self.name}: beside weights in 4 bits an adapter alone trains; give --dtype float32")
        return model

    def _default_name(self) -> str:
        parts = [word for kind, own in self._parts() for word in kind.label(own)]
        parts += [f"init-{self.dense_init}"] if self.dense_init is not None else []
        parts += [self.optimizer] if self.optimizer is not None else []
        parts += ["qk-norm"] if self.qk_norm else []
        return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts))


# --- a recipe's model under an arm, and its optimizer ---------------------------------------------------------


def build_model(recipe: Recipe, prepared: Any, arm: Arm | None = None) -> nn.Module:
    """Return the task's model before the arm changes it, drawn from the run's seed."""
    model: nn.Module = recipe.task.build_model(prepared, (arm or recipe.arm).dense_init, seed=recipe.train.seed)
    return model


def apply_arm(recipe: Recipe, arm: Arm, model: nn.Module, *, verbose: bool = False) -> nn.Module:
    """Return the model with the arm's change, drawn from the run's seed; raise UserError where it does not fit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        drawn = getattr(getattr(recipe.task, "backbone", None), "dense_init", None)
        setup = recipe.task.adapter_setup(model)
        if recipe.train.head_lr is not None and not (setup and setup.head):
            raise UserError("--head-lr does nothing: the model has no new head; omit it, or set --lr")
        begun = bool(getattr(recipe.task, "init_from", ""))
        return arm.apply(model, setup, dense_init=drawn, begun=begun, verbose=verbose)


def is_adapted(model: Any) -> bool:
    """Return whether it is a model of peft's; without importing peft, which takes seconds."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def uses_muon(recipe: Recipe, arm: Arm) -> bool:
    """Return whether dense matrices are trained by Muon."""
    return (arm.optimizer or recipe.train.optimizer) == "muon"


def optimizer_groups(model: nn.Module, recipe: Recipe, arm: Arm, lr: float) -> list[dict[str, Any]]:
    """Return groups of what is trained: each role's learning rate and decay, LoRA+'s and the new head's own.

    LoRA+ is as `peft.optimizers.create_loraplus_optimizer` has it: B (of our adapters the up factors) and every 1-D
    tensor are fast, A and the head's matrices slow. peft trains adapters on embeddings at 1e-6, which is of no use
    beside a tuned learning rate; here they learn like A. UserError where Muon is asked for, and the arm trains an
    adapter or no dense matrix.
    """
    train, muon = recipe.train, uses_muon(recipe, arm)
    if muon and is_adapted(model):
        raise UserError(f"{arm.name} trains an adapter, whose factors are not Muon's to take; omit optimizer=muon")
    groups = param_groups(model, lr, train.weight_decay, muon=muon, verbose=False)
    if muon and {group["optimizer"] for group in groups} != {"muon", "adamw"}:
        raise UserError(f"{arm.name} trains no dense matrices, which are what Muon takes; omit optimizer=muon")
    base: Any = model
    setup = recipe.task.adapter_setup(base.get_base_model() if is_adapted(model) else base)
    head_lr = arm.head_lr[0] if arm.head_lr else train.head_lr
    heads: set[str] = set()
    if head_lr is not None and setup is not None and setup.head:
        # In an adapted model the names end in the adapter's and are further down.
        head = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, setup.head))})\.")
        names = {name for group in groups for name, _ in group["params"]}
        found = set(filter(head.search, names))
        heads = found if arm.head_lr or found != names else heads
    if (ratio := arm.settings.get("plus")) and ":" not in arm.method:
        fast = {name for group in groups for name, each in group["params"] if each.ndim == 1 or _UP.search(name)}
        groups = _split(groups, fast - heads, ratio, "LoRA+ up")
    return _split(groups, heads, (head_lr or lr) / lr, "head")


def _split(groups: list[dict[str, Any]], chosen: set[str], ratio: float, note: str) -> list[dict[str, Any]]:
    """The groups with the chosen parameters in groups of their own, at `ratio` times the learning rate."""
    split: list[dict[str, Any]] = []
    for group in groups:
        own = [pair for pair in group["params"] if pair[0] in chosen]
        rest = [pair for pair in group["params"] if pair[0] not in chosen]
        changed = {"lr": group["lr"] * ratio, "role": f"{group['role']} ({note})"}
        split += [{**group, "params": rest}] if rest else []
        split += [{**group, "params": own, **changed}] if own else []
    return split


def optimizer_settings(
    model: nn.Module, recipe: Recipe, arm: Arm, lr: float, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer's class and its arguments; fresh ones each time, since Trainer takes "params" out."""
    groups = optimizer_groups(model, recipe, arm, lr)
    shared = {"params": groups, "lr": lr, "weight_decay": recipe.train.weight_decay, "betas": recipe.train.betas}
    if uses_muon(recipe, arm):
        return MuonAdamW, shared
    return torch.optim.AdamW, {**shared, "fused": True} if device.type in ("cpu", "cuda") else shared
