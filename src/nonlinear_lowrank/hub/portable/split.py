"""Fused projections as one linear a part."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .core import SPLITS, names_here, replace, width_of


class SplitLinear(nn.Module):
    """A linear (..., d_in) -> (..., d_out) whose parts, such as q_proj, k_proj and v_proj, are linears of their own.

    The rows of d_out are `groups` times a share of each part, one after another.
    """

    def __init__(self, fused: Any, names: list[str], widths: list[int], groups: int) -> None:
        super().__init__()
        self.names, self.groups = names, groups
        d_in, conv = width_of(fused)[0], isinstance(fused, Conv1D)
        shares = [width // groups for width in widths]
        for name, width in zip(names, widths, strict=True):
            with torch.device("meta"):
                setattr(self, name, Conv1D(width, d_in) if conv else nn.Linear(d_in, width, fused.bias is not None))
        for tensor, old in fused.named_parameters(recurse=False):
            turned = conv and tensor == "weight"
            rows = (old.detach().t() if turned else old.detach()).unflatten(0, (groups, -1)).split(shares, 1)
            for name, part in zip(names, rows, strict=True):
                own = part.flatten(0, 1).t() if turned else part.flatten(0, 1)
                setattr(
                    self.get_submodule(name), tensor, nn.Parameter(own.clone(memory_format=torch.contiguous_format))
                )

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        parts = [self.get_submodule(name)(x).unflatten(-1, (self.groups, -1)) for name in self.names]
        return torch.cat(parts, -1).flatten(-2)


def split(model: nn.Module, row: dict[str, Any]) -> None:
    """Split the projections that a row of config.json names, but those that an inner model has split already."""
    found = {name: model.get_submodule(name) for name in names_here(model, row["modules"])}
    names = [name for name, module in found.items() if not isinstance(module, SplitLinear)]
    replace(model, names, lambda name, module: SplitLinear(module, row["names"], row["widths"], row["groups"]))


SPLITS.append(split)
