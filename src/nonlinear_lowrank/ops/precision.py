"""The types in which operators compute, and whether their results are finite."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the tensor's device."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()  # a block takes time, and an exported program would have a call in its place
    return torch.autocast(device, enabled=False)


def all_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, by the least and the largest: no copy is made, and NaN is both."""
    if tensor.numel() == 0 or tensor.is_complex():
        return bool(tensor.isfinite().all())
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


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


def check_unrounded(tensor: Tensor, what: str) -> None:
    """Raise UserError where FSDP has rounded what is kept in float32: a phase of 30 rad would be off by 0.1 rad."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        raise UserError(
            f"FSDP has rounded {what} to 16 bits: use MixedPrecisionPolicy(param_dtype=torch.float32) and "
            "autocast, in torchtitan --training.mixed_precision_param float32"
        )
