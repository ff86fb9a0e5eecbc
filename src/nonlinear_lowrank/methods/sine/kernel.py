"""Sine deltas of a weight on NVIDIA GPUs (sine_lowrank.txt, equation (3)): W + D in one pass, dU and dV in one more.

Shapes: up (m, r), down (r, n), weight and the gradient of the sum (m, n) with any strides, so that a weight stored
(n, m) is read as it lies. m = d_out, n = d_in; D = amplitude * sin(omega * up @ down).

`form_kernel` rounds W + D (or D alone) once into a buffer that the caller gives; for sine-DoRA it first walks over its
rows for their norms. In `gradient_kernel` every program owns a block of columns and some rows, keeps its part of d down
in registers, and writes one partial d up for each row tile. No atomics; one sum over parts in a fixed order.

Product, phase and sine are float32: for a 16-bit weight three TF32 products ("tf32x3": 22 of float32's 24 bits), for
a float32 weight float32 multiply-adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nonlinear_lowrank.ops.kernels import processors
from nonlinear_lowrank.ops.sine import SineFactors
from nonlinear_lowrank.ops.triton import Variant, cosine, power_of_2, sine

RANK = 256
"""The largest rank these kernels take: a row tile of `up` stays in registers."""


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
def gradient_kernel(gradient, up, down, weight, ratios, dup, ddown, projection, m, n, g_row, g_column, row_stride,
                    column_stride, omega, amplitude, R: tl.constexpr, BR: tl.constexpr, DORA: tl.constexpr,
                    FAST: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr,
                    BN: tl.constexpr):  # fmt: skip
    """Parts of d up (column blocks, m, r), d down (row shares, r, n) and, with DORA, of direction . gradient."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BR)
    d = tl.load(down + k[:, None] * n + columns[None, :], mask=(k < R)[:, None] & (columns < n)[None, :], other=0.0)
    d = d.to(tl.float32)
    dd = tl.zeros([BR, BN], tl.float32)
    block = tl.program_id(0).to(tl.int64)
    for tile in range(tl.program_id(1), tl.cdiv(m, BM), tl.num_programs(1)):
        rows = tile * BM + tl.arange(0, BM)
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        some = (rows < m)[:, None] & (k < R)[None, :]
        u = tl.load(up + rows[:, None] * R + k[None, :], mask=some, other=0.0).to(tl.float32)
        phase = tl.dot(u * omega, d, input_precision=PRECISION)
        g = _weight(gradient, rows, columns, inside, g_row, g_column)  # zero outside
        if DORA:
            direction = amplitude * sine(phase, FAST) + _weight(
                weight, rows, columns, inside, row_stride, column_stride
            )
            tl.store(projection + block * m + rows, tl.sum(direction * g, 1), mask=rows < m)
            g *= tl.load(ratios + rows, mask=rows < m, other=0.0)[:, None]
        dphase = cosine(phase, FAST) * g
        du = tl.dot(dphase, tl.trans(d), input_precision=SUMS)
        tl.store(dup + block * m * R + rows.to(tl.int64)[:, None] * R + k[None, :], du, mask=some)
        dd = tl.dot(tl.trans(u), dphase, dd, input_precision=SUMS)
    place = ddown + tl.program_id(1).to(tl.int64) * R * n + k[:, None] * n + columns[None, :]
    tl.store(place, dd, mask=(k < R)[:, None] & (columns < n)[None, :])


def _accuracy(rank: int, dtype: torch.dtype) -> dict[str, object]:
    wide = dtype == torch.float32
    return {"R": rank, "FAST": not wide, "PRECISION": "ieee" if wide else "tf32x3"}


def form_variant(rank: int, dtype: torch.dtype, *, base: bool, dora: bool) -> Variant:
    """Return `form_kernel` as it is launched; dtype is the weight's (out's where there is none)."""
    constants = _accuracy(rank, dtype) | {"BR": min(power_of_2(rank, 16), 32), "BASE": base, "DORA": dora}
    constants |= {"BM": 16 if dora else 64, "BN": 64}
    return Variant("sine weight", form_kernel, constants, 4 if dora else 8, 1, 1 if dtype != torch.float32 else 0)


def gradient_variant(rank: int, dtype: torch.dtype, *, dora: bool) -> Variant:
    """Return `gradient_kernel` as it is launched; dtype is the gradient's."""
    block = power_of_2(rank, 16)
    shape = {"BR": block, "BM": 32 if dora or block > 64 else 64, "BN": 64 if block <= 128 else 32}
    # The phase is as exact as in forward. In the sums TF32's steps (2^-11) are a quarter of the 16-bit gradient's own.
    sums = "tf32" if dtype != torch.float32 else "ieee"
    constants = _accuracy(rank, dtype) | {"DORA": dora, "SUMS": sums} | shape
    return Variant("sine factors", gradient_kernel, constants, 8, 1, 3 if dtype != torch.float32 else 0)


def form(weight: Tensor | None, factors: SineFactors, *, base: bool, out: Tensor) -> Tensor | None:
    """Write W + D (D alone without base) into `out` (m, n); with a magnitude return ratio and norm (2, m)."""
    up, down, dora = factors.up, factors.down, factors.magnitude is not None
    (m, rank), n = up.shape, down.shape[1]
    ratios = up.new_empty(2, m if dora else 0, dtype=torch.float32)
    read = out if weight is None else weight
    variant = form_variant(rank, read.dtype, base=base, dora=dora)
    grid = triton.cdiv(m, variant.constants["BM"]), 1 if dora else triton.cdiv(n, variant.constants["BN"])
    length = ratios if factors.magnitude is None else factors.magnitude.float().contiguous()
    tensors = up.contiguous(), down.contiguous(), read, length, ratios, out
    numbers = *read.stride(), *out.stride(), factors.omega, factors.amplitude
    variant.launch(grid, *tensors, m, n, *numbers)
    return ratios if dora else None


def factor_gradients(
    gradient: Tensor, weight: Tensor | None, factors: SineFactors, ratios: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return d up (m, r), d down (r, n) and, with the ratios that `form` returned, d magnitude (m), in float32."""
    up, down = factors.up, factors.down
    (m, rank), n = up.shape, down.shape[1]
    read = gradient if weight is None else weight
    variant = gradient_variant(rank, gradient.dtype, dora=ratios is not None)
    blocks, tiles = triton.cdiv(n, variant.constants["BN"]), triton.cdiv(m, variant.constants["BM"])
    shares = max(1, min(tiles, triton.cdiv(4 * processors(up.device), blocks)))
    dup = up.new_empty(blocks, m, rank, dtype=torch.float32)
    ddown = up.new_empty(shares, rank, n, dtype=torch.float32)
    projection = up.new_empty(blocks, m if ratios is not None else 0, dtype=torch.float32)
    tensors = gradient, up.contiguous(), down.contiguous(), read, dup if ratios is None else ratios, dup, ddown
    numbers = *gradient.stride(), *read.stride(), factors.omega, factors.amplitude
    variant.launch((blocks, shares), *tensors, projection, m, n, *numbers)
    chain = factors.omega * factors.amplitude
    dmagnitude = None
    if ratios is not None:
        dmagnitude = torch.where(ratios[1] > 0, projection.sum(0) / ratios[1], 0.0)
    return dup.sum(0).mul_(chain), ddown.sum(0).mul_(chain), dmagnitude
