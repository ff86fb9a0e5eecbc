"""Base of tuners: finds the modules, checks them before anything is changed, and puts the layers in place."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, PeftType, register_peft_method
from peft.utils.constants import DUMMY_TARGET_MODULES, INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.error import NoMatchingPeftModuleError
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from peft.utils.quantization_utils import get_quantization_kwargs
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.matrix import holders, matrix_of, replace_modules
from nonlinear_lowrank.surgery.targets import bypassed_linears, output_head_names, unreached_experts, why_bypassed

from .config import BASE_ROWS, AdapterConfig, NamedConfig
from .lora import LoraLayer
from .weights import AdapterLayer, TensorLayer

_HEADS = {"classifier", "score", "qa_outputs"}  # peft puts them into modules_to_save, whichever exists
Tuner = TypeVar("Tuner", bound="type[CheckedTuner]")


class NoTargetError(UserError, NoMatchingPeftModuleError):
    """Error for a model without a module to adapt; a subclass of peft's."""


def register_adapter(config_class: type[NamedConfig]) -> Callable[[Tuner], Tuner]:
    """Register a method with peft; a decorator for its tuner."""

    def register(tuner: Tuner) -> Tuner:
        # peft looks the name up in `PeftType`, a closed enum: add a member as `enum` itself would.
        name = config_class.type_name
        member = str.__new__(PeftType, name)
        member._name_ = member._value_ = name
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
        type.__setattr__(PeftType, name, member)
        register_peft_method(name=name.lower(), config_cls=config_class, model_cls=tuner, prefix=tuner.prefix)
        return tuner

    return register


class CheckedTuner(BaseTuner):
    """Base of all tuners: checks before a model is changed, merging, and batches that mix adapters.

    A tuner also derives from one of peft's, or from `AdapterModel`, which puts layers in itself.
    """

    prefix: str
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def check_target(self, name: str, base: nn.Module, config: Any) -> None:
        """Raise UserError where the method cannot adapt a plain module; called for all of them, before any change."""
        raise NotImplementedError

    def is_own(self, layer: nn.Module) -> bool:
        """Return whether a further adapter can join those of a layer."""
        return isinstance(layer, self.tuner_layer_cls)

    def targets(self, config: Any, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that an adapter goes on, by dotted name: plain ones, or our layers from another adapter.

        UserError where the config matches none of the model's modules.
        """
        inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
        found = {
            name: module
            for name, module in model.named_modules()
            if name and not name.startswith(inside) and self._check_target_module_exists(config, name)
        }
        if not found and not getattr(config, "target_parameters", None):
            raise NoTargetError(self.nothing_found(config, model))
        return found

    def nothing_found(self, config: Any, model: nn.Module) -> str:
        """Return the error where nothing matches."""
        have = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        hint = f"; its linears are called {', '.join(sorted(have))}" if have else ""
        return f"{asked_for(config)} match no module of {type(model).__name__}{hint}"

    # What peft calls.

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Inject an adapter as peft does, after its name was checked."""
        # A ModuleDict keeps its entries as attributes: "keys" would hide its method, "a.b" cannot be one.
        bad = adapter_name == BASE_ROWS or not adapter_name or "." in adapter_name
        if bad or hasattr(nn.ModuleDict(), adapter_name):
            raise UserError(f"an adapter cannot be called {adapter_name!r}; choose a plain word without dots")
        # Names in a state dict override the config's targets: nothing to check.
        self._targets_are_given = kwargs.get("state_dict") is not None
        # Left by an earlier get_peft_model, whose config may have made other tensors in other places.
        for layer in model.modules():
            if isinstance(layer, AdapterLayer) and layer.present([adapter_name]):
                layer.delete_adapter(adapter_name)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if peft_config.target_modules is None and not getattr(peft_config, "target_parameters", None):
            model_type = model_config.get("model_type")
            if model_type not in self.target_module_mapping:
                raise UserError(
                    f"Please specify `target_modules`, such as 'all-linear': peft has none for {model_type!r}"
                )
        return super()._prepare_adapter_config(peft_config, model_config)

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Make every check that needs the model, before the first module is changed."""
        super()._prepare_model(peft_config, model)
        places = Counter(child for parent in model.modules() for child in parent._modules.values())
        self._repeated = {child for child, count in places.items() if child is not None and count > 1}
        if self._targets_are_given or peft_config.target_modules == DUMMY_TARGET_MODULES:
            return
        every = peft_config.target_modules == INCLUDE_LINEAR_LAYERS_SHORTHAND
        parameters = getattr(peft_config, "target_parameters", None) or ()
        # peft's LoRA adapts experts by target_parameters.
        if every and not parameters and (experts := unreached_experts(model)):
            warnings.warn(f"{type(peft_config).__name__}: {experts}: they get no adapter", stacklevel=2)
        _maybe_include_all_linear_layers(peft_config, model)
        if every:  # an image classifier is not an output embedding, which peft skips
            peft_config.target_modules -= output_head_names(model).keys()
        targets = self._acting(peft_config, model, every)
        for name, module in targets.items():
            adapted = isinstance(module, BaseTunerLayer)
            if adapted and not self.is_own(module):
                raise UserError(f"{name} has an adapter of another method; call unload() or merge_and_unload()")
            base: Any = module.get_base_layer() if adapted else module  # type: ignore[operator]
            self.check_target(name, base, peft_config.resolve(name))
        for pattern in peft_config.patterns.values():
            keys = getattr(peft_config, pattern)
            names = (*targets, *(f".{name}" for name in parameters))
            unused = [key for key in keys if all(get_pattern_key([key], name) != key for name in names)]
            if unused:
                raise UserError(f"{pattern} has {', '.join(map(repr, unused))}, which match no adapted module")
        for field in ("modules_to_save", "trainable_token_indices"):
            given = getattr(peft_config, field, None) or ()  # bare token indices belong to the input embedding
            for key in {each for each in given if isinstance(each, str)} - _HEADS:
                if not any(name.endswith(key) for name, _ in model.named_modules()):
                    raise UserError(f"{field} has {key!r}, which matches no module of {type(model).__name__}")

    def _acting(self, peft_config: Any, model: nn.Module, every: bool) -> dict[str, nn.Module]:
        """Return the targets, without those that the model's code does not call; UserError if the user named one."""
        targets, bypassed = self.targets(peft_config, model), bypassed_linears(model)
        dead = {name: bypassed[name].why for name in targets if name in bypassed and bypassed[name].refused}
        for name in (name for name, module in targets.items() if isinstance(module, nn.Embedding)):
            *path, own = name.split(".")
            parent, grandparent = (model.get_submodule(".".join(each)) for each in (path, path[:-1]))
            if why_bypassed(name, own, parent, grandparent):  # T5's `shared`
                dead[name] = f"the forward of {type(parent).__name__} does not call it"
        if partly := [name for name in targets if name in bypassed and name not in dead]:
            which = f"{len(partly)} of {len(targets)}; {partly[0]}: {bypassed[partly[0]].why}"
            warnings.warn(f"adapters do not act on every path of the model ({which})", stacklevel=3)
        if not dead:
            return targets
        name, why = next(iter(dead.items()))
        excluded = peft_config.exclude_modules
        if not every or isinstance(excluded, str):
            raise UserError(f"an adapter on {name} would have no effect: {why}; name it in exclude_modules")
        peft_config.exclude_modules = [*(excluded or ()), *dead]
        warnings.warn(f"{len(dead)} linears get no adapter: it would have no effect ({name}: {why})", stacklevel=3)
        return self.targets(peft_config, model)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        trained = {name for name, tensor in self.named_parameters() if tensor.requires_grad}
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for name, tensor in self.named_parameters():  # peft replaces an embedding's by new, trainable ones
            tensor.requires_grad_(name in trained)
        for layer in self.model.modules() if not autocast_adapter_dtype else ():
            if isinstance(layer, AdapterLayer):
                layer.narrow(adapter_name)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        if child in self._repeated:  # peft sees the first place
            self._repeated.add(new_module)
            replace_modules(self.model, {child: new_module})
        super()._replace_module(parent, child_name, new_module, child)

    # Merging.

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        for name, tensor in self.named_parameters():
            mine = name.endswith("base_layer.weight") or f".{self.prefix}" in name
            if mine and hasattr(tensor, "device_mesh"):
                raise UserError(f"{name} is sharded; merge before sharding, in one process")
        held = holders(self.model)
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer) and module.quantization_backend is None:
                weight = getattr(module.get_base_layer(), module.weight_name, None)
                if not isinstance(weight, nn.Parameter):
                    raise UserError(f"{name} has no weight of its own that a merge could change; use it unmerged")
                if others := [each for each, _ in held.get(id(weight), ()) if not f"{each}.".startswith(f"{name}.")]:
                    raise UserError(f"{name} and {others[0]} share one weight; use it unmerged, or nlr merge if tied")

    def _before_merge(self, adapter_names: list[str] | None, safe_merge: bool) -> None:
        if isinstance(adapter_names, str):
            raise UserError(f"adapter_names must be a list of names, such as [{adapter_names!r}]")
        if unknown := sorted({*(adapter_names or [])} - {*(known := self.peft_config)}):
            raise UserError(f"there is no adapter {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
        self._check_merge_allowed()
        # Check all before changing any: a merge that fails halfway would leave a half-merged model.
        for module in self.model.modules() if safe_merge else ():
            if isinstance(module, AdapterLayer):
                module.check_merge(adapter_names)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge as peft does; with safe_merge every layer is checked before the first is changed."""
        self._before_merge(adapter_names, safe_merge)
        super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = False, safe_merge: bool = False, adapter_names: Any = None
    ) -> Any:
        if merge:
            self._before_merge(adapter_names, safe_merge)
        return super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    # Batches that mix adapters.

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Hand `adapter_names` to every layer for one call of the model; peft's models open it around theirs."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            yield
            return
        if self.training:
            raise UserError("Cannot pass `adapter_names` when the model is in training mode; call model.eval() first")
        known = [*self.peft_config, BASE_ROWS]
        if unknown := sorted({*names} - {*known}):
            raise UserError(
                f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}; choose from {', '.join(known)}"
            )
        beams = kwargs.get("num_beams")
        repeated = [name for name in names for _ in range(beams)] if isinstance(beams, int) and beams > 1 else names
        two_parts = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        in_encoder = {id(each) for each in self.model.get_encoder().modules()} if two_parts else set()
        length: list[int] = []
        with ExitStack() as stack:
            hook: Any = partial(_see_length, length)
            stack.callback(self.model.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for name, module in self.model.named_modules():
                if isinstance(module, AdapterLayer | AuxiliaryTrainingWrapper):
                    # Beam search repeats the decoder's rows; the encoder still sees each once.
                    rows = names if id(module) in in_encoder else repeated
                    # Experts see tokens in an order of their own.
                    hook = partial(_give_names, rows, [] if ".experts." in f"{name}." else length)
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    # Files.

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        given = {name: tensor for name, tensor in remapped.items() if f".{cls.prefix}" in name}
        own = re.compile(rf".*\.{cls.prefix}\w+\.{re.escape(adapter_name)}(\..*)?")
        have = {name: each for name, each in model.state_dict().items() if own.fullmatch(name)}
        wrong = "the adapter was made for another base model or config"
        for name in have.keys() & given.keys():
            if have[name].shape != given[name].shape:
                raise UserError(f"{wrong}: {name} is {_shape(given[name])} in its file and {_shape(have[name])} here")
        for ours, theirs, where in ((given, have, "only in its file"), (have, given, "only here")):
            if names := sorted(ours.keys() - theirs.keys()):
                named = f"{names[0]} {_shape(ours[names[0]])}"
                raise UserError(f"{wrong}: {len(names)} tensors are {where}, among them {named}")
        return remapped


class AdapterModel(CheckedTuner):
    """peft's tuner for a method whose layers are its own.

    Subclasses give `prefix` and `layer_classes`, and may narrow `check_target`. A method that wraps other modules
    than those with one matrix overrides `targets` and `new_layer` instead.
    """

    tuner_layer_cls = AdapterLayer
    _add_modules_to_save_to_tie = LoraModel._add_modules_to_save_to_tie
    layer_classes: ClassVar[Mapping[str, type[nn.Module]]] = {}
    """The layer for each kind of `methods.matrix.Matrix` that the method adapts."""

    def check_target(self, name: str, base: nn.Module, config: Any) -> None:
        matrix = matrix_of(base)
        if isinstance(matrix, str):
            raise UserError(f"{name} {matrix}; take it out of target_modules, or name it in exclude_modules")
        if matrix.kind not in (kinds := self.layer_classes):
            raise UserError(f"{name} is a {type(base).__name__}; {type(config).__name__} adapts {', '.join(kinds)}")

    def new_layer(self, base: nn.Module) -> Any:
        """Return a layer, still without adapters, around a plain module."""
        matrix: Any = matrix_of(base)
        return self.layer_classes[matrix.kind](base, get_quantization_kwargs(self.model))

    def is_own(self, layer: nn.Module) -> bool:
        return isinstance(layer, TensorLayer) and layer.adapter_layer_names[0].startswith(self.prefix)

    def _create_and_replace(  # type: ignore[override]
        self, peft_config: Any, adapter_name: str, target: Any, target_name: str, parent: Any, current_key: str
    ) -> None:
        config: AdapterConfig = peft_config.resolve(current_key)
        if isinstance(target, TensorLayer):
            target.update_layer(adapter_name, config)
            return
        layer = self.new_layer(target)
        layer._active_adapter = self.active_adapters
        layer.update_layer(adapter_name, config)
        self._replace_module(parent, target_name, layer, target)


def _see_length(length: list[int], _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Record the length of a model's sequences."""
    given = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    shaped = next((each for each in (*args, *given) if isinstance(each, Tensor) and each.ndim > 1), None)
    length[:] = [] if shaped is None else [shaped.shape[1]]


def _give_names(
    names: list[str], length: list[int], _module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Pass on one adapter per row; per token where the model has flattened its sequences (shared experts, routers)."""
    x = args[0] if args else None
    if length and isinstance(x, Tensor) and x.ndim == 2 and len(x) == len(names) * length[0]:
        names = [name for name in names for _ in range(length[0])]
    return args, {**kwargs, "adapter_names": names}


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def asked_for(config: Any, field: str = "target_modules") -> str:
    """Return a config's targets and their limits, as errors name them."""
    names = getattr(config, field)
    if isinstance(names, set):
        names = [*sorted(names)[:4], *(["..."] if len(names) > 4 else [])]
    limits = ("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")
    given = [f"{limit}={value!r}" for limit in limits if (value := getattr(config, limit))]
    return ", ".join([f"{field}={names!r}", *given])
