"""Augmented models as Hugging Face models: save_pretrained, and loading by the Auto classes.

    nlr.augment(model, nlr.NobleConfig(rank=64))
    model.save_pretrained("out")
    # in another process
    import nonlinear_lowrank
    model = AutoModelForCausalLM.from_pretrained("out")

`augment` turns the model, in place, into its augmented twin: class, config class and the config's list
`nonlinear_lowrank`, to which every further augment appends. Augment the model that is saved, not a part of it.

Without this package, `trust_remote_code=True` runs the saved modeling file (`modeling_file`): plain formulas in one
file. A model saved without it (`model.config.modeling_file = False`) fails on its model_type `nonlinear_lowrank_...`.
**A concrete class cannot be stopped**: `GlmForCausalLM.from_pretrained("out")` drops the branches and only warns of
unexpected tensors. Loading here is strict: tensors that are missing, or that nothing reads, raise `UserError`, unless
another head is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .classes import AugmentedModel, make_saveable, register
    from .conversion import ConvertReport, convert
    from .image_tokens import ImageTokensConfig
    from .kat import KatConfig
    from .loading import load_model, load_tokenizer
    from .pooled import MeanPooledConfig

__all__ = [
    "AugmentedModel",
    "ConvertReport",
    "ImageTokensConfig",
    "KatConfig",
    "MeanPooledConfig",
    "convert",
    "load_model",
    "load_tokenizer",
    "make_saveable",
    "register",
]

_FILES = {"ImageTokensConfig": "image_tokens", "KatConfig": "kat", "MeanPooledConfig": "pooled"}
_FILES |= dict.fromkeys(("AugmentedModel", "make_saveable", "register"), "classes")
_FILES |= dict.fromkeys(("ConvertReport", "convert"), "conversion")
_FILES |= dict.fromkeys(("load_model", "load_tokenizer"), "loading")


def __getattr__(name: str) -> Any:
    """Import a name's file when it is first used: transformers takes seconds."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
