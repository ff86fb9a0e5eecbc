"""How NOBLE's up projection gets into the output: two forms of one sum.

    "accumulated"   y = x W^T, then y += u up^T in place      y is read and written once more
    "joined"        y = [x | u] [W | up]^T                    x and W are written once more, beside u and up

T tokens, d_in, d_out, rank r; u (T, r). By the numbers each form reads and writes, "joined" moves less where

    d_in + r < T d_out / (T + d_out)

that is, where a layer widens and the batch is large: a gate or up projection, never a square or a narrowing one. It
also rounds y once, not twice, in 16 bits. It is taken on NVIDIA GPUs in training alone: elsewhere products are bound
by arithmetic, and without gradients a branch whose up projection is zero has to leave the plain output to the bit,
which a product of another inner width does not promise.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .forced import forced

UpForm = Literal["accumulated", "joined"]

MEASURED: dict[tuple[int, int, int, int], UpForm] = {}
"""(tokens, d_in, d_out, r) -> the faster form, where a GPU's clock and the count of numbers disagree. Filled from the
part "forms" of benchmarks/gpu.py; empty: not measured yet."""

_FORCED: ContextVar[UpForm | None] = ContextVar("nonlinear_lowrank_up_form", default=None)


def use_up_form(form: UpForm | None) -> AbstractContextManager[None]:
    """Inside it the forward of NOBLE layers in training is of this form, on any device; None: as chosen.

    Raises:
        UserError: there is no such form.
    """
    return forced(_FORCED, form, get_args(UpForm), "an up projection")


def numbers_moved(form: UpForm, tokens: int, d_in: int, d_out: int, rank: int) -> int:
    """How many numbers the products and copies of a form read and write, each operand counted once a product."""
    if form == "accumulated":
        main = tokens * d_in + d_out * d_in + tokens * d_out
        return main + tokens * rank + d_out * rank + 2 * tokens * d_out
    return 3 * (tokens + d_out) * (d_in + rank) + tokens * d_out  # the copies' read and write, the product's read


def main_plus_up(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None, u_TR: Tensor, up: Tensor, *, training: bool
) -> Tensor:
    """`x weight^T + bias + u up^T` without autograd, in the form chosen for these sizes: (T, d_out)."""
    sizes = (*x_TI.shape, *up.shape)
    if training and chosen_form(*sizes, device=x_TI.device.type, dtype=x_TI.dtype) == "joined":
        return F.linear(torch.cat((x_TI, u_TR), dim=1), torch.cat((weight, up), dim=1), bias)
    return F.linear(x_TI, weight, bias).addmm_(u_TR, up.t())


def chosen_form(tokens: int, d_in: int, d_out: int, rank: int, *, device: str, dtype: torch.dtype) -> UpForm:
    """The form of one forward in training.

    Args:
        tokens: rows of x.
        d_in: columns of x.
        d_out: columns of y.
        rank: columns of u.
        device: a device's type, e.g. "cuda".
        dtype: of x. In 16 bits rows must be multiples of 16 bytes for the matrix units.
    """
    if (named := _FORCED.get()) is not None:
        return named
    if device != "cuda" or (dtype.itemsize * (d_in + rank)) % 16:
        return "accumulated"
    if (measured := MEASURED.get((tokens, d_in, d_out, rank))) is not None:
        return measured
    sizes = (tokens, d_in, d_out, rank)
    return "joined" if numbers_moved("joined", *sizes) < numbers_moved("accumulated", *sizes) else "accumulated"
