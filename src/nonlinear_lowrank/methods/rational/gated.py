"""R(gate) * up, the gated half of a SwiGLU or GeGLU with a rational activation (nora.txt, equations (6)-(8)).

Shapes: gate and up (..., C), coefficients as in rational.py. `rational_gated` keeps gate, up and the coefficients for
backward, as SwiGLU's fused kernels do, and never R(gate): it is evaluated again. On NVIDIA GPUs one kernel forward
reads gate and up and writes y, one backward reads both and dy and writes both gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nonlinear_lowrank.errors import UserError

from .gpu import gradients_on_gpu, kernel, on_gpu, op_gradients, opaque
from .op import LinearTails, check, gradients, needs_gradient, rational_reference, value


def rational_gated_reference(
    gate: Tensor,
    up: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """`rational_reference(gate) * up`, the plain formula."""
    return rational_reference(gate, numerator, denominator, form, tails) * up


def rational_gated(
    gate: Tensor,
    up: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str = "abs_of_sum",
    tails: LinearTails | None = None,
) -> Tensor:
    """R(gate) * up, keeping gate, up and the coefficients for backward.

    Second derivatives are refused with a RuntimeError (use the reference).

    Args:
        gate: (..., C).
        up: of the same shape and type; both may be halves of one tensor.
        numerator: (G, m + 1).
        denominator: (G, n'), as the form wants it.
        form: of the denominator.
        tails: straight lines outside limits.

    Returns:
        (..., C) in their type.

    Raises:
        UserError: as `rational`, or gate and up differ in shape or type.
    """
    check(gate, numerator, denominator, form)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise UserError(
            f"gate and up must have one shape and type, not {tuple(gate.shape)} {gate.dtype} "
            f"and {tuple(up.shape)} {up.dtype}"
        )
    limits = None if tails is None else tuple(tails)
    if not needs_gradient(gate, up, numerator, denominator):
        return _forward(gate, up, numerator, denominator, form, limits)
    return _RationalGated.apply(gate, up, numerator, denominator, form, limits)


class _RationalGated(torch.autograd.Function):
    """Saves gate, up and the coefficients."""

    @staticmethod
    def forward(gate, up, numerator, denominator, form, limits):
        return _forward(gate, up, numerator, denominator, form, limits)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.form, ctx.limits = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "second derivatives through rational_gated are not defined; use rational_gated_reference for them"
            )
        wanted = list(ctx.needs_input_grad[:4])
        gate, up, numerator, denominator = ctx.saved_tensors
        found = _backward(dy, gate, up, numerator, denominator, ctx.form, ctx.limits, wanted)
        return *(each if want else None for each, want in zip(found, wanted, strict=True)), None, None


def _forward(
    gate: Tensor, up: Tensor, numerator: Tensor, denominator: Tensor, form: str, limits: Sequence[float] | None
) -> Tensor:
    if opaque(gate):
        return torch.ops.nonlinear_lowrank.rational_gated_forward(gate, up, numerator, denominator, form, limits)
    if (fast := kernel(gate, up, numerator, denominator)) is not None:
        return on_gpu(fast, gate, up, numerator, denominator, form, limits)
    return value(gate, numerator, denominator, form, None if limits is None else tuple(limits)) * up


def _backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: Sequence[float] | None,
    wanted: list[bool],
) -> list[Tensor | None]:
    """Gradients of gate, up, numerator, denominator."""
    rest = numerator, denominator, form, limits
    if opaque(gate):
        return list(torch.ops.nonlinear_lowrank.rational_gated_backward(dy, gate, up, *rest, wanted))
    if (fast := kernel(gate, up, dy, numerator, denominator)) is not None:
        return gradients_on_gpu(fast, dy, gate, up, *rest, wanted[2] or wanted[3])
    tails = None if limits is None else tuple(limits)
    dup = dy * value(gate, numerator, denominator, form, tails) if wanted[1] else None
    mine = [wanted[0], *wanted[2:]]
    if not any(mine):
        return [None, dup, None, None]
    dgate, *others = gradients(dy * up, gate, numerator, denominator, form, tails, wanted=mine)
    return [dgate, dup, *others]


# The opaque ops under torch.compile on NVIDIA; plain registrations, as in cosnet.py.


def _forward_body(
    gate: Tensor, up: Tensor, numerator: Tensor, denominator: Tensor, form: str, limits: list[float] | None
) -> Tensor:
    return _forward(gate, up, numerator, denominator, form, limits).contiguous()


def _backward_body(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    form: str,
    limits: list[float] | None,
    wanted: list[bool],
) -> list[Tensor]:
    """`_backward` as an op returns it."""
    found = _backward(dy, gate, up, numerator, denominator, form, limits, wanted)
    return op_gradients(found, (gate, up, numerator, denominator), wanted)


_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_INPUTS = "Tensor gate, Tensor up, Tensor numerator, Tensor denominator, str form, float[]? limits"
_LIBRARY.define(f"rational_gated_forward({_INPUTS}) -> Tensor")
_LIBRARY.define(f"rational_gated_backward(Tensor dy, {_INPUTS}, bool[] wanted) -> Tensor[]")
_LIBRARY.impl("rational_gated_forward", _forward_body, "CompositeExplicitAutograd")
_LIBRARY.impl("rational_gated_backward", _backward_body, "CompositeExplicitAutograd")


@torch.library.register_fake("nonlinear_lowrank::rational_gated_forward")
def _(gate, up, numerator, denominator, form, limits):
    return gate.new_empty(gate.shape)


@torch.library.register_fake("nonlinear_lowrank::rational_gated_backward")
def _(dy, gate, up, numerator, denominator, form, limits, wanted):
    made = zip((gate, up, numerator, denominator), wanted, strict=True)
    return [each.new_empty(each.shape if want else 0) for each, want in made]
