"""What `rational` and `rational_gated` share on a GPU: when the kernels of `triton/rational.py` are used, and how.

In every function `up` is the other factor of the gated form, None for the plain activation; coefficients and limits
are rational.py's.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nonlinear_lowrank.ops.kernels import kernels
from nonlinear_lowrank.ops.reshaped import reshaped


def opaque(x: Tensor) -> bool:
    """Whether torch.compile shall see this as one call; Inductor fuses the PyTorch code on everything but NVIDIA."""
    return torch.compiler.is_compiling() and x.is_cuda and torch.version.cuda is not None


def kernel(x: Tensor, *others: Tensor) -> ModuleType | None:
    """`triton/rational.py` where all tensors are its own to read."""
    same = all(each.dtype == x.dtype for each in others if each.shape == x.shape)
    return kernels("rational", x, *others) if same and not torch.compiler.is_compiling() else None


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
    channels = x.shape[-1]
    rows = [None if each is None else fast.plain_rows(each, channels) for each in (x, up)]
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
    """Of x, up, numerator, denominator by the kernel; the last two None without `sums`."""
    channels = x.shape[-1]
    rows = [None if each is None else fast.plain_rows(each, channels) for each in (dy, x, up)]
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


def op_gradients(found: Sequence[Tensor | None], inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Gradients as the fakes promise them: contiguous, as the kernels' are; new empty tensors where not wanted.

    Args:
        found: of each input; None allowed where not wanted.
        inputs: whose types the empty tensors have.
        wanted: for each input.
    """
    listed = []
    for gradient, like, want in zip(found, inputs, wanted, strict=True):
        assert gradient is not None or not want
        listed.append(gradient.contiguous() if want and gradient is not None else like.new_empty(0))
    return listed


def _coefficients(numerator: Tensor, denominator: Tensor, form: str) -> tuple[Tensor, Tensor]:
    a, b = numerator.float().contiguous(), denominator.float().contiguous()
    return a, b.abs() if form == "sum_of_abs" else b
