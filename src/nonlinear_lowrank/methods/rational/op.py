"""Grouped rational activations (nora.txt, equations (6)-(8)).

    R(x) = P(x) / Q(x)        P(x) = a0 + a1 x + ... + am x^m
    form "abs_of_sum"         Q(x) = 1 + |b0 + b1 x + ... + bn x^n|            nora.txt, equation (6)
    form "sum_of_abs"         Q(x) = 1 + |b1| |x| + ... + |bn| |x|^n           the KAT kernels' denominator

The two are different functions of the same coefficients: evaluate a fit only in the form it was made for.

Shapes, here and below: x (..., C), channels last; numerator (G, m + 1); denominator (G, n + 1) for
"abs_of_sum" (b0 first), (G, n) for "sum_of_abs" (b1 first). The C channels are G contiguous groups of
C / G, and every channel of group g uses row g of the coefficients.

`rational_reference` is the plain formula. `rational` gives the same numbers and keeps x alone for backward.
`rational_anchored` is f(x) + (R(x; theta') - R(x; theta)), f a fixed activation: with the same coefficients
twice it is f to the bit. Polynomials are evaluated in float32 or wider and rounded once to the type of x.

Under torch.compile both are plain tensor code with a hand-written backward, which Inductor fuses into one
pass forward and one pass backward. Rows of x are laid out as (tokens * G, C / G) there: with one loop nest for
dx and for the coefficients' sums, nothing of x's size is written but dx (measured: half the time of sums
over a (tokens, G, C / G) view, and independent of G). In eager mode the same code runs over pieces that
stay in cache. On NVIDIA GPUs `rational` is the kernels of `triton/rational.py`, under torch.compile as opaque ops.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.activations import FORMULAS, activation, activation_slope
from nonlinear_lowrank.ops.reshaped import reshaped

from .gpu import gradients_on_gpu, kernel, on_gpu, op_gradients, opaque

FORMS = ("abs_of_sum", "sum_of_abs")

# Elements that eager mode handles at once: within cache on a CPU, few launches elsewhere.
_PIECE_CPU, _PIECE_OTHER = 1 << 16, 1 << 24


class LinearTails(NamedTuple):
    """Straight lines outside [low, high]: R(high) + high_slope * (x - high) above, likewise below."""

    low: float
    high: float
    low_slope: float
    high_slope: float


def denominator_size(degree: int, form: str) -> int:
    """Number of stored coefficients of a denominator of this degree."""
    return degree + 1 if form == "abs_of_sum" else degree


def rational_reference(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """R(x), term by term, differentiable as often as asked; shapes in this file's docstring.

    Returns:
        (..., C) in the type of x.

    Raises:
        UserError: unknown form, C not divisible by G, or coefficients of the wrong shape.
    """
    check(x, numerator, denominator, form)
    wide = _compute_type(x)
    groups = numerator.shape[0]
    z = x.to(wide).unflatten(-1, (groups, -1))
    inside = z if tails is None else z.clamp(tails.low, tails.high)
    a, b = numerator.to(wide)[:, :, None], denominator.to(wide)[:, :, None]
    p = sum(a[:, i] * inside**i for i in range(a.shape[1]))
    if form == "abs_of_sum":
        q = 1 + sum(b[:, j] * inside**j for j in range(b.shape[1])).abs()
    else:
        q = 1 + sum(b[:, j].abs() * inside.abs() ** (j + 1) for j in range(b.shape[1]))
    y = p / q
    if tails is not None:
        # At a limit itself, which 16-bit inputs hit, the slope is R's alone: clamp() would add the line's to it.
        y = y + tails.low_slope * torch.where(z < tails.low, z - tails.low, 0)
        y = y + tails.high_slope * torch.where(z > tails.high, z - tails.high, 0)
    return y.flatten(-2).to(x.dtype)


def rational(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """`rational_reference` that keeps only x (in its own type) and the coefficients for backward.

    At b = 0 the slope of |b| is taken as 1, not 0: coefficients that start at zero could never move
    otherwise. Second derivatives are refused with a RuntimeError (use the reference).

    Returns:
        (..., C) in the type of x.

    Raises:
        UserError: as `rational_reference`.
    """
    check(x, numerator, denominator, form)
    limits = None if tails is None else tuple(tails)
    if not needs_gradient(x, numerator, denominator):
        return value(x, numerator, denominator, form, limits)
    return _Rational.apply(x, numerator, denominator, form, limits)


def rational_anchored_reference(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    base_numerator: Tensor,
    base_denominator: Tensor,
    formula: str,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """f(x) + (R(x; numerator, denominator) - R(x; base)), differentiable as often as asked.

    Args:
        x: (..., C).
        numerator: (G, m + 1).
        denominator: as the form wants it.
        base_numerator: (G or 1, m + 1), the fit of f; no gradient.
        base_denominator: likewise.
        formula: f, one of `nonlinear_lowrank.ops.activations.FORMULAS`.
        form: of both denominators.
        tails: limits; outside them the difference stays what it is at the limit.

    Returns:
        (..., C) in the type of x.

    Raises:
        UserError: as `rational_reference`, or an unknown formula.
    """
    _check_anchor(x, base_numerator, base_denominator, numerator, denominator, formula)
    z = x.to(_compute_type(x))
    flat = None if tails is None else LinearTails(tails.low, tails.high, 0.0, 0.0)
    base = base_numerator.detach().expand_as(numerator), base_denominator.detach().expand_as(denominator)
    shift = rational_reference(z, numerator, denominator, form, flat) - rational_reference(z, *base, form, flat)
    return (activation(x, formula).to(z.dtype) + shift).to(x.dtype)


def rational_anchored(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    base_numerator: Tensor,
    base_denominator: Tensor,
    formula: str,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """`rational_anchored_reference` that keeps only x and the coefficients for backward.

    Bit-equal to f(x) where the coefficients are the base's: both are evaluated by the same operations,
    and the difference is taken before f is added.

    Returns:
        (..., C) in the type of x.

    Raises:
        UserError: as `rational_anchored_reference`.
    """
    check(x, numerator, denominator, form)
    _check_anchor(x, base_numerator, base_denominator, numerator, denominator, formula)
    limits = None if tails is None else (tails.low, tails.high, 0.0, 0.0)
    # Base coefficients take part like the shifted ones, row by row, so that the two round alike.
    base = base_numerator.detach().expand_as(numerator), base_denominator.detach().expand_as(denominator)
    if not needs_gradient(x, numerator, denominator):
        return value(x, numerator, denominator, form, limits, *base, formula)
    return _Rational.apply(x, numerator, denominator, form, limits, *base, formula)


class _Rational(torch.autograd.Function):
    """Saves x and the coefficients. Inputs: x, numerator, denominator, form, limits [, base..., formula]."""

    @staticmethod
    def forward(x, numerator, denominator, form, limits, *anchor):
        return value(x, numerator, denominator, form, limits, *anchor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, numerator, denominator, ctx.form, ctx.limits, *anchor = inputs
        ctx.formula = anchor[2] if anchor else None
        ctx.save_for_backward(x, numerator, denominator, *anchor[:2])

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives through rational are not defined; use rational_reference for them")
        x, numerator, denominator, *base = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        anchor = (*base, ctx.formula) if base else ()
        nothing = [None] * (2 + len(anchor))
        return *gradients(dy, x, numerator, denominator, ctx.form, ctx.limits, *anchor, wanted=wanted), *nothing


# One piece of x as both passes see it: rows of C / G channels, and every coefficient as something that
# broadcasts against them.
class _Rows(NamedTuple):
    x: Tensor
    numerator: list[Tensor]
    denominator: list[Tensor]
    base_numerator: list[Tensor]
    base_denominator: list[Tensor]
    sum: Callable[[Tensor], Tensor]
    """Rows -> (G)."""


def _forward(rows: _Rows, form: str, limits: tuple | None, formula: str | None, x: Tensor) -> list[Tensor | None]:
    """[y] of one piece, in rows; x is the piece in its own type and shape of rows."""
    inside = rows.x if limits is None else rows.x.clamp(limits[0], limits[1])
    p, _, q = _polynomials(inside, rows.numerator, rows.denominator, form)
    y = p / q
    if formula is not None:
        p, _, q = _polynomials(inside, rows.base_numerator, rows.base_denominator, form)
        # Parenthesised so: the difference is exactly 0 where the coefficients agree.
        y = activation(x, formula).to(y.dtype) + (y - p / q)
    elif limits is not None:
        low, high, low_slope, high_slope = limits
        if low_slope:
            y = y + low_slope * (rows.x - low).clamp(max=0)
        if high_slope:
            y = y + high_slope * (rows.x - high).clamp(min=0)
    return [y]


def _backward(
    rows: _Rows,
    form: str,
    limits: tuple | None,
    formula: str | None,
    dy: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """[dx in rows, dnumerator (G, m + 1), ddenominator] of one piece; None where not wanted."""
    inside = rows.x if limits is None else rows.x.clamp(limits[0], limits[1])
    p, s, q = _polynomials(inside, rows.numerator, rows.denominator, form)
    inverse = 1 / q
    dp = dy * inverse  # dL/dP
    dq = -dp * p * inverse  # dL/dQ, then times the slope of the absolute value
    variable, weight = inside, dq
    if form == "abs_of_sum":
        weight = dq * torch.sign(s)
    else:
        variable = inside.abs()

    dx: Tensor | None = None
    if wanted[0]:
        dx = dp * _slope(rows.numerator, inside)
        dx = dx + _denominator_term(weight, rows.denominator, variable, inside, form)
        if formula is not None:
            p, s, q = _polynomials(inside, rows.base_numerator, rows.base_denominator, form)
            inverse = 1 / q
            dp_base = dy * inverse
            dq_base = -dp_base * p * inverse
            if form == "abs_of_sum":
                dq_base = dq_base * torch.sign(s)
            base = dp_base * _slope(rows.base_numerator, inside)
            base = base + _denominator_term(dq_base, rows.base_denominator, variable, inside, form)
            dx = dx - base
        if limits is not None:
            low, high, low_slope, high_slope = limits
            dx = torch.where(rows.x < low, dy * low_slope, torch.where(rows.x > high, dy * high_slope, dx))
        if formula is not None:
            dx = dx + dy * activation_slope(rows.x, formula)

    dnumerator = _moments(dp, inside, len(rows.numerator), rows.sum) if wanted[1] else None
    ddenominator: Tensor | None = None
    if wanted[2]:
        start = weight if form == "abs_of_sum" else weight * variable
        ddenominator = _moments(start, variable, len(rows.denominator), rows.sum)
    return [dx, dnumerator, ddenominator]


def _polynomials(x: Tensor, a: list[Tensor], b: list[Tensor], form: str) -> tuple[Tensor, Tensor, Tensor]:
    """P, what stands inside Q's absolute value (for "sum_of_abs": Q - 1), and Q, by Horner's rule."""
    p = _horner(a, x)
    if form == "abs_of_sum":
        s = _horner(b, x)
        return p, s, 1 + s.abs()
    size = x.abs()
    s = _horner(b, size) * size
    return p, s, 1 + s


def _horner(coefficients: list[Tensor], x: Tensor) -> Tensor:
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = torch.addcmul(coefficient, value, x)
    # A polynomial of degree 0 is still a tensor of x's shape.
    return value if len(coefficients) > 1 else value.expand_as(x)


def _slope(coefficients: list[Tensor], x: Tensor) -> Tensor:
    """Derivative of c0 + c1 x + ... at x."""
    if len(coefficients) == 1:
        return torch.zeros_like(x)
    return _horner([power * coefficient for power, coefficient in enumerate(coefficients)][1:], x)


def _denominator_term(weight: Tensor, b: list[Tensor], variable: Tensor, x: Tensor, form: str) -> Tensor:
    """What Q adds to dx; `weight` is dL/d(the polynomial inside)."""
    if form == "abs_of_sum":
        return weight * _slope(b, variable)
    return weight * _slope([torch.zeros_like(b[0]), *b], variable) * torch.sign(x)


def _moments(weight: Tensor, x: Tensor, count: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """(G, count): sums of weight * x^k over each group."""
    sums = [total(weight)]
    for _ in range(count - 1):
        weight = weight * x
        sums.append(total(weight))
    return torch.stack(sums, 1)


def value(x: Tensor, numerator: Tensor, denominator: Tensor, form: str, limits: tuple | None, *anchor: Any) -> Tensor:
    """R(x), or the anchored sum (base coefficients and formula in `anchor`)."""
    if not anchor and opaque(x):
        return torch.ops.nonlinear_lowrank.rational_forward(x, numerator, denominator, form, limits)
    if not anchor and (fast := kernel(x, numerator, denominator)) is not None:
        return on_gpu(fast, x, None, numerator, denominator, form, limits)
    y = _in_pieces(_forward, x, numerator, denominator, form, limits, *anchor)[0]
    assert y is not None
    return y


def gradients(
    dy: Tensor,
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: tuple | None,
    *anchor: Any,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Of x, numerator and denominator; None where not wanted."""
    if not anchor and opaque(x):
        found = torch.ops.nonlinear_lowrank.rational_backward(dy, x, numerator, denominator, form, limits, list(wanted))
        return [each if want else None for each, want in zip(found, wanted, strict=True)]
    if not anchor and (fast := kernel(x, dy, numerator, denominator)) is not None:
        sums = wanted[1] or wanted[2]
        dx, _, *others = gradients_on_gpu(fast, dy, x, None, numerator, denominator, form, limits, sums)
        return [dx, *others]
    return _in_pieces(_backward, x, numerator, denominator, form, limits, *anchor, dy=dy, wanted=wanted)


def _in_pieces(
    function: Callable[..., list[Tensor | None]],
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: tuple | None,
    base_numerator: Tensor | None = None,
    base_denominator: Tensor | None = None,
    formula: str | None = None,
    *,
    dy: Tensor | None = None,
    wanted: Sequence[bool] = (),
) -> list[Tensor | None]:
    """Runs `_forward` or `_backward` over all of x, whole when compiling, piece by piece in eager mode."""
    wide = _compute_type(x)
    groups, channels = numerator.shape[0], x.shape[-1]
    x_TC = x.reshape(-1, channels)
    dy_TC = None if dy is None else dy.reshape(-1, channels)
    a, b = numerator.to(wide), denominator.to(wide)
    if form == "sum_of_abs":
        b = b.abs()
    base_a = None if base_numerator is None else base_numerator.to(wide)
    base_b = None if base_denominator is None else base_denominator.to(wide)
    if base_b is not None and form == "sum_of_abs":
        base_b = base_b.abs()

    def run(x_TC: Tensor, dy_TC: Tensor | None) -> list[Tensor | None]:
        own, rows = _rows(x_TC, (a, b, base_a, base_b), groups, wide)
        if dy_TC is None:
            return function(rows, form, limits, formula, own)
        return function(rows, form, limits, formula, dy_TC.reshape(own.shape).to(wide), wanted)

    if torch.compiler.is_compiling() or x.is_meta:
        first, *sums = run(x_TC, dy_TC)
        shaped = None if first is None else reshaped(first.reshape(x.shape).to(x.dtype), x.shape)
    else:
        shaped, sums = _eager(run, x, x_TC, dy_TC, skip=bool(wanted) and not wanted[0])
    if len(sums) == 2 and sums[1] is not None and form == "sum_of_abs":
        sums[1] = torch.where(denominator < 0, -sums[1], sums[1])
    own = zip(sums, (numerator, denominator), strict=False)  # forward has no sums
    return [shaped, *(None if each is None else each.to(like.dtype) for each, like in own)]


def _eager(
    run: Callable[..., list[Tensor | None]], x: Tensor, x_TC: Tensor, dy_TC: Tensor | None, skip: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`run` piece by piece: the result of x's shape written in place, the coefficients' sums added up."""
    tokens, channels = x_TC.shape
    step = max(1, (_PIECE_CPU if x.device.type == "cpu" else _PIECE_OTHER) // channels)
    out = None if skip else torch.empty_like(x_TC)
    sums: list[list[Tensor | None]] = []
    # An empty batch still goes through once, for the shapes of its sums.
    for start in range(0, max(tokens, 1), step):
        piece = slice(start, start + step)
        first, *rest = run(x_TC[piece], None if dy_TC is None else dy_TC[piece])
        if out is not None and first is not None:
            out[piece] = first.reshape(-1, channels)
        sums.append(rest)
    totals = [None if each[0] is None else torch.stack(list(each)).sum(0) for each in zip(*sums, strict=True)]
    return None if out is None else reshaped(out, x.shape), totals


def _rows(x_TC: Tensor, coefficients: Sequence[Tensor | None], groups: int, wide: torch.dtype) -> tuple[Tensor, _Rows]:
    """The piece in its own type as rows of C / G channels, and the `_Rows` over it."""
    tokens, channels = x_TC.shape
    width = channels // groups
    if torch.compiler.is_compiling():
        x = x_TC.reshape(tokens * groups, width)

        def spread(column: Tensor) -> Tensor:  # (G) -> (T * G, 1); Inductor makes it an index, not a copy
            return column.expand(tokens, groups).reshape(tokens * groups, 1)

        def total(t: Tensor) -> Tensor:
            return t.sum(1).view(tokens, groups).sum(0)
    else:
        x = x_TC.reshape(tokens, groups, width)

        def spread(column: Tensor) -> Tensor:
            return column[:, None]

        def total(t: Tensor) -> Tensor:
            return t.sum((0, 2))

    a, b, base_a, base_b = (
        [] if each is None else [spread(column) for column in each.unbind(1)] for each in coefficients
    )
    return x, _Rows(x.to(wide), a, b, base_a, base_b, total)


def _compute_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd shall see this call."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check(x: Tensor, numerator: Tensor, denominator: Tensor, form: str) -> None:
    """Raises UserError; see `rational_reference`."""
    if form not in FORMS:
        raise UserError(f"unknown denominator form {form!r}; choose one of {', '.join(FORMS)}")
    if numerator.ndim != 2 or denominator.ndim != 2 or numerator.shape[0] != denominator.shape[0]:
        raise UserError(
            "coefficients must be (groups, terms) with as many groups above as below, got "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}"
        )
    if x.shape[-1] % numerator.shape[0]:
        raise UserError(
            f"{x.shape[-1]} channels do not divide into {numerator.shape[0]} groups; "
            "choose groups that divide the width"
        )


def _check_anchor(
    x: Tensor,
    base_numerator: Tensor,
    base_denominator: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    formula: str,
) -> None:
    if formula not in FORMULAS:
        raise UserError(f"unknown activation {formula!r}; choose one of {', '.join(FORMULAS)}")
    for base, shifted in ((base_numerator, numerator), (base_denominator, denominator)):
        if base.ndim != 2 or base.shape[1] != shifted.shape[1] or base.shape[0] not in (1, shifted.shape[0]):
            raise UserError(
                f"base coefficients {tuple(base.shape)} do not fit the shifted ones, {tuple(shifted.shape)}"
            )


# The opaque ops under torch.compile on NVIDIA; plain registrations, as in cosnet.py.


def _forward_body(x: Tensor, numerator: Tensor, denominator: Tensor, form: str, limits: list[float] | None) -> Tensor:
    return value(x, numerator, denominator, form, None if limits is None else tuple(limits)).contiguous()


def _backward_body(
    dy: Tensor,
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: list[float] | None,
    wanted: list[bool],
) -> list[Tensor]:
    """`gradients` as an op returns them."""
    tails = None if limits is None else tuple(limits)
    found = gradients(dy, x, numerator, denominator, form, tails, wanted=wanted)
    return op_gradients(found, (x, numerator, denominator), wanted)


_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_SETTINGS = "Tensor numerator, Tensor denominator, str form, float[]? limits"
_LIBRARY.define(f"rational_forward(Tensor x, {_SETTINGS}) -> Tensor")
_LIBRARY.define(f"rational_backward(Tensor dy, Tensor x, {_SETTINGS}, bool[] wanted) -> Tensor[]")
_LIBRARY.impl("rational_forward", _forward_body, "CompositeExplicitAutograd")
_LIBRARY.impl("rational_backward", _backward_body, "CompositeExplicitAutograd")


@torch.library.register_fake("nonlinear_lowrank::rational_forward")
def _(x, numerator, denominator, form, limits):
    return x.new_empty(x.shape)


@torch.library.register_fake("nonlinear_lowrank::rational_backward")
def _(dy, x, numerator, denominator, form, limits, wanted):
    made = zip((x, numerator, denominator), wanted, strict=True)
    return [each.new_empty(each.shape if want else 0) for each, want in made]
