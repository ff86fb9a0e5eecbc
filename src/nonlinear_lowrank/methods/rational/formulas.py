"""The fixed activation functions that rational ones stand in for: value and slope by name.

A name is a formula, not only a function: "gelu", "gelu_python" are both the erf GELU, evaluated in a
different order of operations, because a network that must start bit-equal to the original needs the
original's rounding. `KIND` gives the function that a formula computes.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715
_QUICK = 1.702


def _gelu_python(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * torch.pow(x, 3.0))))


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + _CUBIC * x * x)))


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": _gelu_python,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_fast,
    "quick_gelu": lambda x: x * torch.sigmoid(_QUICK * x),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}

FORMULAS = tuple(_VALUES)
"""Names that `activation` takes."""

KIND: dict[str, str] = {name: name for name in FORMULAS} | {
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""The function each formula computes: gelu, gelu_tanh, quick_gelu, silu, relu, tanh or sigmoid."""


def activation(x: Tensor, name: str) -> Tensor:
    """f(x) in the type of x, rounded as the module that uses this formula rounds it.

    Args:
        x: any shape.
        name: one of `FORMULAS`.
    """
    return _VALUES[name](x)


def activation_slope(x: Tensor, name: str) -> Tensor:
    """f'(x) by the closed formula, in the type of x (give it float32 or wider)."""
    kind = KIND[name]
    if kind == "gelu":
        density = torch.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))
        return torch.addcmul(0.5 * (1.0 + torch.erf(x * _SQRT_HALF)), x, density)
    if kind == "gelu_tanh":
        t = torch.tanh(_SQRT_2_OVER_PI * x * (1.0 + _CUBIC * x * x))
        inner = _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    if kind in ("silu", "quick_gelu"):
        rate = 1.0 if kind == "silu" else _QUICK
        s = torch.sigmoid(rate * x)
        return s * (1.0 + rate * x * (1.0 - s))
    if kind == "relu":
        return (x > 0).to(x.dtype)
    if kind == "tanh":
        t = torch.tanh(x)
        return 1.0 - t * t
    s = torch.sigmoid(x)
    return s * (1.0 - s)
