"""Number types of operators and plain formulas, and whether export traces; in modeling files too: torch alone."""

from collections.abc import Callable

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float32, or float64 where a tensor is."""
    has_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if has_double else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """Return it in float32 or wider: phases of low-precision arguments lose the cosine entirely."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


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


def kept_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what a module's `_apply` does to a tensor, with float32 for a cast to a 16-bit type."""
    narrow = torch.bfloat16, torch.float16

    def apply(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        narrowed = found.dtype in narrow and tensor.dtype not in narrow
        return tensor.to(found.device, torch.float32) if narrowed else found

    return apply


def exporting() -> bool:
    """Return whether `torch.export` is tracing.

    `torch.compiler.is_exporting` does the same, but in torch 2.11 is always true inside the compiler.
    """
    return torch.compiler._is_exporting_flag
