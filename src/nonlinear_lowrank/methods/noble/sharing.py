"""One down projection for NOBLE branches that read the same input: query, key and value of an attention.

    h = x down^T, once;        y_i = W_i x + b_i + up_i bottleneck_i(h)        i = q, k, v

Only `noble_down` is shared: each branch keeps its own frequencies, phases, mixes and up projection. To share the
bottleneck as well would be the branch of one fused projection, whose three outputs have r numbers between them.
Of the down projections' 3 r d parameters and 6 r d FLOPs a token two thirds are saved, and as much again backward.
The tensor belongs to the first of the group (the query), so that a file has it once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.precision import autocast_dtype

from .inputs import HandOff, circumstances, qkv_groups


class SharedDown:
    """The product of a group's down projection, the first layer's, with its input."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.owner = layers[0]
        self.hand_off = HandOff(len(layers))
        for place, layer in enumerate(layers):
            layer.noble_shared, layer.noble_place = self, place
            if place:
                layer.noble_down = None

    def product(self, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return x (..., d_in), cast where autocast does, and h (..., r)."""
        how = circumstances(x, self.owner.noble_down)
        found: tuple[Tensor, Tensor] = self.hand_off.take(x, place, self._product, how)
        return found

    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        down = self.owner.noble_down
        if (dtype := autocast_dtype(x)) is not None:
            x, down = x.to(dtype), down.to(dtype)
        return x, F.linear(x, down)


def shared_groups(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """Return `qkv_groups` of linears that can share.

    Args:
        shapes: (d_in, d_out) by name.

    Raises:
        UserError: there is no group, or its members read inputs of different widths.
    """
    groups = qkv_groups(shapes)
    if not groups:
        raise UserError(
            "share_down='qkv' needs separate query, key and value projections among the linears to swap, and there are "
            "none; a fused one (c_attn, qkv) has a single down projection anyway: omit share_down"
        )
    for group in groups:
        widths = {name: shapes[name][0] for name in group}
        if len(set(widths.values())) > 1:
            read = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise UserError(f"share_down='qkv' needs one input, and these read different widths: {read}; use exclude=")
    return groups
