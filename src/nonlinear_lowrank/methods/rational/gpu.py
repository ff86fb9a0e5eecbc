"""When the kernels of `kernel` are used, and how. `up` is the other factor of the gated form, None for R(x) alone."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nonlinear_lowrank.ops.kernels import kernels, reshaped


def opaque(x: Tensor) -> bool:
    """Return whether torch.compile is to see this as one call; Inductor fuses the PyTorch code elsewhere."""
    return torch.compiler.is_compiling() and x.is_cuda and torch.version.cuda is not None


def kernel(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the module of kernels where all tensors are its own to read."""
    given = [each for each in others if each is not None]
    same = all(each.dtype == x.dtype for each in given if each.shape == x.shape)
    return kernels("rational", x, *given) if same and not torch.compiler.is_compiling() else None


def on_gpu(
    fast: ModuleType,
    x: Tensor,
    up: Tensor | None,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: Sequence[float] | None,
) -> Tensor:
    """R(x), times up where given, by the kernel."""
    rows = [None if each is None else fast.plain_rows(each, x.shape[-1]) for each in (x, up)]
    y_TC = fast.forward(*rows, *_coefficients(numerator, denominator, form), form, limits)
    return reshaped(y_TC, x.shape)


def gradients_on_gpu(
    fast: ModuleType,
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: Sequence[float] | None,
    sums: bool,
) -> list[Tensor | None]:
    """Gradients of x, up, numerator, denominator by the kernel; the last two None without `sums`."""
    rows = [None if each is None else fast.plain_rows(each, x.shape[-1]) for each in (dy, x, up)]
    coefficients = _coefficients(numerator, denominator, form)
    dx, dup, da, db = fast.backward(*rows, *coefficients, form, limits, coefficients=sums)
    if db is not None and form == "sum_of_abs":
        db = torch.where(denominator < 0, -db, db)
    return [
        dx.view(x.shape),
        None if dup is None else dup.view(x.shape),
        None if da is None else da.to(numerator.dtype),
        None if db is None else db.to(denominator.dtype),
    ]


def _coefficients(numerator: Tensor, denominator: Tensor, form: str) -> tuple[Tensor, Tensor]:
    a, b = numerator.float().contiguous(), denominator.float().contiguous()
    return a, b.abs() if form == "sum_of_abs" else b
