"""Ways to tune a pretrained model: all of it, its new head, or an adapter of peft's beside the head.

One row of `TUNINGS` each. The settings of an arm are the fields of the row's peft config:

| arm                   | peft config        | trained                                              |
|-----------------------|--------------------|------------------------------------------------------|
| full                  | -                  | every weight                                         |
| head                  | -                  | the new head; the pretrained part is frozen          |
| lora, dora            | LoraConfig         | B A; DoRA adds a magnitude                           |
| peanut                | PeanutConfig       | peft's own nonlinear adapter                         |
| sine-lora, sine-dora  | SineLoraConfig     | sin(omega B A) / gain; sine-DoRA adds a magnitude    |
| nora, nora++          | NoraConfig         | shifts of rational activations; ++ adds LoRA         |
| noble-adapter         | NobleAdapterConfig | a NOBLE branch                                       |

The head is trained in all of them, drawn from the same seed. `plus=16` on a low-rank arm is LoRA+
(arXiv 2402.12354): the up factors learn 16 times as fast as the down factors, with peft's grouping.
"""

import contextlib
import dataclasses
import importlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, all_methods, method_of_layer
from nonlinear_lowrank.validation import check_integer, check_number, one_line

from .methods import ArmKind, Settings, Setup, as_text

_SHORT = {"r": "r", "lora_r": "lora", "omega": "w", "lora_alpha": "a", "target_modules": "on-", "groups": "g"}
# Fields that are peft's own bookkeeping, or set by the task.
_NOT_SETTINGS = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "modules_to_save"),
}


@dataclass(frozen=True)
class Tuning(ArmKind):
    """One way to tune a pretrained model: by an adapter, by its new head alone, or `everything`."""

    name: str
    adapter: AdapterArm | None = None
    control: bool = False
    everything: bool = False
    aliases: ClassVar = {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}

    def read(self, settings: Settings) -> dict[str, Any]:
        full = dict(settings)
        if (adapter := self.adapter) is None:
            if full:
                raise UserError(f"{self.name} has no setting {next(iter(full))!r}; it takes lr=, grid= and name=")
            return {}
        known = {each.name for each in dataclasses.fields(_config_class(adapter))} - _NOT_SETTINGS - set(adapter.fixed)
        for key, value in full.items():
            if key not in known and not (key == "plus" and "plus" in adapter.shown):
                raise UserError(f"{self.name} has no setting {key!r}; it has {', '.join(adapter.shown)}")
            if key in ("r", "lora_r"):
                check_integer(f"{key} of {self.name}", value, minimum=1)
            # Slashes separate ends of names; "all-linear" and regular expressions stay as they are.
            lists = key in ("target_modules", "lora_target_modules", "exclude_modules") and isinstance(value, str)
            if lists and value != "all-linear" and not re.search(r"[.*+?()\[\]|\\^$]", value):
                full[key] = value.split("/")
        if "plus" in full:
            check_number(f"plus of {self.name}", full["plus"], minimum=1)
        self._config(adapter, full)
        return full

    def label(self, settings: Settings) -> list[str]:
        parts = [self.name.replace("++", "-plus-plus")]
        return parts + [f"{_SHORT.get(key, key)}{as_text(value)}" for key, value in settings.items()]

    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        """Return the model with what is not trained frozen; with an adapter a `PeftModel`."""
        if setup is None:
            raise UserError(f"{self.name} tunes a pretrained model, and this recipe trains one from scratch")
        if self.everything:
            return model.requires_grad_(True)
        if self.adapter is not None:
            return self._adapt(model, self.adapter, settings, setup, verbose)
        if not setup.head:
            raise UserError(f"{self.name} trains a new head, and this model has none; choose another arm")
        model.requires_grad_(False)
        for name in setup.head:
            model.get_submodule(name).requires_grad_(True)
        return model

    def _adapt(
        self, model: nn.Module, adapter: AdapterArm, settings: Mapping[str, Any], setup: AdapterSetup, verbose: bool
    ) -> nn.Module:
        from peft import get_peft_model

        named: dict[str, Any] = {**({"modules_to_save": list(setup.head)} if setup.head else {}), **settings}
        if adapter.targets and setup.targets and named.get(adapter.targets) is None:
            named[adapter.targets] = list(setup.targets)
        if adapter.config[0] == "peft" and isinstance(named.get(adapter.targets), list):
            named[adapter.targets] = _dense_parts(model, named[adapter.targets])
        config = self._config(adapter, named, task_type=setup.task_type)
        quiet = contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO())
        try:
            with warnings.catch_warnings(), quiet:  # some methods say what they found
                # Of transformers, about a name that peft uses.
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
_PEANUT = AdapterArm(config=("peft", "PeanutConfig"), shown=("r", "depth", "act_fn", "scaling", "target_modules"))

TUNINGS: tuple[Tuning, ...] = (
    Tuning("full", control=True, everything=True),
    Tuning("head", control=True),
    Tuning("lora", _LORA, control=True),
    Tuning("dora", replace(_LORA, fixed={"use_dora": True}), control=True),
    Tuning("peanut", _PEANUT, control=True),
    *(Tuning(*arm) for method in all_methods().values() for arm in method.adapter_arms.items()),
)
