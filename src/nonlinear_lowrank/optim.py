"""Learning-rate and weight-decay multipliers by role, and the optimizer groups made from them.

Roles of the plain parts, here; each method adds its own in its layer's table.

| role      | tensors                                | lr x | decay | with muon=True |
|-----------|----------------------------------------|------|-------|----------------|
| dense     | matrices of linears                    | 1    | yes   | Muon           |
| embedding | embeddings, output heads               | 1    | yes   | AdamW          |
| other     | other tensors of 2 or more dimensions  | 1    | yes   | AdamW          |
| vector    | biases, norm weights, all 1-D tensors  | 1    | no    | AdamW          |

Muon also trains the two matrices of a nonlinear query, which replace a dense one. Branches stay with AdamW: Muon with
their multipliers diverges in the first steps. A fused projection is one matrix to Muon.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from .errors import LearningRateWarning, UserError
from .methods.base import MultiplierLayer, Role, dense_part, layers_alive, method_of_layer
from .methods.experts import projections
from .surgery.targets import is_linear, output_head_names

DENSE = Role("dense", muon=True)
EMBEDDING = Role("embedding")
OTHER = Role("other")
VECTOR = Role("vector", decay=False)


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every trainable parameter, by its name; tied parameters appear once.

    Roles are found through the modules, by name: attributes on parameters do not survive sharding. A module that
    `augment` put in place is asked by its method; an adapter's layer by its own `parameter_roles()`, since it holds
    its parameters by adapter, one level deeper.
    """
    inside: nn.Module = getattr(model, "get_base_model", lambda: model)()  # of peft's model, which hides the backbone
    heads = {id(part) for name in output_head_names(inside) for part in inside.get_submodule(name).modules()}
    kept: Any = getattr(inside, "no_weight_decay", ())  # timm's method; others hold the names
    kept = kept() if callable(kept) else kept
    by_name: dict[str, Role] = {}
    named: dict[str, Role] = {}  # before the parameters: a module may hold them one or two levels deeper
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        method = method_of_layer(module)
        own = method.roles(module) if method else {}
        for local, role in {**own, **getattr(module, "parameter_roles", dict)()}.items():
            named[prefix + local] = role
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = prefix + local
            if (known := named.get(name) or named.get(_whole(name))) is not None:
                role = known
            elif parameter.ndim < 2:
                role = VECTOR
            elif isinstance(module, nn.Embedding) or id(module) in heads:
                role = EMBEDDING
            elif parameter.ndim == 2 and (is_linear(module) or method) and not projections(module):
                role = DENSE
            else:
                role = OTHER
            by_name[name] = role
    roles = {name: by_name[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: replace(role, decay=False) if name in kept else role for name, role in roles.items()}


def _whole(name: str) -> str:
    """Return the name of the tensor that torch's parametrizations, pruning or old weight norm made a parameter of."""
    return re.sub(r"(parametrizations\.)?(\w+)(\.original\d*|_orig|_g|_v)$", r"\2", name)


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, muon: bool = False, verbose: bool = True
) -> list[dict[str, Any]]:
    """Return optimizer groups with each role's learning-rate and weight-decay multiplier.

    Args:
        model: augmented or plain.
        lr: the base learning rate, of multiplier 1.
        weight_decay: for the roles that decay; the others, and what the model's `no_weight_decay` names, get 0.
        muon: name the split for `MuonAdamW`: each group has an "optimizer" of "muon" or "adamw".
        verbose: print the groups.

    Returns:
        Groups with "params" (a list of (name, parameter) tuples), "lr", "weight_decay" and "role". transformers'
        Trainer takes "params" out of them, so call this again for every optimizer.

    Raises:
        UserError: lr or weight_decay is out of range, nothing is trainable, or parameters are given for the model.

    Source: noble.txt, section 3.3, equations (3) and (4); appendix A.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"param_groups takes the model, not its parameters, got {type(model).__name__}")
    if isinstance(lr, str) or not 0 < lr < math.inf:
        raise UserError(f"lr must be a finite number above 0, got {lr!r}")
    if isinstance(weight_decay, str) or not 0 <= weight_decay < math.inf:
        raise UserError(f"weight_decay must be a finite number of at least 0, got {weight_decay!r}")
    roles, parameters = parameter_roles(model), dict(model.named_parameters())
    if not roles:
        raise UserError("the model has no trainable parameters; unfreeze some (requires_grad_(True))")
    groups: dict[Role, dict[str, Any]] = {}
    for name, role in roles.items():
        decay = weight_decay if role.decay else 0.0
        fresh = {"params": [], "lr": lr * role.lr, "weight_decay": decay, "role": role.name}
        if muon:
            fresh["optimizer"] = "muon" if role.muon else "adamw"
        groups.setdefault(role, fresh)["params"].append((name, parameters[name]))
    ordered = sorted(groups.values(), key=lambda group: (group["role"], group["lr"]))
    for group in ordered if verbose else ():
        size = sum(parameter.numel() for _, parameter in group["params"])
        print(
            f"{group['role']:<18} {len(group['params']):>5} tensors {size:>14,} parameters  "
            f"lr {group['lr']:.3g} (x {group['lr'] / lr:.3g})  decay {group['weight_decay']:g}"
            + (f"  {group['optimizer']}" if muon else "")
        )
    return ordered


_KINDS = ("muon", "adamw")


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the groups marked "muon", `torch.optim.AdamW` for the rest, as one optimizer.

    Schedulers, Trainer and checkpoints see one list of groups and one state. Muon's updates are scaled by
    `adjust_lr_fn="match_rms_adamw"`, so both share one learning rate.

    `params` are groups of `param_groups(model, lr, weight_decay, muon=True)`, `lr` and `weight_decay` the defaults of
    groups that have none, `betas` and `eps` AdamW's, `momentum` Muon's.

    Raises:
        UserError: a group says neither "muon" nor "adamw", or there is no group of either kind.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        groups = [dict(group) if isinstance(group, dict) else {"params": group} for group in list(params)]
        kinds = {group.get("optimizer") for group in groups}
        if kinds == {"adamw"}:
            raise UserError("no dense matrix is trained, and Muon takes nothing else; use torch.optim.AdamW")
        if kinds == {"muon"}:
            raise UserError("only dense matrices are trained; use torch.optim.Muon")
        if kinds != {*_KINDS}:
            raise UserError("MuonAdamW needs groups of both kinds; make them with param_groups(..., muon=True)")
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        muon = torch.optim.Muon(
            self._kind("muon"), lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(self._kind("adamw"), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        # The inner optimizers filled in their own defaults: take their groups over, in our order.
        of_params = {id(group["params"][0]): group for inner in (muon, adamw) for group in inner.param_groups}
        self.param_groups = [of_params[id(group["params"][0])] for group in self.param_groups]
        self._inner = (muon, adamw)
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group marked "muon" (matrices alone) or "adamw"; raise UserError for any other."""
        kind = param_group.get("optimizer")
        if kind not in _KINDS:
            raise UserError(f"a group of MuonAdamW must have optimizer 'muon' or 'adamw', got {kind!r}")
        super().add_param_group(param_group)
        if kind == "muon" and any(each.ndim != 2 for each in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise UserError("Muon is for matrices; put vectors and kernels into a group with optimizer 'adamw'")
        if not hasattr(self, "_inner"):
            return  # under construction
        added, inner = self.param_groups.pop(), self._inner[_KINDS.index(kind)]
        inner.add_param_group(_with_names(added))
        self.param_groups.append(inner.param_groups[-1])
        self._link()

    def _kind(self, kind: str) -> list[dict[str, Any]]:
        return [_with_names(group) for group in self.param_groups if group["optimizer"] == kind]

    def _link(self) -> None:
        for kind, inner in zip(_KINDS, self._inner, strict=False):
            inner.param_groups = [group for group in self.param_groups if group["optimizer"] == kind]
            inner.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, with the inner optimizers."""
        return {**super().__getstate__(), "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Link the inner optimizers to new groups and state, after load_state_dict or copying."""
        super().__setstate__(state)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.step()
        return loss


def _with_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group whose params are (name, parameter) pairs, where it has names."""
    group = dict(group)
    if "param_names" in group:
        group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
    return group


_begun: WeakSet[Optimizer] = WeakSet()
_checked: WeakSet[Optimizer] = WeakSet()
_trained: WeakSet[nn.Module] = WeakSet()
_warned: WeakSet[nn.Module] = WeakSet()


class Mismatch(NamedTuple):
    """A tensor that an optimizer trains against its role."""

    layer: nn.Module
    tensor: Tensor
    role: Role
    lost: bool
    """It is trained without its learning-rate multiplier."""
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


def mismatches(groups: Iterable[Mapping[str, Any]], lr: float | None = None) -> list[Mismatch]:
    """Return the tensors that optimizer groups train without their multiplier, or decay against their role.

    They are found by identity among all living layers, which works under DDP and FSDP2. A learning rate is compared
    with that of a tensor of multiplier 1 in the same layer: one of the branch's (the down projection), else the dense
    weight, else that of any other layer, else `lr`, the one that the optimizer was given. What cannot be judged is
    skipped: flattened tensors (FSDP1, DeepSpeed), compiled steps and optimizers of one tensor. A ratio other than 1
    is assumed intended.
    """
    group_of = {id(each): group for group in groups for each in group["params"]}
    held = []
    for layer in list(layers_alive):
        if not (roles := multiplier_roles(layer)):
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
        for tensor, role in mine:
            group = group_of[id(tensor)]
            rates = _rates(group)
            base_rates = own or fallback or (None if lr is None else (rates[0], lr))
            lost = role.lr != 1 and base_rates is not None and _same(rates, base_rates)
            decayed = not role.decay and float(group.get("weight_decay") or 0) > 0
            if lost or decayed:
                found.append(Mismatch(layer, tensor, role, lost, decayed))
    return found


def warn_once(layers: Iterable[nn.Module], message: str) -> None:
    """Warn with `LearningRateWarning` on rank 0, unless all these layers were warned of before."""
    new = [each for each in layers if each not in _warned]
    if new and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        warnings.warn(message, LearningRateWarning, stacklevel=5)
    _warned.update(new)


def _rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the learning rate now and before schedules: at the start of a warm-up every one is 0."""
    lr = group.get("lr", 0.0)
    return float(lr), float(group.get("initial_lr", lr))


def _same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return any(other) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(one, other, strict=True))


def check_first_steps(optimizer: Optimizer) -> None:
    """Warn of what an optimizer trains against its role, and at its second step of branches that none trains; called
    before every step."""
    if optimizer in _checked:
        return
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if optimizer in _begun:  # and so have the others, where several train one model
        _checked.add(optimizer)
        _warn_of_untrained(held)
        return
    _begun.add(optimizer)
    _trained.update(layer for layer, own in _branches() if any(id(each) in held for each in own))
    if sum(len(group["params"]) for group in optimizer.param_groups) < 2 or isinstance(optimizer, torch.optim.LBFGS):
        return  # LBFGS takes one group, and its line search one learning rate
    _warn_of_bypassed(held)
    _warn_of_uncalled(optimizer)
    found = mismatches(optimizer.param_groups)
    parts = []
    if lost := [each.role for each in found if each.lost]:
        low, high = min(role.lr for role in lost), max(role.lr for role in lost)
        parts.append(f"trains {_counted(lost)} without their learning-rate multipliers (x {low:.3g} to {high:.3g})")
    if decayed := [each.role for each in found if each.decayed]:
        parts.append(f"decays {_counted(decayed)}, which must not be decayed")
    if parts:
        fix = "use nlr.param_groups(model, lr=...), nlr.TrainerMixin or nlr.LearningRateCallback"
        if lost and all("role" in group for group in optimizer.param_groups):  # rates that were right once
            fix = "a scheduler gave all groups one rate: pass it [g['lr'] for g in optimizer.param_groups]"
        warn_once(
            {each.layer: None for each in found},
            f"{type(optimizer).__name__} {' and '.join(parts)}; {fix}, or silence nlr.LearningRateWarning",
        )


def _branches() -> list[tuple[Any, list[Tensor]]]:
    """Return the living layers that go beside a dense part, with the trainable tensors of their branches."""
    layers = [layer for layer in list(layers_alive) if dense_part(layer) is not None]
    return [(layer, [each for each in layer.parameters(recurse=False) if each.requires_grad]) for layer in layers]


def _warn_of_untrained(held: set[int]) -> None:
    """Warn of branches in no optimizer, beside a dense weight in this one: it was made before the model's layers."""
    left = [
        layer
        for layer, own in _branches()
        if layer not in _trained and any(each.grad is not None for each in own) and id(layer.weight) in held
    ]
    if left:
        warnings.warn(
            f"{len(left)} branches are in no optimizer that has stepped: make it after nlr.augment, or freeze them "
            "(requires_grad_(False))",
            stacklevel=5,
        )


def _warn_of_bypassed(held: set[int]) -> None:
    """Warn of branches that got no gradient while the dense weights beside them did: nobody calls these layers.

    `augment` knows what the code of a model's forward shows; this also finds what it does not.
    """
    bypassed = []
    for layer, tensors in _branches():
        own = [each for each in tensors if id(each) in held]
        if own and layer.weight.grad is not None and all(each.grad is None for each in own):
            bypassed.append(f"{type(layer).__name__} {layer.weight.shape[1]} -> {layer.weight.shape[0]}")
    if bypassed:
        warnings.warn(
            f"{len(bypassed)} branches have no effect: the model takes the weights of these layers without calling "
            f"them ({', '.join(dict.fromkeys(bypassed))}); leave them out with exclude=",
            stacklevel=5,
        )


def _warn_of_uncalled(optimizer: Optimizer) -> None:
    """Warn where no adapter of a kind got a gradient while other tensors did: the model no longer calls them."""
    graded = {id(each): each.grad is not None for group in optimizer.param_groups for each in group["params"]}
    kinds: dict[str, set[bool]] = {}
    for layer in (each for each in list(layers_alive) if dense_part(each) is None):
        own = {graded[id(each)] for each in layer.parameters() if each.requires_grad and id(each) in graded}
        kinds.setdefault(type(layer).__name__, set()).update(own)
    if idle := sorted(kind for kind, found in kinds.items() if found == {False} and any(graded.values())):
        warnings.warn(
            f"no {' and no '.join(idle)} got a gradient: the model does not call them (a forward that Liger or another "
            "tool put in place afterwards?); switch that off, or leave them out with exclude_modules=",
            stacklevel=5,
        )


def _counted(roles: list[Role]) -> str:
    names = sorted({role.name for role in roles})
    return f"{len(roles)} tensor{'s' if len(roles) > 1 else ''} ({', '.join(names)})"
