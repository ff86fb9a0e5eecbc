"""Grouped rational activations (nora.txt, equations (6)-(8)).

    R(x) = P(x) / Q(x)        P(x) = a0 + a1 x + ... + am x^m
    form "abs_of_sum"         Q(x) = 1 + |b0 + b1 x + ... + bn x^n|            nora.txt, equation (6)
    form "sum_of_abs"         Q(x) = 1 + |b1| |x| + ... + |bn| |x|^n           the KAT kernels' denominator

The two are different functions of the same coefficients: evaluate a fit only in the form it was made for.

Shapes, here and below: x (..., C), channels last; numerator (G, m + 1); denominator (G, n + 1) for
"abs_of_sum" (b0 first), (G, n) for "sum_of_abs" (b1 first). The C channels are G contiguous groups of
C / G, and every channel of group g uses row g of the coefficients.

`rational` is R(x), `rational_gated` R(gate) * up, the gated half of a SwiGLU or GeGLU, and `rational_anchored`
f(x) + (R(x; theta') - R(x; theta)), f a fixed activation: with the same coefficients twice it is f to the bit. All save
their inputs alone for backward. Polynomials are evaluated in float32 or wider and rounded once to the type of x. At
b = 0 the slope of |b| is taken as 1, not 0: coefficients that start at zero could never move otherwise. The plain
formulas are in `reference`, and run where `ops.derivatives` says.

Under torch.compile all are plain tensor code with a hand-written backward, which Inductor fuses into one pass each way.
Rows of x are (tokens * G, C / G) there: one loop nest for dx and the coefficients' sums (measured: half the time of
sums over a (tokens, G, C / G) view). In eager mode the same code runs over pieces that stay in cache, float32 on
a CPU, with the papers' degrees 5 and 4, as C++ (`ops.native`). On NVIDIA GPUs R(x) and R(gate) * up are the kernels of
`kernel`, under torch.compile as opaque ops.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.derivatives import differentiated, formula_gradients, transformed
from nonlinear_lowrank.ops.kernels import custom_op, fake_gradients, filled, kernels, plain_rows, reshaped
from nonlinear_lowrank.ops.native import native
from nonlinear_lowrank.ops.plain import wide_dtype
from nonlinear_lowrank.validation import check_choice

from .reference import (
    FORMS,
    FORMULAS,
    LinearTails,
    activation,
    activation_gradient,
    check,
    denominator_size,
    rational_anchored_reference,
    rational_reference,
)

__all__ = ["FORMS", "LinearTails", "denominator_size", "rational", "rational_anchored", "rational_gated"]

# Elements that eager mode handles at once: within cache on a CPU, few launches elsewhere.
_PIECE_CPU, _PIECE_OTHER = 1 << 16, 1 << 24


class Ratio(NamedTuple):
    """A rational function, and with the last three what it is anchored to."""

    numerator: Tensor
    denominator: Tensor
    form: str
    tails: LinearTails | None
    base_numerator: Tensor | None = None
    base_denominator: Tensor | None = None
    formula: str | None = None
    """f."""
    channel_dim: int = -1
    """x is a view of a tensor with its channels in this dimension, and f is applied to that tensor."""


def rational(
    x: Tensor, numerator: Tensor, denominator: Tensor, form: str = "abs_of_sum", tails: LinearTails | None = None
) -> Tensor:
    """R(x): (..., C) in the type of x.

    Raises:
        UserError: unknown form, C not divisible by G, or coefficients of the wrong shape.
    """
    check(x, numerator, denominator, form)
    return _evaluate(x, None, Ratio(numerator, denominator, form, tails))


def rational_gated(
    gate: Tensor,
    up: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """R(gate) * up, of one shape and type (..., C); both may be halves of one tensor.

    Raises:
        UserError: as `rational`, or gate and up differ in shape or type.
    """
    check(gate, numerator, denominator, form)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise UserError(
            f"gate and up must have one shape and type, got {tuple(gate.shape)} {gate.dtype} "
            f"and {tuple(up.shape)} {up.dtype}"
        )
    return _evaluate(gate, up, Ratio(numerator, denominator, form, tails))


def rational_anchored(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    base_numerator: Tensor,
    base_denominator: Tensor,
    formula: str,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
    *,
    channel_dim: int = -1,
) -> Tensor:
    """f(x) + (R(x; numerator, denominator) - R(x; base)): (..., C) in the type of x.

    Bit-equal to f(x) where the coefficients are the base's: both are evaluated by the same operations, and the
    difference is taken before f is added. The base, a fit of f (`formula`, one of `reference.FORMULAS`) in the same
    form, has G rows or one, and no gradient. f is rounded as in the layout of the tensor
    whose dimension `channel_dim` was moved to the end for x. Outside the limits of `tails` the difference stays what it
    is there.

    Raises:
        UserError: as `rational`, or an unknown formula.
    """
    check(x, numerator, denominator, form)
    check_choice("activation", formula, FORMULAS)
    # Base coefficients take part like the shifted ones, row by row, so that the two round alike.
    base = base_numerator.detach().expand_as(numerator), base_denominator.detach().expand_as(denominator)
    flat = None if tails is None else LinearTails(tails.low, tails.high, 0.0, 0.0)
    return _evaluate(x, None, Ratio(numerator, denominator, form, flat, *base, formula, channel_dim))


# Autograd.


def _evaluate(x: Tensor, up: Tensor | None, ratio: Ratio) -> Tensor:
    if transformed():
        return _formula(x, up, ratio)
    tensors = [each for each in (x, up, ratio.numerator, ratio.denominator) if each is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Rational.apply(x, up, *ratio)
    return _value(x, up, ratio)


class _Rational(torch.autograd.Function):
    """Saves x, up and the coefficients."""

    @staticmethod
    def forward(ctx: Any, x: Any, up: Any, *ratio: Any) -> Any:
        numerator, denominator, ctx.form, ctx.tails, *base, ctx.formula, _ = ratio
        ctx.save_for_backward(x, up, numerator, denominator, *base)
        return _value(x, up, Ratio(*ratio))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, up, numerator, denominator, base_numerator, base_denominator = ctx.saved_tensors
        ratio = Ratio(numerator, denominator, ctx.form, ctx.tails, base_numerator, base_denominator, ctx.formula)
        if differentiated(dy):

            def formula(x: Any, up: Any, numerator: Any, denominator: Any) -> Tensor:
                return _formula(x, up, ratio._replace(numerator=numerator, denominator=denominator))

            inputs = x, up, numerator, denominator
            return *formula_gradients(formula, inputs, ctx.needs_input_grad[:4], dy), *[None] * 6
        return *_gradients(dy, x, up, ratio, ctx.needs_input_grad[:4]), *[None] * 6


def _formula(x: Tensor, up: Tensor | None, ratio: Ratio) -> Tensor:
    """Return `_value` by the plain formula."""
    if ratio.formula is not None:
        anchor: tuple[Any, Any, Any] = (ratio.base_numerator, ratio.base_denominator, ratio.formula)
        return rational_anchored_reference(x, ratio.numerator, ratio.denominator, *anchor, ratio.form, ratio.tails)
    y = rational_reference(x, ratio.numerator, ratio.denominator, ratio.form, ratio.tails)
    return y if up is None else y * up


def _value(x: Tensor, up: Tensor | None, ratio: Ratio) -> Tensor:
    """Return the function's values, times up where given."""
    if _opaque(x, ratio):
        y: Tensor = _forward_op(x, up, *ratio[:4])
        return y
    own = None
    if ratio.formula is not None:  # whole and in its own layout: torch rounds pieces and other layouts otherwise
        dim = ratio.channel_dim
        own = activation(x.movedim(-1, dim), ratio.formula).movedim(dim, -1)
    if (fast := _kernel(ratio, x, up)) is not None:
        rows = [None if each is None else plain_rows(each, x.shape[-1]) for each in (x, up if own is None else own)]
        return reshaped(fast.forward(*rows, *_coefficients(ratio), ratio.form, ratio.tails, _base(ratio)), x.shape)
    if (cpu := _native(ratio, x, up)) is not None:
        rows = [None if each is None else plain_rows(each, x.shape[-1]) for each in (x, up, own)]
        base = _base(ratio) or (None, None)
        value = cpu.rational_forward(*rows[:2], *_coefficients(ratio), ratio.tails, rows[2], *base)
        return reshaped(value, x.shape)
    plain = _in_pieces(_forward, x, ratio, own)[0]
    assert plain is not None
    return plain if up is None else plain * up


def _gradients(dy: Tensor, x: Tensor, up: Tensor | None, ratio: Ratio, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return gradients of x, up, numerator and denominator; None where not wanted."""
    if _opaque(x, ratio):
        found = _backward_op(dy, x, up, *ratio[:4], list(wanted))
        return [each if want else None for each, want in zip(found, wanted, strict=True)]
    if (fast := _kernel(ratio, x, up, dy)) is not None:
        second = up if ratio.formula is None else activation_gradient(dy, x, ratio.formula)
        rows = [None if each is None else plain_rows(each, x.shape[-1]) for each in (dy, x, second)]
        given = *rows, *_coefficients(ratio), ratio.form, ratio.tails, _base(ratio)
        found = fast.backward(*given, coefficients=wanted[2] or wanted[3])
        found = *found[:3], _signed(found[3], ratio)
        like = zip(found, wanted, (x, up, ratio.numerator, ratio.denominator), strict=True)
        return [each.to(own.dtype).view(own.shape) if want and own is not None else None for each, want, own in like]
    if (cpu := _native(ratio, x, up, dy)) is not None:
        rows = [None if each is None else plain_rows(each, x.shape[-1]) for each in (dy, x, up)]
        base = _base(ratio) or (None, None)
        dx, dup, da, db = cpu.rational_backward(*rows, *_coefficients(ratio), ratio.tails, *base)
        dx = dx.view(x.shape)
        if ratio.formula is not None and wanted[0]:
            dx.add_(activation_gradient(dy, x, ratio.formula))
        found = dx, None if dup is None else dup.view(x.shape), da, _signed(db, ratio)
        return [each if want else None for each, want in zip(found, wanted, strict=True)]
    dup = dy * _value(x, None, ratio) if wanted[1] else None
    mine = [wanted[0], *wanted[2:]]
    if not any(mine):
        return [None, dup, None, None]
    dx, *others = _in_pieces(_backward, x, ratio, dy if up is None else dy * up, mine)
    return [dx, dup, *others]


# The kernels of `kernel`. `up` is the other factor of the gated form, None for R(x) alone.


def _opaque(x: Tensor, ratio: Ratio) -> bool:
    """Return whether torch.compile is to see this as one call; Inductor fuses the PyTorch code elsewhere."""
    return ratio.formula is None and torch.compiler.is_compiling() and x.is_cuda and torch.version.cuda is not None


def _kernel(ratio: Ratio, x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the module of kernels where all tensors are its own to read."""
    if torch.compiler.is_compiling():
        return None
    given = [each for each in others if each is not None]
    same = all(each.dtype == x.dtype for each in given)
    return kernels("rational", x, *given, ratio.numerator, ratio.denominator) if same else None


def _native(ratio: Ratio, *tensors: Tensor | None) -> Any:
    """Return the C++ operators where these tensors, and this many coefficients, are theirs to read."""
    sizes = 4 if ratio.form == "sum_of_abs" else 5
    if torch.compiler.is_compiling() or (ratio.numerator.shape[1], ratio.denominator.shape[1]) != (6, sizes):
        return None
    return native(*tensors, *ratio[:2], *ratio[4:6])


def _base(ratio: Ratio) -> tuple[Tensor, Tensor] | None:
    """Return `_coefficients` of the base."""
    if ratio.base_numerator is None or ratio.base_denominator is None:
        return None
    return _coefficients(Ratio(ratio.base_numerator, ratio.base_denominator, ratio.form, None))


def _coefficients(ratio: Ratio) -> tuple[Tensor, Tensor]:
    a, b = ratio.numerator.float().contiguous(), ratio.denominator.float().contiguous()
    return a, b.abs() if ratio.form == "sum_of_abs" else b


def _signed(dsizes: Tensor | None, ratio: Ratio) -> Tensor | None:
    """Return the denominator's gradient from that of the evaluated coefficients, or their sizes."""
    if dsizes is None or ratio.form == "abs_of_sum":
        return dsizes
    return torch.where(ratio.denominator < 0, -dsizes, dsizes)


# The formulas.


class _Rows(NamedTuple):
    """One piece of x as rows of C / G channels, and every coefficient as something that broadcasts against them."""

    x: Tensor
    numerator: list[Tensor]
    denominator: list[Tensor]
    base_numerator: list[Tensor]
    base_denominator: list[Tensor]
    sum: Callable[[Tensor], Tensor]
    """Rows -> (G)."""


def _forward(rows: _Rows, ratio: Ratio, own: Tensor | None = None, wanted: Sequence[bool] = ()) -> list[Tensor | None]:
    """Return [y] of one piece, in rows; `own` is f(x) there."""
    tails = ratio.tails
    inside = rows.x if tails is None else rows.x.clamp(tails.low, tails.high)
    p, _, q = _polynomials(inside, rows.numerator, rows.denominator, ratio.form)
    y = p / q
    if own is not None:
        p, _, q = _polynomials(inside, rows.base_numerator, rows.base_denominator, ratio.form)
        # Parenthesised so: the difference is exactly 0 where the coefficients agree.
        y = own + (y - p / q)
    elif tails is not None:
        if tails.low_slope:
            y = y + tails.low_slope * (rows.x - tails.low).clamp(max=0)
        if tails.high_slope:
            y = y + tails.high_slope * (rows.x - tails.high).clamp(min=0)
    return [y]


def _backward(rows: _Rows, ratio: Ratio, dy: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return [dx in rows, dnumerator (G, m + 1), ddenominator] of one piece; None where not wanted."""
    tails, form = ratio.tails, ratio.form
    inside = rows.x if tails is None else rows.x.clamp(tails.low, tails.high)
    variable = inside if form == "abs_of_sum" else inside.abs()
    dp, weight = _slopes(dy, inside, rows.numerator, rows.denominator, form)
    dx: Tensor | None = None
    if wanted[0]:
        dx = _input_slope(dp, weight, rows.numerator, rows.denominator, variable, inside, form)
        if ratio.formula is not None:
            base = rows.base_numerator, rows.base_denominator
            dx = dx - _input_slope(*_slopes(dy, inside, *base, form), *base, variable, inside, form)
        if tails is not None:
            dx = torch.where(rows.x > tails.high, dy * tails.high_slope, dx)
            dx = torch.where(rows.x < tails.low, dy * tails.low_slope, dx)
        if ratio.formula is not None:
            dx = dx + activation_gradient(dy, rows.x, ratio.formula)
    dnumerator = _moments(dp, inside, len(rows.numerator), rows.sum) if wanted[1] else None
    ddenominator: Tensor | None = None
    if wanted[2]:
        start = weight if form == "abs_of_sum" else weight * variable
        ddenominator = _moments(start, variable, len(rows.denominator), rows.sum)
    return [dx, dnumerator, ddenominator]


def _polynomials(x: Tensor, a: list[Tensor], b: list[Tensor], form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return P, what stands inside Q's absolute value (for "sum_of_abs": Q - 1), and Q, by Horner's rule."""
    p = _horner(a, x)
    if form == "abs_of_sum":
        s = _horner(b, x)
        return p, s, 1 + s.abs()
    size = x.abs()
    s = _horner(b, size) * size
    return p, s, 1 + s


def _slopes(dy: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], form: str) -> tuple[Tensor, Tensor]:
    """Return dL/dP, and dL/d(the polynomial inside Q's absolute value)."""
    p, s, q = _polynomials(x, a, b, form)
    inverse = 1 / q
    dp = dy * inverse
    dq = -dp * p * inverse
    return dp, dq * torch.sign(s) if form == "abs_of_sum" else dq


def _horner(coefficients: list[Tensor], x: Tensor) -> Tensor:
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = torch.addcmul(coefficient, value, x)
    # A polynomial of degree 0 is still a tensor of x's shape.
    return value if len(coefficients) > 1 else value.expand_as(x)


def _slope(coefficients: list[Tensor], x: Tensor) -> Tensor:
    """Return the derivative of c0 + c1 x + ... at x."""
    if len(coefficients) == 1:
        return torch.zeros_like(x)
    return _horner([power * coefficient for power, coefficient in enumerate(coefficients)][1:], x)


def _input_slope(
    dp: Tensor, weight: Tensor, a: list[Tensor], b: list[Tensor], variable: Tensor, x: Tensor, form: str
) -> Tensor:
    """Return dx by what `_slopes` returns; `variable` is what the denominator's polynomial is in."""
    dx = dp * _slope(a, x)
    if form == "abs_of_sum":
        return dx + weight * _slope(b, variable)
    return dx + weight * _slope([torch.zeros_like(b[0]), *b], variable) * torch.sign(x)


def _moments(weight: Tensor, x: Tensor, count: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return (G, count): sums of weight * x^k over each group."""
    sums = [total(weight)]
    for _ in range(count - 1):
        weight = weight * x
        sums.append(total(weight))
    return torch.stack(sums, 1)


# All of x, from its pieces.


def _in_pieces(
    function: Callable[..., list[Tensor | None]],
    x: Tensor,
    ratio: Ratio,
    other: Tensor | None = None,
    wanted: Sequence[bool] = (),
) -> list[Tensor | None]:
    """Run `_forward` (other: f(x)) or `_backward` (other: dy) over all of x, piece by piece unless compiling."""
    wide, channels = wide_dtype(x), x.shape[-1]
    x_TC = x.reshape(-1, channels)
    other_TC = None if other is None else other.reshape(-1, channels)
    given = ratio.numerator, ratio.denominator, ratio.base_numerator, ratio.base_denominator
    coefficients = [None if each is None else each.to(wide) for each in given]
    if ratio.form == "sum_of_abs":
        coefficients[1::2] = [None if each is None else each.abs() for each in coefficients[1::2]]

    def run(x_TC: Tensor, other_TC: Tensor | None) -> list[Tensor | None]:
        rows = _rows(x_TC, coefficients, ratio.numerator.shape[0], wide)
        return function(rows, ratio, None if other_TC is None else other_TC.reshape(rows.x.shape).to(wide), wanted)

    if torch.compiler.is_compiling() or x.is_meta:
        out, *sums = run(x_TC, other_TC)
        out = None if out is None else out.reshape(x.shape).to(x.dtype)
    else:
        step = max(1, (_PIECE_CPU if x.device.type == "cpu" else _PIECE_OTHER) // channels)
        out = None if wanted and not wanted[0] else torch.empty_like(x_TC)
        parts = list[list[Tensor | None]]()
        # An empty batch still goes through once, for the shapes of its sums.
        for start in range(0, max(len(x_TC), 1), step):
            piece = slice(start, start + step)
            first, *part = run(x_TC[piece], None if other_TC is None else other_TC[piece])
            if out is not None and first is not None:
                out[piece] = first.reshape(-1, channels)
            parts.append(part)
        sums = [None if each[0] is None else torch.stack(list(each)).sum(0) for each in zip(*parts, strict=True)]
    if sums:  # of backward
        sums = [sums[0], _signed(sums[1], ratio)]
    own = zip(sums, given[:2], strict=False)
    found = [None if each is None else each.to(like.dtype) for each, like in own]
    return [None if out is None else reshaped(out, x.shape), *found]


def _rows(x_TC: Tensor, coefficients: Sequence[Tensor | None], groups: int, wide: torch.dtype) -> _Rows:
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
    return _Rows(x.to(wide), a, b, base_a, base_b, total)


# The opaque ops under torch.compile on NVIDIA. Results are contiguous, as the fakes promise.


def _forward_body(x: Tensor, up: Tensor | None, a: Tensor, b: Tensor, form: str, tails: Any) -> Tensor:
    return _value(x, up, Ratio(a, b, form, tails and LinearTails(*tails))).contiguous()


def _backward_body(
    dy: Tensor, x: Tensor, up: Tensor | None, a: Tensor, b: Tensor, form: str, tails: Any, wanted: list[bool]
) -> list[Tensor]:
    found = _gradients(dy, x, up, Ratio(a, b, form, tails and LinearTails(*tails)), wanted)
    return [each.contiguous() for each in filled(found, x)]


_INPUTS = "Tensor x, Tensor? up, Tensor numerator, Tensor denominator, str form, float[]? tails"
_forward_op = custom_op(f"rational_forward({_INPUTS}) -> Tensor", _forward_body, lambda x, *rest: x.new_empty(x.shape))
_backward_op = custom_op(
    f"rational_backward(Tensor dy, {_INPUTS}, bool[] wanted) -> Tensor[]",
    _backward_body,
    lambda dy, x, up, a, b, form, tails, wanted: fake_gradients([x, up, a, b], wanted, x),
)
