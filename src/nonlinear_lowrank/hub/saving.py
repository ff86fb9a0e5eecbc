"""Turns augmented models into instances of classes that `save_pretrained` and the Auto classes know."""

import copy
import json
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .classes import AugmentedModel, mark_initialized, register, twin_of
from .names import rename_by_transformers
from .registration import FIELD


def make_saveable(model: nn.Module, entry: dict[str, Any]) -> None:
    """Turn an augmented transformers model into its twin; `augment` calls it. Other modules stay as they are.

    Args:
        model: the model, its layers swapped already.
        entry: {"method", "config", "modules"} of the augmentation.
    """
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
    # In the form that is read back: JSON has lists, no tuples.
    entry = json.loads(json.dumps(entry))
    setattr(config, FIELD, [*(getattr(plain_config, FIELD, None) or []), entry])
    # Inner modules hold the same config object, or a part of it.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in memo:
                setattr(module, name, memo[id(value)])
    rename_by_transformers(model)
    mark_initialized(model)
