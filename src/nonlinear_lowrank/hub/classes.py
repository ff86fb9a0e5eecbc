"""Model and config classes of augmented backbones, built when they are first asked for.

`LlamaForCausalLM` has the augmented twin `NonlinearLowrankLlamaForCausalLM`, whose config class is
`NonlinearLowrankLlamaConfig` with model_type "nonlinear_lowrank_llama". The own model_type is what makes
a process without this package fail by name instead of dropping the branches. A twin is the plain class
plus `AugmentedModel`: it builds the plain model, then puts the layers back that the config lists.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from transformers import AutoConfig, conversion_mapping
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, method_of_layer
from nonlinear_lowrank.surgery.augment import apply_saved

from .names import PlainNames, rename_by_transformers
from .registration import CLASS_PREFIX, FIELD, TYPE_PREFIX


class AugmentedModel(PlainNames):
    """Additions of a twin to its plain class (a mixin in front of a `transformers.PreTrainedModel`)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        apply_saved(self, entries_for(self, getattr(config, FIELD, None) or []))  # type: ignore[arg-type]
        rename_by_transformers(self)
        if kept := getattr(self, "_keep_in_fp32_modules", None):  # found by the ends of names
            self._keep_in_fp32_modules = type(kept)([*kept, *(f"{name}.dense" for name in kept)])
        if not any(parameter.is_meta for layer in augmented_layers(self) for parameter in layer.parameters()):
            mark_initialized(self)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw our layers by their own init, before transformers, whose init draws any linear with 0.02.

        Tensors that came from a checkpoint carry a flag and are skipped.
        """
        for layer in augmented_layers(self):
            if not getattr(layer, "_is_hf_initialized", False):
                layer.reset_parameters()
        mark_initialized(self)
        super().initialize_weights()  # type: ignore[misc]

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return transformers' plan, and the tensors that our layers keep in float32 whatever type is loaded."""
        plan = super()._get_dtype_plan(dtype)  # type: ignore[misc]
        if dtype in (torch.bfloat16, torch.float16):
            plan |= {name: torch.float32 for method in _methods_in(self) for name in method.float32}
        return plan

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Distribute the model as transformers does, where its layers can be split (`tensor_parallel`).

        Raises:
            UserError: tensor parallelism is asked for, and the model has layers that cannot be split.
        """
        if getattr(distributed_config, "tp_size", None) not in (None, 1):
            unable = sorted({method.name for method in _methods_in(model) if not method.tensor_parallel})
            if unable:
                raise UserError(
                    f"layers of {', '.join(unable)} cannot be split by tensor parallelism; use data parallelism "
                    "(DDP, FSDP) instead"
                )
            if not hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"):
                raise UserError(
                    f"tensor parallelism needs transformers>=5.23, got {transformers.__version__}; upgrade it"
                )
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
        built without its pooler is loaded as it was built: `from_pretrained(path, add_pooling_layer=False)`.

        Raises:
            UserError: tensors are missing from the checkpoint, or it has some that the model does not.
        """
        quantization = kwargs.get("quantization_config")
        for option in ("llm_int8_skip_modules", "modules_to_not_convert"):
            if skipped := getattr(quantization, option, None):
                kwargs["quantization_config"] = quantization = copy.copy(quantization)
                setattr(quantization, option, [*skipped, *(f"{name}.dense" for name in skipped)])
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        check_loading_info(model, info)
        return (model, info) if output_loading_info else model


def augmented_layers(model: Any) -> Iterator[Any]:
    """Yield the modules that `augment` put into the model."""
    return (module for module in model.modules() if method_of_layer(module) is not None)


def _methods_in(model: Any) -> Iterator[Method]:
    return filter(None, map(method_of_layer, model.modules()))


def mark_initialized(model: Any) -> None:
    """Mark our layers as drawn, as transformers does for the modules that it draws."""
    for layer in augmented_layers(model):
        layer._is_hf_initialized = True
        method = method_of_layer(layer)
        if method is not None and method.dense is not None:
            layer.get_submodule(method.dense)._is_hf_initialized = True


def entries_for(model: Any, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved entries with the module names of this model.

    Names are saved as the augmented model had them. Another head changes the prefix ("model.layers.0" in
    a language model is "layers.0" in its backbone), and modules of a head are absent under another one.
    That no tensor is lost by it is checked when the checkpoint is loaded.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"the config field {FIELD!r} must be a list of methods, got {entries!r}")
    # A classifier builds its backbone by AutoModel, which has put the layers in already.
    # Places that share a module are places of their own.
    plain = {name for name, each in model.named_modules(remove_duplicate=False) if method_of_layer(each) is None}
    prefix = model.base_model_prefix + "."
    resolved = []
    for entry in entries:
        if not {"method", "config", "modules"} <= entry.keys():
            raise UserError(f"an entry of the config field {FIELD!r} needs method, config and modules: {entry!r}")
        modules = entry["modules"]
        if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
            raise UserError(f"modules in the config field {FIELD!r} must be a list of module names, got {modules!r}")
        spellings = [(name, name.removeprefix(prefix), prefix + name) for name in modules]
        names = [next((name for name in each if name in plain), None) for each in spellings]
        resolved.append({**entry, "modules": [name for name in names if name is not None]})
    return resolved


def check_loading_info(model: Any, info: dict[str, Any]) -> None:
    """Raise UserError if a load skipped tensors that both the saved and the loaded class have.

    Args:
        model: the loaded model.
        info: what transformers' from_pretrained returns with output_loading_info=True.
    """
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing or extra:
        written = _keys_of_writer(model)
        if written is not None:
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


def listed_problems(kinds: Mapping[str, Sequence[str]]) -> str:
    """Return the first few tensors of each kind of problem, for a message; empty where there are none."""
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    )


def _keys_of_writer(model: Any) -> set[str] | None:
    """Return tensor names, less the backbone's prefix, of the class that wrote the checkpoint, if it is another."""
    name = (getattr(model.config, "architectures", None) or [""])[0].removeprefix(CLASS_PREFIX)
    if name in ("", type(model).__name__.removeprefix(CLASS_PREFIX)):
        return None
    writer = plain_class(name)
    if writer is None:
        return None
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        written = twin_of(writer)(model.config)
        tensors = written.state_dict()
        # Tensors that the loading class has no use for are listed under their names on disk.
        keys = tensors.keys() | revert_weight_conversion(written, dict(tensors)).keys()
    prefix = writer.base_model_prefix + "."
    return {key.removeprefix(prefix) for key in keys}


def plain_class(name: str) -> Any:
    """Return the transformers model class of that name, or one that others registered, or None."""
    found = getattr(transformers, name, None)
    if found is None:
        registered = [value for mapping in model_mappings().values() for value in mapping._extra_content.values()]
        flat = [each for value in registered for each in (value if isinstance(value, list | tuple) else [value])]
        found = next((each for each in flat if getattr(each, "__name__", "") == name), None)
    return found if _is_model_class(found) else None


def _is_model_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


@cache
def config_class_of(base: Any) -> Any:
    """Return the augmented twin of a plain config class."""

    def __init__(self: Any, *args: Any, nonlinear_lowrank: list[dict[str, Any]] | None = None, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        self.nonlinear_lowrank = nonlinear_lowrank

    twin: Any = type(
        CLASS_PREFIX + base.__name__,
        (base,),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} of an augmented model; `{FIELD}` lists the methods and their places.",
            "__init__": __init__,
            "model_type": TYPE_PREFIX + base.model_type,
        },
    )
    _share_weight_conversions(base.model_type, twin.model_type)
    return twin


def twin_of(base: Any, config_class: type | None = None) -> Any:
    """Return the augmented twin of a plain model class (a twin is its own twin).

    Args:
        base: subclass of transformers.PreTrainedModel.
        config_class: plain config class; default: the one the model class names. They differ where one
            model class serves several configs.
    """
    if issubclass(base, AugmentedModel):
        return base
    return _twin_of(base, config_class or base.config_class)


@cache
def _twin_of(base: Any, config_class: Any) -> Any:
    twin = type(
        CLASS_PREFIX + base.__name__,
        (AugmentedModel, base),
        {
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` with the layers that its config's `{FIELD}` lists.",
            "config_class": config_class_of(config_class),
        },
    )
    _share_weight_conversions(base.__name__, twin.__name__)
    return twin


def __getattr__(name: str) -> Any:
    """Twins by name, so that pickle and `from nonlinear_lowrank.hub.classes import ...` find them."""
    if name.startswith(CLASS_PREFIX):
        base: Any = getattr(transformers, name.removeprefix(CLASS_PREFIX), None)
        if isinstance(base, type) and issubclass(base, transformers.PreTrainedConfig):
            return config_class_of(base)  # type: ignore[arg-type]
        if (base := plain_class(name.removeprefix(CLASS_PREFIX))) is not None:
            return twin_of(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(base_config_class: Any) -> Any:
    """Register the augmented twins of a backbone with transformers' Auto classes, and return the twin config class.

    Nobody needs to call it: it is called when a model is augmented, and when an Auto class meets a model_type
    "nonlinear_lowrank_<base>" whose base it knows (its own, or added by `AutoConfig.register`).

    Raises:
        UserError: the class has no model_type.
    """
    if not getattr(base_config_class, "model_type", ""):
        raise UserError(f"{base_config_class.__name__} has no model_type, so that Auto classes cannot find it")
    return _register(base_config_class)


@cache
def _register(base: Any) -> Any:
    twin = config_class_of(base)
    AutoConfig.register(twin.model_type, twin, exist_ok=True)
    for name, mapping in model_mappings().items():
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


def model_mappings() -> dict[str, Any]:
    """Return transformers' tables of model classes, each by its name in `modeling_auto`."""
    return {name: each for name, each in vars(modeling_auto).items() if isinstance(each, _LazyAutoMapping)}


def _share_weight_conversions(base: str, twin: str) -> None:
    """Give a twin its base's renamings between disk and memory (ViT has such), kept by class and by type."""
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(base)
    if conversions is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(twin, conversions, overwrite=True)


def _share_processors(base: Any, twin: Any) -> None:
    """Give a twin its base's tokenizers and processors."""
    from transformers.models.auto import tokenization_auto as tokenizers

    special = configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME
    special[twin.model_type] = configuration_auto.model_type_to_module_name(base.model_type)
    if base.model_type in tokenizers.TOKENIZER_MAPPING_NAMES:
        tokenizers.TOKENIZER_MAPPING_NAMES[twin.model_type] = tokenizers.TOKENIZER_MAPPING_NAMES[base.model_type]
    if base.model_type in tokenizers.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        tokenizers.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(twin.model_type)
    mappings = [tokenizers.TOKENIZER_MAPPING]
    # Importing these takes seconds, so only where images are.
    if any(hasattr(base, name) for name in ("image_size", "patch_size", "vision_config")):
        from transformers.models.auto import image_processing_auto, processing_auto

        mappings += [image_processing_auto.IMAGE_PROCESSOR_MAPPING, processing_auto.PROCESSOR_MAPPING]
    for mapping in mappings:
        if base in mapping:
            mapping.register(twin, mapping[base], exist_ok=True)
