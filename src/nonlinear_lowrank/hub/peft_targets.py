"""Modules that peft's tuners take in augmented models: those in the layers that a config names, else those that the
tuner takes in the plain model. Whatever else a config says of a layer counts for the module inside.

peft chooses them by the model_type of the config, and a twin has one of its own. The linear beside a branch is
"q_proj.dense", that behind QK-norm "q_proj.projection".
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from peft.utils import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as IA3_FEEDFORWARD
from peft.utils import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as IA3_TARGETS

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import dense_part, method_of_layer
from nonlinear_lowrank.surgery.split import SplitLinear

from .registration import TYPE_PREFIX


def fill_in_targets(tuner: Any, model: Any, config: Any) -> None:
    """Set `config.target_modules` for an augmented model: where it is None and the tuner knows the plain model's type,
    and where it names layers that must not be taken whole, because a merge would be scaled or gated.

    The same for NoRA++'s `lora_target_modules`, where they are names; its `target_modules` are activations.

    Names that no longer hold a linear of their own (sine low-rank weights, nonlinear queries) are dropped in
    the first case. In the second they raise UserError, except with our own tuners, which take such layers whole.
    """
    plain_type = str(getattr(getattr(model, "config", None), "model_type", "")).removeprefix(TYPE_PREFIX)
    known = getattr(tuner, "target_module_mapping", {}).get(plain_type)
    if hasattr(config, "feedforward_modules"):  # IA3, whose tables are elsewhere
        known = IA3_TARGETS.get(plain_type)
        if config.feedforward_modules is None:
            config.feedforward_modules = set(IA3_FEEDFORWARD.get(plain_type, ()))
    _name_insides(config, {name: _inside(module) for name, module in model.named_modules()})
    field = "lora_target_modules" if hasattr(config, "lora_target_modules") else "target_modules"
    given: Any = getattr(config, field, ())
    named = given is not None or getattr(config, "target_parameters", None)
    peft_own = type(tuner).__module__.startswith("peft.")
    if isinstance(given, str) and field == "target_modules":
        matched = {name: module for name, module in model.named_modules() if re.fullmatch(given, name)}
        given = set(matched) if any(map(method_of_layer, matched.values())) else given
    if given and not isinstance(given, str):
        known, named = given, None
    elif field == "lora_target_modules":
        return
    if named or not isinstance(known, list | tuple | set):
        return
    # Whole names, of the layer and of the module inside, by the end that the second has beside the plain name.
    places: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        plain = next((each for each in known if f".{name}".endswith(f".{each}")), None)
        if plain is None:
            continue
        for inner in _inside(module) or [""] * (known is given and not peft_own):
            places[plain + inner].append((name, name + inner))
    if known is given:
        held = [name for name, module in model.named_modules() if method_of_layer(module) and not _inside(module)]
        for name in held if peft_own else ():
            if any(f".{name}".endswith(f".{each}") for each in given):
                raise UserError(f"{name} holds no plain linear that peft could adapt; leave it out of target_modules")
        places |= {
            each: [(each, each)] for each in given if not any(f"{end}.".startswith(f"{each}.") for end in places)
        }
    if not places:
        return
    setattr(config, field, set(places))
    if len({end.removesuffix(".dense").removesuffix(".projection") for end in places}) < len(places):
        # A name with two ends would also match layers that no tuner takes.
        pairs = {pair for found in places.values() for pair in found}
        if field == "target_modules":
            config.target_modules = set(known)
            pairs = {(name, inner) for name, inner in pairs if tuner._check_target_module_exists(config, name)}
        setattr(config, field, {inner for _, inner in pairs})


def _name_insides(config: Any, inside: Mapping[str, Collection[str]]) -> None:
    """Let what a config says of a layer, by its plain name, count for the modules inside, which peft sees in its place.

    `inside` has the paths to the plain modules in each module of the model, "" for one that is plain itself.
    """
    for field, given in list(vars(config).items()):
        if isinstance(given, dict) and field.endswith("_pattern"):
            found = {
                key: {end for name, ends in inside.items() if re.fullmatch(rf"(.*\.)?({key})", name) for end in ends}
                for key in given
            }
            setattr(
                config, field, {key + end: given[key] for key, ends in found.items() for end in sorted(ends or [""])}
            )
        elif given and field in ("exclude_modules", "feedforward_modules"):
            if isinstance(given, str):
                plain = {name for name in inside if re.fullmatch(given, name)}
            else:
                plain = {name for name in inside if any(f".{name}".endswith(f".{each}") for each in given)}
            more = {name + end for name in plain for end in inside[name]} - plain
            if more:
                setattr(config, field, {*(plain if isinstance(given, str) else given), *more})


def _inside(module: Any) -> list[str]:
    """Return the paths to the plain modules in a layer or a split projection; "" where it is one, none without any."""
    if isinstance(module, SplitLinear):
        return [f".{part}{inner}" for part, each in module.named_children() for inner in _inside(each)]
    path = ""
    while method_of_layer(module) is not None:
        child = "projection" if hasattr(module, "projection") else "dense" if dense_part(module) is not None else None
        if child is None:
            return []
        module, path = getattr(module, child), f"{path}.{child}"
    return [path]
