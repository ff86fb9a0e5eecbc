"""NOBLE layers that read one input, computed together in training: `NobleConfig(fuse_shared_inputs=True)`.

Query, key and value of an attention are a group, and so are the gate and up projections of a gated feed-forward. The
first of them that is called computes for all (ops/cosnet_group.py) and hands the others theirs, by the identity of x,
as in noble_sharing.py. A layer that is given another tensor computes its own, and its group does so from then on. The
results are those of the layers alone, up to rounding, whatever is called in which order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError

from .group_op import noble_group
from .sharing import circumstances, qkv_groups

_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))


class NobleGroup:
    """What a group computes, for as long as not all of its layers have asked for theirs.

    Args:
        layers: NOBLE layers of one input width, rank and config.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.together = True
        # (x, how it was made, outputs, places served); one tuple, read once and replaced whole
        self._held: tuple[Tensor, tuple[Any, ...], list[Tensor], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: never the tensors of a forward pass."""
        return {**self.__dict__, "_held": None}

    def output(self, x: Tensor, place: int) -> Tensor | None:
        """y (..., d_out) of the layer at this place; None where it shall compute its own."""
        if not self.together or not all(each.branch_enabled for each in self.layers):
            return None
        held, how = self._held, circumstances(x, self.layers[0].weight)
        if held is None or held[0] is not x or held[1] != how or held[3] >> place & 1:
            if held is not None and held[0] is not x and not torch.compiler.is_compiling():
                # The others are waiting for theirs: this group does not read one tensor.
                self._held, self.together = None, False
                return None
            if not all(each.plain_dense() for each in self.layers):
                return None  # a converted or hooked dense part is called
            held = (x, how, self._compute(x), 0)
        served = held[3] | 1 << place
        self._held = None if served == (1 << len(self.layers)) - 1 else (*held[:3], served)
        return held[2][place]

    def _compute(self, x: Tensor) -> list[Tensor]:
        first = self.layers[0]
        if first.noble_shared is not None:
            downs = [first.noble_shared.owner.noble_down]
        else:
            downs = [each.noble_down for each in self.layers]
        lists = [each._branch_lists() for each in self.layers]
        mixes, frequencies, phases = ([own[kind] for own in lists] for kind in range(3))
        dense = [each.dense_weight() for each in self.layers]
        biases = [each.whole_bias() for each in self.layers]
        ups = [each.noble_up for each in self.layers]
        config = first.noble_config
        ys = noble_group(x, dense, biases, downs, ups, mixes, frequencies, phases, config.activation)
        return ys if config.scale == 1 else [y * config.scale for y in ys]


def input_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names of linears that read one input: query, key and value, then gate and up projections."""
    groups = qkv_groups(names)
    known = set(names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for pair in _GATED:
            whole = tuple(f"{parent}.{own}" if parent else own for own in pair)
            if known.issuperset(whole):
                groups.append(whole)
    return groups


def group(layers: Mapping[str, Any]) -> None:
    """Makes groups of a model's new NOBLE layers.

    Args:
        layers: by whole name.

    Raises:
        UserError: there is none that could be grouped.
    """
    found = [names for names in input_groups(list(layers)) if len({_kind(layers[name]) for name in names}) == 1]
    if not found:
        raise UserError(
            "fuse_shared_inputs needs separate query, key and value, or gate and up, projections of one rank among the "
            "linears to swap, and there are none; leave it out"
        )
    for names in found:
        together = NobleGroup([layers[name] for name in names])
        for place, name in enumerate(names):
            layers[name].noble_group, layers[name].noble_group_place = together, place


def _kind(layer: Any) -> tuple[Any, ...]:
    return (layer.noble_shape[0], layer.noble_rank, layer.weight.dtype, layer.bias is None)
