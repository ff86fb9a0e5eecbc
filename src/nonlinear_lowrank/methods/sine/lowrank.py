"""Linear maps whose weight is a function of a low-rank product (sine_lowrank.txt, equations (2) and (3)).

    W = phi(omega * up @ down) / gain        y = x W^T + bias

Shapes: x (..., d_in), up (d_out, r), down (r, d_in), bias (d_out) or None, y (..., d_out).

| phi      | how it is computed                                                | saved for backward    |
|----------|-------------------------------------------------------------------|-----------------------|
| identity | x through down, then through up; W is never formed                | x, x down^T (r wide)  |
| sine,    | W is formed in float32 or wider, rounded once to x's type, and    | x                     |
| sigmoid, | formed again in backward, as in `ops.sine`; on a GPU the sine is  |                       |
| relu     | `ops.sine`, with its kernels                                      |                       |

No d_out x d_in tensor is saved between forward and backward, eager or compiled. The compiler's partitioner would
find that both need `up @ down`, and save it. So the product is an opaque op for it, and backward's has the output's
gradient as a third argument: it is another value then, and none that forward could have made. The rest is plain
formulas, which the compiler fuses (with forward and backward opaque, a small field's step took some 4 % longer).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.kernels import as_one_op, reshaped
from nonlinear_lowrank.ops.precision import autocast_input, no_autocast, product, wide_dtype
from nonlinear_lowrank.ops.sine import sine_layer
from nonlinear_lowrank.ops.sine_delta import SineFactors


class _Phi(NamedTuple):
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """The derivative at the phase."""


def _sigmoid_slope(phase: Tensor) -> Tensor:
    value = phase.sigmoid()
    return value * (1 - value)


_PHI = {
    "identity": _Phi(lambda phase: phase, torch.ones_like),
    "sine": _Phi(torch.sin, torch.cos),
    "sigmoid": _Phi(torch.sigmoid, _sigmoid_slope),
    "relu": _Phi(torch.relu, lambda phase: (phase > 0).to(phase.dtype)),
}

WEIGHT_ACTIVATIONS = tuple(_PHI)
"""Names of phi."""


def lowrank_weight(up: Tensor, down: Tensor, activation: str, omega: float, gain: float) -> Tensor:
    """Return the weight itself, differentiable: (d_out, d_in), float32 or wider."""
    dtype = wide_dtype(up, down)
    with no_autocast(up):
        return _PHI[activation].value(omega * (up.to(dtype) @ down.to(dtype))) / gain


def lowrank_linear(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    """Return `x (phi(omega * up @ down) / gain)^T + bias`; this file's table names what it saves for backward.

    Under autocast x and the rounded weight are in the autocast type. Second derivatives are refused with a
    RuntimeError, but for the identity (use `reference`).

    Args:
        x: (..., d_in).
        up: (d_out, r).
        down: (r, d_in).
        bias: (d_out) or None.
        activation: phi, one of `WEIGHT_ACTIVATIONS`.
        omega: frequency, phi's argument per unit of the product.
        gain: divisor of phi.

    Returns:
        (..., d_out), in x's type.

    Source: sine_lowrank.txt, section 3.2.1.
    """
    if activation == "sine" and x.is_cuda:
        return sine_layer(x, None, bias, [SineFactors(up, down, omega, gain)], base=False)
    x = autocast_input(x)
    bias = None if bias is None else bias.to(x.dtype)
    if activation == "identity":
        with no_autocast(x):
            narrow = F.linear(x, down.to(x.dtype))
            return F.linear(narrow if omega == gain else narrow * (omega / gain), up.to(x.dtype), bias)
    run = _LowRankLinear.apply if torch.is_grad_enabled() else _run
    return run(x, up, down, bias, activation, float(omega), float(gain))


class _LowRankLinear(torch.autograd.Function):
    """Saves x and the factors."""

    @staticmethod
    def forward(x: Any, up: Any, down: Any, bias: Any, activation: Any, omega: Any, gain: Any) -> Any:
        return _run(x, up, down, bias, activation, omega, gain)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        x, up, down, _bias, *ctx.settings = inputs
        ctx.save_for_backward(x, up, down)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives through lowrank_linear are not defined; use the reference for them")
        wanted = [bool(need) for need in ctx.needs_input_grad[:4]]
        x, up, down = ctx.saved_tensors
        activation, omega, gain = ctx.settings
        return *_backward(dy, x, up, down, activation, omega, gain, wanted), None, None, None


def _run(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    run = _forward_op if as_one_op() and not torch.compiler.is_compiling() else _forward
    return run(x, up, down, bias, activation, omega, gain)


def _forward(
    x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, activation: str, omega: float, gain: float
) -> Tensor:
    """Return y of `lowrank_linear`, with the weight formed."""
    with torch.no_grad(), no_autocast(x):
        weight = _formed(_product(up, down, omega, None), activation, gain, x.dtype)
        return reshaped(F.linear(x, weight, bias), (*x.shape[:-1], up.shape[0]))


def _backward(
    dy: Tensor, x: Tensor, up: Tensor, down: Tensor, activation: str, omega: float, gain: float, wanted: list[bool]
) -> list[Tensor | None]:
    """Return gradients of x, up, down, bias; None where `wanted` says no."""
    dx = dup = ddown = dbias = None
    with torch.no_grad(), no_autocast(x):
        phase = _product(up, down, omega, dy)
        dy_TO, x_TI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        if wanted[0]:
            dx = (dy_TO @ _formed(phase, activation, gain, x.dtype)).view(x.shape)
        if wanted[1] or wanted[2]:
            dphase, chain = _PHI[activation].slope(phase).mul_(dy_TO.t() @ x_TI), omega / gain
            dup = _product(dphase, down.t(), 1.0, None).mul_(chain).to(up.dtype)
            ddown = _product(up.t(), dphase, 1.0, None).mul_(chain).to(down.dtype)
        if wanted[3]:
            dbias = dy_TO.sum(0)
    return [each if want else None for each, want in zip((dx, dup, ddown, dbias), wanted, strict=True)]


def _formed(phase: Tensor, activation: str, gain: float, dtype: torch.dtype) -> Tensor:
    """Return the weight by its phase, rounded once."""
    return _PHI[activation].value(phase).mul_(1 / gain).to(dtype)


def _product(left: Tensor, right: Tensor, scale: float, after: Tensor | None) -> Tensor:
    """Return scale * left @ right in float32 or wider; to the compiler, one op that needs `after` too.

    Nothing has a default: with dynamic shapes dynamo takes a default float for an input, and fails in backward.
    """
    run = _product_op if torch.compiler.is_compiling() else _wide_product
    return run(left, right, scale, after)


def _wide_product(left: Tensor, right: Tensor, scale: float, after: Tensor | None) -> Tensor:
    dtype = wide_dtype(left, right)
    with no_autocast(left):
        scaled = left.to(dtype) if scale == 1 else left.to(dtype) * scale
        return product(scaled, right.to(dtype))


# Plain registrations, since `custom_op` checks every call. CompositeExplicitAutograd is any device; autograd is
# `_LowRankLinear`'s.
_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_LIBRARY.define(
    "lowrank_forward(Tensor x, Tensor up, Tensor down, Tensor? bias, str activation, float omega, float gain) -> Tensor"
)
_LIBRARY.define("wide_product(Tensor left, Tensor right, float scale, Tensor? after) -> Tensor")
_LIBRARY.impl("lowrank_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("wide_product", _wide_product, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.lowrank_forward.default
_product_op = torch.ops.nonlinear_lowrank.wide_product.default


@torch.library.register_fake("nonlinear_lowrank::lowrank_forward")
def _(x: Any, up: Any, down: Any, bias: Any, activation: Any, omega: Any, gain: Any) -> Any:
    return x.new_empty(*x.shape[:-1], up.shape[0])


@torch.library.register_fake("nonlinear_lowrank::wide_product")
def _(left: Any, right: Any, scale: Any, after: Any) -> Any:
    return left.new_empty(left.shape[0], right.shape[1], dtype=wide_dtype(left, right))
