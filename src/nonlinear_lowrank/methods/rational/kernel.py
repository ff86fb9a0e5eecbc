# ruff: noqa: RUF005 - triton's compiler adds tuples and does not unpack them
"""Grouped rational activations on NVIDIA GPUs: y = R(x), or y = R(gate) * up in one pass (nora.txt, (6)-(8)).

Anchored, y = f(x) + (R(x) - R0(x)), where PyTorch has formed f(x), and in backward dy f'(x): they come in up's place.
Shapes and the two denominators are those of `op`: x (T, C) rows with channels side by side (rows may lie
apart, as the halves of a fused projection do), coefficients (G, terms).

Between inputs and outputs everything is float32. A program adds up the coefficients' gradients in registers while it
walks over its tokens, writes one row of partial sums, and one sum over programs in a fixed order ends it: no atomics,
two runs agree to the bit. A block of channels lies within one group where groups are wide, and its coefficients are
scalars; where groups are narrow (down to one channel) every channel of the block has its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nonlinear_lowrank.ops.kernels import processors
from nonlinear_lowrank.ops.triton import Variant, cdiv, power_of_2

__all__ = ["backward", "forward"]

Limits = tuple[float, ...]
"""`LinearTails`."""
Base = tuple[Tensor, Tensor]
"""Coefficients of R0: (G, m + 1) and (G, n'), float32."""

NARROW = 32
"""Groups of fewer channels share their blocks with other groups."""


@triton.jit
def _coefficients(at, group, COUNT: tl.constexpr):
    """COUNT coefficients of a group (a scalar each) or of each channel's group (a row each), as a tuple."""
    found = ()
    for index in tl.static_range(COUNT):
        found = found + (tl.load(at + group * COUNT + index),)  # type: ignore[assignment]
    return found


@triton.jit
def _zeros(COUNT: tl.constexpr, NARROW_GROUPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, V: tl.constexpr):
    found = ()
    for _index in tl.static_range(COUNT):
        if NARROW_GROUPS:
            found = found + (tl.zeros([BT, BC], tl.float32),)  # type: ignore[assignment]
        else:
            found = found + (tl.zeros([BT * BC // V], tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def _polynomial(c, x):
    """Value and slope of c0 + c1 x + ... at x, by Horner's rule."""
    count: tl.constexpr = len(c)
    value = tl.zeros_like(x) + c[count - 1]
    slope = tl.zeros_like(x)
    for index in tl.static_range(1, count):
        slope = slope * x + value
        value = value * x + c[count - 1 - index]
    return value, slope


@triton.jit
def _add_moments(sums, weight, x, NARROW_GROUPS: tl.constexpr):
    """sums[k] + weight x^k, over the pieces of a wide group's tile; a power and a multiply-add for each k."""
    power = tl.full(x.shape, 1.0, tl.float32)
    found = ()
    for index in tl.static_range(len(sums)):
        if NARROW_GROUPS:
            found = found + (sums[index] + weight * power,)  # type: ignore[assignment]
        else:
            found = found + (sums[index] + tl.sum(weight * power, 1),)  # type: ignore[assignment]
        power = power * x
    return found


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def _ratio(x, a, b, SUM_OF_ABS: tl.constexpr):
    """P, P', 1 / Q, the slope of Q by x, and the two factors that take dL/dQ to Q's coefficients: a weight, a variable.

    With "sum_of_abs" b are sizes, and the first coefficient's power is 1.
    """
    p, p_slope = _polynomial(a, x)
    if SUM_OF_ABS:
        size = tl.abs(x)
        inner, inner_slope = _polynomial(b, size)
        inverse = 1.0 / (1.0 + inner * size)
        q_slope = (inner + inner_slope * size) * _sign(x)
        weight, variable = size, size
    else:
        inner, inner_slope = _polynomial(b, x)
        inverse = 1.0 / (1.0 + tl.abs(inner))
        weight, variable = _sign(inner), x
        q_slope = inner_slope * weight
    return p, p_slope, inverse, q_slope, weight, variable


@triton.jit
def _place(C, WIDTH: tl.constexpr, NARROW_GROUPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, V: tl.constexpr):
    """Rows and channels of this program's tiles, both broadcast to a tile; which channels exist; group or groups.

    A tile of a wide group is laid out as pieces of V neighbours, so that a thread that holds a piece adds it up by
    itself, and the coefficients' sums take a register each and not V.
    """
    block = tl.program_id(0)
    if NARROW_GROUPS:
        rows = tl.arange(0, BT)[:, None]
        channels = (block * BC + tl.arange(0, BC))[None, :]
        exist = channels < C
        group = tl.minimum(channels, C - 1) // WIDTH
    else:
        per_group: tl.constexpr = (WIDTH + BC - 1) // BC
        piece = tl.arange(0, BT * BC // V)
        rows = (piece // (BC // V))[:, None]
        group = block // per_group
        within = (block % per_group) * BC + ((piece % (BC // V)) * V)[:, None] + tl.arange(0, V)[None, :]
        channels = group * WIDTH + within
        exist = within < WIDTH
    return rows, channels, exist, group


@triton.jit
def _rows(at, first, stride, rows, channels, inside):
    """A tile of rows from `first` on, float32, zeros where it is not inside."""
    place = at + first.to(tl.int64) * stride + (rows * stride + channels)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(at, value, first, C, rows, channels, inside):
    tl.store(at + first.to(tl.int64) * C + (rows * C + channels), value.to(at.dtype.element_ty), mask=inside)


@triton.jit
def forward_kernel(x, up, a, b, a0, b0, y, T, C, x_stride, up_stride, low, high, low_slope, high_slope,
                   WIDTH: tl.constexpr, TERMS_A: tl.constexpr, TERMS_B: tl.constexpr, SUM_OF_ABS: tl.constexpr,
                   TAILS: tl.constexpr, GATED: tl.constexpr, ANCHORED: tl.constexpr, NARROW_GROUPS: tl.constexpr,
                   BT: tl.constexpr, BC: tl.constexpr, V: tl.constexpr):  # fmt: skip
    rows, channels, exist, group = _place(C, WIDTH, NARROW_GROUPS, BT, BC, V)
    above, below = _coefficients(a, group, TERMS_A), _coefficients(b, group, TERMS_B)
    if ANCHORED:
        above_base, below_base = _coefficients(a0, group, TERMS_A), _coefficients(b0, group, TERMS_B)
    for tile in range(tl.program_id(1), tl.cdiv(T, BT), tl.num_programs(1)):
        first = tile * BT
        inside = (rows < T - first) & exist
        z = _rows(x, first, x_stride, rows, channels, inside)
        value = _value(z, above, below, low, high, low_slope, high_slope, SUM_OF_ABS, TAILS, ANCHORED)
        if GATED:
            value = value * _rows(up, first, up_stride, rows, channels, inside)
        if ANCHORED:
            base = _value(z, above_base, below_base, low, high, low_slope, high_slope, SUM_OF_ABS, TAILS, ANCHORED)
            value = _rows(up, first, up_stride, rows, channels, inside) + (value - base)
        _put(y, value, first, C, rows, channels, inside)


@triton.jit
def _value(z, above, below, low, high, low_slope, high_slope, SUM_OF_ABS: tl.constexpr, TAILS: tl.constexpr,
           ANCHORED: tl.constexpr):  # fmt: skip
    """R(z)."""
    within = z
    if TAILS:
        within = tl.minimum(tl.maximum(z, low), high)
    p, _p_slope, inverse, _q_slope, _weight, _variable = _ratio(within, above, below, SUM_OF_ABS)
    if ANCHORED:  # no product, which would be contracted with the difference: equal coefficients have to leave zero
        value = tl.fma(p, inverse, tl.zeros_like(p))
    else:
        value = p * inverse
    if TAILS:
        value += low_slope * tl.minimum(z - low, 0.0) + high_slope * tl.maximum(z - high, 0.0)
    return value


@triton.jit
def backward_kernel(x, up, dy, a, b, a0, b0, dx, dup, sums, T, C, x_stride, up_stride, dy_stride, low, high, low_slope,
                    high_slope, WIDTH: tl.constexpr, TERMS_A: tl.constexpr, TERMS_B: tl.constexpr,
                    SUM_OF_ABS: tl.constexpr, TAILS: tl.constexpr, GATED: tl.constexpr, ANCHORED: tl.constexpr,
                    NARROW_GROUPS: tl.constexpr, COEFFICIENTS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                    V: tl.constexpr):  # fmt: skip
    """Write dx, dup, and with COEFFICIENTS the sums of this program: numerator's, then denominator's."""
    rows, channels, exist, group = _place(C, WIDTH, NARROW_GROUPS, BT, BC, V)
    above, below = _coefficients(a, group, TERMS_A), _coefficients(b, group, TERMS_B)
    if ANCHORED:
        above_base, below_base = _coefficients(a0, group, TERMS_A), _coefficients(b0, group, TERMS_B)
    da = _zeros(TERMS_A, NARROW_GROUPS, BT, BC, V)
    db = _zeros(TERMS_B, NARROW_GROUPS, BT, BC, V)
    for tile in range(tl.program_id(1), tl.cdiv(T, BT), tl.num_programs(1)):
        first = tile * BT
        inside = (rows < T - first) & exist
        z = _rows(x, first, x_stride, rows, channels, inside)
        slope_out = _rows(dy, first, dy_stride, rows, channels, inside)  # zero outside, and with it every sum
        if GATED:
            value = _value(z, above, below, low, high, low_slope, high_slope, SUM_OF_ABS, TAILS, ANCHORED)
            _put(dup, value * slope_out, first, C, rows, channels, inside)
            slope_out *= _rows(up, first, up_stride, rows, channels, inside)
        within = z
        if TAILS:
            within = tl.minimum(tl.maximum(z, low), high)
        p, p_slope, inverse, q_slope, weight, variable = _ratio(within, above, below, SUM_OF_ABS)
        dp = slope_out * inverse
        dq = -dp * p * inverse
        dz = dp * p_slope + dq * q_slope
        if ANCHORED:
            p, p_slope, inverse, q_slope, _weight, _variable = _ratio(within, above_base, below_base, SUM_OF_ABS)
            by_p = slope_out * inverse
            dz -= by_p * p_slope - by_p * p * inverse * q_slope
        if TAILS:
            dz = tl.where(z < low, slope_out * low_slope, tl.where(z > high, slope_out * high_slope, dz))
        if ANCHORED:
            dz += _rows(up, first, up_stride, rows, channels, inside)
        _put(dx, dz, first, C, rows, channels, inside)
        if COEFFICIENTS:
            da = _add_moments(da, dp, within, NARROW_GROUPS)
            db = _add_moments(db, dq * weight, variable, NARROW_GROUPS)
    if COEFFICIENTS:
        if NARROW_GROUPS:
            places = sums + (tl.program_id(1).to(tl.int64) * C + channels) * (TERMS_A + TERMS_B)
            for index in tl.static_range(TERMS_A):
                tl.store(places + index, tl.sum(da[index], 0, keep_dims=True), mask=exist)
            for index in tl.static_range(TERMS_B):
                tl.store(places + TERMS_A + index, tl.sum(db[index], 0, keep_dims=True), mask=exist)
        else:
            sums += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (TERMS_A + TERMS_B)
            for index in tl.static_range(TERMS_A):
                tl.store(sums + index, tl.sum(da[index]))
            for index in tl.static_range(TERMS_B):
                tl.store(sums + TERMS_A + index, tl.sum(db[index]))


def _constants(
    width: int, terms: tuple[int, int], form: str, tails: bool, second: str, dtype: torch.dtype
) -> dict[str, object]:
    narrow = width < NARROW
    return {
        "BT": 4 if narrow else 16,
        "BC": 128 if narrow else min(power_of_2(width, 32), 128),
        "V": 16 // dtype.itemsize,  # of a load of 16 bytes
        "WIDTH": width,
        "TERMS_A": terms[0],
        "TERMS_B": terms[1],
        "SUM_OF_ABS": form == "sum_of_abs",
        "TAILS": tails,
        "GATED": second == "gated",
        "ANCHORED": second == "anchored",
        "NARROW_GROUPS": narrow,
    }


def forward_variant(
    width: int, terms: tuple[int, int], form: str, tails: bool, second: str, dtype: torch.dtype
) -> Variant:
    """Return `forward_kernel` as it is launched, for groups of `width` channels; second: "gated", "anchored" or ""."""
    constants = _constants(width, terms, form, tails, second, dtype)
    return Variant("rational forward", forward_kernel, constants, 4, 1)


def backward_variant(
    width: int, terms: tuple[int, int], form: str, tails: bool, second: str, coefficients: bool, dtype: torch.dtype
) -> Variant:
    """Return `backward_kernel` as it is launched."""
    constants = _constants(width, terms, form, tails, second, dtype) | {"COEFFICIENTS": coefficients}
    # In narrow groups each channel has sums of its own, and a base is a second function: more tokens a tile spill.
    constants |= {"BT": 2 if constants["NARROW_GROUPS"] else 4 if constants["ANCHORED"] else 8, "V": 4}
    return Variant("rational backward", backward_kernel, constants, 4, 1)


def _grid(variant: Variant, x: Tensor, groups: int, programs: int) -> tuple[int, int]:
    """Blocks of channels, and programs that share the tokens of each: so many a multiprocessor, fastest on an H200."""
    constants, channels = variant.constants, x.shape[1]
    per_group = cdiv(constants["WIDTH"], constants["BC"])
    blocks = cdiv(channels, constants["BC"]) if constants["NARROW_GROUPS"] else groups * per_group
    full = cdiv(programs * processors(x.device), blocks)
    return blocks, max(1, min(cdiv(x.shape[0], constants["BT"]), full))


def _settings(limits: Limits | None) -> tuple[float, ...]:
    return (0.0,) * 4 if limits is None else tuple(float(each) for each in limits)


def _second(up: Tensor | None, base: Base | None) -> str:
    return "" if up is None else "gated" if base is None else "anchored"


def forward(
    x: Tensor, up: Tensor | None, a: Tensor, b: Tensor, form: str, limits: Limits | None, base: Base | None = None
) -> Tensor:
    """Return R(x) (T, C), times `up` (T, C) where given; a (G, m + 1) and b (G, n') float32, sizes in "sum_of_abs".

    With the coefficients of R0 as base, like a and b, return up + (R(x) - R0(x)).
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        width, terms = x.shape[1] // a.shape[0], (a.shape[1], b.shape[1])
        variant = forward_variant(width, terms, form, limits is not None, _second(up, base), x.dtype)
        second = x if up is None else up
        strides = x.stride(0), second.stride(0)
        tensors = x, second, a, b, *(base or (a, b)), y
        variant.launch(_grid(variant, x, a.shape[0], 32), *tensors, *x.shape, *strides, *_settings(limits))
    return y


def backward(
    dy: Tensor, x: Tensor, up: Tensor | None, a: Tensor, b: Tensor, form: str, limits: Limits | None,
    base: Base | None = None, *, coefficients: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return gradients of x, up, a and b (float32), of b's sizes with "sum_of_abs"; arguments as in `forward`.

    With a base `up` is a part of the gradient of x, and has none itself.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dup = None if up is None or base is not None else torch.empty_like(dx)
    groups, terms = a.shape[0], (a.shape[1], b.shape[1])
    if not x.numel():
        return dx, dup, torch.zeros_like(a), torch.zeros_like(b)
    width = x.shape[1] // groups
    variant = backward_variant(width, terms, form, limits is not None, _second(up, base), coefficients, x.dtype)
    grid = _grid(variant, x, groups, 16)
    rows = x.shape[1] if variant.constants["NARROW_GROUPS"] else grid[0]
    sums = x.new_empty(grid[1] if coefficients else 0, rows, sum(terms), dtype=torch.float32)
    second, dsecond = x if up is None else up, dx if dup is None else dup
    strides = x.stride(0), second.stride(0), dy.stride(0)
    tensors = x, second, dy, a, b, *(base or (a, b)), dx, dsecond, sums
    variant.launch(grid, *tensors, *x.shape, *strides, *_settings(limits))
    if not coefficients:
        return dx, dup, None, None
    da, db = sums.unflatten(1, (groups, -1)).sum((0, 2)).split(terms, 1)
    return dx, dup, da, db
