"""The types in which operators compute."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .kernels import exporting


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float32, or float64 where a tensor is."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the tensor's device."""
    device = tensor.device.type
    if device == "meta" or (exporting() and not torch.is_autocast_enabled(device)):
        return contextlib.nullcontext()  # an exported program would have a call in place of the block's formula
    return torch.autocast(device, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast gives a linear of this input, or None."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_input(x: Tensor) -> Tensor:
    """Return x in autocast's type: cast once, in front of an operator whose backward runs outside autocast."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


_PRECISION_LOCK = threading.Lock()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Form float32 products in float32 and not in TF32 or bfloat16, whatever the process has set."""
    backends: Any = torch.backends  # its modules are made at run time
    places = (backends.cuda.matmul, backends.mkldnn.matmul)
    with _PRECISION_LOCK:  # the settings are the process's, and backward has a thread for each device
        before = [each.fp32_precision for each in places]
        if all(each in ("none", "ieee") for each in before):
            yield
            return
        legacy = None
        with contextlib.suppress(RuntimeError):  # raised where only the newer interface was used
            legacy = torch.get_float32_matmul_precision()
        try:
            if legacy is not None:  # torch refuses to run where the two interfaces disagree
                torch.set_float32_matmul_precision("highest")
            for each in places:
                each.fp32_precision = "ieee"
            yield
        finally:
            if legacy is not None:
                torch.set_float32_matmul_precision(legacy)
            for each, value in zip(places, before, strict=True):
                each.fp32_precision = value


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right of wide matrices, in their own type."""
    with full_precision():
        return left @ right


def formula_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `product` as part of a plain formula, which the compiler may trace."""
    return left @ right if torch.compiler.is_compiling() else product(left, right)


def kept_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what a module's `_apply` does to a tensor, without casts from float32 to a 16-bit type."""

    def apply(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        narrowed = found.dtype in (torch.bfloat16, torch.float16) and tensor.dtype == torch.float32
        return tensor.to(found.device) if narrowed else found

    return apply
