"""Parts that every modeling file has: the model that puts its layers back, as its config lists them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import conversion_mapping


class Layer:
    """Base of the layers of this file; each has `reset_parameters`, and lists tensors that stay in float32."""

    float32: tuple[str, ...] = ()
    reset_parameters: Callable[[], None]


Put = Callable[[nn.Module, list[str], dict[str, Any]], None]
METHODS: dict[str, Put] = {}
"""By the name of a method in config.json: puts its layers into a plain model, (model, names of modules, settings)."""
SPLITS: list[Callable[[nn.Module, dict[str, Any]], None]] = []
"""Splits the fused projections of a row that a method's entry in config.json has under "split", (model, row)."""


class AugmentedConfig:
    """The plain config and `nonlinear_lowrank`, the list of methods: {"method", "config", "modules"} of each."""

    nonlinear_lowrank: list[dict[str, Any]] | None
    modeling_file: bool

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with this file, which it copies, in the place of the repository's."""
        if names := getattr(self, "auto_map", None):
            self.auto_map = {auto: name.rpartition("--")[2] for auto, name in names.items()}
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


class AugmentedModel:
    """The plain model, whose layers are replaced as `config.nonlinear_lowrank` lists them.

    Weights of the plain model keep their names, in memory and in files.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        entries = config.nonlinear_lowrank or []
        for row in [row for entry in entries for row in entry.get("split", ())]:
            for split in SPLITS:
                split(self, row)  # type: ignore[arg-type]
        places = [names_here(self, entry["modules"]) for entry in entries]  # find all first: some layers wrap others
        for entry, names in zip(entries, places, strict=True):
            METHODS[entry["method"]](self, names, entry["config"])  # type: ignore[arg-type]
        if not any(parameter.is_meta for parameter in self.parameters()):  # type: ignore[attr-defined]
            _draw(list(_layers(self)))

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but raise where a file lacks tensors of a layer, of which it only warns."""
        if kwargs.get("quantization_config") is not None:
            raise ValueError("quantization would drop the new layers here: pip install nonlinear-lowrank and import it")
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        own = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Layer))
        lost = sorted(key for key in info["missing_keys"] if key.startswith(own))
        if lost and not output_loading_info and kwargs.get("state_dict") != {}:
            raise ValueError(
                f"the checkpoint lacks {len(lost)} tensors of new layers, such as {lost[0]}: copy it again"
            )
        return (model, info) if output_loading_info else model

    def initialize_weights(self) -> None:
        """Draw as the plain model does, then the new layers by their own init; skip what was loaded."""
        new = [layer for layer in _layers(self) if not getattr(layer, "_is_hf_initialized", False)]
        # Inits that draw an attention's weights (T5's) find one marked as loaded where a layer has none.
        found = [each for each in _layers(self) if hasattr(each, "shape") and not _has_weight(each)]
        inside = {own for each in found for own in each.modules() if own is not each}
        bare = {each: _stand_in(each) for each in found if each not in inside}
        _put(self, bare)  # type: ignore[arg-type]
        super().initialize_weights()  # type: ignore[misc]
        _put(self, {other: each for each, other in bare.items()})  # type: ignore[arg-type]
        _draw(new)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: inits here skip what was loaded, as those of transformers do."""
        return False

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        plan: dict[str, Any] = super()._get_dtype_plan(dtype)  # type: ignore[misc]
        kept = {name for layer in _layers(self) for name in layer.float32}
        return plan | dict.fromkeys(kept, torch.float32) if dtype in (torch.bfloat16, torch.float16) else plan


@torch.no_grad()
def _draw(layers: list[Any]) -> None:
    for layer in layers:
        layer.reset_parameters()
        layer._is_hf_initialized = True


def _layers(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, Layer))


def _has_weight(layer: Any) -> bool:
    return hasattr(type(layer), "weight") or "weight" in layer._parameters


def _stand_in(layer: Any) -> Any:
    inside = getattr(layer, "projection", None)
    if inside is not None:
        return _stand_in(inside) if isinstance(inside, Layer) and not _has_weight(inside) else inside
    linear = nn.Linear(1, 1, device="meta")  # where nothing is drawn
    for parameter in linear.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return linear


def names_here(model: Any, saved: list[str]) -> list[str]:
    """Return saved names as this class has them: a backbone lacks its prefix under a head, and a head's modules."""
    plain = {name for name, each in model.named_modules(remove_duplicate=False) if not isinstance(each, Layer)}
    prefix = f"{model.base_model_prefix}."
    spellings = [(name, name.removeprefix(prefix), prefix + name) for name in saved]
    found = [next((name for name in each if name in plain), None) for each in spellings]
    return [name for name in found if name is not None]


def replace(model: nn.Module, names: list[str], build: Callable[[str, Any], nn.Module]) -> dict[str, nn.Module]:
    """Put `build(name, module)` in every place of each module, which may have several; return them by name."""
    modules = {name: model.get_submodule(name) for name in names}
    layers = {name: build(name, module).train(module.training) for name, module in modules.items()}
    _put(model, {module: layers[name] for name, module in modules.items()})
    return layers


def _put(model: nn.Module, new: dict[Any, Any]) -> None:
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module in new:
                setattr(parent, child, new[module])


def with_state(layer: Any, module: Any) -> Any:
    """Return a layer, on which no constructor was run, with the tensors and settings of the module it replaces."""
    for name, value in vars(module).items():
        vars(layer)[name] = value.copy() if isinstance(value, dict) else value
    vars(layer).pop("_is_hf_initialized", None)
    for tensor in layer._parameters.values():
        if tensor is not None:
            vars(tensor).pop("_is_hf_initialized", None)
    return layer


def width_of(linear: Any) -> tuple[int, int]:
    """Return (d_in, d_out) of a linear, of transformers' Conv1D, or of a layer in place of one."""
    if hasattr(linear, "shape"):
        shape: tuple[int, int] = linear.shape
        return shape
    return (linear.nx, linear.nf) if hasattr(linear, "nx") else (linear.in_features, linear.out_features)


def register(config: Any, models: dict[Any, Any]) -> None:
    """Let transformers build these models of a config, each by its Auto class, and name tensors in files as plain ones.

    A head builds its backbone by `AutoModel`; Mixtral's experts have other names in files than in memory.
    """
    names = {config.__bases__[1].model_type: config.model_type}
    for auto, model in models.items():
        auto.register(config, model, exist_ok=True)
        names[model.__bases__[1].__name__] = model.__name__
    for plain, own in names.items():
        if (known := conversion_mapping.get_checkpoint_conversion_mapping(plain)) is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(own, known, overwrite=True)
