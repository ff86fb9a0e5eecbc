"""Rational activations: an activation function with trainable coefficients, by groups of channels.

Init and learning-rate table. G groups, degrees (m, n); n' is n + 1 in the form "abs_of_sum" and n in "sum_of_abs"
(see `ops.rational`). The fit is that of `rational_fit.fit_rational`.

| tensor                    | shape      | init               | lr x | decay |
|---------------------------|------------|--------------------|------|-------|
| rational_numerator        | (G, m + 1) | the fit, every row | 1    | no    |
| rational_denominator      | (G, n')    | the fit, every row | 1    | no    |
| rational_base_numerator   | (1, m + 1) | the fit; a buffer  | -    | -     |
| rational_base_denominator | (1, n')    | the fit; a buffer  | -    | -     |

The last two are there with anchor="exact" only. All four stay float32 when the model is cast to a 16-bit type: a
coefficient that is off by 2^-9 moves R by up to 2^-9 x, more than the whole error of a fit.

Source: nora.txt, section 3, equations (6)-(8); anchor and tails are ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import activations as hf
from transformers import initialization as init

from ..errors import UserError
from ..ops.activations import FORMULAS
from ..ops.rational import FORMS, LinearTails, denominator_size, rational, rational_anchored
from .method import Method, Role
from .rational_fit import RationalFit, check_degrees, check_range, fit_rational, straight_tails

Form = Literal["abs_of_sum", "sum_of_abs"]
Tails = Literal["linear", "rational"]
Anchor = Literal["none", "exact"]


@dataclass(frozen=True, kw_only=True)
class RationalConfig:
    """Settings of a rational activation.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    method: ClassVar[str] = "rational"

    activation: str = "gelu"
    """What it stands for: one of `ops.activations.FORMULAS`."""
    groups: int = 8
    """G, contiguous groups of channels with coefficients of their own; must divide the width."""
    degrees: tuple[int, int] = (5, 4)
    """Of numerator and denominator."""
    form: Form = "abs_of_sum"
    """The denominator: "abs_of_sum" is 1 + |b0 + b1 x + ...|, equation (6) of the paper; "sum_of_abs" is
    1 + |b1| |x| + |b2| |x|^2 + ..., that of the KAT kernels."""
    fit_range: float | tuple[float, float] = 10.0
    """Where the fit is good: (low, high) around 0, or L for (-L, L)."""
    tails: Tails = "linear"
    """Beyond fit_range: "linear" goes on straight with the activation's own slopes far out; "rational" lets R go
    on, which leaves the activation quickly (both tails of an even denominator share one slope)."""
    anchor: Anchor = "none"
    """"none": R(x), the paper's. "exact": f(x) + (R(x) - R(x; fit)), which starts bit-equal to f."""
    channel_dim: Literal[-1, 1] = -1
    """Where the channels are: last, or behind the batch."""

    def __post_init__(self) -> None:
        low, high = check_range(self.fit_range)
        object.__setattr__(self, "fit_range", (low, high))
        object.__setattr__(self, "degrees", check_degrees(self.degrees))
        for name, known in (
            ("activation", FORMULAS),
            ("form", FORMS),
            ("tails", ("linear", "rational")),
            ("anchor", ("none", "exact")),
            ("channel_dim", (-1, 1)),
        ):
            if getattr(self, name) not in known:
                raise UserError(f"{name} must be one of {', '.join(map(repr, known))}, not {getattr(self, name)!r}")
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise UserError(f"groups must be a whole number of at least 1, not {self.groups!r}")

    def fit(self) -> RationalFit:
        """The fit that the coefficients start from."""
        return fit_rational(self.activation, form=self.form, degrees=self.degrees, fit_range=self.fit_range)

    # Settings never change, and torch.compile(dynamic=True) would make symbols of their floats.
    @torch.compiler.assume_constant_result
    def straight_tails(self) -> LinearTails | None:
        """The operator's `tails`."""
        low, high = self.fit_range  # type: ignore[misc]
        return straight_tails(self.activation, (low, high)) if self.tails == "linear" else None

    def evaluate(self, x: Tensor, numerator: Tensor, denominator: Tensor, base: tuple[Tensor, Tensor] | None) -> Tensor:
        """The activation with given coefficients.

        Args:
            x: any shape, with a multiple of G channels at channel_dim.
            numerator: (G, m + 1).
            denominator: (G, n').
            base: coefficients of the fit, (G or 1, .), with anchor="exact".

        Returns:
            Of the shape and type of x.

        Raises:
            UserError: the groups do not divide the channels.
        """
        last = x if self.channel_dim == -1 else x.movedim(1, -1)
        tails = self.straight_tails()
        if base is None:
            y = rational(last, numerator, denominator, self.form, tails)
        else:
            y = rational_anchored(last, numerator, denominator, *base, self.activation, self.form, tails)
        return y if self.channel_dim == -1 else y.movedim(-1, 1)


class RationalActivation(nn.Module):
    """An activation that is a rational function: any shape with a multiple of G channels -> the same.

    Args:
        config: its settings.
        device: of the coefficients, which are float32.
    """

    rational_numerator: nn.Parameter
    rational_denominator: nn.Parameter
    rational_base_numerator: Tensor | None
    rational_base_denominator: Tensor | None

    def __init__(self, config: RationalConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.rational_config = config
        m, n = config.degrees
        for side, terms in (("numerator", m + 1), ("denominator", denominator_size(n, config.form))):
            values = torch.empty(config.groups, terms, device=device, dtype=torch.float32)
            setattr(self, f"rational_{side}", nn.Parameter(values))
            base = torch.empty(1, terms, device=device, dtype=torch.float32) if config.anchor == "exact" else None
            self.register_buffer(f"rational_base_{side}", base)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets every coefficient to the fit's; on the meta device nothing."""
        if self.rational_numerator.is_meta:
            return
        fit = self.rational_config.fit()
        for side, values in (("numerator", fit.numerator), ("denominator", fit.denominator)):
            for name in (f"rational_{side}", f"rational_base_{side}"):
                tensor = getattr(self, name)
                if tensor is not None:
                    row = torch.tensor(values, dtype=torch.float32, device=tensor.device)
                    init.copy_(tensor, row.expand_as(tensor))

    def base_coefficients(self) -> tuple[Tensor, Tensor] | None:
        """Of the fit, (1, .) each, with anchor="exact"."""
        if self.rational_base_numerator is None or self.rational_base_denominator is None:
            return None
        return self.rational_base_numerator, self.rational_base_denominator

    def forward(self, x: Tensor) -> Tensor:
        """As `RationalConfig.evaluate`."""
        coefficients = self.rational_numerator, self.rational_denominator
        return self.rational_config.evaluate(x, *coefficients, self.base_coefficients())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = {**self._parameters, **self._buffers}
        before = {name: tensor.detach() for name, tensor in own.items() if tensor is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            now = getattr(self, name)
            if now.dtype in (torch.bfloat16, torch.float16) and old.dtype == torch.float32:
                now.data = old.to(now.device)
        return self

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        config = self.rational_config
        low, high = config.fit_range  # type: ignore[misc]
        m, n = config.degrees
        return (
            f"{config.activation}, groups={config.groups}, degree {m}/{n}, {config.form}, "
            f"range=[{low:g}, {high:g}], tails={config.tails}, anchor={config.anchor}"
        )


def formula_of(module: nn.Module) -> str | None:
    """The formula of `ops.activations` that a module computes; None if it is not an activation we have a fit for."""
    kind = type(module)
    if kind is hf.GELUActivation:
        return "gelu_python" if module.act == getattr(module, "_gelu_python", None) else "gelu"
    if kind is hf.GELUTanh:
        return "gelu_new" if module.act == getattr(module, "_gelu_tanh_python", None) else "gelu_tanh"
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _FORMULAS.get(kind)


_FORMULAS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    hf.AccurateGELUActivation: "gelu_new",
    hf.FastGELUActivation: "gelu_fast",
    hf.NewGELUActivation: "gelu_new",
    hf.QuickGELUActivation: "quick_gelu",
    hf.SiLUActivation: "silu",
}


def _build(module: nn.Module, config: RationalConfig) -> nn.Module:
    return RationalActivation(config).train(module.training)


def _roles(module: nn.Module) -> Mapping[str, Role]:
    return {
        "rational_numerator": Role("rational.numerator", decay=False),
        "rational_denominator": Role("rational.denominator", decay=False),
    }


def _check(name: str, module: nn.Module, config: Any) -> None:
    """Nothing: the width that the groups must divide is not known here; the operator checks it."""


METHOD = Method(
    name=RationalConfig.method,
    config_class=RationalConfig,
    layer_types=(RationalActivation,),
    is_target=lambda module: formula_of(module) is not None or isinstance(module, RationalActivation),
    check=_check,
    build=lambda name, module, config: _build(module, config),
    roles=_roles,
    # Elementwise work does not count, neither here nor in the plain activation.
    flops=lambda module: 0,
    float32=tuple(f"rational_{base}{side}" for base in ("", "base_") for side in ("numerator", "denominator")),
)
