"""Sine deltas of a weight on NVIDIA GPUs (sine_lowrank.txt, equation (3)): W + D in one pass, dU and dV in one more.

Shapes: up (m, r), down (r, n), weight and the gradient of the sum (m, n) with any strides, so that a weight stored
(n, m) is read as it lies. m = d_out, n = d_in; D = amplitude * sin(omega * up @ down).

`form_kernel` rounds W + D (or D alone) once into a buffer that the caller gives; for sine-DoRA it first walks over its
rows for their norms. `gradient_kernel` runs once for each factor: a program owns rows of it, keeps their gradient in
registers while it walks over the other dimension, alone or with others that sum up after it in a fixed order: no
atomics, and partial sums of at most m n / 8 bytes, or the gradient alone. The phase is made twice, which costs less
than partial sums of both in one pass, r / 16 numbers for each of the weight, to memory and back.

Product, phase and sine are float32: for a 16-bit weight three TF32 products ("tf32x3": 22 of float32's 24 bits), for
a float32 weight float32 multiply-adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nonlinear_lowrank.ops.kernels import processors
from nonlinear_lowrank.ops.sine import SineFactors
from nonlinear_lowrank.ops.triton import Variant, cdiv, cosine, power_of_2, sine

RANK = 64
"""The largest rank these kernels take: above, products are the larger part, and cuBLAS's are faster."""

SHARE = 32
"""Columns for each of r, at least, that a program sums over where several share a row: bounds their partial sums."""


@triton.jit
def _phase(up, down, rows, columns, m, n, omega, R: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """omega * up @ down of a tile. omega multiplies the factor, as the PyTorch code does."""
    phase = tl.zeros([BM, BN], tl.float32)
    for start in range(0, R, BR):
        k = start + tl.arange(0, BR)
        u = tl.load(up + rows[:, None] * R + k[None, :], mask=(rows < m)[:, None] & (k < R)[None, :], other=0.0)
        d = tl.load(down + k[:, None] * n + columns[None, :], mask=(k < R)[:, None] & (columns < n)[None, :], other=0.0)
        phase = tl.dot(u.to(tl.float32) * omega, d.to(tl.float32), phase, input_precision=PRECISION)
    return phase


@triton.jit
def _weight(weight, rows, columns, inside, row_stride, column_stride):
    place = weight + (rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def form_kernel(up, down, weight, magnitude, ratios, out, m, n, row_stride, column_stride, out_row, out_column, omega,
                amplitude, R: tl.constexpr, BR: tl.constexpr, BASE: tl.constexpr, DORA: tl.constexpr,
                FAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
    """Rows of W + D; without DORA a program forms a tile, with it all columns of its rows, and writes their ratios."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    start, end, step = tl.program_id(1) * BN, (tl.program_id(1) + 1) * BN, BN
    if DORA:
        start, end = 0, n
        squares = tl.zeros([BM, BN], tl.float32)
        for column in range(0, n, BN):
            columns = column + tl.arange(0, BN)
            inside = (rows < m)[:, None] & (columns < n)[None, :]
            delta = amplitude * sine(_phase(up, down, rows, columns, m, n, omega, R, BR, PRECISION, BM, BN), FAST)
            direction = delta + _weight(weight, rows, columns, inside, row_stride, column_stride)
            squares += tl.where(inside, direction * direction, 0.0)
        norm = tl.sqrt(tl.sum(squares, 1))
        length = tl.load(magnitude + rows, mask=rows < m, other=1.0).to(tl.float32)
        # a row of zeros has no direction and stays as it is
        ratio = tl.where(norm > 0, length / tl.where(norm > 0, norm, 1.0), 1.0)
        tl.store(ratios + rows, ratio, mask=rows < m)
        tl.store(ratios + m + rows, norm, mask=rows < m)
    for column in range(start, end, step):
        columns = column + tl.arange(0, BN)
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        value = amplitude * sine(_phase(up, down, rows, columns, m, n, omega, R, BR, PRECISION, BM, BN), FAST)
        if DORA:
            base = _weight(weight, rows, columns, inside, row_stride, column_stride)
            value = ratio[:, None] * value + base * (ratio[:, None] - 1.0)
        if BASE:
            value += _weight(weight, rows, columns, inside, row_stride, column_stride)
        place = out + (rows.to(tl.int64)[:, None] * out_row + columns.to(tl.int64)[None, :] * out_column)
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(gradient, own, other, weight, ratios, parts, projection, m, n, g_row, g_column, row_stride,
                    column_stride, own_row, own_k, other_k, other_column, omega, amplitude, R: tl.constexpr,
                    BR: tl.constexpr, BK: tl.constexpr, OF_DOWN: tl.constexpr, DORA: tl.constexpr, FAST: tl.constexpr,
                    PRECISION: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Parts (column shares, own's shape) of d own (m, r); with DORA and for `up` of direction . gradient (shares, m).

    OF_DOWN: all matrices are read transposed, so that `own` is down.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BR)
    some = (rows < m)[:, None] & (k < R)[None, :]
    at = rows[:, None] * own_row + k[None, :] * own_k
    total = tl.zeros([BM, BR], tl.float32)
    projected = tl.zeros([BM], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(n, BN), tl.num_programs(1)):
        columns = tile * BN + tl.arange(0, BN)
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        phase = tl.zeros([BM, BN], tl.float32)
        for start in tl.static_range(0, BR, BK):
            i = start + tl.arange(0, BK)
            near = (rows < m)[:, None] & (i < R)[None, :]
            far = (i < R)[:, None] & (columns < n)[None, :]
            o = tl.load(own + rows[:, None] * own_row + i[None, :] * own_k, mask=near, other=0.0).to(tl.float32)
            p = tl.load(other + i[:, None] * other_k + columns[None, :] * other_column, mask=far, other=0.0)
            if OF_DOWN:  # forward multiplies `up` by omega
                phase = tl.dot(o, p.to(tl.float32) * omega, phase, input_precision=PRECISION)
            else:
                phase = tl.dot(o * omega, p.to(tl.float32), phase, input_precision=PRECISION)
        g = _weight(gradient, rows, columns, inside, g_row, g_column)  # zero outside
        if DORA:
            if OF_DOWN:
                g *= tl.load(ratios + columns, mask=columns < n, other=0.0)[None, :]
            else:
                base = _weight(weight, rows, columns, inside, row_stride, column_stride)
                projected += tl.sum((amplitude * sine(phase, FAST) + base) * g, 1)
        there = (k < R)[:, None] & (columns < n)[None, :]
        f = tl.load(other + k[:, None] * other_k + columns[None, :] * other_column, mask=there, other=0.0)
        total = tl.dot(cosine(phase, FAST) * g, tl.trans(f.to(tl.float32)), total, input_precision=SUMS)
    share = tl.program_id(1).to(tl.int64)
    if DORA and not OF_DOWN:
        tl.store(projection + share * m + rows, projected, mask=rows < m)
        total *= tl.load(ratios + rows, mask=rows < m, other=0.0)[:, None]
    tl.store(parts + share * m * R + at, total, mask=some)


def _accuracy(rank: int, dtype: torch.dtype) -> dict[str, object]:
    wide = dtype == torch.float32
    return {"R": rank, "FAST": not wide, "PRECISION": "ieee" if wide else "tf32x3"}


def form_variant(rank: int, dtype: torch.dtype, *, base: bool, dora: bool) -> Variant:
    """Return `form_kernel` as it is launched; dtype is the weight's (out's where there is none)."""
    constants = _accuracy(rank, dtype) | {"BR": min(power_of_2(rank, 16), 32), "BASE": base, "DORA": dora}
    constants |= {"BM": 16 if dora else 32, "BN": 128}
    return Variant("sine weight", form_kernel, constants, 8 if dora else 4, 1, 1 if dtype != torch.float32 else 0)


def gradient_variant(rank: int, dtype: torch.dtype, *, of_down: bool, dora: bool) -> Variant:
    """Return `gradient_kernel` as it is launched; dtype is the gradient's."""
    block = power_of_2(rank, 16)
    # The fastest on an H200 at r = 32 and 64 of those that spill nowhere.
    columns = 64 if block == 64 and dtype != torch.float32 else 32
    shape = {"BR": block, "BK": min(block, 32), "BM": 128, "BN": columns}
    # The phase is as exact as in forward. In the sums TF32's steps (2^-11) are a quarter of the 16-bit gradient's own.
    sums = "tf32" if dtype != torch.float32 else "ieee"
    constants = _accuracy(rank, dtype) | {"OF_DOWN": of_down, "DORA": dora, "SUMS": sums} | shape
    return Variant("sine factors", gradient_kernel, constants, 8, 1, 2 if dtype != torch.float32 else 0)


def form(weight: Tensor | None, factors: SineFactors, *, base: bool, out: Tensor) -> Tensor | None:
    """Write W + D (D alone without base) into `out` (m, n); with a magnitude return ratio and norm (2, m)."""
    up, down, dora = factors.up, factors.down, factors.magnitude is not None
    (m, rank), n = up.shape, down.shape[1]
    ratios = up.new_empty(2, m if dora else 0, dtype=torch.float32)
    read = out if weight is None else weight
    variant = form_variant(rank, read.dtype, base=base, dora=dora)
    grid = cdiv(m, variant.constants["BM"]), 1 if dora else cdiv(n, variant.constants["BN"])
    length = ratios if factors.magnitude is None else factors.magnitude.float().contiguous()
    tensors = up.contiguous(), down.contiguous(), read, length, ratios, out
    numbers = *read.stride(), *out.stride(), factors.omega, factors.amplitude
    variant.launch(grid, *tensors, m, n, *numbers)
    return ratios if dora else None


def factor_gradients(
    gradient: Tensor, weight: Tensor | None, factors: SineFactors, ratios: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return d up (m, r), d down (r, n) and, with the ratios that `form` returned, d magnitude (m), in float32."""
    up, down = factors.up.contiguous(), factors.down.contiguous()
    read = gradient if weight is None else weight
    dup, projection = _factor_gradient(gradient, up, down, read, factors, ratios, of_down=False)
    ddown, _ = _factor_gradient(gradient.t(), down.t(), up.t(), read.t(), factors, ratios, of_down=True)
    dmagnitude = None
    if ratios is not None:
        dmagnitude = torch.where(ratios[1] > 0, projection / ratios[1], 0.0)
    return dup, ddown.t(), dmagnitude


def _factor_gradient(
    gradient: Tensor, own: Tensor, other: Tensor, read: Tensor, factors: SineFactors, ratios: Tensor | None, *,
    of_down: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of `own` (m, r), strided as it is, and of `up` direction . gradient (m)."""
    (m, rank), n, dora = own.shape, other.shape[1], ratios is not None
    variant = gradient_variant(rank, gradient.dtype, of_down=of_down, dora=dora)
    blocks, tiles = cdiv(m, variant.constants["BM"]), cdiv(n, variant.constants["BN"])
    most = max(1, min(tiles, n // (SHARE * rank)))
    shares = min(most, cdiv(4 * processors(own.device), blocks))
    parts = torch.empty((shares, *own.t().shape) if of_down else (shares, *own.shape), device=own.device)
    projection = torch.empty(shares, m if dora and not of_down else 0, device=own.device)
    tensors = gradient, own, other, read, parts if ratios is None else ratios, parts, projection
    strides = *gradient.stride(), *read.stride(), *own.stride(), *other.stride()
    variant.launch((blocks, shares), *tensors, m, n, *strides, factors.omega, factors.amplitude)
    total = (parts.sum(0) if shares > 1 else parts[0]).mul_(factors.omega * factors.amplitude)
    return total.t() if of_down else total, projection.sum(0)
