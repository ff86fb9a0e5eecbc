"""Choice and calls of the kernels of `kernel`. `up` is the other factor of the gated form, None for R(x) alone."""

from types import ModuleType

import torch
from torch import Tensor

from nonlinear_lowrank.ops.kernels import kernels, reshaped

from .ratio import Ratio


def opaque(x: Tensor) -> bool:
    """Return whether torch.compile is to see this as one call; Inductor fuses the PyTorch code elsewhere."""
    return torch.compiler.is_compiling() and x.is_cuda and torch.version.cuda is not None


def kernel(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the module of kernels where all tensors are its own to read."""
    given = [each for each in others if each is not None]
    same = all(each.dtype == x.dtype for each in given if each.shape == x.shape)
    return kernels("rational", x, *given) if same and not torch.compiler.is_compiling() else None


def on_gpu(fast: ModuleType, x: Tensor, up: Tensor | None, ratio: Ratio) -> Tensor:
    """Return R(x), times up where given, by the kernel."""
    rows = [None if each is None else fast.plain_rows(each, x.shape[-1]) for each in (x, up)]
    return reshaped(fast.forward(*rows, *_coefficients(ratio), ratio.form, ratio.limits), x.shape)


def gradients_on_gpu(
    fast: ModuleType, dy: Tensor, x: Tensor, up: Tensor | None, ratio: Ratio, sums: bool
) -> list[Tensor | None]:
    """Return gradients of x, up, numerator, denominator by the kernel; the last two None without `sums`."""
    rows = [None if each is None else fast.plain_rows(each, x.shape[-1]) for each in (dy, x, up)]
    dx, dup, da, db = fast.backward(*rows, *_coefficients(ratio), ratio.form, ratio.limits, coefficients=sums)
    if db is not None and ratio.form == "sum_of_abs":
        db = torch.where(ratio.denominator < 0, -db, db)
    return [
        dx.view(x.shape),
        None if dup is None else dup.view(x.shape),
        None if da is None else da.to(ratio.numerator.dtype),
        None if db is None else db.to(ratio.denominator.dtype),
    ]


def _coefficients(ratio: Ratio) -> tuple[Tensor, Tensor]:
    a, b = ratio.numerator.float().contiguous(), ratio.denominator.float().contiguous()
    return a, b.abs() if ratio.form == "sum_of_abs" else b
