"""Layers that read one input: their groups, and the hand-off of what one of them computes for all."""

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from nonlinear_lowrank.methods.attention import SEPARATE
from nonlinear_lowrank.ops.precision import autocast_dtype

_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))


class HandOff:
    """Result that the first of `size` layers makes of an input, held until each has taken its part.

    It counts for the very tensor it was made of: results are those of the layers alone, whatever is called in which
    order. A layer that comes a second time, or with another tensor (keys of a cross-attention), makes its own.
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
        if held is not None and held[0] is not x and not torch.compiler.is_compiling():
            self._held, self._apart = None, True
        return self._apart


def circumstances(x: Tensor, parameter: Tensor) -> Hashable:
    """Return what a product in training also depends on beside the identity of x."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled()  # one pass; nothing is held from one to the next
    versions = [None if each.is_inference() else each._version for each in (x, parameter)]
    return (torch.is_grad_enabled(), autocast_dtype(x), id(parameter), *versions)


def qkv_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return groups of query, key and value projections, in this order, that stand in one attention: at least two.

    Args:
        names: whole names of linears.
    """
    groups = []
    for parent in _parents(names):
        for query in SEPARATE:
            word = "query" if "query" in query else "q"
            others = ("key", "value") if word == "query" else ("k", "v")
            found = _known(parent, (query, *(query.replace(word, other) for other in others)), names)
            if len(found) > 1:
                groups.append(found)
    return groups


def input_groups(layers: Mapping[str, Any], kind: Callable[[Any], Hashable]) -> list[tuple[str, ...]]:
    """Return names of layers that read one input and are of one kind: `qkv_groups`, then gate and up projections."""
    pairs = [_known(parent, pair, layers) for parent in _parents(layers) for pair in _GATED]
    groups = [*qkv_groups(layers), *(pair for pair in pairs if len(pair) == 2)]
    return [group for group in groups if len({kind(layers[name]) for name in group}) == 1]


def _parents(names: Collection[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _known(parent: str, children: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    whole = (f"{parent}.{child}" if parent else child for child in children)
    return tuple(name for name in whole if name in names)
