"""Triton kernels of KAT's way (`op.kat_rational`): an atomic addition for every element and coefficient."""

import torch
import triton
import triton.language as tl

BLOCK = 256


class KatRational(torch.autograd.Function):
    """R(x) (..., C) in the type of x, of numerators (G, 6) and denominators (G, 4)."""

    @staticmethod
    def forward(ctx, x, numerator, denominator):
        x, numerator, denominator = x.contiguous(), numerator.contiguous(), denominator.contiguous()
        ctx.save_for_backward(x, numerator, denominator)
        y = torch.empty_like(x)
        sizes = x.numel(), x.shape[-1], x.shape[-1] // numerator.shape[0]
        _forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, numerator, denominator, y, *sizes, BLOCK)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, numerator, denominator = ctx.saved_tensors
        dx, da, db = torch.empty_like(x), torch.zeros_like(numerator), torch.zeros_like(denominator)
        sizes = x.numel(), x.shape[-1], x.shape[-1] // numerator.shape[0]
        given = dy.contiguous(), x, numerator, denominator
        _backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](*given, dx, da, db, *sizes, BLOCK)
        return dx, da, db


@triton.jit
def _forward_kernel(x_ptr, a_ptr, b_ptr, y_ptr, size, channels, width, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    group = (index % channels) // width
    x = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    a, b = a_ptr + group * 6, b_ptr + group * 4
    p = tl.load(a + 5)
    for k in tl.static_range(4, -1, -1):
        p = p * x + tl.load(a + k)
    size_x = tl.abs(x)
    q = tl.abs(tl.load(b + 3))
    for k in tl.static_range(2, -1, -1):
        q = q * size_x + tl.abs(tl.load(b + k))
    tl.store(y_ptr + index, p / (1.0 + q * size_x), mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, a_ptr, b_ptr, dx_ptr, da_ptr, db_ptr,
    size, channels, width, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    group = (index % channels) // width
    x = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + index, mask, other=0.0).to(tl.float32)
    a, b = a_ptr + group * 6, b_ptr + group * 4
    p = tl.load(a + 5)
    dp_dx = tl.zeros_like(x)
    for k in tl.static_range(4, -1, -1):
        dp_dx = dp_dx * x + p
        p = p * x + tl.load(a + k)
    size_x = tl.abs(x)
    inner = tl.abs(tl.load(b + 3))
    slope = tl.zeros_like(x)
    for k in tl.static_range(2, -1, -1):
        slope = slope * size_x + inner
        inner = inner * size_x + tl.abs(tl.load(b + k))
    slope = slope * size_x + inner
    q = 1.0 + inner * size_x
    sign = tl.where(x < 0, -1.0, 1.0)
    above = dy / q
    below = -above * p / q
    tl.store(dx_ptr + index, above * dp_dx + below * slope * sign, mask)
    power = above
    for k in tl.static_range(0, 6):
        tl.atomic_add(da_ptr + group * 6 + k, power, mask)
        power = power * x
    power = below * size_x
    for k in tl.static_range(0, 4):
        value = tl.load(b + k)
        tl.atomic_add(db_ptr + group * 4 + k, tl.where(value < 0, -power, power), mask)
        power = power * size_x
