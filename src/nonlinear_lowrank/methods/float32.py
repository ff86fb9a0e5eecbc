"""Tensors that stay float32 in a model that is cast to a 16-bit type."""

from collections.abc import Callable

import torch
from torch import Tensor


def kept_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what a module's `_apply` does to a tensor, without casts from float32 to a 16-bit type."""

    def apply(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        narrowed = found.dtype in (torch.bfloat16, torch.float16) and tensor.dtype == torch.float32
        return tensor.to(found.device) if narrowed else found

    return apply
