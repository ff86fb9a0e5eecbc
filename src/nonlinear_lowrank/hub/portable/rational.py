"""Rational activations."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from nonlinear_lowrank.ops.plain import kept_float32, wide

from .core import METHODS, Layer

RATIONAL_FITS: dict[Any, tuple[list[float], list[float]]] = {}
"""Numerator and denominator that stand for an activation, by (activation, form, degrees, range)."""

_GELUS = ("gelu", "gelu_python", "gelu_new", "gelu_fast", "quick_gelu")
PLAIN_ACTIVATIONS = {name: ACT2FN[name] for name in (*_GELUS, "silu", "relu", "tanh", "sigmoid")}
PLAIN_ACTIVATIONS["gelu_tanh"] = ACT2FN["gelu_pytorch_tanh"]


class RationalActivation(Layer, nn.Module):
    """A rational function in the place of an activation, by groups of channels (NoRA, equations (6) to (8)).

        R(x) = P(x) / Q(x)        P(x) = a0 + a1 x + ... + am x^m
        Q(x) = 1 + |b0 + b1 x + ... + bn x^n|, or with form="sum_of_abs" 1 + |b1| |x| + ... + |bn| |x|^n

    Tensors: rational_numerator (G, m + 1), rational_denominator (G, n + 1) or (G, n), for G contiguous groups. Beyond
    `fit_range` R continues straight with tails="linear". With anchor="exact" the value is f(x) + (R(x) - R(x; fit)), f
    the plain activation. Everything is computed in float32 or wider.
    """

    float32 = ("rational_numerator", "rational_denominator", "rational_base_numerator", "rational_base_denominator")

    rational_numerator: nn.Parameter
    rational_denominator: nn.Parameter

    def __init__(self, settings: dict[str, Any], device: Any) -> None:
        super().__init__()
        self.rational = settings
        m, n = settings["degrees"]
        sizes = {"numerator": m + 1, "denominator": n + (settings["form"] == "abs_of_sum")}
        experts = [settings["experts"]] if settings.get("experts") else []
        for side, terms in sizes.items():
            values = torch.empty(*experts, settings["groups"], terms, device=device, dtype=torch.float32)
            setattr(self, f"rational_{side}", nn.Parameter(values))
            base = torch.empty(1, terms, device=device) if settings["anchor"] == "exact" else None
            self.register_buffer(f"rational_base_{side}", base)

    def reset_parameters(self) -> None:
        """Set every coefficient to the fit's."""
        settings = self.rational
        kind = (settings["activation"], settings["form"], tuple(settings["degrees"]), tuple(settings["fit_range"]))
        for side, values in zip(("numerator", "denominator"), RATIONAL_FITS[kind], strict=True):
            for name in (f"rational_{side}", f"rational_base_{side}"):
                if (tensor := getattr(self, name)) is not None and not tensor.is_meta:
                    row = torch.tensor(values, dtype=torch.float32, device=tensor.device)
                    init.copy_(tensor, row.expand_as(tensor))

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels) -> the same, or with the channels in the dimension channel_dim."""
        return self.evaluate(x, self.rational_numerator, self.rational_denominator)

    def evaluate(self, x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
        """Return the function by coefficients (..., G, terms), in the type of x."""
        settings, dim = self.rational, self.rational["channel_dim"] or -1
        z = wide(x.movedim(dim, -1))
        low, high = settings["fit_range"]
        linear, exact = settings["tails"] == "linear", settings["anchor"] == "exact"
        inside = z.clamp(low, high) if linear else z
        y = self._ratio(inside, numerator, denominator)
        if exact:
            base = self._ratio(inside, self.rational_base_numerator, self.rational_base_denominator)
            own = PLAIN_ACTIVATIONS[settings["activation"]](x)
            y = wide(own.movedim(dim, -1)) + (y - base)
        elif linear and settings["activation"] not in ("tanh", "sigmoid"):  # whose slopes far out are 0
            y = y + (z - high).clamp(min=0)
        y = y.to(x.dtype)
        return y if dim == -1 else y.movedim(-1, dim).contiguous()

    def _ratio(self, x: Tensor, numerator: Any, denominator: Any) -> Tensor:
        rows = x.unflatten(-1, (numerator.shape[-2], -1))
        a, b = numerator.to(x.dtype)[..., None], denominator.to(x.dtype)[..., None]
        if self.rational["form"] == "abs_of_sum":
            below = 1 + _polynomial(b, rows).abs()
        else:
            below = 1 + _polynomial(b.abs(), rows.abs()) * rows.abs()
        return (_polynomial(a, rows) / below).flatten(-2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(kept_float32(fn), recurse)


def _polynomial(coefficients: Tensor, x: Tensor) -> Tensor:
    """Return c0 + c1 x + ... by Horner's rule; coefficients (..., G, terms, 1), x (..., G, channels of a group)."""
    value = coefficients[..., -1, :].expand_as(x)
    for k in reversed(range(coefficients.shape[-2] - 1)):
        value = torch.addcmul(coefficients[..., k, :], value, x)
    return value


def put_rational(model: Any, names: list[str], settings: dict[str, Any], build: Any = RationalActivation) -> None:
    """Put rational functions in the place of activations, one in each place."""
    for name in names:
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        near = next((each for each in (*parent.parameters(), *model.parameters())), torch.empty(0))
        setattr(parent, child, build(settings, near.device).train(model.training))


METHODS["rational"] = put_rational
