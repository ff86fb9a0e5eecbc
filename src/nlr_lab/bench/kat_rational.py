"""A rational activation as KAT's code computes it: what ours is measured against, and nothing else.

    R(x) = (a0 + a1 x + ... + a5 x^5) / (1 + |b1| |x| + ... + |b4| |x|^4)        by groups of channels

On an NVIDIA GPU it is that code's way: one kernel each way, and in backward every element adds its share to its
group's gradients in memory by an atomic operation, so that sums of one run differ from the next. Elsewhere it is that
code's other way: all powers of x are stacked, in autograd's sight.
"""

import torch
from torch import Tensor

from nonlinear_lowrank.ops.kernels import kernels


def kat_rational(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return R(x).

    Args:
        x: (..., C).
        numerator: (G, 6).
        denominator: (G, 4), b1 first.

    Returns:
        (..., C) in the type of x.
    """
    if not torch.compiler.is_compiling() and kernels("rational", x, numerator, denominator) is not None:
        return _Kernel.apply(x, numerator, denominator)
    groups = numerator.shape[0]
    z = x.float().unflatten(-1, (groups, -1))
    powers = torch.stack([z**k for k in range(numerator.shape[1])], -1)
    above = (powers * numerator[:, None]).sum(-1)
    below = 1 + (powers[..., 1:5].abs() * denominator.abs()[:, None]).sum(-1)
    return (above / below).flatten(-2).to(x.dtype)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(x, numerator, denominator):
        from . import kat_kernel  # imports triton

        return kat_kernel.forward(x, numerator, denominator)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        from . import kat_kernel

        return kat_kernel.backward(dy, *ctx.saved_tensors)
