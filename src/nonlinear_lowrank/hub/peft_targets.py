"""Modules that peft's tuners take in augmented models: those in the layers that a config names, else those that the
tuner takes in the plain model.

peft chooses them by the model_type of the config, and a twin has one of its own. The linear beside a branch is
"q_proj.dense", that behind QK-norm "q_proj.projection".
"""

from collections import defaultdict
from typing import Any

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
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    known = getattr(tuner, "target_module_mapping", {}).get(str(model_type).removeprefix(TYPE_PREFIX))
    field = "lora_target_modules" if hasattr(config, "lora_target_modules") else "target_modules"
    given: Any = getattr(config, field, ())
    named = given is not None or getattr(config, "target_parameters", None)
    peft_own = type(tuner).__module__.startswith("peft.")
    if given and not isinstance(given, str):
        known, named = given, None
    elif field == "lora_target_modules":
        return
    if named or not str(model_type).startswith(TYPE_PREFIX) or not isinstance(known, list | tuple | set):
        return
    places: dict[str, list[str]] = defaultdict(list)  # whole names, by the end that they have beside the plain name
    for name, module in model.named_modules():
        plain = next((each for each in known if f".{name}".endswith(f".{each}")), None)
        if plain is None:
            continue
        for inner in _inside(module) or [""] * (known is given and not peft_own):
            places[plain + inner].append(name + inner)
    if known is given:
        held = [name for name, module in model.named_modules() if method_of_layer(module) and not _inside(module)]
        for name in held if peft_own else ():
            if any(f".{name}".endswith(f".{each}") for each in given):
                raise UserError(f"{name} holds no plain linear that peft could adapt; leave it out of target_modules")
        places |= {each: [each] for each in given if not any(f"{end}.".startswith(f"{each}.") for end in places)}
    # A name with two ends would also match layers that no tuner takes.
    several = len({end.removesuffix(".dense").removesuffix(".projection") for end in places}) < len(places)
    if places:
        setattr(config, field, set().union(*places.values()) if several else set(places))


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
