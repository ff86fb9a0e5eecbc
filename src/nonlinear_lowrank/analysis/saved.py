"""Bytes saved for backward: distinct storages that autograd holds when a forward pass has ended.

Storages are told apart by `untyped_storage()._cdata`, which also works on meta and fake tensors (their data pointers
are all 0); a saved view counts as its whole storage. Parameters, buffers and autocast's copies of them are excluded: a
model has these anyhow. What a function keeps as attributes of its context counts; what `torch.utils.checkpoint`
computes again does not.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(kw_only=True)
class SavedStorage:
    """One block of memory that is saved for backward, and the result of `label()` when it was first saved."""

    nbytes: int
    dtype: torch.dtype
    label: str
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the tensors in it that were saved."""


def saved_bytes(function: Callable[..., Any], *args: Any, parameters: Iterable[Tensor] = (), **kwargs: Any) -> int:
    """Return the bytes that `function(*args, **kwargs)` saves for backward; see this file's docstring.

    Args:
        function: a module (its parameters and buffers are known) or any function, eager or compiled.
        *args: its arguments. Those that are saved count, like any other activation.
        parameters: further tensors to exclude, for functions that are not modules.
        **kwargs: its keyword arguments.
    """
    return sum(storage.nbytes for storage in saved_storages(function, *args, parameters=parameters, **kwargs))


def saved_storages(
    function: Callable[..., Any],
    *args: Any,
    parameters: Iterable[Tensor] = (),
    label: Callable[[], str] = str,
    **kwargs: Any,
) -> list[SavedStorage]:
    """Return the storages behind `saved_bytes`, in the order in which they were first saved."""
    excluded = list(parameters)
    if isinstance(function, nn.Module):
        excluded += [*function.parameters(), *function.buffers()]
    held: list[weakref.ref[_Held]] = []

    def pack(tensor: Tensor) -> "_Held":
        # Detached: a saved output holds its node, which holds what it saved, and would never die.
        holder = _Held(tensor.detach(), label())
        held.append(weakref.ref(holder))
        return holder

    known = {_key(tensor) for tensor in excluded}
    # A dispatch mode would make torch.compile fall back to eager, so it serves fake tensors alone, which
    # have no contents to compare.
    casts = _CastWatch(known) if any(_is_fake(tensor) for tensor in excluded) else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor), casts or nullcontext():
        result = function(*args, **kwargs)
    saved = [(holder.tensor, holder.label) for holder in (each() for each in held) if holder is not None]
    saved += [(tensor, "") for tensor in _kept_on_contexts(result)]
    storages: dict[int, SavedStorage] = {}
    for tensor, name in saved:
        key = _key(tensor)
        if key in known:
            continue
        if key not in storages and casts is None and _is_cast_copy(tensor, excluded):
            known.add(key)
            continue
        new = SavedStorage(nbytes=tensor.untyped_storage().nbytes(), dtype=tensor.dtype, label=name)
        storages.setdefault(key, new).shapes.append(tuple(tensor.shape))
    return list(storages.values())


@dataclass(eq=False)
class _Held:
    """Stand-in that autograd saves for a tensor; it is freed as soon as the graph lets go of it."""

    tensor: Tensor
    label: str


class _CastWatch(TorchDispatchMode):
    """Adds the storages of type-cast copies of known tensors to `known`, and keeps those copies alive."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.copies: list[Tensor] = []  # a freed storage's address could come again for an activation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _key(args[0]) in self.known:
            self.known.add(_key(result))
            self.copies.append(result)
        return result


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_fake(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor.data, FakeTensor)


def _is_cast_copy(tensor: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Return whether a saved tensor is a parameter in another floating type, by its contents."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    for parameter in parameters:
        if parameter.numel() != flat.numel() or parameter.dtype == flat.dtype or not parameter.is_floating_point():
            continue
        copy = parameter.detach().to(flat.dtype)
        layouts = [copy.reshape(-1), copy.t().reshape(-1)] if copy.ndim == 2 else [copy.reshape(-1)]
        if any(torch.equal(flat, layout) for layout in layouts):
            return True
    return False


def _kept_on_contexts(result: Any) -> Iterator[Tensor]:
    """Yield tensors that functions hold as attributes of their contexts, over the whole graph of the result."""
    pending = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            for value in vars(node).values():
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
