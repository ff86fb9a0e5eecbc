"""NOBLE layers that read one input, computed together in training: `NobleConfig(fuse_shared_inputs=True)`.

Query, key and value of an attention are a group, and so are the gate and up projections of a gated feed-forward. The
first of them that is called computes for all (`op.noble_linears`). Where they turn out not to read one tensor, each
computes its own from then on. Results are those of the layers alone, up to rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from nonlinear_lowrank.errors import UserError

from .inputs import HandOff, circumstances, input_groups
from .op import noble_linears


class NobleGroup:
    """Layers of one input width, rank and config."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.hand_off = HandOff(len(layers))
        for place, layer in enumerate(layers):
            layer.noble_group, layer.noble_place = self, place

    def output(self, x: Tensor, place: int) -> Tensor | None:
        """Return y (..., d_out) of the layer at this place; None where it shall compute its own."""
        together = all(each.branch_enabled and each.plain_weight() is not None for each in self.layers)
        if not together or self.hand_off.apart(x):
            return None
        how = circumstances(x, self.layers[0].weight)
        y: Tensor = self.hand_off.take(x, place, self._compute, how)[place]
        return y

    def _compute(self, x: Tensor) -> list[Tensor]:
        layers = self.layers
        dense, biases = [each.plain_weight() for each in layers], [each.whole_bias() for each in layers]
        ys = noble_linears(x, dense, biases, [each.branch() for each in layers])
        scale = layers[0].noble_config.scale
        return ys if scale == 1 else [y * scale for y in ys]


def group(layers: Mapping[str, Any]) -> None:
    """Make groups of a model's new NOBLE layers.

    Args:
        layers: by whole name.

    Raises:
        UserError: there is none that could be grouped.
    """
    found = input_groups(layers, _kind)
    if not found:
        raise UserError(
            "fuse_shared_inputs needs separate query, key and value, or gate and up, projections of one rank among the "
            "linears to swap, and there are none; omit it"
        )
    for names in found:
        NobleGroup([layers[name] for name in names])


def _kind(layer: Any) -> tuple[Any, ...]:
    return (layer.noble_shape[0], layer.noble_rank, layer.weight.dtype, layer.bias is None)
