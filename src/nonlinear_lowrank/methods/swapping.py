"""Putting modules in the place of others."""

from collections.abc import Mapping

from torch import nn


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Puts every replacement where its module stands, wherever that is reachable by several names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children skips repeats
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
