"""The base classes of methods and of their layers: how a method changes a model, is trained, and what it costs.

A method is a folder or file beside this one with a class of its own under `@register`. Another distribution adds one
by an entry point in the group `nonlinear_lowrank.methods` that names the module. Surgery, optimizer, files and reports
know methods only through this class.
"""

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nonlinear_lowrank.errors import UserError

from .experts import active_experts, expert_count, linear_shapes, projections
from .matrix import is_plain_linear

ENTRY_POINTS = "nonlinear_lowrank.methods"


@dataclass(frozen=True)
class Role:
    """One row of a method's learning-rate table: the training of one kind of parameter."""

    name: str
    """Shown in the printed groups, e.g. "noble.up"."""
    lr: float = 1.0
    """Learning-rate multiplier."""
    decay: bool = True
    """True where weight decay applies."""
    muon: bool = False
    """True where Muon takes it, if it is asked for: plain hidden matrices of multiplier 1."""


@dataclass(frozen=True, kw_only=True)
class PlainCost:
    """Parameters, and forward FLOPs per token, of the plain layer whose weight a method's layer replaces."""

    parameters: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """One module that a method can replace, where the method finds its modules itself."""

    config: Any
    """The user's config, with open fields filled in for this place."""
    details: str
    """Kind of the new layer, for the report."""
    device: torch.device | None = None
    """Module path of the new layer; None: the default."""
    skipped: str = ""
    """Reason it is skipped unless the user names it; empty: it is replaced."""
    refused: str = ""
    """Reason it cannot be replaced, with the fix: an error when it is chosen."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Modules of a model that a method can replace, and those it cannot."""

    targets: Mapping[str, Target]
    """By dotted name, in the model's order. Each place is one of its own, also where places share a module."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Modules that can never be replaced, and why; "" is the model itself."""


@dataclass(frozen=True, kw_only=True)
class AdapterArm:
    """A way to fine-tune with a PEFT adapter of a method, as arms of comparisons and benchmarks name it."""

    config: tuple[str, str]
    """Module and name of the peft config class; imported when it is used, for peft takes seconds to import."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Config fields that make the arm what it is."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """Fields that differ from the config's own defaults unless the arm sets them."""
    rank: str = "r"
    """The field that benchmarks set to the rank."""
    targets: str = "target_modules"
    """The field that says which modules the adapter goes on; empty: none."""
    shown: tuple[str, ...] = ()
    """The settings that an error message lists."""


class Method:
    """A way to swap modules. A subclass states the first three attributes and overrides what differs.

    Every hook that may raise raises UserError, before anything is changed.
    """

    name: ClassVar[str]
    """Name in saved configs and on the command line."""
    config_class: ClassVar[type]
    """Frozen keyword-only dataclass; validates itself."""
    layer_types: ClassVar[tuple[type[nn.Module], ...]]
    """Classes of the modules that the method puts in place."""

    kind: ClassVar[str] = "linear"
    """Name of its targets in messages."""
    include: ClassVar[str | None] = None
    """Regular expression of the whole names that it replaces where the user names none; None: every linear."""
    wraps: ClassVar[bool] = False
    """True where its layers go around others, also of other methods, which are then in them as `projection`."""
    tensor_parallel: ClassVar[bool] = False
    """True where a model with its layers may be split over devices by transformers' plans."""
    replaces_weights: ClassVar[bool] = False
    """True where its layers drop the plain layer's weight."""
    keeps_weights_by: ClassVar[Mapping[str, Any]] = {}
    """Config fields with which such layers keep what is trained after all, and start at its outputs; empty: none do."""
    dense: ClassVar[str | None] = None
    """The child of its layers that is the plain linear they go beside, whose tensors files have under the layer's own
    name; its layers are branches, switched by `branch_enabled`. None: they replace the linear. (Layers in place of
    experts have no such child: they are the experts too.)"""
    float32: ClassVar[tuple[str, ...]] = ()
    """Tensors of a layer, by their name in it, that stay float32 in a model of a 16-bit type."""
    adapter: ClassVar[str] = ""
    """Module of its PEFT adapters, imported with peft; empty: it has none."""
    adapter_arms: ClassVar[Mapping[str, AdapterArm]] = {}
    """Arms of comparisons that fine-tune with these adapters, by name."""
    optimizable: ClassVar[bool] = False
    """True where `optimize_for_inference` makes a model with its layers faster."""
    draws_up: ClassVar[bool] = False
    """True where it has `draw_up`."""
    controls: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arms of comparisons that change one factor of the method and keep the rest: config fields by the arm's name."""
    budgeted: ClassVar[bool] = False
    """True where its config has a `rank_ratio`, and `added` gives its layers' cost, so that a budget can be met."""

    def is_target(self, module: nn.Module) -> bool:
        """Return whether the method can replace this module: a plain linear, unless overridden."""
        return is_plain_linear(module)

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        """Return a new, uninitialised layer that holds the parameters of the plain module it keeps."""
        raise NotImplementedError

    def build_all(self, modules: Mapping[str, nn.Module], config: Any) -> Mapping[str, nn.Module]:
        """Build the layers of a model, which may share tensors."""
        return {name: self.build(name, module, config) for name, module in modules.items()}

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        """Return the roles of the parameters a layer adds, by their name in the layer."""
        raise NotImplementedError

    def flops(self, layer: nn.Module) -> int:
        """Return the forward FLOPs per token that a layer adds to the plain one; negative where it saves some."""
        return 0

    def plain(self, layer: nn.Module) -> PlainCost | None:
        """Return what the plain layer cost, where its weight is gone (`replaces_weights`).

        It had a bias where the layer has one, or says so itself as `replaced_bias`.
        """
        if not self.replaces_weights:
            return None
        bias = getattr(layer, "replaced_bias", getattr(layer, "bias", None) is not None)
        count, active = 1, 1.0
        if projections(layer):
            count, active, bias = expert_count(layer), active_experts(layer) or 0, getattr(layer, "has_bias", False)
        shapes = linear_shapes(layer)
        parameters = count * sum(d_in * d_out + d_out * bias for d_in, d_out in shapes)
        return PlainCost(parameters=parameters, flops=round(2 * active * sum(d_in * d_out for d_in, d_out in shapes)))

    def added(self, modules: Mapping[str, nn.Module], config: Any) -> tuple[int, int]:
        """Return parameters and forward FLOPs per token that layers in place of these plain modules would add."""
        raise NotImplementedError

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        """Raise where the module cannot have this config: its `check_rank`, if it has one, says why."""
        if (why := _refused_rank(module, config)) is not None:
            raise UserError(f"{name}: {why}; choose a smaller rank or leave it out with exclude=")

    def check_parent(self, name: str, module: nn.Module, parent: nn.Module) -> None:
        """Raise where the module around it does not allow it; only asked when a model is augmented."""

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        """Return why a module that the user did not name is skipped, or None."""
        return _refused_rank(module, config)

    def find(self, model: nn.Module, config: Any) -> Findings | None:
        """Return the targets of a method that replaces modules other than linears; None: it replaces linears."""
        return None

    def converted(self, config: Any) -> Any:
        """Return the config by which the layers of a converted checkpoint keep its weights and start at its outputs."""
        return replace(config, **self.keeps_weights_by)

    def discards(self, config: Any) -> bool:
        """Return whether layers of this config put new weights in the place of trained ones."""
        kept = bool(self.keeps_weights_by) and all(
            getattr(config, name) == value for name, value in self.keeps_weights_by.items()
        )
        return self.replaces_weights and not kept

    def draw_up(self, layer: nn.Module) -> None:
        """Draw, as in a model from scratch, what starts at zero in a converted one; only with `draws_up`."""
        raise NotImplementedError

    def initial(self, config: Any, *, pretrained: bool) -> Any:
        """Return the config with an init that is left open chosen for a trained model, or a new one."""
        return config

    def settings(self, config: Any, layers: Collection[nn.Module]) -> list[str]:
        """Return what the report says of settings and new layers, beside the method's name."""
        return []

    def saved_config(self, layer: nn.Module, config: Any) -> Any:
        """Return the config of one layer as it is saved, with what only building the layer determines."""
        return config

    def complete(self, model: nn.Module, config: Any, names: list[str]) -> Any:
        """Return the config with what it leaves open taken from the model and the chosen names."""
        return config

    def optimize(self, model: nn.Module, *, shared_inputs: bool, quantized: bool) -> bool:
        """Make the method's layers in a model faster for inference, in place; return whether any was changed.

        `shared_inputs`: layers that read one input may be joined. `quantized`: the plain linears are quantized
        afterwards, and must stay linears.
        """
        return False


def _refused_rank(module: nn.Module, config: Any) -> str | None:
    shapes = linear_shapes(module) if hasattr(config, "check_rank") else []
    return next((why for shape in shapes if (why := config.check_rank(*shape)) is not None), None)


MethodClass = TypeVar("MethodClass", bound=type[Method])
_REGISTERED: dict[str, Method] = {}


def register(method: MethodClass) -> MethodClass:
    """Add a method; a class decorator."""
    _REGISTERED[method.name] = method()
    return method


@functools.cache
def all_methods() -> Mapping[str, Method]:
    """Return every method by name: those of the folders here, then those of entry points."""
    package = importlib.import_module(__package__)
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{found.name}")
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        entry.load()
    return _REGISTERED


def method_named(name: str) -> Method | None:
    """Return the method of this name, or None."""
    return _REGISTERED.get(name) or all_methods().get(name)


def method_of_config(config: object) -> Method | None:
    """Return the method that a config object belongs to, or None."""
    return next((method for method in _REGISTERED.values() if isinstance(config, method.config_class)), None)


def method_of_layer(module: object) -> Method | None:
    """Return the method that put this module in place, or None for a plain module."""
    return next((method for method in _REGISTERED.values() if isinstance(module, method.layer_types)), None)


def config_from_dict(config_class: type, values: Mapping[str, Any]) -> Any:
    """Return the config of these fields; raise UserError for an unknown one, or a value that the config refuses."""
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


def dense_part(module: nn.Module) -> nn.Module | None:
    """Return the plain linear that a layer goes beside (`Method.dense`), or None."""
    method = method_of_layer(module)
    return getattr(module, method.dense, None) if method is not None and method.dense else None


class BranchLayer(nn.Module):
    """Base of layers with a branch beside their child `dense`, a plain linear that converters may take.

    `weight` and `bias` read the dense part's tensors. A state dict that has them under these names loads too: plain
    checkpoints, and the files that transformers saves (`hub`).
    The branch's parameters are the layer's own; with `branch_enabled` off, forward gives the dense part alone.
    """

    dense: nn.Module
    plain_names = False
    """True: `state_dict()` has the dense part's tensors under the plain layer's names, as torchtitan's checkpoints do.
    Torch's distributed state dicts load wrapped models by the names of `named_parameters`, not by those."""

    def put_beside(self, dense: nn.Module) -> None:
        """Take the linear; called once, after `nn.Module.__init__`."""
        self.dense = dense
        self.branch_enabled = True
        # A loop over all modules would undo the layer's init of the dense part.
        dense.reset_parameters = _drawn_by_the_layer  # type: ignore[assignment]
        self.register_state_dict_post_hook(_with_plain_names)

    @property
    def weight(self) -> Any:
        """The dense part's weight, in its own shape."""
        return self.dense.weight

    @property
    def bias(self) -> Any:
        """The dense part's bias (d_out), or None."""
        return self.dense.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the dense part's tensors under either name."""
        for name in ("weight", "bias"):
            if (plain := prefix + name) in state_dict:
                state_dict[f"{prefix}dense.{name}"] = state_dict.pop(plain)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _drawn_by_the_layer() -> None:
    pass


def _with_plain_names(layer: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Rename the dense part's tensors in what `state_dict()` returns."""
    for name in ("weight", "bias") if layer.plain_names else ():
        if (inside := f"{prefix}dense.{name}") in state_dict:
            state_dict[prefix + name] = state_dict.pop(inside)


layers_alive: WeakSet[Any] = WeakSet()


class MultiplierLayer:
    """Base, beside `nn.Module`, of layers whose roles have multipliers: registers them for `optim`'s check.

    In `__new__`, since a copied or unpickled layer is never initialised.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _check_all_optimizers()
        layer = super().__new__(cls)
        layers_alive.add(layer)
        return layer


@functools.cache
def _check_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        importlib.import_module("nonlinear_lowrank.optim").check_first_steps(optimizer)
