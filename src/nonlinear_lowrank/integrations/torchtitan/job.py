"""A training job with a method's layers: its model, optimizer groups and Hugging Face export."""

import copy
import re
from dataclasses import replace
from typing import Any

from torchtitan.components.optimizer import ParamGroupConfig

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.integrations.name_patterns import name_patterns
from nonlinear_lowrank.optim import parameter_roles
from nonlinear_lowrank.surgery.targets import Patterns

from .converter import AugmentConverter
from .hugging_face import BranchAdapter, state_dict_adapter
from .layers import built


def augment(trainer_config: Any, method: Any, *, include: Patterns = None, exclude: Patterns = None) -> Any:
    """Put a method's layers into a training job: model, optimizer and Hugging Face export.

    Args:
        trainer_config: torchtitan's `Trainer.Config`, with a model and an optimizer; changed in place.
        method: as in `AugmentConverter.Config`.
        include: likewise.
        exclude: likewise.

    Returns:
        The config that was given.

    Raises:
        UserError: as `AugmentConverter` and `optimizer_config`; the config is then as it was.
    """
    if (spec := trainer_config.model_spec) is None:
        raise UserError("the trainer config has no model_spec; set one, e.g. model_registry('debugmodel')")
    if spec.state_dict_adapter and issubclass(spec.state_dict_adapter, BranchAdapter):
        raise UserError("the job is augmented already; put a second method in by AugmentConverter, before augment")
    converter = AugmentConverter.Config(method=method, include=include, exclude=exclude).build()
    model = converter.convert(copy.deepcopy(spec.model))
    trainer_config.optimizer = optimizer_config(trainer_config.optimizer, model)
    adapter = spec.state_dict_adapter and state_dict_adapter(spec.state_dict_adapter)
    trainer_config.model_spec = replace(spec, model=model, state_dict_adapter=adapter)
    return trainer_config


def optimizer_config(optimizer: Any, model_config: Any) -> Any:
    """Return the optimizer's config with every group split by the multipliers of `nonlinear_lowrank.param_groups`.

    A learning rate is the group's times the role's multiplier; weight decay is the group's, or 0 for roles that have
    none (frequencies, phases, and as in `param_groups` all vectors: norms and biases).

    Args:
        optimizer: `OptimizersContainer.Config`, e.g. `default_adamw(lr=8e-4)`.
        model_config: the augmented model's config.

    Returns:
        A new config, whose patterns each match the parameters of one group and of one multiplier.

    Raises:
        UserError: a parameter has no group, a pattern matches nothing, a group names no learning rate, or Muon
            would get a branch's tensor.
    """
    roles = parameter_roles(built(model_config))
    groups = optimizer.param_groups
    of_name = {name: _first(groups, name) for name in roles}
    for place, group in enumerate(groups):
        if place not in of_name.values():
            raise UserError(f"the optimizer's pattern {group.pattern!r} matches no parameter of this model by itself")
        if "lr" not in group.optimizer_kwargs:
            raise UserError(f"the optimizer's group {group.pattern!r} has no lr; add it to its optimizer_kwargs")
    kinds: dict[tuple[int, float, bool], list[str]] = {}
    for name, role in roles.items():
        group = groups[of_name[name]]
        if group.optimizer_name == "DistMuon" and "." in role.name and not role.muon:
            raise UserError(
                f"{name} would go to Muon, which the multipliers of {role.name} blow up; put a group of AdamW with the "
                f"pattern {name.rpartition('.')[2]!r} before {group.pattern!r}"
            )
        kinds.setdefault((of_name[name], role.lr, role.decay), []).append(name)
    patterns = name_patterns(list(kinds.values()))
    split = []
    for (place, lr, decay), pattern in sorted(zip(kinds, patterns, strict=True), key=lambda each: each[0][0]):
        group = groups[place]
        own = {**group.optimizer_kwargs, "lr": group.optimizer_kwargs["lr"] * lr}
        if not decay:
            own["weight_decay"] = 0.0
        split.append(ParamGroupConfig(pattern=pattern, optimizer_name=group.optimizer_name, optimizer_kwargs=own))
    return replace(optimizer, param_groups=split)


def _first(groups: list[Any], name: str) -> int:
    """Return the index of the group that torchtitan gives a parameter to."""
    for place, group in enumerate(groups):
        if re.search(group.pattern, name):
            return place
    raise UserError(f"the optimizer has no group for {name}; end its param_groups with the pattern '.*'")
