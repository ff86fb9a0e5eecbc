"""Shared by operators: the choice of how they run (kernels or PyTorch, one op or many), and custom ops.

Kernels, a method's `kernel.py`, run on NVIDIA GPUs of compute capability 8.0 or newer where triton can be imported
(torch's CUDA builds bring it). Everywhere else, and inside `use_kernels(False)`, the operators are PyTorch. The choice
is made inside the operators' bodies, so that what torch.compile traces on a machine without a GPU is the same.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

_SWITCHES: list[tuple[object, bool]] = [(None, True)]  # the default, then every open block's; the last one decides
_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def use_kernels(enabled: bool) -> Iterator[None]:
    """Use the kernels in the block, or do not; backward follows the setting at the time it runs.

    It holds for the whole process, since backward of a GPU's tensors runs in a thread of autograd's. Among open
    blocks, in any thread, the one entered last decides; a block that ends removes only its own setting.
    On a CPU NOBLE's backward follows its forward.
    """
    switch = (object(), enabled)
    _SWITCHES.append(switch)
    try:
        yield
    finally:
        _SWITCHES.remove(switch)


def enabled() -> bool:
    """Return whether `use_kernels` allows kernels here."""
    return _SWITCHES[-1][1]


def kernels(name: str, *tensors: Tensor) -> ModuleType | None:
    """Return the module `methods.<name>.kernel`, or None where PyTorch must handle these tensors.

    A kernel reads plain tensors (no DTensor, no fake one) of at most 32 bits on one NVIDIA GPU. Tensors there that wrap
    others are named in a warning, once a kind.
    """
    if not enabled():
        return None
    if not all(map(_fits, tensors)):
        for each in tensors:
            if each.is_cuda and is_traceable_wrapper_subclass(each):
                _warn_of_wrapped(name, type(each).__name__)
        return None
    return load(name) if _usable(tensors[0].device) else None


@functools.cache
def _warn_of_wrapped(name: str, kind: str) -> None:
    fix = "give them local tensors (DTensor.to_local())"
    warnings.warn(f"{name}: PyTorch's operators run, since kernels do not read {kind}; {fix}", stacklevel=3)


def load(name: str) -> ModuleType:
    """Return the module `methods.<name>.kernel`; imports triton."""
    return importlib.import_module(f"nonlinear_lowrank.methods.{name}.kernel")


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _fits(tensor: Tensor) -> bool:
    # Subclasses have their own idea of what an op does.
    return tensor.is_cuda and tensor.dtype in _KERNEL_TYPES and type(tensor) in (Tensor, torch.nn.Parameter)


@functools.cache
def _usable(device: torch.device) -> bool:
    return (
        torch.version.cuda is not None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def as_one_op() -> bool:
    """Return whether torch.compile or selective activation checkpointing is watching.

    The compiler would save other activations for backward. Selective checkpointing keeps the outputs of products, and
    refuses those that were changed in place afterwards, as a lean forward does.
    """
    if torch.compiler.is_compiling():
        return True
    modes = _get_current_dispatch_mode_stack()
    return bool(modes) and any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor that the caller made, and keeps no reference to, in another shape; no copy, no view to autograd.

    A view that leaves an `autograd.Function` refuses every in-place operation. `F.linear` with a bias returns one for
    an input of more than two dimensions, so its results pass through here too.
    """
    return torch.ops.aten._unsafe_view.default(result, shape)


def plain_rows(tensor: Tensor, columns: int) -> Tensor:
    """Return rows of `columns` numbers side by side; a copy only where a view does not do."""
    rows = tensor.reshape(-1, columns)
    return rows if rows.stride(1) == 1 or rows.numel() == 0 else rows.contiguous()


_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")


def custom_op(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an op that is opaque to torch.compile, for any device, and return it; autograd is the caller's.

    A plain registration: `torch.library.custom_op` wraps every call in checks that take longer than a small layer's
    elementwise part.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nonlinear_lowrank::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.nonlinear_lowrank, name).default
    return op


def filled(gradients: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return an op's gradients, a new empty tensor for each None: an op returns neither None nor one tensor twice."""
    return [like.new_empty(0) if each is None else each for each in gradients]


def fake_gradients(parameters: Sequence[Any], wanted: Sequence[bool], like: Tensor) -> list[Tensor]:
    """Return what `filled` returns, without numbers."""
    pairs = zip(parameters, wanted, strict=True)
    return filled([each.new_empty(each.shape) if want else None for each, want in pairs], like)
