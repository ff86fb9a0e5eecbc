"""Sine low-rank weights: a linear whose weight is a function of a low-rank product (sine_lowrank.txt, section 3).

    W = phi(omega * U V) / g        phi is the sine, or another of `op.WEIGHT_ACTIVATIONS`

Init and learning-rate table, for a linear m x n (n inputs, m outputs) at rank k. The fans are those of the
factors themselves: U has k inputs and V has n.

| tensor    | shape  | init                                        | lr x | decay |
|-----------|--------|---------------------------------------------|------|-------|
| sine_up   | (m, k) | Kaiming uniform, +-sqrt(6 / ((1 + a^2) k))  | 1    | yes   |
| sine_down | (k, n) | Kaiming uniform, +-sqrt(6 / ((1 + a^2) n))  | 1    | yes   |
| bias      | (m)    | 0                                           | 1    | no    |

a is sqrt(5) ("kaiming_sqrt5", nn.Linear's own: entries of U V then have standard deviation 1 / (3 sqrt(n))) or 0
("kaiming_zero": 2 / sqrt(n), six times as much). The paper says Kaiming and no more; the choice moves every result
as much as omega does, so comparisons tune it for each arm. With init="fit" the factors are fitted to the plain linear's
weight, the bias stays, and each layer has a g of its own (`fit`): that compresses a trained model.

omega and g are never learned. Where they are not given:

| phi            | omega                                    | g       |
|----------------|------------------------------------------|---------|
| sine, sigmoid  | published for the rank (`OMEGA_BY_RANK`) | sqrt(n) |
| identity, relu | 1                                        | 1       |

The second row is plain low rank, equation (2), and its half-wave.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Method, Role, register
from nonlinear_lowrank.methods.experts import active_experts, linear_shapes, projections
from nonlinear_lowrank.methods.matrix import is_hooked, linear_shape, replace_modules
from nonlinear_lowrank.ops.plain import kept_float32
from nonlinear_lowrank.ops.precision import check_unrounded
from nonlinear_lowrank.validation import check_choice, check_integer, check_number

from .experts import SineExperts
from .fit import fit_factors
from .op import WEIGHT_ACTIVATIONS, lowrank_linear, lowrank_weight

WeightActivation = Literal["sine", "identity", "sigmoid", "relu"]

OMEGA_BY_RANK: dict[str, dict[int, float]] = {
    "vit-small-cifar100": {1: 500, 5: 500, 10: 300, 30: 300, 60: 300},
    "vit-base-imagenet": {1: 1000, 5: 800, 10: 800, 30: 400, 60: 200, 100: 200, 150: 150, 250: 150},
    "convnext-tiny-cifar100": {1: 400, 5: 300, 20: 300},
    "nerf": {1: 1400, 5: 800, 10: 600, 30: 400, 60: 300},
    "occupancy": {1: 200, 2: 100, 5: 50, 20: 20},
}
"""Published frequencies by rank (tables 9, 11 and 13, appendix A.2.4)."""

_INITS = {"kaiming_sqrt5": 5.0, "kaiming_zero": 0.0}  # a squared
_HOMOGENEOUS = ("identity", "relu")


@dataclass(frozen=True, kw_only=True)
class SineLowRankConfig:
    """Settings of low-rank weights with an activation.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    method: ClassVar[str] = "sine-lowrank"

    rank: int = 8
    """k; a linear m x n is replaced where k (m + n) < m n, so that it gets smaller."""
    omega: float | str | None = None
    """Frequency: a number, or the name of a published table (`OMEGA_BY_RANK`), whose entry for the largest
    rank up to `rank` is used. None: "vit-small-cifar100", or 1 for identity and relu."""
    gain: float | None = None
    """g, the divisor. None: sqrt(d_in), or 1 for identity and relu; with init="fit" what fits each layer."""
    activation: WeightActivation = "sine"
    """phi; "identity" is plain low rank."""
    init: Literal["kaiming_sqrt5", "kaiming_zero", "fit"] = "kaiming_sqrt5"
    """Kaiming uniform with a = sqrt(5) or a = 0; see the table of this file. "fit": the trained weight that is
    replaced, as closely as factors of this rank come to it, for sine and (by SVD) identity."""

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, minimum=1)
        check_choice("activation", self.activation, WEIGHT_ACTIVATIONS)
        check_choice("init", self.init, (*_INITS, "fit"))
        object.__setattr__(self, "omega", self._omega())
        check_number("omega", self.omega, above=0)
        if self.gain is not None:
            check_number("gain", self.gain, above=0)
        if self.init == "fit" and self.activation not in ("sine", "identity"):
            raise UserError(f"init='fit' is for sine and identity, not for {self.activation!r}; omit one of them")
        if self.init == "fit" and self.gain is not None:
            raise UserError("gain is found by the fit of init='fit'; omit one of them")

    def _omega(self) -> Any:
        if self.omega is None and self.activation in _HOMOGENEOUS:
            return 1.0
        name = "vit-small-cifar100" if self.omega is None else self.omega
        if not isinstance(name, str):
            return name
        if name not in OMEGA_BY_RANK:
            raise UserError(f"omega must be a number or one of {', '.join(OMEGA_BY_RANK)}, got {name!r}")
        table = OMEGA_BY_RANK[name]
        return float(table[max((rank for rank in table if rank <= self.rank), default=min(table))])

    def gain_for(self, d_in: int) -> float:
        """Return g of a linear with this many inputs."""
        if self.gain is not None:
            return float(self.gain)
        return 1.0 if self.activation in _HOMOGENEOUS else float(d_in) ** 0.5

    def draw(self, factor: Tensor, fan: int) -> None:
        """Draw a factor by this config's init; raise UserError for "fit", which draws nothing."""
        if self.init == "fit":
            raise UserError("init='fit' needs a trained layer's weight, which is absent here; use kaiming_sqrt5")
        bound = (6 / (1 + _INITS[self.init]) / fan) ** 0.5
        init.uniform_(factor, -bound, bound)

    def check_rank(self, d_in: int, d_out: int) -> str | None:
        """Return why a linear d_in -> d_out is not factored, or None."""
        factored = self.rank * (d_in + d_out)
        if factored < d_in * d_out:
            return None
        return f"rank {self.rank} saves no parameters ({d_in} -> {d_out}: {factored:,} for {d_in * d_out:,})"


class SineLowRankLinear(nn.Module):
    """A linear map with weight `phi(omega * U V) / g`: (..., in_features) -> (..., out_features).

    It holds no m x n tensor, and saves none for backward. The factors stay float32 when the model is
    cast to a 16-bit type: a phase of 30 rad from bfloat16 factors is off by 0.1 rad. The arguments are those of
    nn.Linear, and the config; a float64 `dtype` makes the factors float64 too.

    Raises:
        UserError: the rank saves no parameters here.

    Source: sine_lowrank.txt, section 3.2.1, equation (3).
    """

    sine_up: nn.Parameter
    sine_down: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: SineLowRankConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if (why := config.check_rank(in_features, out_features)) is not None:
            raise UserError(f"{why}; choose a smaller rank")
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sine_config = config
        self.fit_error: float | None = None
        self.has_model_values = False
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.sine_up = nn.Parameter(torch.empty(out_features, config.rank, device=device, dtype=wide))
        self.sine_down = nn.Parameter(torch.empty(config.rank, in_features, device=device, dtype=wide))
        held = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", held)
        self.reset_parameters()

    @property
    def weight(self) -> Tensor:
        """W (out_features, in_features) in float32 or wider, formed at each access; differentiable."""
        omega, gain = self._settings()
        return lowrank_weight(self.sine_up, self.sine_down, self.sine_config.activation, omega, gain)

    def _settings(self) -> tuple[float, float]:
        assert isinstance(self.sine_config.omega, int | float)
        return float(self.sine_config.omega), self.sine_config.gain_for(self.in_features)

    @torch.no_grad()
    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Fit the factors to a weight (out_features, in_features), and take the bias; the gain is this layer's then.

        The next `reset_parameters` draws nothing.
        """
        fitted = fit_factors(weight, self.sine_config.rank, self.sine_config.activation)
        root = self._settings()[0] ** -0.5
        self.sine_up.copy_(fitted.up * root)
        self.sine_down.copy_(fitted.down * root)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)
        self.sine_config = replace(self.sine_config, init="kaiming_sqrt5", gain=fitted.gain)
        self.fit_error, self.has_model_values = fitted.error, True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table of this file's docstring; what was fitted stays, once."""
        kept, self.has_model_values = self.has_model_values, False
        if kept or self.sine_up.is_meta:
            return
        self.sine_config.draw(self.sine_up, self.sine_config.rank)
        self.sine_config.draw(self.sine_down, self.in_features)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features); raise UserError where FSDP has rounded the factors to 16 bits."""
        factors = self.sine_up, self.sine_down
        check_unrounded(self.sine_up, "sine factors")
        return lowrank_linear(x, *factors, self.bias, self.sine_config.activation, *self._settings())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        keep = kept_float32(fn)
        # The factors and their gradients are matrices, the bias is not.
        return super()._apply(lambda tensor: keep(tensor) if tensor.ndim == 2 else fn(tensor), recurse)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        config, (omega, gain) = self.sine_config, self._settings()
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={config.rank}, {config.activation}, omega={omega:g}, gain={gain:g}"
        )


_SHOWN = ("r", "omega", "gain", "lora_alpha", "lora_dropout", "target_modules", "plus")


@register
class SineLowRankMethod(Method):
    """Sine low-rank weights."""

    name = SineLowRankConfig.method
    config_class = SineLowRankConfig
    layer_types = (SineLowRankLinear, SineExperts)
    optimizable = True
    float32 = tuple(f"sine_{end}{side}" for end in ("", "in_", "out_") for side in ("up", "down"))
    adapter = "nonlinear_lowrank.methods.sine.adapter"
    adapter_arms: ClassVar = {
        "sine-lora": AdapterArm(config=(adapter, "SineLoraConfig"), fixed={"use_dora": False}, shown=_SHOWN),
        "sine-dora": AdapterArm(config=(adapter, "SineLoraConfig"), fixed={"use_dora": True}, shown=_SHOWN),
    }
    controls: ClassVar = {
        "low-rank": {"activation": "identity"},
        "sigmoid-low-rank": {"activation": "sigmoid"},
        "relu-low-rank": {"activation": "relu"},
    }
    replaces_weights = True
    keeps_weights_by: ClassVar = {"init": "fit"}

    def is_target(self, module: nn.Module) -> bool:
        return super().is_target(module) or bool(projections(module))

    def skip_reason(self, module: nn.Module, config: Any) -> str | None:
        return super().skip_reason(module, config) or _refused_fit(module, config)

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        super().check(name, module, config)
        if (why := _refused_fit(module, config)) is not None:
            raise UserError(f"{name}: {why}; leave it out with exclude=")

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        """Build a layer that shares nothing with the plain one: fitted to it, or undrawn."""
        if projections(module):
            return SineExperts.replacing(module, config)
        weight, bias = cast(Tensor, module.weight), cast(Tensor | None, module.bias)
        shape = linear_shape(module)
        layer = SineLowRankLinear(*shape, bias is not None, config=config, device="meta", dtype=weight.dtype)
        layer = layer.to_empty(device=weight.device).train(module.training)
        if config.init == "fit" and not weight.is_meta:
            try:
                layer.take(weight.t() if isinstance(module, Conv1D) else weight, bias)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
        return layer

    def build_all(self, modules: Mapping[str, nn.Module], config: Any) -> Mapping[str, nn.Module]:
        quiet = True if config.init != "fit" else None  # None: shown on a terminal alone
        shown = logging.tqdm(modules.items(), desc="fitting", unit="weight", disable=quiet, leave=False)
        return {name: self.build(name, module, config) for name, module in shown}

    def saved_config(self, layer: nn.Module, config: Any) -> Any:
        return layer.sine_config

    def settings(self, config: Any, layers: Collection[nn.Module]) -> list[str]:
        errors: list[Any] = [each.fit_error for each in layers if getattr(each, "fit_error", None) is not None]
        return [f"relative error of the fit {min(errors):.3f} to {max(errors):.3f}"] if errors else []

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        return {name: Role(f"sine.{name.rpartition('_')[2]}") for name in self.float32 if name in layer._parameters}

    def flops(self, layer: nn.Module) -> int:
        """Return a token's FLOPs; forming W (2 k m n, once per batch) is not counted."""
        assert isinstance(layer, SineLowRankLinear | SineExperts)
        if layer.sine_config.activation != "identity":
            return 0
        shapes, active = linear_shapes(layer), active_experts(layer) if isinstance(layer, SineExperts) else 1
        saved = sum(layer.sine_config.rank * (d_in + d_out) - d_in * d_out for d_in, d_out in shapes)
        return round(2 * (active or 0) * saved)

    @torch.no_grad()
    def optimize(self, model: nn.Module, *, shared_inputs: bool, quantized: bool) -> bool:
        """Put a plain linear, faster and as large as the dense one was, in each layer's place."""
        formed: dict[nn.Module, nn.Module] = {
            each: _dense(each, model)
            for each in model.modules()
            if isinstance(each, self.layer_types) and not is_hooked(each)
        }
        replace_modules(model, formed)
        return bool(formed)


def _refused_fit(module: nn.Module, config: Any) -> str | None:
    return "init='fit' is for linears, not for experts" if config.init == "fit" and projections(module) else None


def _dense(layer: Any, model: Any) -> nn.Module:
    """Return the plain linear or experts of a layer, in the model's type."""
    if isinstance(layer, SineExperts):
        return layer.dense(getattr(model, "dtype", torch.float32))
    dtype = layer.bias.dtype if layer.bias is not None else getattr(model, "dtype", layer.sine_up.dtype)
    made = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
    made.weight = nn.Parameter(layer.weight.to(dtype))
    made.register_parameter("bias", layer.bias)
    return made.train(layer.training)
