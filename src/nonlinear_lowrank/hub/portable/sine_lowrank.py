"""Sine low-rank weights."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from nonlinear_lowrank.ops.plain import autocast_input, kept_float32

from .core import METHODS, Layer, replace, width_of

SINE_ACTIVATIONS: dict[str, Any] = {
    "sine": torch.sin,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "identity": lambda phase: phase,
}


class SineLowRankLinear(Layer, nn.Module):
    """A linear whose weight is a sine of a low-rank product (sine low-rank weights, section 3.2, equation (3)).

        W = phi(omega * U V) / g        y = x W^T + b        phi is the sine, or `activation`

    Tensors: sine_up U (d_out, k), sine_down V (k, d_in), bias. omega and g are fixed; g is sqrt(d_in) unless given,
    and 1 for "identity" and "relu". The product and the sine are float32 or wider whatever the model's type.
    """

    float32 = ("sine_up", "sine_down")
    bias: nn.Parameter | None

    def __init__(self, plain: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self.in_features, self.out_features = width_of(plain)
        self.sine = settings
        dtype = torch.float64 if plain.weight.dtype == torch.float64 else torch.float32
        options: dict[str, Any] = {"device": plain.weight.device, "dtype": dtype}
        self.sine_up = nn.Parameter(torch.empty(self.out_features, settings["rank"], **options))
        self.sine_down = nn.Parameter(torch.empty(settings["rank"], self.in_features, **options))
        held = None if plain.bias is None else nn.Parameter(torch.empty_like(plain.bias))
        self.register_parameter("bias", held)

    def reset_parameters(self) -> None:
        """Draw the factors by Kaiming's uniform init, each by its own fan; the bias is 0."""
        draw_sine_factor(self.sine_up, self.sine["rank"], self.sine)
        draw_sine_factor(self.sine_down, self.in_features, self.sine)
        if self.bias is not None:
            init.zeros_(self.bias)

    @property
    def weight(self) -> Tensor:
        """W (d_out, d_in)."""
        return sine_weight(self.sine_up, self.sine_down, self.sine, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return sine_product(x, self.sine_up, self.sine_down, self.bias, self.sine)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        keep = kept_float32(fn)
        return super()._apply(lambda tensor: keep(tensor) if tensor.ndim == 2 else fn(tensor), recurse)


def draw_sine_factor(factor: Tensor, fan: int, settings: dict[str, Any]) -> None:
    """Draw U(-l, l) with l = sqrt(6 / ((1 + a^2) fan)), a^2 = 5 or 0."""
    bound = (6 / (6.0 if settings["init"] == "kaiming_sqrt5" else 1.0) / fan) ** 0.5
    init.uniform_(factor, -bound, bound)


def sine_gain(settings: dict[str, Any], d_in: int) -> float:
    """Return g."""
    if settings["gain"] is not None:
        return float(settings["gain"])
    return 1.0 if settings["activation"] in ("identity", "relu") else float(d_in) ** 0.5


def sine_weight(up: Tensor, down: Tensor, settings: dict[str, Any], d_in: int) -> Tensor:
    """Return W (d_out, d_in) in float32 or wider."""
    with torch.autocast(up.device.type, enabled=False):
        phase = (up * float(settings["omega"])) @ down
        weight: Tensor = SINE_ACTIVATIONS[settings["activation"]](phase) * (1 / sine_gain(settings, d_in))
        return weight


def sine_product(x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, settings: dict[str, Any]) -> Tensor:
    """Return x W^T + b; a plain low-rank weight ("identity") is never formed."""
    x, d_in = autocast_input(x), down.shape[1]
    bias = None if bias is None else bias.to(x.dtype)
    if settings["activation"] != "identity":
        return F.linear(x, sine_weight(up, down, settings, d_in).to(x.dtype), bias)
    factor = float(settings["omega"]) / sine_gain(settings, d_in)
    narrow = F.linear(x, down.to(x.dtype))
    return F.linear(narrow if factor == 1 else narrow * factor, up.to(x.dtype), bias)


def put_sine_lowrank(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put low-rank weights in the place of linears."""
    replace(model, names, lambda name, module: SineLowRankLinear(module, settings))


METHODS["sine-lowrank"] = put_sine_lowrank
