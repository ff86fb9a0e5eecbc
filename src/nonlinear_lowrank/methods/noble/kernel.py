"""CosNet between its projections, c2 = cos(f2 * (M cos(f1 * h + p1)) + p2), on NVIDIA GPUs (noble.txt, (2)).

Shapes: h and every r-wide tensor (T, r); mix M (r, r); f1, p1, f2, p2 (r).

docs/kernels.md lists the kernels and when they run. Backward recomputes c1 and c2 from h in two kernels: a single one,
with M's gradient in registers, had small tiles and took three times as long at r = 128. Blocks are the fastest on
an H200, at 16,384 tokens, of those that do not spill. No atomics: every program writes its own partial sums, and one
sum over programs in a fixed order ends it, so two runs agree to the bit. Arguments of the cosine and all sums are
float32; c1 and the gradient of h2 are rounded to h's type, as the plain formula rounds them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nonlinear_lowrank.ops.triton import Variant, cdiv, cosine, power_of_2, sine

from .op import TILE, Branch


@triton.jit
def _vector(at, columns, R: tl.constexpr):
    """A vector of r numbers as a float32 row."""
    return tl.load(at + columns, mask=columns < R, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _tile(at, first, columns, T, R: tl.constexpr, BT: tl.constexpr):
    """Rows from `first` on and columns of a (T, r) matrix, zeros outside it. Offsets within a tile are 32 bits."""
    rows = tl.arange(0, BT)
    inside = (rows < T - first)[:, None] & (columns < R)[None, :]
    return tl.load(at + first.to(tl.int64) * R + (rows[:, None] * R + columns[None, :]), mask=inside, other=0.0)


@triton.jit
def _put(at, value, first, columns, T, R: tl.constexpr, BT: tl.constexpr):
    rows = tl.arange(0, BT)
    inside = (rows < T - first)[:, None] & (columns < R)[None, :]
    place = at + first.to(tl.int64) * R + (rows[:, None] * R + columns[None, :])
    tl.store(place, value.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _put_sums(sums, row: tl.constexpr, first, second, tile, columns, R: tl.constexpr):
    """Sum over the rows of two tiles, as rows `row` and `row + 1` of the token tile's four."""
    place = sums + (tile * 4 + row) * R + columns
    tl.store(place, tl.sum(first, 0), mask=columns < R)
    tl.store(place + R, tl.sum(second, 0), mask=columns < R)


@triton.jit
def _mixed(h, mix, f1, p1, first, columns, T, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           FAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Columns of h2 = M c1 (BT, BN), c1 made out of h block by block."""
    h2 = tl.zeros([BT, BN], tl.float32)
    for start in range(0, R, BK):
        k = start + tl.arange(0, BK)
        argument = _tile(h, first, k, T, R, BT).to(tl.float32) * _vector(f1, k, R) + _vector(p1, k, R)
        c1 = cosine(argument, FAST).to(h.dtype.element_ty)
        inside = (k < R)[:, None] & (columns < R)[None, :]
        m = tl.load(mix + columns[None, :] * R + k[:, None], mask=inside, other=0.0).to(h.dtype.element_ty)
        h2 = tl.dot(c1, m, h2, input_precision=PRECISION)
    return h2


@triton.jit
def forward_kernel(h, mix, f1, p1, f2, p2, c2, T, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * BT
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    h2 = _mixed(h, mix, f1, p1, first, columns, T, R, BT, BN, BK, FAST, PRECISION)
    value = cosine(h2 * _vector(f2, columns, R) + _vector(p2, columns, R), FAST)
    _put(c2, value, first, columns, T, R, BT)


@triton.jit
def down_kernel(x, down, mix, f1, p1, f2, p2, h, c2, T, D: tl.constexpr, R: tl.constexpr, BT: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """h = x Wdown^T and c2 for r <= BN; c1 and c2 come from h as stored, since backward recomputes them so."""
    first = tl.program_id(0) * BT
    columns = tl.arange(0, BN)
    total = tl.zeros([BT, BN], tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        inside = (k < D)[:, None] & (columns < R)[None, :]
        w = tl.load(down + columns[None, :] * D + k[:, None], mask=inside, other=0.0)
        total = tl.dot(_tile(x, first, k, T, D, BT), w, total, input_precision=PRECISION)
    stored = total.to(h.dtype.element_ty)
    _put(h, stored, first, columns, T, R, BT)
    argument = stored.to(tl.float32) * _vector(f1, columns, R) + _vector(p1, columns, R)
    c1 = cosine(argument, FAST).to(h.dtype.element_ty)
    square = (columns < R)[:, None] & (columns < R)[None, :]
    m = tl.load(mix + columns[None, :] * R + columns[:, None], mask=square, other=0.0).to(h.dtype.element_ty)
    h2 = tl.dot(c1, m, input_precision=PRECISION)
    value = cosine(h2 * _vector(f2, columns, R) + _vector(p2, columns, R), FAST)
    _put(c2, value, first, columns, T, R, BT)


@triton.jit
def outer_kernel(h, du, mix, f1, p1, f2, p2, c2, dh2, sums, T, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """c2, the gradient of h2, and each tile's sums for f2 and p2."""
    first = tl.program_id(0) * BT
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    h2 = _mixed(h, mix, f1, p1, first, columns, T, R, BT, BN, BK, FAST, PRECISION)
    outer = h2 * _vector(f2, columns, R) + _vector(p2, columns, R)
    _put(c2, cosine(outer, FAST), first, columns, T, R, BT)
    douter = -sine(outer, FAST) * _tile(du, first, columns, T, R, BT).to(tl.float32)
    _put(dh2, douter * _vector(f2, columns, R), first, columns, T, R, BT)
    _put_sums(sums, 2, douter * h2, douter, tl.program_id(0), columns, R)


@triton.jit
def inner_kernel(h, dh2, mix, f1, p1, c1, dh, sums, T, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """c1 (M's gradient needs it), dh, and each tile's sums for f1 and p1."""
    first = tl.program_id(0) * BT
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    dc1 = tl.zeros([BT, BN], tl.float32)
    for start in range(0, R, BK):
        k = start + tl.arange(0, BK)
        inside = (k < R)[:, None] & (columns < R)[None, :]
        m = tl.load(mix + k[:, None] * R + columns[None, :], mask=inside, other=0.0).to(h.dtype.element_ty)
        dc1 = tl.dot(_tile(dh2, first, k, T, R, BT), m, dc1, input_precision=PRECISION)
    h_wide = _tile(h, first, columns, T, R, BT).to(tl.float32)
    argument = h_wide * _vector(f1, columns, R) + _vector(p1, columns, R)
    _put(c1, cosine(argument, FAST), first, columns, T, R, BT)
    dargument = -sine(argument, FAST) * dc1
    _put(dh, dargument * _vector(f1, columns, R), first, columns, T, R, BT)
    _put_sums(sums, 0, dargument * h_wide, dargument, tl.program_id(0), columns, R)


def _variant(
    name: str, kernel: Any, rank: int, dtype: torch.dtype, shape: dict[str, int], stages: int, products: int
) -> Variant:
    # float32 as three products of 11-bit parts, which keep 22 of its 24 bits. One of TF32, also where the process
    # allows it, errs twice as much as cuBLAS's on an H200: triton cuts the numbers off and does not round.
    fast, precision = (False, "tf32x3") if dtype == torch.float32 else (True, "ieee")
    constants = {"R": rank, "FAST": fast, "PRECISION": precision, "BT": TILE} | shape
    return Variant(name, kernel, constants, 4, stages, products)


def _tiled(name: str, kernel: Any, rank: int, dtype: torch.dtype, widest: int) -> Variant:
    block = min(power_of_2(rank, 16), widest if dtype != torch.float32 else 64)
    shape = {"BN": block, "BK": min(block, 64 if dtype != torch.float32 else 32)}
    return _variant(name, kernel, rank, dtype, shape, 2, 1)


def forward_variant(rank: int, dtype: torch.dtype) -> Variant:
    """Return `forward_kernel` as it is launched."""
    return _tiled("cosnet forward", forward_kernel, rank, dtype, 256)


def down_variant(d_in: int, rank: int, dtype: torch.dtype) -> Variant:
    """Return `down_kernel` as it is launched."""
    shape = {"D": d_in, "BN": power_of_2(rank, 16), "BK": 64 if dtype != torch.float32 else 32}
    return _variant("cosnet with down", down_kernel, rank, dtype, shape, 4 if dtype != torch.float32 else 3, 2)


def backward_variants(rank: int, dtype: torch.dtype) -> tuple[Variant, Variant]:
    """Return `outer_kernel` and `inner_kernel` as they are launched."""
    return (
        _tiled("cosnet backward, outer", outer_kernel, rank, dtype, 64),
        _tiled("cosnet backward, inner", inner_kernel, rank, dtype, 64),
    )


def _grid(variant: Variant, tokens: int, rank: int) -> tuple[int, int]:
    return cdiv(tokens, TILE), cdiv(rank, variant.constants["BN"])


def forward(h: Tensor, branch: Branch) -> Tensor:
    """Return c2 (T, r) in h's type."""
    tokens, rank = h.shape
    c2 = torch.empty_like(h, memory_format=torch.contiguous_format)
    if h.numel():
        variant = forward_variant(rank, h.dtype)
        variant.launch(_grid(variant, tokens, rank), h.contiguous(), *_read(branch), c2, tokens)
    return c2


def down_forward(x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
    """Return h = x down^T and c2 of it, both (T, r) in x's type; x (T, d_in), r <= `op.FUSED_DOWN_RANK`."""
    assert branch.down is not None
    (tokens, d_in), rank = x.shape, branch.down.shape[0]
    h, c2 = (x.new_empty(tokens, rank) for _ in range(2))
    if h.numel():
        variant = down_variant(d_in, rank, x.dtype)
        variant.launch((cdiv(tokens, TILE),), x.contiguous(), branch.down.contiguous(), *_read(branch), h, c2, tokens)
    return h, c2


def backward(h: Tensor, du: Tensor, branch: Branch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return c2, dh, and the gradients of M, f1, f2, p1, p2 in their types; du is the gradient of c2."""
    tokens, rank = h.shape
    h, du, (mix, *vectors) = h.contiguous(), du.contiguous(), _read(branch)
    c2, dh = torch.empty_like(h), torch.empty_like(h)
    outer, inner = backward_variants(rank, h.dtype)
    grid = _grid(outer, tokens, rank)
    sums = h.new_empty(grid[0], 4, rank, dtype=torch.float32)
    c1, dh2 = torch.empty_like(h), torch.empty_like(h)
    if h.numel():
        outer.launch(grid, h, du, mix, *vectors, c2, dh2, sums, tokens)
        inner.launch(_grid(inner, tokens, rank), h, dh2, mix, *vectors[:2], c1, dh, sums, tokens)
    dmix = dh2.t() @ c1
    df1, dp1, df2, dp2 = sums.sum(0)
    parameters = (*branch.mixes, *branch.frequencies, *branch.phases)
    gradients = (dmix, df1, df2, dp1, dp2)
    return c2, dh, [each.to(like.dtype) for each, like in zip(gradients, parameters, strict=True)]


def _read(branch: Branch) -> list[Tensor]:
    """Return M, then f1, p1, f2, p2 in float32, as kernels read them."""
    (mix,), (f1, f2), (p1, p2) = branch.mixes, branch.frequencies, branch.phases
    return [mix.contiguous(), *(each.float().contiguous() for each in (f1, p1, f2, p2))]
