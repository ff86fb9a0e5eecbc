"""Rational activations: an activation function with trainable coefficients, by groups of channels.

Init and learning-rate table. G groups, degrees (m, n); n' is n + 1 in the form "abs_of_sum" and n in "sum_of_abs"
(see `op`). The fit is that of `fit.fit_rational`.

| tensor                    | shape      | init               | lr x | decay |
|---------------------------|------------|--------------------|------|-------|
| rational_numerator        | (G, m + 1) | the fit, every row | 1    | no    |
| rational_denominator      | (G, n')    | the fit, every row | 1    | no    |
| rational_base_numerator   | (1, m + 1) | the fit; a buffer  | -    | -     |
| rational_base_denominator | (1, n')    | the fit; a buffer  | -    | -     |

The last two are there with anchor="exact" only. All four stay float32 when the model is cast to a 16-bit type: a
coefficient that is off by 2^-9 moves R by up to 2^-9 x, more than the whole error of a fit. In a module that holds E
experts the first two are (E, G, .).

Source: nora.txt, section 3, equations (6)-(8); anchor and tails are ours.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Findings, Method, Role, Target, register
from nonlinear_lowrank.methods.experts import by_expert
from nonlinear_lowrank.ops.plain import kept_float32
from nonlinear_lowrank.ops.precision import check_unrounded
from nonlinear_lowrank.validation import check_choice, check_integer

from .fit import RationalFit, check_degrees, check_range, fit_rational
from .op import rational, rational_anchored
from .reference import FORMS, FORMULAS, KIND, Form, LinearTails, denominator_size
from .sites import Site, formula_of, survey

Tails = Literal["linear", "rational"]
Anchor = Literal["none", "exact"]


@dataclass(frozen=True, kw_only=True)
class RationalConfig:
    """Settings of a rational activation.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    method: ClassVar[str] = "rational"

    activation: str | None = None
    """The function it is fitted to: one of `reference.FORMULAS`. None: in a model that is augmented, each activation's
    own function; a module of its own needs it."""
    groups: int = 8
    """G, contiguous groups of channels with coefficients of their own; must divide the width."""
    degrees: tuple[int, int] = (5, 4)
    """Degrees of numerator and denominator."""
    form: Form = "abs_of_sum"
    """The denominator: "abs_of_sum" is 1 + |b0 + b1 x + ...|, equation (6) of the paper; "sum_of_abs" is
    1 + |b1| |x| + |b2| |x|^2 + ..., that of the KAT kernels."""
    fit_range: float | tuple[float, float] = 10.0
    """Interval of the fit: (low, high) around 0, or L for (-L, L)."""
    tails: Tails = "linear"
    """Beyond fit_range: "linear" continues straight with the activation's own slopes far out; "rational" continues
    R, which leaves the activation quickly (both tails of an even denominator share one slope)."""
    anchor: Anchor = "none"
    """"none": R(x), the paper's. "exact": f(x) + (R(x) - R(x; fit)), which starts bit-equal to f."""
    channel_dim: Literal[-4, -3, -2, -1, 1] | None = None
    """Dimension of the channels: last, behind the batch, or counted from the end (-3 for images, with a batch or
    without). None: in an augmented model, read from the layers around the activation; else last."""
    width: int | None = None
    """Channels there; in an augmented model, read from the layers around the activation. None: not checked."""
    experts: int | None = None
    """Number of experts, each with coefficients of its own, in a module that holds them as 3-D parameters; in an
    augmented model, read from that module. None: no experts."""

    def __post_init__(self) -> None:
        low, high = check_range(self.fit_range)
        object.__setattr__(self, "fit_range", (low, high))
        object.__setattr__(self, "degrees", check_degrees(self.degrees))
        if self.activation is not None:
            check_choice("activation", self.activation, FORMULAS)
        check_choice("form", self.form, FORMS)
        check_choice("tails", self.tails, get_args(Tails))
        check_choice("anchor", self.anchor, get_args(Anchor))
        if self.channel_dim not in (-4, -3, -2, -1, 1, None):
            raise UserError(f"channel_dim must be -4 to -1, or 1, got {self.channel_dim!r}")
        check_integer("groups", self.groups, minimum=1)
        for name in ("width", "experts"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)

    def fit(self) -> RationalFit:
        """Return the fit that the coefficients start from; raise UserError where no function is given."""
        return fit_rational(self._formula(), form=self.form, degrees=self.degrees, fit_range=self.fit_range)

    # Settings never change, and torch.compile(dynamic=True) would make symbols of their floats.
    @torch.compiler.assume_constant_result
    def straight_tails(self) -> LinearTails | None:
        """Return the operator's `tails`."""
        if self.tails == "rational":
            return None
        low, high = self.fit_range  # type: ignore[misc]
        return LinearTails(low, high, 0.0, 0.0 if KIND[self._formula()] in ("tanh", "sigmoid") else 1.0)

    @property
    def dim(self) -> int:
        """The dimension of the channels: `channel_dim`, the last where that is open."""
        return self.channel_dim or -1

    def _formula(self) -> str:
        if self.activation is None:
            raise UserError(
                "a rational activation by itself needs the function that it starts from, as in "
                'RationalConfig(activation="gelu"); in a model, nlr.augment takes each activation\'s own'
            )
        return self.activation

    def evaluate(self, x: Tensor, numerator: Tensor, denominator: Tensor, base: tuple[Tensor, Tensor] | None) -> Tensor:
        """Evaluate it by coefficients (G, m + 1), (G, n'), those of the fit with anchor="exact"; shape and type of x.

        Raises:
            UserError: the groups do not divide the channels, or these are not where they should be.
        """
        dim = self.dim
        if self.width is not None and x.shape[dim] != self.width and self.width in x.shape[1:]:
            raise UserError(
                f"a rational activation of {self.width} channels, but not in the expected dimension of its input "
                f"{tuple(x.shape)}; leave it out with exclude=, or name the dimension with channel_dim="
            )
        last = x.movedim(dim, -1)
        tails = self.straight_tails()
        if base is None:
            y = rational(last, numerator, denominator, self.form, tails)
        else:
            anchor = *base, self._formula(), self.form, tails
            y = rational_anchored(last, numerator, denominator, *anchor, channel_dim=dim)
        if dim == -1:
            return y
        y = y.movedim(-1, dim)
        # In the plain activation's layout: a convolution of another one is another algorithm, rounded otherwise.
        return y.contiguous() if x.is_contiguous() or x.stride(dim) > x.stride(-1) else y

    def evaluate_all(
        self,
        x: Tensor,
        numerator: Tensor,
        denominator: Tensor,
        base: tuple[Tensor, Tensor] | None,
        ends: list[int] | None,
    ) -> Tensor:
        """`evaluate`, or with `experts` the same of each expert's rows, which end at `ends`, by (E, G, .)."""
        if self.experts is None:
            return self.evaluate(x, numerator, denominator, base)
        return by_expert(functools.partial(self.evaluate, base=base), x, ends, numerator, denominator)


class RationalActivation(nn.Module):
    """An activation that is a rational function: any shape with a multiple of G channels -> the same.

    With `experts` it is called by a module that holds them: rows (S, channels), sorted by expert.

    Raises:
        UserError: the config does not say what it is fitted to.
    """

    rational_numerator: nn.Parameter
    rational_denominator: nn.Parameter
    rational_base_numerator: Tensor | None
    rational_base_denominator: Tensor | None

    def __init__(self, config: RationalConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        config.fit()  # on meta too, where nothing is drawn: a wrong config fails at once
        self.rational_config = config
        m, n = config.degrees
        self.num_experts, self.expert_ends = config.experts, None
        for side, terms in (("numerator", m + 1), ("denominator", denominator_size(n, config.form))):
            shape = (config.groups, terms) if config.experts is None else (config.experts, config.groups, terms)
            values = torch.empty(shape, device=device, dtype=torch.float32)
            setattr(self, f"rational_{side}", nn.Parameter(values))
            base = torch.empty(1, terms, device=device, dtype=torch.float32) if config.anchor == "exact" else None
            self.register_buffer(f"rational_base_{side}", base)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every coefficient to the fit's; on the meta device nothing."""
        if self.rational_numerator.is_meta:
            return
        fit = self.rational_config.fit()
        for side, values in (("numerator", fit.numerator), ("denominator", fit.denominator)):
            for name in (f"rational_{side}", f"rational_base_{side}"):
                tensor = getattr(self, name)
                if tensor is not None and not getattr(tensor, "_is_hf_initialized", False):
                    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of FSDP2
                    shard.copy_(torch.tensor(values, dtype=torch.float32, device=shard.device).expand_as(shard))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator: (G, .), or (E, G, .) of experts."""
        return self.rational_numerator, self.rational_denominator

    def base_coefficients(self) -> tuple[Tensor, Tensor] | None:
        """Return the fit's coefficients, (1, .) each, with anchor="exact"."""
        if self.rational_base_numerator is None or self.rational_base_denominator is None:
            return None
        return self.rational_base_numerator, self.rational_base_denominator

    def forward(self, x: Tensor) -> Tensor:
        """See `RationalConfig.evaluate`; raise UserError where FSDP has rounded the coefficients to 16 bits."""
        check_unrounded(self.rational_numerator, "rational coefficients")
        return self.rational_config.evaluate_all(x, *self.coefficients(), self.base_coefficients(), self.expert_ends)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(kept_float32(fn), recurse)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        config = self.rational_config
        low, high = config.fit_range  # type: ignore[misc]
        m, n = config.degrees
        return (
            f"{config.activation}, groups={config.groups}, degree {m}/{n}, {config.form}, "
            f"range=[{low:g}, {high:g}], tails={config.tails}, anchor={config.anchor}"
        )


@register
class RationalMethod(Method):
    """Rational activations."""

    name = RationalConfig.method
    config_class = RationalConfig
    layer_types = (RationalActivation,)
    kind = "activation"
    optimizable = True
    adapter = "nonlinear_lowrank.methods.rational.adapter"
    adapter_arms: ClassVar = {
        "nora": AdapterArm(
            config=(adapter, "NoraConfig"),
            fixed={"lora_r": 0},
            targets="",
            shown=("r", "groups", "degrees", "anchor", "tails"),
        ),
        "nora++": AdapterArm(
            config=(adapter, "NoraConfig"),
            default={"lora_r": 8},
            rank="lora_r",
            targets="lora_target_modules",
            shown=("r", "groups", "lora_r", "lora_target_modules", "lora_alpha", "plus"),
        ),
    }
    float32 = tuple(f"rational_{base}{side}" for base in ("", "base_") for side in ("numerator", "denominator"))

    def is_target(self, module: nn.Module) -> bool:
        return formula_of(module) is not None or isinstance(module, RationalActivation)

    def find(self, model: nn.Module, config: Any) -> Findings:
        """Find every activation of a model; see `sites`."""
        seen = survey(model)
        if seen.adapters:
            raise UserError(
                f"{seen.adapters[0] or 'the model'} has adapters; augment the model before they go on, or tune "
                "activations as an adapter too (nlr.NoraConfig)"
            )
        targets = {name: _target(name, site, config) for name, site in seen.sites.items()}
        return Findings(targets=targets, skipped=seen.skipped())

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        if config.width is not None and config.width % config.groups:
            raise UserError(
                f"groups={config.groups} do not divide the {config.width} channels of {name}; choose groups that do, "
                "or leave it out with exclude="
            )

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        if config.activation is None:
            config = replace(config, activation=formula_of(module))
        return RationalActivation(config).train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        return {f"rational_{side}": Role(f"rational.{side}", decay=False) for side in ("numerator", "denominator")}


def _target(name: str, site: Site, config: RationalConfig) -> Target:
    config = replace(
        config,
        activation=config.activation or site.formula,
        channel_dim=config.channel_dim or site.channel_dim,  # type: ignore[arg-type]
        width=config.width or site.width,
        experts=site.experts,
    )
    refused = f"{site.bypassed}, or leave it out with exclude=" if site.bypassed else ""
    if isinstance(site.module, RationalActivation):
        refused = f"{name} is rational already; start from the plain model, or leave it out with exclude="
    of = "" if config.activation == site.formula else f" in place of {site.formula}"
    weight = getattr(site.neighbour, "weight", None)  # an activation has none to tell its own device
    of_experts = f", for each of {config.experts} experts" if config.experts else ""
    return Target(
        config=config,
        details=f"{config.fit()}{of}, {config.groups} groups of {config.width or '?'} channels{of_experts}",
        device=weight.device if isinstance(weight, Tensor) else None,
        skipped=site.skipped,
        refused=refused,
    )
