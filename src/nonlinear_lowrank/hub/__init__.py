"""Augmented models in the Hugging Face house: save_pretrained, and loading by the Auto classes.

    nlr.augment(model, nlr.NobleConfig(rank=64))
    model.save_pretrained("out")
    # in another process
    import nonlinear_lowrank
    model = AutoModelForCausalLM.from_pretrained("out")

`augment` turns the model, in place, into its augmented twin (see `hub.classes`): class, config class and
the config's list `nonlinear_lowrank`, to which every further augment appends. The config is a copy, so a
plain model that was built from the same config object stays plain. Augment the model that is saved, not
a part of it: a part does not know the whole.

A process that did not import this package cannot load such a folder through the Auto classes; the error
names the model_type `nonlinear_lowrank_...`. **A concrete class cannot be stopped**:
`GlmForCausalLM.from_pretrained("out")` loads the dense weights, drops the branches and only warns of
"a model of type nonlinear_lowrank_glm" and of unexpected tensors. Use the Auto classes or `load_model`.

Loading is strict: tensors that are missing, or that nothing reads, raise `UserError`, unless another
head is asked for (see `AugmentedModel.from_pretrained`).
"""

import copy
import importlib
import json
from typing import Any

import wrapt
from torch import nn

from nonlinear_lowrank.surgery.augment import after_augment

from .classes import FIELD, AugmentedModel, mark_initialized, register, twin_of
from .conversion import ConvertReport, convert
from .image_tokens_config import ImageTokensConfig
from .loading import load_model, load_tokenizer
from .names import rename_by_transformers
from .pooled_config import MeanPooledConfig

__all__ = [
    "AugmentedModel",
    "ConvertReport",
    "ImageTokensConfig",
    "MeanPooledConfig",
    "convert",
    "load_model",
    "load_tokenizer",
    "make_saveable",
    "register",
]


def make_saveable(model: nn.Module, entry: dict[str, Any]) -> None:
    """Turns an augmented transformers model into its twin; `augment` calls it. Other modules stay as they are.

    Args:
        model: the model, its layers swapped already.
        entry: {"method", "config", "modules"} of the augmentation.
    """
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    if not isinstance(model, PreTrainedModel) or not getattr(model.config, "model_type", ""):
        return
    plain_config = model.config
    memo: dict[int, Any] = {}
    config = copy.deepcopy(plain_config, memo)
    if not isinstance(model, AugmentedModel):
        config.__class__ = register(type(plain_config))
        twin = twin_of(type(model), type(plain_config))
        # transformers keeps which outputs (hidden states, ...) a model can record under the class's name.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(twin), model._can_record_outputs)
        model.__class__ = twin
    # As it will be read back: JSON has lists, no tuples.
    entry = json.loads(json.dumps(entry))
    setattr(config, FIELD, [*(getattr(plain_config, FIELD, None) or []), entry])
    # Inner modules hold the same config object, or a part of it.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in memo:
                setattr(module, name, memo[id(value)])
    rename_by_transformers(model)
    mark_initialized(model)


def _register_own(module: Any) -> None:
    """Imports the models of our own types, which tell the Auto classes of themselves."""
    importlib.import_module(".pooled", __package__)
    importlib.import_module(".image_tokens", __package__)


after_augment.append(make_saveable)
wrapt.register_post_import_hook(_register_own, "transformers.models.auto.modeling_auto")
