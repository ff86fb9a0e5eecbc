"""Kinds of arms: nothing, a method built into the model before training, a wider MLP, a way to tune a pretrained model,
or a function of the user's own.
"""

import contextlib
import dataclasses
import difflib
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit, draw_matrix
from nonlinear_lowrank.analysis.importance import PARTS, part_of
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Method, all_methods, method_of_layer
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.surgery.budget import parse_budget
from nonlinear_lowrank.surgery.targets import dense_parts
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, one_line

Settings = Mapping[str, Any]
Setup = AdapterSetup | None


class ArmKind:
    """One kind of change to a model; the defaults are those of a model that stays as it is."""

    name: str = "baseline"
    """Name on the command line."""
    control: bool = True
    """It is a control to compare with, not a method of this library."""
    own_init: bool = False
    """Its settings have an `init` of their own; else `init=` is the dense init."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Short names of settings."""
    redraws: bool = False
    """It draws layers of its own in the place of the model's, and so is for models that are trained from scratch."""
    stage: int | None = None
    """Order in which an arm of several applies them, the lowest first; None: it can only be alone."""

    def check_known(self, settings: Settings, known: Collection[str]) -> None:
        """Raise UserError for a setting that the kind does not have."""
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
                raise UserError(f"{self.name} has no setting {key!r}; {fix}")

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the settings with JSON's types; raise UserError where they do not fit."""
        if settings:
            raise UserError(f"a baseline has no setting {next(iter(settings))!r}; it takes init=, lr= and name=")
        return {}

    def label(self, settings: Settings) -> list[str]:
        """Return the parts of the arm's name."""
        return [self.name.replace(":", "."), *(f"{key}-{as_text(value)}" for key, value in settings.items())]

    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        """Return the changed model; raise UserError where the change does not fit it.

        `setup` has the task's facts of a pretrained model (None: trained from scratch), `init` drew its linears.
        """
        return model


# Arguments of `augment` beside the config. `select` names parts of a block here: a choice by scores needs data.
_PATTERNS = ("include", "exclude")
_CHOICES = (*_PATTERNS, "select", "budget", "split_fused")
# How settings are written in the arm's name.
_SHORT = {"rank": "r", "activation": "", "depth": "d", "omega": "w", "include": "on-", "select": "on-"}
_SHORT["exclude"] = "not-"


@dataclass(frozen=True)
class Augmented(ArmKind):
    """A method that swaps modules of the model, or a control made of one by fixing fields of its config.

    Beside the fields of the method's config, an arm may say `include=` and `exclude=`, as in `augment`; one that takes
    linears also `budget=` (in place of the rank), and `select=query/feed_forward`: parts of a block by
    `analysis.part_of`.
    """

    method: Method
    name: str
    fixed: Mapping[str, Any] | None = None

    @property
    def control(self) -> bool:  # type: ignore[override]
        return self.fixed is not None

    @property
    def own_init(self) -> bool:  # type: ignore[override]
        return "init" in self._fields()

    @property
    def stage(self) -> int:  # type: ignore[override]
        """Linears of certain names come before every linear that is left, and norms around them last."""
        return 3 if self.method.wraps else 2 if self.method.include is None else 1

    @property
    def aliases(self) -> Mapping[str, str]:  # type: ignore[override]
        return {} if "r" in self._fields() else {"r": "rank"}

    def read(self, settings: Settings) -> dict[str, Any]:
        known = (*self._fields(), *_PATTERNS)
        known += ("select", "split_fused") if self.method.kind == "linear" else ()
        known += ("budget",) if self.method.budgeted else ()
        self.check_known(settings, known)
        if len(ranks := [name for name in ("rank", "rank_ratio", "budget") if name in settings]) > 1:
            raise UserError(f"{self.name}: {ranks[1]} replaces {ranks[0]}; give one of them")
        if "budget" in settings:
            parse_budget(settings["budget"])
        if "select" in settings and not set(str(settings["select"]).split("/")) <= set(PARTS):
            parts = f"choose from {', '.join(PARTS)}, joined by '/'"
            raise UserError(f"select={settings['select']} names no part of a block; {parts}")
        if not isinstance(settings.get("split_fused", False), bool):
            raise UserError(f"split_fused must be true or false, got {settings['split_fused']!r}")
        if settings.get("split_fused") and "select" in settings:
            raise UserError("select knows no parts of fused projections; give split_fused with include instead")
        for key in settings.keys() & set(_PATTERNS):
            if not isinstance(settings[key], str):
                raise UserError(f"{key} must be one pattern of names, got {settings[key]!r}; join several by |")
        self._config(settings)
        return dict(settings)

    def label(self, settings: Settings) -> list[str]:
        parts = [self.name]
        for key, value in settings.items():
            words = re.findall(r"[\w.]+" if key == "budget" else r"\w+", str(value))
            named = key in _CHOICES and not isinstance(value, bool)
            parts.append(_SHORT.get(key, f"{key}-") + ("-".join(words) if named else as_text(value)))
        return parts

    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        choice = {key: settings[key] for key in _CHOICES if key in settings}
        if parts := choice.get("select"):
            inside, linears = dense_parts(model), (nn.Linear, Conv1D)
            plain = [name for name, each in model.named_modules() if isinstance(each, linears) and each not in inside]
            choice["select"] = [name for name in plain if part_of(name) in parts.split("/")]
            if not choice["select"]:
                raise UserError(f"{self.name}: no plain linear of this {type(model).__name__} is {parts} by its name")
        augment(model, self._config(settings), verbose=verbose, **choice)
        return model

    def _fields(self) -> list[str]:
        names = [each.name for each in dataclasses.fields(self.method.config_class)]
        return [name for name in names if name not in (self.fixed or ())]

    def _config(self, settings: Settings) -> Any:
        own = {key: value for key, value in settings.items() if key not in _CHOICES}
        return self.method.config_class(**(self.fixed or {}), **own)


# --- the plain model with a wider MLP -------------------------------------------------------------------------

# Ends of names: those whose outputs are the MLP's width (times the number), and the one whose inputs are.
_SHAPES = (({"fc1": 1}, "fc2"), ({"gate_up_proj": 2}, "down_proj"), ({"gate_proj": 1, "up_proj": 1}, "down_proj"))
_WIDE_SETTINGS = ({"ratio"}, {"hidden"}, {"match"}, {"match", "by"}, {"match", "hidden"}, {"match", "by", "hidden"})


class Sized(ArmKind):
    """A model whose MLPs are of another width: a setting `hidden`, or found by a comparison to `match` another arm."""

    redraws = True
    by: str = "parameters"
    """Count that is matched where the arm does not say."""
    of_width: str = "MLPs"
    """Word for what has the width."""

    def width(self, model: nn.Module) -> int:
        """Return a width from which a match is looked for; raise UserError where the MLPs are not known."""
        return mlp_width(model)

    def check(self, settings: Settings, setup: Setup) -> None:
        """Raise UserError where the width is not known yet."""
        if "match" in settings and "hidden" not in settings:
            raise UserError(
                f"{self.name}:match={settings['match']} is resolved by nlr compare, beside that arm; "
                f"elsewhere say how wide it is: {self.name}:hidden=512"
            )


class WideMlp(Sized):
    """Every MLP of another width, for asking whether a gain is more than more parameters.

        wide-mlp:ratio=4.75                       4.75 times the model's width
        wide-mlp:hidden=408                       so wide
        wide-mlp:match=noble-r64                  the narrowest with at least the parameters of the arm of that name
        wide-mlp:match=noble-r64,by=flops         the same by FLOPs

    The last two are resolved by a comparison that has the other arm, and are then written with the width that was
    found, `wide-mlp:match=noble-r64,hidden=408`. The MLPs are rebuilt with the init of the arm's other linears, all
    else keeps its draws, and the config is updated, so that the model is saved and loaded as a plain one of that size.
    Known are pairs fc1, fc2 (OPT, ViT) and gated ones (GLM's gate_up_proj, Llama's and EuroBERT's gate_proj and
    up_proj, each with down_proj).
    """

    name = "wide-mlp"
    stage = 0

    def read(self, settings: Settings) -> dict[str, Any]:
        if set(settings) not in _WIDE_SETTINGS:
            raise UserError(
                f"{self.name} needs the MLP's width over the model's, its width, or an arm to match: "
                f"{self.name}:ratio=4.75, {self.name}:hidden=512 or {self.name}:match=noble-r64 (with by=flops)"
            )
        if "ratio" in settings:
            check_number("ratio", settings["ratio"], above=0)
        if "hidden" in settings:
            check_integer("hidden", settings["hidden"], minimum=1)
        if not isinstance(settings.get("match", ""), str):
            raise UserError(f"match must be the name of another arm, got {settings['match']!r}")
        check_choice("by", settings.get("by", "parameters"), ("parameters", "flops"))
        return dict(settings)

    def label(self, settings: Settings) -> list[str]:
        if "match" in settings:
            return [self.name, "as", settings["match"], *(["flops"] if settings.get("by") == "flops" else [])]
        return [self.name, as_text(settings["ratio"]) if "ratio" in settings else f"h{settings['hidden']}"]

    @torch.no_grad()
    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        self.check(settings, setup)
        blocks, config = _blocks(model), getattr(model, "config", None)
        names = [each for each in ("ffn_dim", "intermediate_size") if isinstance(getattr(config, each, None), int)]
        if not names:
            raise UserError(f"{self.name} does not know where {type(model).__name__} says the width of its MLPs")
        width: Any = blocks[0][0].get_submodule(blocks[0][1][1]).out_features
        hidden = settings["hidden"] if "hidden" in settings else round(settings["ratio"] * width)
        if hidden < 1:
            raise UserError(f"ratio {settings['ratio']!r} leaves no MLP at width {width}")
        for block, (outward, inward) in blocks:
            for each, times in outward.items():
                _resize(model, block, each, None, times * hidden, init)
            _resize(model, block, inward, hidden, None, init)
        setattr(config, names[0], hidden)
        for module in model.modules():  # some keep the width beside their linears
            if isinstance(getattr(module, "intermediate_size", None), int):
                module.intermediate_size = hidden
        if verbose:
            print(f"{self.name}: {len(blocks)} MLPs of width {hidden}")
        return model


def mlp_width(model: nn.Module) -> int:
    """Return the width of a model's MLPs; raise UserError where they are not known."""
    block, (_, inward) = _blocks(model)[0]
    width: Any = block.get_submodule(inward).in_features
    return int(width)


def _blocks(model: nn.Module) -> list[tuple[nn.Module, tuple[dict[str, int], str]]]:
    """The modules that hold an MLP's linears, with the linears' names; UserError where they are not known."""
    found = []
    for module in model.modules():
        own = {name for name, child in module.named_children() if type(child) is nn.Linear}
        found += [(module, shape) for shape in _SHAPES if {*shape[0], shape[1]} <= own][:1]
    if not found:
        raise UserError(
            f"this arm does not know the MLPs of {type(model).__name__}; it knows fc1 and fc2, gate_up_proj or "
            "gate_proj and up_proj with down_proj"
        )
    return found


def _resize(model: Any, block: nn.Module, name: str, d_in: int | None, d_out: int | None, init: DenseInit) -> None:
    """Put a linear of another size in a linear's place, drawn as the old one was."""
    old: Any = block.get_submodule(name)
    like = {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
    new = nn.Linear(d_in or old.in_features, d_out or old.out_features, **like).train(old.training)
    if not old.weight.is_meta:
        model._init_weights(new)
        draw_matrix(new.weight, init)
    setattr(block, name, new)


# --- ways to tune a pretrained model --------------------------------------------------------------------------

_SHORT_TUNED = {"r": "r", "lora_r": "lora", "omega": "w", "lora_alpha": "a", "target_modules": "on-", "groups": "g"}
# Fields that are peft's own bookkeeping, or set by the task.
_NOT_SETTINGS = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    "peft_version",
}
_LISTS = ("target_modules", "lora_target_modules", "exclude_modules", "modules_to_save")


@dataclass(frozen=True)
class Tuning(ArmKind):
    """A way to tune a pretrained model: everything, its new head alone, or an adapter of peft's beside the head.

    The settings are the fields of the adapter's peft config. The head is drawn from the same seed in all of them.
    `plus=16` on a low-rank arm is LoRA+ (arXiv 2402.12354): the up factors learn 16 times as fast as the down factors.

    | arm                   | peft config        | trained                                              |
    |-----------------------|--------------------|------------------------------------------------------|
    | full                  | -                  | every weight, or those that `include` names fully    |
    | head                  | -                  | the new head; the pretrained part is frozen          |
    | lora, dora            | LoraConfig         | B A; DoRA adds a magnitude                           |
    | peanut                | PeanutConfig       | peft's own nonlinear adapter                         |
    | oft                   | OFTConfig          | a rotation of each block of inputs                   |
    | sine-lora, sine-dora  | SineLoraConfig     | sin(omega B A) / gain; sine-DoRA adds a magnitude    |
    | nora, nora++          | NoraConfig         | shifts of rational activations; ++ adds LoRA         |
    | noble-adapter         | NobleAdapterConfig | a NOBLE branch                                       |
    """

    name: str
    adapter: AdapterArm | None = None
    control: bool = False
    everything: bool = False
    aliases: ClassVar = {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}

    def read(self, settings: Settings) -> dict[str, Any]:
        full = dict(settings)
        if (adapter := self.adapter) is None:
            own = ("include",) if self.everything else ()
            if odd := [key for key in full if key not in own]:
                takes = ", ".join(f"{key}=" for key in (*own, "lr", "grid"))
                raise UserError(f"{self.name} has no setting {odd[0]!r}; it takes {takes} and name=")
            try:
                re.compile(full.get("include", ""))
            except (re.error, TypeError) as error:
                raise UserError(f"include={full['include']!r} is not a regular expression: {error}") from error
            return full
        known = {each.name for each in dataclasses.fields(_config_class(adapter))} - _NOT_SETTINGS - set(adapter.fixed)
        for key, value in full.items():
            if key not in known and not (key == "plus" and "plus" in adapter.shown):
                raise UserError(f"{self.name} has no setting {key!r}; it has {', '.join(adapter.shown)}")
            if key in ("r", "lora_r"):
                check_integer(f"{key} of {self.name}", value, minimum=1)
            # Slashes separate ends of names; "all-linear" and regular expressions stay as they are.
            lists = key in _LISTS and isinstance(value, str)
            names = key == "modules_to_save" or not re.search(r"[.*+?()\[\]|\\^$]", str(value))
            if lists and value != "all-linear" and names:
                full[key] = value.split("/")
        if "plus" in full:
            check_number(f"plus of {self.name}", full["plus"], minimum=1)
        self._config(adapter, full)
        return full

    def label(self, settings: Settings) -> list[str]:
        parts = [self.name.replace("++", "-plus-plus")]
        return parts + [f"{_SHORT_TUNED.get(key, key)}{as_text(value)}" for key, value in settings.items()]

    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        """Return the model with what is not trained frozen; with an adapter a `PeftModel`."""
        if setup is None:
            raise UserError(f"{self.name} tunes a pretrained model, and this recipe trains one from scratch")
        if self.adapter is not None:
            return self._adapt(model, self.adapter, settings, setup, verbose)
        model.requires_grad_(self.everything and "include" not in settings)
        if self.everything:
            include = settings.get("include", ".*")
            found = {name: each for name, each in model.named_parameters() if re.fullmatch(include, name)}
            if not found:
                like = next(name for name, _ in model.named_parameters())
                raise UserError(f"include={include!r} matches no parameter's whole name; one is {like}")
            for each in found.values():
                each.requires_grad_(True)
        elif not setup.head:
            raise UserError(f"{self.name} trains a new head, and this model has none; choose another arm")
        for name in setup.head:
            model.get_submodule(name).requires_grad_(True)
        return model

    def _adapt(
        self, model: nn.Module, adapter: AdapterArm, settings: Mapping[str, Any], setup: AdapterSetup, verbose: bool
    ) -> nn.Module:
        from peft import get_peft_model

        named = dict(settings)
        if whole := [*setup.head, *settings.get("modules_to_save", ())]:
            have = [f".{name}" for name, _ in model.named_modules()]
            if lost := [each for each in whole if not any(place.endswith(f".{each}") for place in have)]:
                raise UserError(f"modules_to_save: the model has no module {', '.join(lost)}")
            named["modules_to_save"] = whole
        if adapter.targets and setup.targets and named.get(adapter.targets) is None:
            named[adapter.targets] = list(setup.targets)
        if adapter.config[0] == "peft" and isinstance(named.get(adapter.targets), list):
            named[adapter.targets] = _dense_parts(model, named[adapter.targets])
        config = self._config(adapter, named, task_type=setup.task_type)
        quiet = contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO())
        try:
            with warnings.catch_warnings(), quiet:  # some methods say what they found
                # From transformers, about a name that peft uses.
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
                adapted = get_peft_model(model, config)  # type: ignore[arg-type]
        except UserError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
            ends = sorted({name.removesuffix(".dense").rpartition(".")[2] for name in linears})
            targets = as_text(named.get(adapter.targets))
            known = f"{adapter.targets}={targets}; the linears of this model end in {', '.join(ends)}"
            raise UserError(f"{self.name} does not fit the model: {one_line(error)} ({known})") from error
        if verbose:
            adapted.print_trainable_parameters()
        return adapted

    def _config(self, adapter: AdapterArm, settings: Mapping[str, Any], **more: Any) -> Any:
        values = {**adapter.default, **settings, **adapter.fixed, **more}
        values.pop("plus", None)
        try:
            return _config_class(adapter)(**values)
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.name}: {one_line(error)}") from error


def _config_class(adapter: AdapterArm) -> Any:
    return getattr(importlib.import_module(adapter.config[0]), adapter.config[1])


def _dense_parts(model: nn.Module, ends: Sequence[str]) -> list[str]:
    """The ends of module names, of which those of layers with a branch name its dense part: peft takes only linears."""
    found = []
    for end in ends:
        named = [module for name, module in model.named_modules() if f".{name}".endswith(f".{end}")]
        methods = {method_of_layer(module) for module in named}
        found += [f"{end}.{method.dense}" for method in methods if method is not None and method.dense is not None]
        found += [end] if None in methods or not named else []
    return found


_LORA = AdapterArm(config=("peft", "LoraConfig"), shown=("r", "lora_alpha", "lora_dropout", "target_modules", "plus"))
_OFT = AdapterArm(config=("peft", "OFTConfig"), shown=("oft_block_size", "target_modules"), rank="oft_block_size")
_PEANUT = AdapterArm(config=("peft", "PeanutConfig"), shown=("r", "depth", "act_fn", "scaling", "target_modules"))

TUNINGS: tuple[Tuning, ...] = (
    Tuning("full", control=True, everything=True),
    Tuning("head", control=True),
    Tuning("lora", _LORA, control=True),
    Tuning("dora", replace(_LORA, fixed={"use_dora": True}), control=True),
    Tuning("peanut", _PEANUT, control=True),
    Tuning("oft", _OFT, control=True),
    *(Tuning(*arm) for method in all_methods().values() for arm in method.adapter_arms.items()),
)


# --- a user's own function ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function(ArmKind):
    """A user's own function, "module:function": model in, model out."""

    name: str
    control = False

    def read(self, settings: Settings) -> dict[str, Any]:
        return dict(settings)

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

    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        changed = self.function()(model, **settings)
        if not isinstance(changed, nn.Module):
            raise UserError(f"{self.name} gave back {type(changed).__name__}, not a module; return the changed model")
        return changed


# --- settings as text -----------------------------------------------------------------------------------------


def read_value(text: str) -> Any:
    """Read a setting's value: integer, number, true/false, slash-separated numbers (a list), or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    parts = [read_value(part) for part in text.split("/")] if "/" in text else []
    return parts if parts and all(isinstance(part, int | float) for part in parts) else text


def as_text(value: Any) -> str:
    """Reverse `read_value`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)
