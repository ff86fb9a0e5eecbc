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

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from nonlinear_lowrank.methods.base import Role, method_of_layer
from nonlinear_lowrank.surgery.targets import is_linear, output_head_names

from .errors import UserError

DENSE = Role("dense", muon=True)
EMBEDDING = Role("embedding")
OTHER = Role("other")
VECTOR = Role("vector", decay=False)


@runtime_checkable
class HasRoles(Protocol):
    """A module that gives roles to parameters of its children."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Return roles by the parameters' names in this module."""


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every trainable parameter, by its name; tied parameters appear once.

    Roles are found through the modules, by name: attributes on parameters do not survive sharding. A module that
    `augment` put in place is asked by its method; an adapter's layer by its own `parameter_roles()`, since it holds
    its parameters by adapter, one level deeper.
    """
    heads = output_head_names(model)
    by_name: dict[str, Role] = {}
    named_by_parent: dict[str, Role] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        method = method_of_layer(module)
        own = method.roles(module) if method else {}
        if isinstance(module, HasRoles):
            named_by_parent |= {prefix + local: role for local, role in module.parameter_roles().items()}
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = prefix + local
            if local in own:
                role = own[local]
            elif name in named_by_parent:
                role = named_by_parent[name]
            elif parameter.ndim < 2:
                role = VECTOR
            elif isinstance(module, nn.Embedding) or module_name in heads:
                role = EMBEDDING
            elif parameter.ndim == 2 and (is_linear(module) or method):
                role = DENSE
            else:
                role = OTHER
            by_name[name] = role
    return {name: by_name[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, muon: bool = False, verbose: bool = True
) -> list[dict[str, Any]]:
    """Return optimizer groups with each role's learning-rate and weight-decay multiplier.

    Args:
        model: augmented or plain.
        lr: the base learning rate, of multiplier 1.
        weight_decay: for the roles that decay; the others get 0.
        muon: name the split for `MuonAdamW`: each group has an "optimizer" of "muon" or "adamw".
        verbose: print the groups.

    Returns:
        A fresh list of groups, each with "params" (a list of (name, parameter) tuples), "lr",
        "weight_decay" and "role". transformers' Trainer takes "params" out of the dict of optimizer
        arguments it is given, so call this anew for every optimizer.

    Raises:
        UserError: lr or weight_decay is out of range, or nothing is trainable.

    Source: noble.txt, section 3.3, equations (3) and (4); appendix A.
    """
    if not 0 < lr < float("inf"):
        raise UserError(f"lr must be a finite number above 0, got {lr!r}")
    if not 0 <= weight_decay < float("inf"):
        raise UserError(f"weight_decay must be a finite number of at least 0, got {weight_decay!r}")
    roles, parameters = parameter_roles(model), dict(model.named_parameters())
    if not roles:
        raise UserError("the model has no trainable parameters; unfreeze some (requires_grad_(True))")
    groups: dict[Role, dict[str, Any]] = {}
    for name, role in roles.items():
        if role not in groups:
            groups[role] = {
                "params": [],
                "lr": lr * role.lr,
                "weight_decay": weight_decay if role.decay else 0.0,
                "role": role.name,
            }
            if muon:
                groups[role]["optimizer"] = "muon" if role.muon else "adamw"
        groups[role]["params"].append((name, parameters[name]))
    ordered = sorted(groups.values(), key=lambda group: (group["role"], group["lr"]))
    if verbose:
        print(describe_groups(ordered, lr))
    return ordered


def describe_groups(groups: Iterable[dict[str, Any]], lr: float) -> str:
    """Return a line for each group: role, tensors, parameters, learning rate and multiplier, weight decay."""
    lines = []
    for group in groups:
        size = sum(parameter.numel() for _, parameter in group["params"])
        lines.append(
            f"{group['role']:<18} {len(group['params']):>5} tensors {size:>14,} parameters  "
            f"lr {group['lr']:.3g} (x {group['lr'] / lr:.3g})  decay {group['weight_decay']:g}"
            + (f"  {group['optimizer']}" if "optimizer" in group else "")
        )
    return "\n".join(lines)


_KINDS = ("muon", "adamw")


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the groups marked "muon", `torch.optim.AdamW` for the rest, as one optimizer.

    Schedulers, Trainer and checkpoints see one list of groups and one state. Muon's updates are scaled by
    `adjust_lr_fn="match_rms_adamw"`, so both share one learning rate.

    Args:
        params: groups of `param_groups(model, lr, weight_decay, muon=True)`.
        lr: default of groups that have none.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: default of groups that have none.
        momentum: Muon's.

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
        if kinds != {*_KINDS}:
            raise UserError("MuonAdamW needs groups of both kinds; make them with param_groups(..., muon=True)")
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        muon = torch.optim.Muon(
            self._kind("muon"),
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = torch.optim.AdamW(self._kind("adamw"), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        # The inner optimizers filled in their own defaults: take their groups over, in our order.
        of_params = {id(group["params"][0]): group for inner in (muon, adamw) for group in inner.param_groups}
        self.param_groups = [of_params[id(group["params"][0])] for group in self.param_groups]
        self._inner = (muon, adamw)
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a further group, which says "muon" or "adamw".

        Raises:
            UserError: it says neither, or "muon" of what is no matrix.
            ValueError: as torch's: a parameter is there already.
        """
        kind = param_group.get("optimizer")
        if kind not in _KINDS:
            raise UserError(f"a group of MuonAdamW must have optimizer 'muon' or 'adamw', got {kind!r}")
        super().add_param_group(param_group)
        if kind == "muon" and any(each.ndim != 2 for each in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise UserError("Muon is for matrices; put vectors and kernels into a group with optimizer 'adamw'")
        if not hasattr(self, "_inner"):
            return  # it is being made
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

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
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
