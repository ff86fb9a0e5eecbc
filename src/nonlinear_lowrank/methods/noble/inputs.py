"""NOBLE layers that read one input: how they are found, and what the first one called computes for all.

Query, key and value of an attention are a group, and so are the gate and up projections of a gated feed-forward.
`SharedDown` is `NobleConfig(share_down="qkv")`, `NobleGroup` is `NobleConfig(fuse_shared_inputs=True)`. Results are
those of the layers alone, up to rounding.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import align_module_device
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.names import known, parents, qkv_groups
from nonlinear_lowrank.ops.plain import autocast_dtype

from .op import noble_linears

_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))


class HandOff:
    """Result that the first of `size` layers makes of an input, held until each has taken its part.

    It is valid for the very tensor it was made from, in any order of calls. A layer called a second time, or with
    another tensor (keys of a cross-attention), makes its own.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._apart = False
        # (x, how, what was made, places served): one tuple, read once and replaced whole, so that threads that share
        # a model never see half of another's.
        self._held: tuple[Tensor, Hashable, Any, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: never the tensors of a forward pass."""
        return {**self.__dict__, "_held": None}

    def take(self, x: Tensor, place: int, make: Callable[[Tensor], Any], how: Hashable = None) -> Any:
        """Return `make(x)`, called now unless another place (0 to size - 1) has just done so under equal `how`."""
        held = self._held
        if held is None or held[0] is not x or held[1] != how or held[3] >> place & 1:
            held = (x, how, make(x), 0)
        served = held[3] | 1 << place
        self._held = None if served == (1 << self.size) - 1 else (*held[:3], served)
        return held[2]

    def apart(self, x: Tensor) -> bool:
        """Return whether these layers were ever given another tensor while some waited for their part."""
        held = self._held
        if held is not None and held[0] is not x:
            self._held, self._apart = None, True
        return self._apart


def _circumstances(x: Tensor, parameter: Tensor) -> Hashable:
    """Return what a product in training also depends on beside the identity of x."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled()  # one pass; nothing is held from one to the next
    versions = [None if each.is_inference() else each._version for each in (x, parameter)]
    return (torch.is_grad_enabled(), autocast_dtype(x), id(parameter), *versions)


class SharedDown(HandOff):
    """One down projection, the first layer's, for NOBLE branches that read the same input: h = x down^T, once.

    Each branch keeps its own frequencies, phases, mixes and up projection. Sharing the bottleneck too would give
    the branch of one fused projection, whose three outputs share r numbers. Two thirds of the down projections'
    3 r d parameters and 6 r d FLOPs per token are saved, and as much again backward.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(len(layers))
        self.owner = layers[0]
        for place, layer in enumerate(layers):
            layer.noble_shared, layer.noble_place = self, place
            if place:
                layer.noble_down = None

    def product(self, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return x (..., d_in), cast where autocast does, and h (..., r)."""
        if self.apart(x):
            return self._product(x)
        how = _circumstances(x, self.owner.noble_down)
        found: tuple[Tensor, Tensor] = self.take(x, place, self._product, how)
        return found

    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        down = self.owner.noble_down
        if down.is_meta:  # offloaded by accelerate, which holds it in memory during the owner's own forward alone
            with align_module_device(self.owner):
                down = self.owner.noble_down
        if (dtype := autocast_dtype(x)) is not None:
            x, down = x.to(dtype), down.to(dtype)
        return x, F.linear(x, down)


class NobleGroup(HandOff):
    """Layers of one input width, rank and config, computed together (`op.noble_linears`).

    Where they turn out not to read one tensor, each computes its own from then on.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(len(layers))
        self.layers = list(layers)
        for place, layer in enumerate(layers):
            layer.noble_group, layer.noble_place = self, place

    def output(self, x: Tensor, place: int) -> Tensor | None:
        """Return y (..., d_out) of the layer at this place; None where it must compute its own."""
        together = all(each.branch_enabled and each.plain_weight() is not None for each in self.layers)
        if not together or self.apart(x):
            return None
        y: Tensor = self.take(x, place, self._compute, _circumstances(x, self.layers[0].weight))[place]
        return y

    def _compute(self, x: Tensor) -> list[Tensor]:
        layers, scale = self.layers, self.layers[0].noble_config.scale
        dense, biases = [each.plain_weight() for each in layers], [each.whole_bias() for each in layers]
        ys = noble_linears(x, dense, biases, [each.branch() for each in layers])
        return ys if scale == 1 else [y * scale for y in ys]


def shared_groups(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """Return `qkv_groups` of linears (d_in, d_out) by name; raise where there is none, or one of unequal d_in."""
    groups = qkv_groups(shapes)
    if not groups:
        raise UserError(
            "share_down='qkv' needs separate query, key and value projections among the linears to swap, and there are "
            "none; a fused one (c_attn, qkv) has a single down projection anyway: omit share_down"
        )
    for group in groups:
        if len({shapes[name][0] for name in group}) > 1:
            read = ", ".join(f"{name} {shapes[name][0]}" for name in group)
            raise UserError(f"share_down='qkv' needs one input, and these read different widths: {read}; use exclude=")
    return groups


def input_groups(layers: Mapping[str, Any], kind: Callable[[Any], Hashable]) -> list[tuple[str, ...]]:
    """Return names of layers that read one input and are of one kind: `qkv_groups`, then gate and up projections."""
    pairs = [known(parent, pair, layers) for parent in parents(layers) for pair in _GATED]
    groups = [*qkv_groups(layers), *(pair for pair in pairs if len(pair) == 2)]
    return [group for group in groups if len({kind(layers[name]) for name in group}) == 1]


def group(layers: Mapping[str, Any]) -> None:
    """Make a `NobleGroup` of each group among a model's new NOBLE layers; raise UserError where there is none."""
    found = input_groups(
        layers, lambda each: (each.noble_shape[0], each.noble_rank, each.weight.dtype, each.bias is None)
    )
    if not found:
        raise UserError(
            "fuse_shared_inputs needs separate query, key and value, or gate and up, projections of one rank, all "
            "with a bias or none, among the linears to swap, and there are none; omit it"
        )
    for names in found:
        NobleGroup([layers[name] for name in names])
