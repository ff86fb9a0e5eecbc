"""How NOBLE's down projection is computed on NVIDIA GPUs: a product of its own, or in one kernel with the bottleneck.

    "separate"   h = x Wdown^T by cuBLAS, then h -> u in a kernel: h is written and read
    "fused"      x -> h, u in one kernel: h, which backward needs, is written and not read

T tokens, d_in, rank r. Fused, 2 T r bytes of 2 T (d_in + 3 r) are saved in 16 bits, 5 % at d_in = 1024 and r = 64, and
one launch; but a tile of tokens walks along d_in alone, where cuBLAS may divide the sum among processors. So it is
taken where a tile of tokens for every processor is there: in training and long prompts, not in decoding.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

from nonlinear_lowrank.ops.kernels import processors

from .forced import forced

DownForm = Literal["separate", "fused"]

TOKENS = 64
"""Of a tile of the fused kernel."""
RANK = 128
"""Up to here M and a tile of u fit a processor beside the product."""

MEASURED: dict[tuple[int, int, int], DownForm] = {}
"""(tokens, d_in, r) -> the faster form, where a GPU's clock and the rule disagree. Filled from the part "forms" of
benchmarks/gpu.py; empty: not measured yet."""

_FORCED: ContextVar[DownForm | None] = ContextVar("nonlinear_lowrank_down_form", default=None)


def use_down_form(form: DownForm | None) -> AbstractContextManager[None]:
    """Inside it the forward of NOBLE layers up to rank 128 is of this form, where kernels are used; None: as chosen.

    Raises:
        UserError: there is no such form.
    """
    return forced(_FORCED, form, get_args(DownForm), "a down projection")


def chosen_down_form(tokens: int, d_in: int, rank: int, *, device: torch.device, dtype: torch.dtype) -> DownForm:
    """The form of one forward.

    Args:
        tokens: rows of x.
        d_in: columns of x.
        rank: columns of h.
        device: of x.
        dtype: of x. A float32 product stays cuBLAS's, whose sums keep all of its bits.
    """
    if rank > RANK:
        return "separate"
    if (named := _FORCED.get()) is not None:
        return named
    if device.type != "cuda" or dtype.itemsize != 2 or (dtype.itemsize * d_in) % 16:
        return "separate"
    if (measured := MEASURED.get((tokens, d_in, rank))) is not None:
        return measured
    return "fused" if -(-tokens // TOKENS) >= processors(device) else "separate"
