"""Which tensors are computed by the Triton kernels, a method's `kernel.py`, and which by PyTorch.

Kernels run on NVIDIA GPUs of compute capability 8.0 or newer where triton can be imported (torch's CUDA builds bring
it). Everywhere else, and inside `use_kernels(False)`, the operators are PyTorch. The choice is made inside the
operators' bodies, so that what torch.compile traces on a machine without a GPU is the same.
"""

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

_ENABLED = ContextVar("nonlinear_lowrank_kernels", default=True)
_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def use_kernels(enabled: bool) -> Iterator[None]:
    """Inside it the kernels are used or not; they are by default. Backward runs by the setting of its own moment."""
    token = _ENABLED.set(enabled)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def kernels(name: str, *tensors: Tensor) -> ModuleType | None:
    """The module `methods.<name>.kernel`, or None where these tensors are PyTorch's.

    Args:
        name: "noble", "rational" or "sine".
        *tensors: what the kernel reads; all must be plain tensors (no DTensor, no fake one) of at most 32 bits on
            one NVIDIA GPU.
    """
    if not _ENABLED.get() or not tensors or not all(_fits(tensor) for tensor in tensors):
        return None
    return load(name) if _usable(tensors[0].device) else None


def load(name: str) -> ModuleType:
    """The module `methods.<name>.kernel`; imports triton."""
    return importlib.import_module(f"nonlinear_lowrank.methods.{name}.kernel")


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _fits(tensor: Tensor) -> bool:
    return (
        tensor.is_cuda and tensor.dtype in _KERNEL_TYPES and type(tensor) in (Tensor, torch.nn.Parameter)
    )  # subclasses have their own idea of what an op does


@functools.cache
def _usable(device: torch.device) -> bool:
    return (
        torch.version.cuda is not None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
