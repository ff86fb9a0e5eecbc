"""Settings of NoRA and NoRA++."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from nonlinear_lowrank.adapters.config import AdapterConfig
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, check_share

from .fit import RationalFit, check_range
from .formulas import KIND
from .layer import Anchor, RationalConfig, Tails
from .ratio import Form

ALL_ACTIVATIONS = "all-activations"
"""As `target_modules`: every activation of the network's body."""
ALL_LINEAR = "all-linear"
"""As `lora_target_modules`: every linear but heads."""

Tuning = Literal["low_rank", "rational", "zero_init", "gelu_init", "constants"]


@dataclass
class NoraConfig(AdapterConfig):
    """Settings of NoRA (and NoRA++ with lora_r > 0), for `peft.get_peft_model`; see also `AdapterConfig`.

    `target_modules` are activation modules here: by default "all-activations", all but those of poolers and heads.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    type_name: ClassVar[str] = "NLR_NORA"
    patterns: ClassVar[Mapping[str, str]] = {"r": "rank_pattern", "groups": "groups_pattern"}

    r: int = 2
    """Rank of the coefficients' shift, with tuning="low_rank"."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """{module name or regular expression: r} where it differs."""
    groups: int = 8
    """Contiguous groups of channels, each with coefficients of its own; must divide the width."""
    groups_pattern: dict[str, int] = field(default_factory=dict)
    """{module name or regular expression: groups} where it differs."""
    degrees: tuple[int, int] = (5, 4)
    """Of numerator and denominator. The low-rank shift touches as many coefficients: all but the constant ones."""
    form: Form = "abs_of_sum"
    """The denominator: "abs_of_sum" is 1 + |b0 + b1 x + ...|, equation (6) of the paper; "sum_of_abs" is
    1 + |b1| |x| + |b2| |x|^2 + ..., that of the KAT kernels, on which the paper's networks are built."""
    fit_range: float | tuple[float, float] = 10.0
    """Where the rational function is fitted to the activation it replaces: (low, high), or L for (-L, L)."""
    tails: Tails = "linear"
    """Beyond fit_range: "linear" goes on straight with the activation's own slopes; "rational" lets R go on."""
    anchor: Anchor = "none"
    """"none": the activation becomes R(x; theta + shift), the paper's, and the outputs move by the fit's error.
    "exact": f(x) + (R(x; theta + shift) - R(x; theta)), which starts bit-equal to the original network."""
    numerator_only: bool = False
    """Shift the numerator's coefficients alone (Table 5)."""
    denominator_only: bool = False
    """Shift the denominator's coefficients alone (Table 5)."""
    tuning: Tuning = "low_rank"
    """What is trained (Table 4). "low_rank": NoRA, a shift A B. "rational": the coefficients themselves.
    "zero_init": a shift of every coefficient, from zero. "gelu_init": the coefficients, from GELU's fit whatever
    they replace. "constants": a0 and b0 alone."""
    init_std: float = 0.02
    """A starts as N(0, init_std^2), B at zero."""
    lora_r: int = 0
    """Rank of LoRA on linears, trained together with the activations: NoRA++. 0: none."""
    lora_target_modules: list[str] | str | None = None
    """Linears that get LoRA: names, a regular expression, or "all-linear" for all but heads. None takes peft's
    choice for the model's type, and "all-linear" where it has none."""
    lora_alpha: float | None = None
    """LoRA's product is scaled by lora_alpha / lora_r. None: 2 lora_r, the paper's, and lora_r with lora_sine."""
    lora_dropout: float = 0.0
    """Dropout of LoRA's input in training."""
    lora_sine: bool = False
    """Sine-LoRA in LoRA's place: sin(lora_omega up down) / gain."""
    lora_omega: float = 200.0
    """Frequency, with lora_sine."""
    lora_gain: float | None = None
    """Divisor, with lora_sine. None: the square root of the input width."""
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Coefficients that were fitted, by activation: filled in when the adapter is made and saved with it, so that
    it does not depend on what a later version fits."""

    def __post_init__(self) -> None:
        if self.target_modules == ALL_LINEAR:
            raise UserError(
                "target_modules names activations in NoRA; leave it out for all of them, and give lora_r and "
                f"lora_target_modules={ALL_LINEAR!r} for LoRA on linears (NoRA++)"
            )
        # "all-activations" is none of peft's words: its checks take it for a regular expression.
        everything = self.target_modules in (None, ALL_ACTIVATIONS)
        if everything:
            self.target_modules = None
        super().__post_init__()
        if everything:
            self.target_modules = ALL_ACTIVATIONS
        if isinstance(self.lora_target_modules, list | tuple):
            self.lora_target_modules = set(self.lora_target_modules)  # type: ignore[assignment]
        settings = self.rational("gelu")  # checks what the two have in common
        self.degrees = settings.degrees
        if not isinstance(self.fit_range, int | float):
            self.fit_range = check_range(self.fit_range)  # JSON has lists only
        check_choice("tuning", self.tuning, get_args(Tuning))
        self._check_combinations()
        check_number("init_std", self.init_std, above=0)
        check_integer("lora_r", self.lora_r, minimum=0)
        check_share("lora_dropout", self.lora_dropout)
        check_number("lora_omega", self.lora_omega, above=0)
        for name in ("lora_alpha", "lora_gain"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        for kind, values in self.fits.items():
            self._check_fit(kind, values)

    def _check_combinations(self) -> None:
        if self.numerator_only and self.denominator_only:
            raise UserError("numerator_only and denominator_only leave nothing to train together; set one of them")
        if self.tuning == "constants" and self.form == "sum_of_abs":
            raise UserError(
                "tuning='constants' trains a0 and b0, and form='sum_of_abs' has no b0; use form='abs_of_sum'"
            )
        if self.tuning == "gelu_init" and self.anchor == "exact":
            raise UserError(
                "tuning='gelu_init' starts from GELU and anchor='exact' from the activation as it is; drop one of them"
            )
        if self.lora_r == 0 and (self.lora_sine or self.lora_target_modules):
            name = "lora_sine" if self.lora_sine else "lora_target_modules"
            raise UserError(f"{name} is for NoRA++; set lora_r above 0 too")

    def check_value(self, name: str, value: Any, where: str) -> None:
        """See `AdapterConfig`."""
        check_integer(where, value, minimum=1)

    def rational(self, formula: str, channel_dim: int = -1) -> RationalConfig:
        """Return the rational activation that stands for a formula under these settings."""
        return RationalConfig(
            activation=formula,
            groups=self.groups,
            degrees=self.degrees,
            form=self.form,
            fit_range=self.fit_range,
            tails=self.tails,
            anchor=self.anchor,
            channel_dim=channel_dim,  # type: ignore[arg-type]
        )

    def fit(self, formula: str) -> RationalFit:
        """Return the coefficients for a formula: those in `fits`, else fitted now and put there."""
        kind = KIND[formula]
        if kind not in self.fits:
            fit = self.rational(formula).fit()
            sides = {side: list(getattr(fit, side)) for side in ("numerator", "denominator")}
            self.fits[kind] = {**sides, "error": fit.error}
        known = self.fits[kind]
        coefficients = tuple(known["numerator"]), tuple(known["denominator"])
        return RationalFit(kind, self.form, check_range(self.fit_range), *coefficients, known["error"])

    def _check_fit(self, kind: str, values: Any) -> None:
        m, n = self.degrees
        sizes = {"numerator": m + 1, "denominator": n + (self.form == "abs_of_sum")}
        good = (
            kind in KIND.values()
            and isinstance(values, dict)
            and _are_numbers([values.get("error")], 1)
            and all(_are_numbers(values.get(side), size) for side, size in sizes.items())
        )
        if not good:
            raise UserError(
                f"fits[{kind!r}] is not a fit of degrees {self.degrees} in the form {self.form!r}; omit fits, and it "
                "is filled in"
            )


def _are_numbers(values: Any, size: int) -> bool:
    listed = isinstance(values, list | tuple) and len(values) == size
    return listed and all(type(each) in (int, float) and math.isfinite(each) for each in values)
