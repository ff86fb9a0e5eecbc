"""Ways to tune a pretrained model: all of it, its new head, or an adapter of peft's beside the head.

One row of `TUNINGS` each. The settings of an arm are the fields of the row's peft config:

| arm             | peft config                 | trained                                              |
|-----------------|-----------------------------|------------------------------------------------------|
| full            | -                           | every weight                                         |
| head            | -                           | the new head; the pretrained part is frozen          |
| lora, dora      | LoraConfig                  | B A; DoRA adds a magnitude                           |
| peanut          | PeanutConfig                | peft's own nonlinear adapter                         |
| sine-lora,      | SineLoraConfig              | sin(omega B A) / gain; sine-DoRA adds a magnitude    |
| sine-dora       |                             |                                                      |
| nora, nora++    | NoraConfig                  | shifts of rational activations; ++ adds LoRA         |
| noble-adapter   | NobleAdapterConfig          | a NOBLE branch                                       |

The head is trained in all of them, drawn from the same seed. `plus=16` on a low-rank arm is LoRA+
(arXiv 2402.12354): the up factors learn 16 times as fast as the down factors, with peft's grouping.
"""

import contextlib
import dataclasses
import importlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, all_methods, method_of_layer
from nonlinear_lowrank.validation import check_integer, check_number, one_line

from .kinds import ArmContext, ArmKind, as_text

_ALIASES = {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
_SHORT = {"r": "r", "lora_r": "lora", "omega": "w", "lora_alpha": "a", "target_modules": "on-", "groups": "g"}
# Fields that are peft's own bookkeeping, or set by the task.
_NOT_SETTINGS = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "modules_to_save"),
}
_MODULE_LISTS = ("target_modules", "lora_target_modules", "exclude_modules")


@dataclass(frozen=True)
class Tuning(ArmKind):
    """One way to tune a pretrained model."""

    name: str
    adapter: AdapterArm | None = None
    """None: no adapter."""
    control: bool = False
    everything: bool = False
    """Every weight is trained."""

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings under the config's names; module lists as lists.

        Raises:
            UserError: a setting is unknown, fixed by the method, or no rank or ratio.
        """
        full = {_ALIASES.get(key, key): value for key, value in settings.items()}
        adapter = self.adapter
        if adapter is None:
            if full:
                raise UserError(f"{self.name} has no setting {next(iter(full))!r}; it takes lr=, grid= and name=")
            return {}
        known = {each.name for each in dataclasses.fields(_config_class(adapter))} - _NOT_SETTINGS - set(adapter.fixed)
        for key in full:
            if key not in known and not (key == "plus" and "plus" in adapter.shown):
                raise UserError(f"{self.name} has no setting {key!r}; it has {', '.join(adapter.shown)}")
        for key in ("r", "lora_r"):
            if key in full:
                check_integer(f"{key} of {self.name}", full[key], minimum=1)
        if "plus" in full:
            check_number(f"plus of {self.name}", full["plus"], minimum=1)
        for key in _MODULE_LISTS:
            if isinstance(full.get(key), str):
                full[key] = _modules(full[key])
        self._config(adapter, full)
        return full

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        parts = [self.name.replace("++", "-plus-plus")]
        return parts + [f"{_SHORT.get(key, key)}{as_text(value)}" for key, value in settings.items()]

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        """Return the model with what is not trained frozen; with an adapter a `PeftModel`.

        Raises:
            UserError: the model is not a pretrained one, or the adapter fits none of its modules.
        """
        setup = context.setup
        if setup is None:
            raise UserError(f"{self.name} tunes a pretrained model, and this recipe trains one from scratch")
        if self.everything:
            return model.requires_grad_(True)
        if self.adapter is not None:
            return self._adapt(model, self.adapter, settings, setup, context.verbose)
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

        named = dict(settings)
        if adapter.targets and setup.targets and named.get(adapter.targets) is None:
            named[adapter.targets] = list(setup.targets)
        targets = named.get(adapter.targets)
        if adapter.config[0] == "peft" and isinstance(targets, list):
            named[adapter.targets] = _dense_parts(model, targets)
        more = {"modules_to_save": list(setup.head)} if setup.head else {}
        config = self._config(adapter, {**more, **named}, task_type=setup.task_type)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                # Of transformers, about a name that peft uses.
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
                if not verbose:  # some methods say what they found
                    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                adapted = get_peft_model(model, config)  # type: ignore[arg-type]
        except UserError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.name} does not fit the model: {_why_not(model, error, adapter, targets)}"
            ) from error
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
    module, name = adapter.config
    return getattr(importlib.import_module(module), name)


def _why_not(model: nn.Module, error: Exception, adapter: AdapterArm, targets: Any) -> str:
    """One line; where no module was matched, with the names that there are."""
    text = one_line(error)
    if not any(words in text for words in ("arget modules", "target_modules", "No modules were targeted")):
        return text
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    linear = {name.removesuffix(".dense").rpartition(".")[2] for name in names}
    ends = f"the linears of this model end in {', '.join(sorted(linear))}"
    if targets is None:
        return f"peft has no choice of modules for it; name some with {adapter.targets} ({ends})"
    return f"no module's name matches {adapter.targets}={as_text(targets)} ({ends})"


def _modules(text: str) -> Any:
    """`query/value` and `query` are ends of names; "all-linear" and regular expressions are left as they are."""
    if text == "all-linear" or re.search(r"[.*+?()\[\]|\\^$]", text):
        return text
    return text.split("/")


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


def raise_up_rates(groups: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """Return LoRA+'s groups: those of `param_groups` with up factors and vectors at `ratio` times the learning rate.

    As `peft.optimizers.create_loraplus_optimizer` groups them: B and every 1-D tensor fast, A and the head's matrices
    slow. Our adapters' up factors count as B. peft trains adapters on embeddings at 1e-6, which is of no use beside a
    tuned learning rate; here they learn like A.
    """
    return _split(groups, _is_up, ratio, "LoRA+ up")


def set_head_rate(groups: list[dict[str, Any]], head: Sequence[str], ratio: float) -> list[dict[str, Any]]:
    """Return the groups with a new head at `ratio` times the learning rate; unchanged where it is all there is.

    Args:
        groups: of `param_groups`.
        head: names of modules; in an adapted model they end in the adapter's name and are further down.
        ratio: the head's learning rate over that of the rest.
    """
    if not head:
        return groups
    names = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, head))})\.")
    if all(names.search(name) for group in groups for name, _ in group["params"]):
        return groups
    return _split(groups, lambda name, _: bool(names.search(name)), ratio, "head")


def _split(
    groups: list[dict[str, Any]], chosen: Callable[[str, nn.Parameter], bool], ratio: float, note: str
) -> list[dict[str, Any]]:
    """The groups with the chosen parameters in groups of their own, at `ratio` times the learning rate."""
    split: list[dict[str, Any]] = []
    for group in groups:
        for own in (False, True):
            part = [(name, each) for name, each in group["params"] if chosen(name, each) == own]
            if part:
                changed = {"lr": group["lr"] * ratio, "role": f"{group['role']} ({note})"} if own else {}
                split.append({**group, "params": part, **changed})
    return split


def _is_up(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 1 or bool(re.search(r"lora_B|lora_embedding_B|_up(?:\.|$)", name))
