"""NoRA's settings and layers: activations as rational functions whose coefficients get a shift, and the LoRA of NoRA++.

Init table, for G groups; no learning rate is multiplied. A side is "numerator" (K = m, its degree) or "denominator"
(K = n). With tuning="low_rank" the shift touches a1 ... am and b1 ... bn, as many coefficients as the degree says:
G ((m + 1) r + (n + 1) r) numbers a layer (nora.txt, section 3).

| tensor           | tuning              | shape           | init                  | decay |
|------------------|---------------------|-----------------|-----------------------|-------|
| lora_{side}_a    | low_rank            | (G, K, r)       | N(0, 0.02^2)          | yes   |
|                  | shared              | (r, m + 1 or n) | U(-1, 1) / sqrt(ditto)| yes   |
| lora_{side}_b    | low_rank, shared    | (G, r)          | 0                     | yes   |
| lora_{side}      | zero_init           | as theta's      | 0, a shift            | yes   |
|                  | constants           | (G, 1)          | 0, a shift of a0, b0  | yes   |
|                  | rational, gelu_init | as theta's      | the coefficients      | no    |
| lora_A, lora_B   | NoRA++              | as LoRA's       | as LoRA's             | yes   |

Two PEFT methods cannot share a model, hence LoRA within this one. An activation's tensors are float32, also in a model
that is cast to a 16-bit type.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from torch import Tensor, nn

from nonlinear_lowrank.adapters.config import AdapterConfig
from nonlinear_lowrank.adapters.lora import LoraLayer
from nonlinear_lowrank.adapters.sine import SineLinear
from nonlinear_lowrank.adapters.weights import TensorLayer
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Role
from nonlinear_lowrank.ops.plain import kept_float32, wide_dtype
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, check_share

from .fit import KINDS, RationalFit, check_range
from .layer import Anchor, RationalActivation, RationalConfig, Tails
from .reference import KIND, Form
from .sites import Site

ALL_ACTIVATIONS = "all-activations"
"""As `target_modules`: every activation of the network's body."""
ALL_LINEAR = "all-linear"
"""As `lora_target_modules`: every linear but heads."""

Tuning = Literal["low_rank", "shared", "rational", "zero_init", "gelu_init", "constants"]


@dataclass
class NoraConfig(AdapterConfig):
    """Settings of NoRA (and NoRA++ with lora_r > 0), for `peft.get_peft_model`; see also `AdapterConfig`.

    `target_modules` are activation modules here: by default "all-activations", all but those of poolers and heads.
    """

    type_name: ClassVar[str] = "NLR_NORA"
    patterns: ClassVar[Mapping[str, str]] = {"r": "rank_pattern", "groups": "groups_pattern"}

    r: int = 2
    """Rank of the coefficients' shift, with tuning="low_rank" or "shared"."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """{module name or regular expression: r} where it differs."""
    groups: int = 8
    """Contiguous groups of channels, each with coefficients of its own; must divide the width."""
    groups_pattern: dict[str, int] = field(default_factory=dict)
    """{module name or regular expression: groups} where it differs."""
    degrees: tuple[int, int] = (5, 4)
    """Degrees of numerator and denominator. The low-rank shift touches as many coefficients, all but the constants."""
    form: Form = "abs_of_sum"
    """The denominator: "abs_of_sum" is 1 + |b0 + b1 x + ...|, equation (6) of the paper; "sum_of_abs" is
    1 + |b1| |x| + |b2| |x|^2 + ..., that of the KAT kernels, on which the paper's networks are built."""
    fit_range: float | tuple[float, float] = 10.0
    """Interval of the fit to the activation that is replaced: (low, high), or L for (-L, L)."""
    tails: Tails = "linear"
    """Beyond fit_range: "linear" continues straight with the activation's own slopes; "rational" continues R."""
    anchor: Anchor = "none"
    """"none": the activation becomes R(x; theta + shift), the paper's, and the outputs move by the fit's error.
    "exact": f(x) + (R(x; theta + shift) - R(x; theta)), which starts bit-equal to the original network."""
    numerator_only: bool = False
    """Shift the numerator's coefficients alone (Table 5)."""
    denominator_only: bool = False
    """Shift the denominator's coefficients alone (Table 5)."""
    tuning: Tuning = "low_rank"
    """Trained part (Table 4). "low_rank": NoRA, a shift A B. "shared": the authors' released code, a shift
    shift_alpha / r B A with one A for all groups, of a0 too. "rational": the coefficients themselves.
    "zero_init": a shift of every coefficient, from zero. "gelu_init": the coefficients, from GELU's fit whatever
    they replace. "constants": a0 and b0 alone."""
    init_std: float = 0.02
    """A starts as N(0, init_std^2), B at zero, with tuning="low_rank"."""
    shift_alpha: float | None = None
    """The shift of tuning="shared" is scaled by shift_alpha / r. None: 2 r, the released code's."""
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
    lora_cached_weights: int = 4
    """Number of weights with adapters in them that a layer keeps in evaluation, with lora_sine. 0: none."""
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Coefficients that were fitted, by activation: filled in when the adapter is made and saved with it, so that
    it does not depend on what a later version fits."""

    def __post_init__(self) -> None:
        if self.target_modules == ALL_LINEAR:
            raise UserError(
                "target_modules names activations in NoRA; omit it for all of them, and give lora_r and "
                f"lora_target_modules={ALL_LINEAR!r} for LoRA on linears (NoRA++)"
            )
        # "all-activations" is not peft's word: its checks take it for a regular expression.
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
        check_integer("lora_cached_weights", self.lora_cached_weights, minimum=0)
        check_share("lora_dropout", self.lora_dropout)
        check_number("lora_omega", self.lora_omega, above=0)
        for name in ("shift_alpha", "lora_alpha", "lora_gain"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        for kind in self.fits:
            self._kept_fit(kind)

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
        if self.shift_alpha is not None and self.tuning != "shared":
            raise UserError(f"shift_alpha is for tuning='shared', and tuning is {self.tuning!r}; omit one of them")
        if self.lora_r == 0 and (self.lora_sine or self.lora_target_modules):
            name = "lora_sine" if self.lora_sine else "lora_target_modules"
            raise UserError(f"{name} is for NoRA++; set lora_r above 0 too")
        if self.lora_r == 0 and self.bias.endswith("_only"):
            raise UserError(f"bias={self.bias!r} is for NoRA++, whose linears have biases; use 'all', or set lora_r")

    def lora_config(self, fan_in_fan_out: bool) -> Any:
        """Return the settings of a linear's factors, as the layers take them."""
        alpha = (1 if self.lora_sine else 2) * self.lora_r if self.lora_alpha is None else self.lora_alpha
        config: Any = LoraConfig(
            r=self.lora_r,
            lora_alpha=alpha,  # type: ignore[arg-type]
            lora_dropout=self.lora_dropout,
            init_lora_weights=self.init_weights,
            fan_in_fan_out=fan_in_fan_out,
            inference_mode=self.inference_mode,
        )
        config.omega, config.gain, config.cached_weights = self.lora_omega, self.lora_gain, self.lora_cached_weights
        config.activation_sine = False
        return config

    def rational(self, formula: str, channel_dim: int = -1, experts: int | None = None) -> RationalConfig:
        """Return the rational activation that stands for a formula under these settings."""
        same = {name: getattr(self, name) for name in ("groups", "degrees", "form", "fit_range", "tails", "anchor")}
        return RationalConfig(activation=formula, channel_dim=channel_dim, experts=experts, **same)  # type: ignore[arg-type]

    def fit(self, formula: str) -> RationalFit:
        """Return the coefficients for a formula: those in `fits`, else fitted now and put there."""
        kind = KIND[formula]
        if kind not in self.fits:
            fit = self.rational(formula).fit()
            sides = {side: list(getattr(fit, side)) for side in ("numerator", "denominator")}
            self.fits[kind] = {**sides, "error": fit.error}
        return self._kept_fit(kind)

    def _kept_fit(self, kind: str) -> RationalFit:
        try:
            known = self.fits[kind]
            coefficients = tuple(known["numerator"]), tuple(known["denominator"])
            fit = RationalFit(kind, self.form, check_range(self.fit_range), *coefficients, known["error"])
            good = all(map(math.isfinite, (*fit.numerator, *fit.denominator, fit.error)))
        except (KeyError, TypeError):
            good = False
        if not good or kind not in KINDS or fit.degrees != self.degrees:
            raise UserError(
                f"fits[{kind!r}] is not a fit of degrees {self.degrees} in the form {self.form!r}; omit fits to "
                "have it filled in"
            )
        return fit


_SIDES = ("numerator", "denominator")
_FACTORED = ("low_rank", "shared")
_RANDOM = 0.3  # of init_weights=False, see `reset_adapter`


class NoraActivation(TensorLayer):
    """An activation, or a `RationalActivation` whose coefficients are then theta, with shifts; of any shape."""

    adapter_layer_names = tuple(f"lora_{side}{factor}" for side in _SIDES for factor in ("_a", "_b", ""))
    other_param_names = ("configs", "_theta", "_settings")

    def __init__(self, base_layer: nn.Module, site: Site) -> None:
        super().__init__(base_layer)
        self.formula, self.width, self.channel_dim = site.formula, site.width, site.channel_dim
        self.num_experts = site.experts
        self.expert_ends: list[int] | None = None
        # Not submodules: a neighbour that tells the device, and the plain activation while another is merged in.
        self._neighbour = (site.neighbour,)
        self._original: tuple[nn.Module, ...] = ()
        self._theta: dict[str, tuple[Tensor, Tensor]] = {}
        self._settings: dict[str, RationalConfig] = {}

    @property
    def in_features(self) -> int | None:
        """Number of channels, None where it is not known; `out_features` is the same."""
        return self.width

    out_features = in_features

    def narrow(self, name: str) -> None:
        """See `AdapterLayer`: rounded coefficients would move the start, so all are drawn wide."""
        weight = getattr(self._neighbour[0], "weight", None)
        for tensors in (getattr(self, each) for each in self.adapter_layer_names):
            if name in tensors and isinstance(weight, Tensor) and weight.is_floating_point():
                tensors[name].weight.data = tensors[name].weight.data.to(weight.dtype)

    def original(self) -> nn.Module:
        """See `AdapterLayer`; also while adapters are merged into it."""
        return self._original[0] if self._original else self.base_layer

    # An adapter's tensors.

    def update_layer(self, name: str, config: Any) -> None:
        """See `AdapterLayer`; also keep the rational function that the adapter shifts, and its fit."""
        plain = self.original()
        if isinstance(plain, RationalActivation):
            self._settings[name] = plain.rational_config
        else:
            self._settings[name] = config.rational(self.formula, self.channel_dim, self.num_experts)
            fit = config.fit(self.formula)
            device, _ = self._get_base_layer_device_and_dtype(None)
            # Not buffers: they are the config's, and must survive construction on the meta device.
            device = torch.device("cpu") if device.type == "meta" else device
            self._theta[name] = _row(fit.numerator, device), _row(fit.denominator, device)
        super().update_layer(name, config)

    def rational(self, name: str) -> RationalConfig:
        """Return the rational function that an adapter shifts, as a config."""
        return self._settings[name]

    def flops(self, name: str) -> int:
        """Return the forward FLOPs per token of an adapter's function by Horner's rule; 0 for an unknown width."""
        (m, n), exact = self.rational(name).degrees, self.rational(name).anchor == "exact"
        return (self.width or 0) * (2 * m + 2 * n + 2) * (2 if exact else 1)

    def theta(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the coefficients that an adapter shifts: (1, .), or the base's of all groups and experts; float32."""
        plain = self.original()
        if isinstance(plain, RationalActivation):
            return tuple(each.detach().flatten(0, -2) for each in plain.coefficients())  # type: ignore[return-value]
        return self._theta[name]

    def add_parameters(self, name: str, config: NoraConfig) -> None:
        for side, theta in zip(_SIDES, self.theta(name), strict=True):
            if not _is_tuned(config, side):
                continue
            if config.tuning in _FACTORED:
                shifted, shared = theta.shape[1] - self._first(name, side), config.tuning == "shared"
                shape = (config.r, shifted) if shared else (self._rows(name), shifted, config.r)
                getattr(self, f"lora_{side}_a")[name] = self.parameter(*shape)
                getattr(self, f"lora_{side}_b")[name] = self.parameter(self._rows(name), config.r)
            else:
                terms = 1 if config.tuning == "constants" else theta.shape[1]
                getattr(self, f"lora_{side}")[name] = self.parameter(self._rows(name), terms)

    def _rows(self, name: str) -> int:
        """Return the number of an adapter's functions: one a group, of every expert."""
        groups: int = self.configs[name].groups
        return groups * (self.num_experts or 1)

    def reset_adapter(self, name: str) -> None:
        """Draw the table; with init_weights=False a shift of coefficient k of about 0.3 / L^k, L the end of the fit's
        range: no term then moves the function by more than that inside it."""
        config: NoraConfig = self.configs[name]
        for index, side in enumerate(_SIDES):
            if not _is_tuned(config, side):
                continue
            if config.tuning in _FACTORED:
                a, shared = getattr(self, f"lora_{side}_a")[name].weight, config.tuning == "shared"
                spread = a.shape[1] ** -0.5 if shared else config.init_std
                nn.init.uniform_(a, -spread, spread) if shared else nn.init.normal_(a, std=spread)
                std = 0.0 if config.init_weights else _RANDOM / (spread * config.r**0.5)
                nn.init.normal_(getattr(self, f"lora_{side}_b")[name].weight, std=std)
                if not config.init_weights:
                    falling = self._falling(name, a.shape[1], self._first(name, side)).to(a.device)
                    a.mul_(falling if shared else falling[:, None])
                continue
            tensor = getattr(self, f"lora_{side}")[name].weight
            nn.init.normal_(tensor, std=0.0 if config.init_weights else _RANDOM)
            if not config.init_weights:
                tensor.mul_(self._falling(name, tensor.shape[1], 0).to(tensor.device))
            if config.tuning in ("rational", "gelu_init") and not tensor.is_meta:
                tensor.add_(_grouped(self._start(name)[index].to(tensor.device), self._rows(name)))

    def _falling(self, name: str, count: int, first: int) -> Tensor:
        """Return L^-k for k = first, first + 1, ...: (count)."""
        limit = max(map(abs, check_range(self.configs[name].fit_range)))
        return limit ** -torch.arange(first, first + count, dtype=torch.float32)

    def _start(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the start of coefficients that are trained themselves."""
        if self.configs[name].tuning == "rational":
            return self.theta(name)
        fit = replace(self.rational(name), activation="gelu").fit()
        return _row(fit.numerator), _row(fit.denominator)

    def _first(self, name: str, side: str) -> int:
        """Return the first coefficient that a shift of factors touches; constants stay, except a0 with "shared"."""
        if side == "numerator":
            return 0 if self.configs[name].tuning == "shared" else 1
        return 1 if self.rational(name).form == "abs_of_sum" else 0

    def roles(self, name: str) -> Mapping[str, Role]:
        config: NoraConfig = self.configs[name]
        if config.tuning in _FACTORED:
            return {f"lora_{side}_{factor}": Role(f"nora.{factor}") for side in _SIDES for factor in "ab"}
        shifts = config.tuning in ("zero_init", "constants")
        role = Role("nora.shift" if shifts else "nora.coefficients", decay=shifts)
        return {f"lora_{side}": role for side in _SIDES}

    # The function.

    def coefficients(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator with the shifts of these adapters, float32 or wider: (G, .) or (E G, .)."""
        for name in names[1:]:
            if replace(self.rational(name), groups=1) != replace(self.rational(names[0]), groups=1):
                raise UserError(
                    f"the adapters {names[0]!r} and {name!r} shift different rational functions (form, degrees, "
                    "fit_range, tails or anchor) and cannot be active together; activate one at a time"
                )
        groups = math.lcm(*map(self._rows, names))
        found = []
        for index, side in enumerate(_SIDES):
            total = _grouped(self.theta(names[0])[index], groups)
            for name in names:
                if (shift := self._shift(name, side, index)) is not None:
                    total = total.to(shift.device) + _grouped(shift, groups)
            found.append(total)
        return found[0], found[1]

    def _shift(self, name: str, side: str, index: int) -> Tensor | None:
        """Return what an adapter adds to theta, (G, .) or (E G, .); None: nothing."""
        config: NoraConfig = self.configs[name]
        if not _is_tuned(config, side):
            return None
        theta = self.theta(name)[index]
        if config.tuning in _FACTORED:
            a, b = getattr(self, f"lora_{side}_a")[name](), getattr(self, f"lora_{side}_b")[name]()
            if config.tuning == "shared":
                a = a.t() * (2.0 if config.shift_alpha is None else config.shift_alpha / config.r)
            # Written out: a matrix product would be rounded to 16 bits under autocast.
            shift = (a.to(wide_dtype(a)) * b.to(wide_dtype(b))[:, None, :]).sum(-1)
            return F.pad(shift, (self._first(name, side), 0))
        values = getattr(self, f"lora_{side}")[name]()
        values = values.to(wide_dtype(values))
        if config.tuning == "constants":
            return F.pad(values, (0, theta.shape[1] - 1))
        return values if config.tuning == "zero_init" else values - _grouped(theta.to(values.device), len(values))

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """See `AdapterLayer`; saves x and the coefficients for backward."""
        settings = self.rational(names[0])
        if self.width is not None and x.shape[settings.dim] != self.width and self.width in x.shape[1:]:
            raise UserError(
                f"the activation behind {type(self._neighbour[0]).__name__} has {self.width} channels, but "
                f"not in the expected dimension of its input {tuple(x.shape)}; leave it out with exclude_modules"
            )
        numerator, denominator = (each.to(x.device) for each in self.coefficients(names))
        base = self._anchor(names[0])
        base = base and (base[0].to(x.device), base[1].to(x.device))
        numerator, denominator = self._by_expert(numerator, denominator)
        return settings.evaluate_all(x, numerator, denominator, base, self.expert_ends)

    def _by_expert(self, *values: Tensor) -> list[Tensor]:
        """Return (E G, .) as (E, G, .); (G, .) as it is."""
        return [each if self.num_experts is None else each.unflatten(0, (self.num_experts, -1)) for each in values]

    def _anchor(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the coefficients that anchor="exact" subtracts again."""
        plain = self.original()
        if isinstance(plain, RationalActivation):
            return plain.base_coefficients()
        return self.theta(name) if self.rational(name).anchor == "exact" else None

    # Merging.

    def merging(self, names: Sequence[str], keep: bool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """See `AdapterLayer`; a rational activation takes the activation's place."""
        values = self.coefficients(names)

        def put() -> None:
            settings = replace(self.rational(names[0]), groups=len(values[0]) // (self.num_experts or 1))
            layer = RationalActivation(settings, device=values[0].device).train(self.training)
            for side, tensor, base in zip(
                _SIDES, self._by_expert(*values), self._anchor(names[0]) or (None, None), strict=True
            ):
                getattr(layer, f"rational_{side}").data = tensor.detach().clone()
                if base is not None:
                    setattr(layer, f"rational_base_{side}", base.to(tensor.device, copy=True))
            self._original = self._original or (self.base_layer,)
            self.base_layer = layer.requires_grad_(False)

        return values, put

    def unmerge(self) -> None:
        if self._original:
            self.base_layer = self._original[0]
        self._original, self.merged_adapters = (), []

    # Devices: an activation has no weight to tell its own.

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[Any, Any]:
        weight = getattr(self._neighbour[0], "weight", None)
        return (weight.device if isinstance(weight, Tensor) else torch.get_default_device()), None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A coefficient that is rounded to 16 bits moves R by more than the error of a fit.
        super()._apply(kept_float32(fn), recurse)
        for name, tensors in self._theta.items():
            moved = fn(tensors[0]).device
            if moved.type != "meta":
                self._theta[name] = tensors[0].to(moved), tensors[1].to(moved)
        for kept in self._original:
            kept._apply(fn, recurse)
        return self


def _is_tuned(config: NoraConfig, side: str) -> bool:
    return not (config.denominator_only if side == "numerator" else config.numerator_only)


def _row(values: Sequence[float], device: torch.device | str | None = None) -> Tensor:
    return torch.tensor([values], dtype=torch.float32, device=device)


def _grouped(rows: Tensor, groups: int) -> Tensor:
    """Repeat the rows of fewer groups for those within them."""
    return rows.repeat_interleave(groups // rows.shape[0], 0)


class NoraLoraLinear(LoraLayer, lora.Linear):
    """LoRA around nn.Linear, Conv1D and quantized linears: (..., d_in) -> (..., d_out)."""

    role = "nora.lora"

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """See `AdapterLayer`; the factors are cast to x's type."""
        y = self.based(x, *args, **kwargs)
        for name in names:
            up, down = (each.to(x.dtype) for each in self.matrices(name))
            y = y + (self.scaling[name] * F.linear(F.linear(self.lora_dropout[name](x), down), up)).to(y.dtype)
        return y

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        wide = wide_dtype(weight)
        total = weight.to(wide)
        for name in names:
            up, down = self.matrices(name)
            product = self.scaling[name] * (up.to(wide) @ down.to(wide))
            total = total + (product.t() if self.fan_in_fan_out else product)
        return total.to(weight.dtype)


class NoraSineLinear(SineLinear):
    """Sine-LoRA around the same, with lora_sine."""

    role = "nora.lora"
