"""What a method must say of itself so that surgery, optimizer, files and reports can serve it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from nonlinear_lowrank.errors import UserError


@dataclass(frozen=True)
class Role:
    """How one kind of parameter is trained: one row of a method's learning-rate table."""

    name: str
    """Shown in the printed groups, e.g. "noble.up"."""
    lr: float = 1.0
    """Learning-rate multiplier."""
    decay: bool = True
    """Whether weight decay applies."""
    muon: bool = False
    """Whether Muon takes it where that is asked for: plain hidden matrices of multiplier 1."""


@dataclass(frozen=True, kw_only=True)
class PlainCost:
    """What the plain layer cost whose weight a method's layer has done away with."""

    parameters: int
    flops: int
    """Forward, per token."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One module that a method can take, where the method finds its modules itself."""

    config: Any
    """The user's, with what is left open in it settled for this place."""
    said: str
    """What is put there, for the report."""
    device: torch.device | None = None
    """Where the new layer goes; None: the default."""
    aside: str = ""
    """Why it is left alone unless the user names it; empty: it is taken."""
    refused: str = ""
    """Why it cannot be taken, with the mend: an error when it is chosen."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a model has for a method."""

    targets: Mapping[str, Target]
    """By dotted name, in the model's order. Each place is one of its own, also where places share a module."""
    left: Mapping[str, str] = field(default_factory=dict)
    """What can never be taken, and why; "" is the model itself."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to swap modules. `augment`, `param_groups` and `hub` know methods only through this."""

    name: str
    """Name in saved configs and on the command line."""
    config_class: type
    """Frozen keyword-only dataclass; validates itself."""
    layer_types: tuple[type[nn.Module], ...]
    """Classes of the modules that the method puts in place."""
    is_target: Callable[[nn.Module], bool]
    """Whether the method can take this (plain) module's place."""
    check: Callable[[str, nn.Module, Any], None]
    """(module name, module, config): raises UserError before anything is changed."""
    takes: str = "linear"
    """What its targets are called in messages."""
    find: Callable[[nn.Module, Any], Findings] | None = None
    """(model, config): what the model has for it, for a method that takes other modules than linears; raises UserError
    where the model as a whole cannot be."""
    build: Callable[[str, nn.Module, Any], nn.Module]
    """(module name, plain module, config) -> new, uninitialised module that holds the plain module's parameters."""
    build_all: Callable[[Mapping[str, nn.Module], Any], Mapping[str, nn.Module]] | None = None
    """(plain modules by name, config): as `build` of each, for layers that may share tensors; raises UserError. None:
    they never do."""
    roles: Callable[[nn.Module], Mapping[str, Role]]
    """Roles of the parameters a layer of the method adds, by their name in the layer."""
    flops: Callable[[nn.Module], int]
    """Forward FLOPs per token that a layer adds to the plain one; negative where it saves some."""
    added: Callable[[Mapping[str, nn.Module], Any], tuple[int, int]] | None = None
    """(plain modules by name, config): parameters and forward FLOPs per token that their layers would add, for methods
    whose config has a `rank_ratio`; None: no budget can be asked for."""
    plain: Callable[[nn.Module], PlainCost] | None = None
    """What the plain layer cost, for a method whose layers take the place of its weight; None: it is kept."""
    include: str | None = None
    """Regular expression of the whole names that it takes where the user names none; None: every linear."""
    leave: Callable[[nn.Module, Any], str | None] | None = None
    """(plain module, config): why a module that the user did not name is left alone, or None."""
    check_parent: Callable[[str, nn.Module, nn.Module], None] | None = None
    """(module name, module, the module around it): as `check`, but only asked when a model is augmented."""
    settle: Callable[[nn.Module, Any, list[str]], Any] | None = None
    """(model, config, chosen names) -> the config with what is left open in it taken from the model."""
    wraps: bool = False
    """Whether its layers go around others, also of other methods, which are then in them as `projection`."""
    tensor_parallel: bool = True
    """Whether a model with its layers may be split over devices by transformers' plans."""
    dense: str | None = None
    """The child of its layers that is the plain linear they go beside, whose tensors files have under the layer's own
    name; None: there is none."""
    float32: tuple[str, ...] = ()
    """Tensors of a layer, by their name in it, that stay float32 in a model of a 16-bit type."""


def config_to_dict(config: Any) -> dict[str, Any]:
    """A method's config as JSON-ready fields."""
    return asdict(config)


def config_from_dict(config_class: type, values: Mapping[str, Any]) -> Any:
    """The reverse of `config_to_dict`; raises UserError on unknown fields."""
    known = {field.name for field in fields(config_class)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"{config_class.__name__} has no field {', '.join(map(repr, unknown))}; "
            f"its fields are {', '.join(sorted(known))}"
        )
    try:
        return config_class(**values)
    except TypeError as error:
        raise UserError(f"{config_class.__name__}: {error}") from error
