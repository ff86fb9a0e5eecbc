"""Optimizers that train a method's tensors without their learning-rate multipliers, or not at all, and the warnings.

torch calls a hook before each step of every optimizer. At an optimizer's first step the hook looks for the tensors of
all living layers in its groups, by identity: this works under DDP and FSDP2, needs no model, and keeps none alive.
Later steps cost one look-up. What cannot be judged is skipped: flattened tensors (FSDP1, DeepSpeed), compiled steps and
optimizers of one tensor. A ratio other than 1 is taken to be intended.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nonlinear_lowrank.errors import LearningRateWarning

from .base import Role, method_of_layer

_layers: WeakSet[Any] = WeakSet()
_checked: WeakSet[Optimizer] = WeakSet()
_warned: WeakSet[nn.Module] = WeakSet()


class MultiplierLayer:
    """Base, beside `nn.Module`, of layers whose roles have multipliers: it makes them known to the check.

    In `__new__`, since a copied or unpickled layer is never initialised.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _check_all_optimizers()
        layer = super().__new__(cls)
        _layers.add(layer)
        return layer


class Mismatch(NamedTuple):
    """A tensor that an optimizer trains against its role."""

    layer: nn.Module
    tensor: Tensor
    role: Role
    lost: bool
    """Its learning rate is that of what has no multiplier."""
    decayed: bool
    """It is decayed, though its role is not."""


def multiplier_roles(module: nn.Module) -> Mapping[str, Role]:
    """Return the roles of a layer's tensors by their names in it; none where all multipliers are 1."""
    if not isinstance(module, MultiplierLayer):
        return {}
    layer: Any = module
    method = method_of_layer(layer)
    try:
        roles: Mapping[str, Role] = method.roles(layer) if method else layer.parameter_roles()
    except AttributeError:  # its __init__ failed, and a traceback still holds it
        return {}
    return roles if any(role.lr != 1 for role in roles.values()) else {}


def mismatches(groups: Iterable[Mapping[str, Any]]) -> list[Mismatch]:
    """Return the tensors that optimizer groups train without their multiplier, or decay against their role.

    A learning rate is compared with that of a tensor of multiplier 1 in the same layer: one of the branch's (the down
    projection), else the dense weight, else that of any other layer.
    """
    group_of = {id(each): group for group in groups for each in group["params"]}
    held = []
    for layer in list(_layers):
        roles = multiplier_roles(layer)
        if not roles:
            continue
        tensors = dict(layer.named_parameters())
        mine = [(tensors[name], role) for name, role in roles.items() if name in tensors]
        mine = [(each, role) for each, role in mine if each.requires_grad and id(each) in group_of]
        plain = sorted((not role.decay, place) for place, (_, role) in enumerate(mine) if role.lr == 1)
        base = mine[plain[0][1]][0] if plain else getattr(layer, "weight", None)
        held.append((layer, mine, _rates(group_of[id(base)]) if id(base) in group_of else None))
    fallback = next((rates for _, _, rates in held if rates is not None), None)
    found = []
    for layer, mine, own in held:
        base_rates = own or fallback
        for tensor, role in mine:
            group = group_of[id(tensor)]
            lost = role.lr != 1 and base_rates is not None and _same(_rates(group), base_rates)
            decayed = not role.decay and float(group.get("weight_decay") or 0) > 0
            if lost or decayed:
                found.append(Mismatch(layer, tensor, role, lost, decayed))
    return found


def warn_once(layers: Iterable[nn.Module], message: str) -> None:
    """Warn with `LearningRateWarning` on rank 0, unless all these layers were warned of before."""
    new = [each for each in layers if each not in _warned]
    if new and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        warnings.warn(message, LearningRateWarning, stacklevel=4)
    _warned.update(new)


def _rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the learning rate now and before schedules: at the start of a warm-up every one is 0."""
    lr = group.get("lr", 0.0)
    return float(lr), float(group.get("initial_lr", lr))


def _same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return any(other) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(one, other, strict=True))


@functools.cache
def _check_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_first_step)


def _check_first_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _checked:
        return
    _checked.add(optimizer)
    if sum(len(group["params"]) for group in optimizer.param_groups) < 2:
        return
    _warn_of_bypassed(optimizer)
    found = mismatches(optimizer.param_groups)
    lost = [each.role for each in found if each.lost]
    decayed = [each.role for each in found if each.decayed]
    parts = []
    if lost:
        low, high = (pick(role.lr for role in lost) for pick in (min, max))
        parts.append(f"trains {_counted(lost)} without their learning-rate multipliers (x {low:.3g} to {high:.3g})")
    if decayed:
        parts.append(f"decays {_counted(decayed)}, which must not be decayed")
    if parts:
        warn_once(
            {each.layer: None for each in found},
            f"{type(optimizer).__name__} {' and '.join(parts)}; use nlr.param_groups(model, lr=...), nlr.TrainerMixin "
            "or nlr.LearningRateCallback, or silence nlr.LearningRateWarning",
        )


def _warn_of_bypassed(optimizer: Optimizer) -> None:
    """Warn of branches that got no gradient while the dense weights beside them did: nobody calls these layers.

    What `augment` reads in the code of a model's forward is known before; this also finds what that does not show.
    """
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    bypassed = []
    for layer in list(_layers):
        method = method_of_layer(layer)
        if method is None or method.dense is None:
            continue
        own = [each for each in layer.parameters(recurse=False) if each.requires_grad and id(each) in held]
        if own and layer.weight.grad is not None and all(each.grad is None for each in own):
            bypassed.append(f"{type(layer).__name__} {layer.weight.shape[1]} -> {layer.weight.shape[0]}")
    if bypassed:
        warnings.warn(
            f"{len(bypassed)} branches have no effect: the model takes the weights of these layers without calling "
            f"them ({', '.join(dict.fromkeys(bypassed))}); leave them out with exclude=",
            stacklevel=4,
        )


def _counted(roles: list[Role]) -> str:
    names = sorted({role.name for role in roles})
    return f"{len(roles)} tensor{'s' if len(roles) > 1 else ''} ({', '.join(names)})"
