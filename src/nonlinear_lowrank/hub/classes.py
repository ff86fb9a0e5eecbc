"""Augmented twins of transformers' model and config classes, built when they are first asked for.

`LlamaForCausalLM` has the twin `NonlinearLowrankLlamaForCausalLM`, whose config class `NonlinearLowrankLlamaConfig` has
the model_type "nonlinear_lowrank_llama": a process without this package takes the saved modeling file, or fails, and
does not drop the branches. A twin is the plain class plus `AugmentedModel`: it builds the plain model, then puts the
layers back that the config lists. Files name tensors as the plain model does (`q_proj.weight`, in memory
`q_proj.dense.weight`).
"""

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    revert_weight_conversion,
)
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, dense_part, method_of_layer
from nonlinear_lowrank.methods.experts import ExpertsLayer
from nonlinear_lowrank.surgery.augment import apply_saved
from nonlinear_lowrank.surgery.split import SplitLinear, drawn_whole, saved_splits

from .modeling_file import write_modeling_file
from .registration import CLASS_PREFIX, FIELD, OWN_TYPES, TYPE_PREFIX


class DenseNames(WeightRenaming):
    """Renaming, between files and memory, of the tensors in the dense parts of one model's layers.

    `layers` maps whole names to the child that is the dense part and to the layer's own tensors; `prefix` is the
    backbone's within a model with a head, which a file may have or lack.
    """

    __slots__ = ("layers", "prefix", "saving")

    def __init__(self, layers: dict[str, tuple[str, frozenset[str]]], prefix: str, *, saving: bool = False) -> None:
        super().__init__("weight", "weight")  # patterns of its own: see rename_source_key
        self.layers, self.prefix, self.saving = layers, prefix, saving

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern that matched; None where none did."""
        parts = source_key.split(".")
        for end in range(1, len(parts)):
            name, rest = ".".join(parts[:end]), parts[end:]
            spellings = (name, name.removeprefix(self.prefix), self.prefix + name)
            found = next((self.layers[each] for each in spellings if each in self.layers), None)
            if found is None:
                continue
            dense, own = found
            if self.saving and rest[0] == dense:
                return ".".join([name, *rest[1:]]), "weight"
            if not self.saving and rest[0] != dense and rest[0] not in own:
                return ".".join([name, dense, *rest]), "weight"
        return source_key, None

    def reverse_transform(self) -> "DenseNames":
        """Return the renaming in the other direction."""
        return DenseNames(self.layers, self.prefix, saving=not self.saving)

    def on_dense(self, model: Any, conversions: list[WeightTransform]) -> list[WeightTransform]:
        """Return the conversions and this; those that split a file's tensor over linears now name dense parts.

        transformers converts after it renames on loading, and before on saving. A converter that would have to name
        dense parts in some layers only, or linears beside layers without one, is dropped: all then have tensors of
        their own in files too.
        """
        found: list[WeightTransform] = []
        names = [f".{name}" for name, _ in model.named_modules()]
        ours = {name for name, module in model.named_modules() if method_of_layer(module) is not None}
        for each in conversions:
            if not isinstance(each, WeightConverter):
                found.append(each)
                continue
            of_targets = [[name[1:] for name in names if name.endswith(f".{end}")] for end in each.target_patterns]
            apart = [name in ours and name not in self.layers for of_target in of_targets for name in of_target]
            if any(apart) and not all(apart):
                continue
            held = [[name in self.layers for name in of_target] for of_target in of_targets]
            if not any(map(any, held)):
                found.append(each)
            elif all(len(set(of_target)) == 1 for of_target in held):
                both = zip(each.target_patterns, held, strict=True)
                targets = [f"{target}.dense" if of_target[0] else target for target, of_target in both]
                for tensor in ("weight", "bias"):
                    ends = [[f"{name}.{tensor}" for name in some] for some in (each.source_patterns, targets)]
                    found.append(each.copy(*ends, operations=each.operations))
        return [*found, self]


def dense_names(model: Any) -> DenseNames | None:
    """Return the renaming, for loading, of a model's layers that hold a plain linear; None where no layer is ours."""
    layers, ours = {}, False
    for name, module in model.named_modules():
        ours = ours or method_of_layer(module) is not None
        if dense_part(module) is not None:
            own = frozenset(own for own, _ in module.named_parameters(recurse=False))
            layers[name] = (str(method_of_layer(module).dense), own)  # type: ignore[union-attr]
    return DenseNames(layers, f"{getattr(model, 'base_model_prefix', '')}.") if ours else None


def in_files(model: Any, tensors: Mapping[str, Any], *, reverse: bool = False) -> dict[str, Any]:
    """Return a model's tensors renamed from memory's names to those in files; with `reverse` the other way."""
    if (names := dense_names(model)) is None:
        return dict(tensors)
    names = names if reverse else names.reverse_transform()
    return {names.rename_source_key(name)[0]: tensor for name, tensor in tensors.items()}


class AugmentedModel:
    """Additions of a twin to its plain class (a mixin in front of a `transformers.PreTrainedModel`)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        layers = apply_saved(self, _entries_for(self, getattr(config, FIELD, None) or []))  # type: ignore[arg-type]
        if kept := getattr(self, "_keep_in_fp32_modules", None):  # found by the ends of names
            self._keep_in_fp32_modules = type(kept)([*kept, *(f"{name}.dense" for name in kept)])
        drawn = not any(parameter.is_meta for layer in augmented_layers(self) for parameter in layer.parameters())
        if drawn:
            self._draw(layers)
            _mark_drawn(self)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw as transformers does, dense parts included, and then our layers by their own init.

        Tensors that came from a checkpoint carry a flag and are skipped.
        """
        new = [layer for layer in augmented_layers(self) if not getattr(layer, "_is_hf_initialized", False)]
        with drawn_whole(self):  # type: ignore[arg-type]
            super().initialize_weights()  # type: ignore[misc]
        self._draw(new)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return whether the plain class is not transformers' own, whose inits it trusts to keep what was loaded."""
        plain: Any = cls.__bases__[-1]
        return bool(plain.is_custom_code())

    def _draw(self, layers: Iterable[Any]) -> None:
        for layer in layers:
            layer._is_hf_initialized = False
            self._initialize_weights(layer)  # type: ignore[attr-defined]

    def _init_weights(self, module: nn.Module) -> None:
        """Draw one of our layers by its own init, what experts keep and other modules as the plain class does."""
        method = method_of_layer(module)
        if method is None or isinstance(module, ExpertsLayer):
            super()._init_weights(module)  # type: ignore[misc]
        if method is not None:
            module.reset_parameters()  # type: ignore[operator]

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return transformers' plan, and the tensors that our layers keep in float32 whatever type is loaded."""
        plan = super()._get_dtype_plan(dtype)  # type: ignore[misc]
        if dtype in (torch.bfloat16, torch.float16):
            plan |= {name: torch.float32 for method in _methods_in(self) for name in method.float32}
        return plan

    @property
    def _weight_conversions(self) -> list[Any] | None:
        """Conversions that transformers reverts on saving: the plain class's, and ours last."""
        known, ours = vars(self).get("_weight_conversions"), dense_names(self)
        if ours is None:
            return known
        if known is None:
            plain = conversion_mapping.get_model_conversion_mapping(self, add_legacy=False)  # type: ignore[arg-type]
            known = [each for each in plain if not isinstance(each, PrefixChange)]  # as transformers does
        return ours.on_dense(self, [each for each in known if not isinstance(each, DenseNames)])

    @_weight_conversions.setter
    def _weight_conversions(self, value: list[Any] | None) -> None:
        vars(self)["_weight_conversions"] = value

    @_weight_conversions.deleter
    def _weight_conversions(self) -> None:  # by `dequantize` of transformers 5.24
        vars(self).pop("_weight_conversions", None)

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load as transformers does, with the renamings of this model."""
        if (ours := dense_names(model)) is not None:
            load_config = replace(load_config, weight_mapping=ours.on_dense(model, load_config.weight_mapping or []))
        plain: Any = super(AugmentedModel, type(model))
        return plain._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Distribute the model as transformers does, where its layers can be split (`tensor_parallel`).

        Raises:
            UserError: tensor parallelism is asked for, and the model has layers that cannot be split.
        """
        if getattr(distributed_config, "tp_size", None) not in (None, 1):
            unable = [method.name for method in _methods_in(model) if not method.tensor_parallel]
            for name, kind in (("experts", ExpertsLayer), ("split projections", SplitLinear)):
                unable += [name] * any(isinstance(each, kind) for each in model.modules())
            if unable := sorted(unable):
                raise UserError(f"layers of {', '.join(unable)} cannot be split by tensor parallelism; use DDP or FSDP")
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)  # type: ignore[misc]

    def _resolve_parallel_plans(self, distributed_config: Any) -> tuple[dict[str, str], ...]:
        """Return transformers' plans, with the styles of layers that have a branch."""
        tensor, *others = super()._resolve_parallel_plans(distributed_config)  # type: ignore[misc]
        if tensor:
            from nonlinear_lowrank.integrations.tensor_parallel import with_branches

            tensor = with_branches(self, tensor, distributed_config.tp_size)  # type: ignore[arg-type]
        return (tensor, *others)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but raise for missing or extra tensors, of which it only warns.

        A tensor may be new, or stay unread, only where the saved class and this one differ: a language
        model's checkpoint loads into a classifier, whose head is new, and the reverse. With
        ignore_mismatched_sizes=True a head may also change its size; a branch may not. A backbone that was
        built without its pooler is loaded as it was built: `from_pretrained(path, add_pooling_layer=False)`;
        tensors that such an argument adds are new, and those that it drops stay unread.
        With output_loading_info=True the tensors are returned instead; with state_dict={} all are new.

        Raises:
            UserError: tensors are missing from the checkpoint, or it has some that the model does not.
        """
        quantization = kwargs.get("quantization_config")
        for option in ("llm_int8_skip_modules", "modules_to_not_convert"):
            if skipped := getattr(quantization, option, None):
                kwargs["quantization_config"] = quantization = copy.copy(quantization)
                setattr(quantization, option, [*skipped, *(f"{name}.dense" for name in skipped)])
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        if output_loading_info:
            return model, info
        if kwargs.get("state_dict") != {}:
            check_loading_info(model, info)
        return model


def augmented_layers(model: Any) -> Iterator[Any]:
    """Yield the modules that `augment` put into the model."""
    return (module for module in model.modules() if method_of_layer(module) is not None)


def _methods_in(model: Any) -> set[Method]:
    return set(filter(None, map(method_of_layer, model.modules())))


def _mark_drawn(model: Any) -> None:
    """Mark layers as drawn, as transformers marks its own."""
    for layer in augmented_layers(model):
        layer._is_hf_initialized = True
        if (dense := dense_part(layer)) is not None:
            dense._is_hf_initialized = True  # type: ignore[assignment]


def _entries_for(model: Any, entries: list[Any]) -> list[dict[str, Any]]:
    """Return the saved entries with the module names of this model.

    Another head changes the prefix ("model.layers.0" in a language model is "layers.0" in its backbone), and modules of
    a head are absent under another one. That no tensor is lost by it is checked when the checkpoint is loaded.
    """
    # A classifier's backbone, built by AutoModel, has its layers already. Places that share a module are their own.
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name for name, each in modules.items() if method_of_layer(each) is not None}
    plain = modules.keys() - layers
    prefix = model.base_model_prefix + "."
    resolved = []
    for entry in entries:
        if not isinstance(entry, dict) or not {"method", "config"} <= entry.keys() or not entry.get("modules"):
            raise UserError(f"the config field {FIELD!r} must list method, config and modules, got {entry!r}")
        splits = [_renamed(row, plain, prefix) for row in entry.get("split", ())]
        for row in splits:
            plain |= {f"{name}.{part}" for name in row["modules"] for part in row["names"]} - layers
        resolved.append({**_renamed(entry, plain, prefix), **({"split": splits} if splits else {})})
    return resolved


def _renamed(row: dict[str, Any], names: Collection[str], prefix: str) -> dict[str, Any]:
    """Return a row with its "modules" as `names` spells them, without those absent there."""
    spellings = [(name, name.removeprefix(prefix), prefix + name) for name in row["modules"]]
    found = (next((name for name in each if name in names), None) for each in spellings)
    return {**row, "modules": [name for name in found if name is not None]}


def check_loading_info(model: Any, info: dict[str, Any]) -> None:
    """Raise UserError if a load (`output_loading_info`) skipped tensors that the saved and the loaded class have."""
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if (missing or extra) and (written := _keys_of_writer(model)) is not None:
        prefix = model.base_model_prefix + "."
        missing = [key for key in missing if key.removeprefix(prefix) in written]
        extra = [key for key in extra if key.removeprefix(prefix) not in written]
    branches = tuple(f"{name}." for name, module in model.named_modules() if method_of_layer(module) is not None)
    resized = sorted(key for key, *_ in info["mismatched_keys"] if key.startswith(branches))
    if problems := listed_problems({"missing": missing, "extra": extra, "of another size": resized}):
        where = model.config._name_or_path or "the given state dict"
        raise UserError(
            f"the checkpoint {where} does not fit {type(model).__name__}: tensors {problems}; "
            "load the file that was saved with this config.json"
        )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers and the hub, progress bars included."""
    verbosity, bars, hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub)
        if bars:
            logging.enable_progress_bar()


def listed_problems(kinds: Mapping[str, Sequence[str]]) -> str:
    """Return the first few tensors of each kind of problem, for a message; empty where there are none."""
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    )


def _keys_of_writer(model: Any) -> set[str] | None:
    """Return tensor names, less the backbone's prefix, of the class that wrote the checkpoint, as its config builds it.

    The model differs where it is of another class or was given arguments, such as use_mask_token.
    """
    name = (getattr(model.config, "architectures", None) or [""])[0].removeprefix(CLASS_PREFIX)
    if (writer := plain_class(name)) is None:
        return None
    with torch.device("meta"):
        written = twin_of(writer)(model.config)
        tensors = written.state_dict()
        # Tensors that the loading class has no use for are listed under their names on disk.
        keys = tensors.keys() | revert_weight_conversion(written, dict(tensors)).keys()
    return {key.removeprefix(writer.base_model_prefix + ".") for key in keys}


def plain_class(name: str) -> Any:
    """Return the transformers model class of that name, or one that others registered, or None."""
    found = getattr(transformers, name, None)
    if found is None:
        registered = [value for mapping in _model_mappings().values() for value in mapping._extra_content.values()]
        flat = [each for value in registered for each in (value if isinstance(value, list | tuple) else [value])]
        found = next((each for each in flat if getattr(each, "__name__", "") == name), None)
    return found if _is_model_class(found) else None


def _is_model_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PreTrainedModel)


@cache
def _config_twin(base: Any) -> Any:
    def __init__(
        self: Any,
        *args: Any,
        nonlinear_lowrank: list[dict[str, Any]] | None = None,
        modeling_file: bool = True,
        **kwargs: Any,
    ) -> None:
        base.__init__(self, *args, **kwargs)
        self.nonlinear_lowrank, self.modeling_file = nonlinear_lowrank, modeling_file

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        write_modeling_file(self, base, save_directory)
        base.save_pretrained(self, save_directory, *args, **kwargs)

    doc = (
        f"{base.__name__} of an augmented model; `{FIELD}` lists the methods and their places. With `modeling_file` "
        "saving also writes what a process without this package needs (`hub.modeling_file`)."
    )
    own = {"__module__": __name__, "__doc__": doc, "__init__": __init__, "model_type": TYPE_PREFIX + base.model_type}
    own |= {"save_pretrained": save_pretrained, "modeling_file": True}  # of configs that only change their class too
    own["__reduce_ex__"] = lambda self, protocol: _by_plain_classes(base.__reduce_ex__(self, protocol), base)
    twin: Any = type(CLASS_PREFIX + base.__name__, (base,), own)
    _share_weight_conversions(base.model_type, twin.model_type)
    return twin


@cache
def twin_of(base: Any, config_class: Any = None) -> Any:
    """Return the augmented twin of a plain model class (a twin is its own twin).

    Its plain config class differs from the one that it names where one model class serves several configs.
    """
    if issubclass(base, AugmentedModel):
        return base
    if config_class is None:
        return twin_of(base, base.config_class)
    doc = f"`{base.__name__}` with the layers that its config's `{FIELD}` lists."

    @wraps(base.__init__)  # transformers reads signatures
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        AugmentedModel.__init__(self, *args, **kwargs)

    own = {"__module__": __name__, "__doc__": doc, "__init__": __init__, "config_class": _config_twin(config_class)}
    own["__reduce_ex__"] = lambda self, protocol: _by_plain_classes(
        base.__reduce_ex__(self, protocol), base, config_class
    )
    twin = type(CLASS_PREFIX + base.__name__, (AugmentedModel, base), own)
    _share_weight_conversions(base.__name__, twin.__name__)
    return twin


def _by_plain_classes(reduced: Any, *plain: Any) -> Any:
    """Return what pickle keeps of a twin's object, with its plain classes: those of a user's file have no name here."""
    return _new, plain, *reduced[2:]


def _new(base: Any, config_class: Any = None) -> Any:
    twin = _config_twin(base) if config_class is None else twin_of(base, config_class)
    return twin.__new__(twin)


def __getattr__(name: str) -> Any:
    """Twins by name, for `from nonlinear_lowrank.hub.classes import ...`."""
    if name.startswith(CLASS_PREFIX):
        base: Any = getattr(transformers, name.removeprefix(CLASS_PREFIX), None)
        if isinstance(base, type) and issubclass(base, PreTrainedConfig):
            return _config_twin(base)  # type: ignore[arg-type]
        if (base := plain_class(name.removeprefix(CLASS_PREFIX))) is not None:
            return twin_of(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def register(base_config_class: Any) -> Any:
    """Register the augmented twins of a backbone with transformers' Auto classes, and return the twin config class.

    Nobody needs to call it: it is called when a model is augmented, and when an Auto class meets a model_type
    "nonlinear_lowrank_<base>" whose base it knows (its own, or added by `AutoConfig.register`).

    Raises:
        UserError: the class has no model_type.
    """
    base = base_config_class
    if not getattr(base, "model_type", ""):
        raise UserError(f"{base.__name__} has no model_type, so that Auto classes cannot find it")
    twin = _config_twin(base)
    AutoConfig.register(twin.model_type, twin, exist_ok=True)
    for name, mapping in _model_mappings().items():
        if base not in mapping:
            continue
        plain = mapping[base]
        many = isinstance(plain, list | tuple)
        # Where a dependency of the backbone is absent, transformers has a stand-in instead of the model.
        twins = tuple(twin_of(each, base) for each in (plain if many else [plain]) if _is_model_class(each))
        if twins:
            mapping.register(twin, twins if many else twins[0], exist_ok=True)
            # Trainer (label smoothing) looks for a model's class name in this table.
            names = tuple(each.__name__ for each in twins)
            getattr(modeling_auto, f"{name}_NAMES")[twin.model_type] = names if many else names[0]
    _share_processors(base, twin)
    return twin


def _model_mappings() -> dict[str, Any]:
    """Return transformers' tables of model classes, each by its name in `modeling_auto`."""
    return {name: each for name, each in vars(modeling_auto).items() if isinstance(each, _LazyAutoMapping)}


def _share_weight_conversions(base: str, twin: str) -> None:
    """Give a twin its base's renamings between disk and memory (ViT has some), kept by class and by type."""
    if (conversions := conversion_mapping.get_checkpoint_conversion_mapping(base)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(twin, conversions, overwrite=True)


def _share_processors(base: Any, twin: Any) -> None:
    from transformers.models.auto import tokenization_auto as tokenizers

    special = configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME
    special[twin.model_type] = configuration_auto.model_type_to_module_name(base.model_type)
    if base.model_type in tokenizers.TOKENIZER_MAPPING_NAMES:
        tokenizers.TOKENIZER_MAPPING_NAMES[twin.model_type] = tokenizers.TOKENIZER_MAPPING_NAMES[base.model_type]
    if base.model_type in tokenizers.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        tokenizers.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(twin.model_type)
    mappings = [tokenizers.TOKENIZER_MAPPING]
    # Importing these takes seconds, so only for images.
    if any(hasattr(base, name) for name in ("image_size", "patch_size", "vision_config")):
        from transformers.models.auto import image_processing_auto, processing_auto

        mappings += [image_processing_auto.IMAGE_PROCESSOR_MAPPING, processing_auto.PROCESSOR_MAPPING]
    with quiet_loading():  # without torchvision, transformers warns of the slower processor that it finds
        for mapping in mappings:
            if base in mapping:
                mapping.register(twin, mapping[base], exist_ok=True)


def make_saveable(model: nn.Module, entry: dict[str, Any]) -> None:
    """Turn an augmented transformers model into its twin, and those inside any other module; `augment` calls it.

    Args:
        model: the model, its layers swapped already.
        entry: {"method", "config", "modules"} of the augmentation, and "split" where projections were.
    """
    if not isinstance(model, PreTrainedModel):
        for name, child in model.named_children():
            if own := [each.removeprefix(f"{name}.") for each in entry["modules"] if each.startswith(f"{name}.")]:
                splits = {"split": saved_splits(child, own)} if "split" in entry else {}
                make_saveable(child, {**entry, "modules": own, **splits})
        return
    if not getattr(model.config, "model_type", ""):
        return
    plain_config, memo = model.config, {}  # type: ignore[var-annotated]
    config = copy.deepcopy(plain_config, memo)
    if not isinstance(model, AugmentedModel):
        plain: Any = type(plain_config)
        model_class: Any = type(model)
        config.__class__, twin = register(plain), twin_of(model_class, plain)
        vars(config).pop("model_type", None)  # the plain one, of a config that was read from a file
        # transformers keeps which outputs (hidden states, ...) a model can record under the class's name.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(twin), model._can_record_outputs)
        model.__class__ = twin
        config.modeling_file = True
    # In the form that is read back: JSON has lists, not tuples.
    setattr(config, FIELD, [*(getattr(plain_config, FIELD, None) or []), json.loads(json.dumps(entry))])
    # Inner modules hold the same config object, or a part of it.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in memo:
                setattr(module, name, memo[id(value)])
    _mark_drawn(model)


def check_saveable(model: PreTrainedModel) -> None:
    """Raise UserError for a model with layers that its config does not list: its files would lose them."""
    configs: list[Any] = [model.config]
    if model.config.model_type in OWN_TYPES:  # whose plain models have such layers
        return
    for each in configs:  # with those of its parts
        configs += [value for value in vars(each).values() if isinstance(value, PreTrainedConfig)]
    if not any(getattr(each, FIELD, None) for each in configs) and any(map(method_of_layer, model.modules())):
        raise UserError(
            f"the config of {type(model).__name__} does not list its augmented layers, and its files would lose them: "
            "augment the whole model that you save, with include= for a part"
        )
