"""One down projection for NOBLE branches that read the same input: query, key and value of an attention.

    h = x down^T, once;        y_i = W_i x + b_i + up_i bottleneck_i(h)        i = q, k, v

Only `noble_down` is shared: each branch keeps its own frequencies, phases, mixes and up projection. To share the
bottleneck as well would be the branch of one fused projection, whose three outputs have r numbers between them.
Of the down projections' 3 r d parameters and 6 r d FLOPs a token two thirds are saved, and as much again backward.

The tensor belongs to the first of the group (the query), so that a file has it once. The product goes from the first
layer that is called to the others by a hand-off in Python: it counts for the very tensor it was made of, and a layer
that is given another one (keys of a cross-attention) makes its own. The results are therefore those of the formula,
whatever is called in which order.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.attention import SEPARATE


class SharedDown:
    """The product of a group's down projection with its input.

    Args:
        owner: the layer that has `noble_down`.
        size: layers of the group, places 0 to size - 1.
    """

    def __init__(self, owner: nn.Module, size: int) -> None:
        self.owner, self.size = owner, size
        # (x, how it was made, x in the products' type, h, places served) from the first layer to the last one. One
        # tuple, read once and replaced whole: threads that share a model never see half of another's.
        self._held: tuple[Tensor, tuple[Any, ...], Tensor, Tensor, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: never the tensors of a forward pass."""
        return {"owner": self.owner, "size": self.size, "_held": None}

    def product(self, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """x (..., d_in), cast where autocast does, and h (..., r); made anew unless another place has just done so."""
        down: Any = self.owner.noble_down
        held, how = self._held, circumstances(x, down)
        if held is None or held[0] is not x or held[1] != how or held[4] >> place & 1:
            cast, matrix = x, down
            device = x.device.type
            if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
                cast, matrix = (each.to(torch.get_autocast_dtype(device)) for each in (x, down))
            held = (x, how, cast, F.linear(cast, matrix), 0)
        served = held[4] | 1 << place
        self._held = None if served == (1 << self.size) - 1 else (*held[:4], served)
        return held[2], held[3]


def circumstances(x: Tensor, down: Tensor) -> tuple[Any, ...]:
    """What a product also depends on beside the identity of x."""
    if torch.compiler.is_compiling():
        return (torch.is_grad_enabled(),)  # one pass; nothing is held from one to the next
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    versions = [None if each.is_inference() else each._version for each in (x, down)]
    return (torch.is_grad_enabled(), autocast, id(down), *versions)


def qkv_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Groups of query, key and value projections, in this order, that stand in one attention: at least two of them.

    Args:
        names: whole names of linears.
    """
    known = set(names)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    groups = []
    for parent in parents:
        for query in SEPARATE:
            word = "query" if "query" in query else "q"
            others = ("key", "value") if word == "query" else ("k", "v")
            trio = (query, *(query.replace(word, other) for other in others))
            found = tuple(name for own in trio if (name := f"{parent}.{own}" if parent else own) in known)
            if len(found) > 1:
                groups.append(found)
    return groups


def checked_groups(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """`qkv_groups` of linears that can share.

    Args:
        shapes: (d_in, d_out) by name.

    Raises:
        UserError: there is no group, or its members read inputs of different widths.
    """
    groups = qkv_groups(shapes)
    if not groups:
        raise UserError(
            "share_down='qkv' needs separate query, key and value projections among the linears to swap, and there are "
            "none; a fused one (c_attn, qkv) has a single down projection anyway: leave share_down out"
        )
    for group in groups:
        widths = {name: shapes[name][0] for name in group}
        if len(set(widths.values())) > 1:
            read = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise UserError(f"share_down='qkv' needs one input, and these read different widths: {read}; use exclude=")
    return groups


def share(layers: Sequence[Any]) -> None:
    """Makes one down projection, the first layer's, serve all; to be called before anything is drawn."""
    shared = SharedDown(layers[0], len(layers))
    for place, layer in enumerate(layers):
        layer.noble_shared, layer.noble_place = shared, place
        if place:
            layer.noble_down = None
