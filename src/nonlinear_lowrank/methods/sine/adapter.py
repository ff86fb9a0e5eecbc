"""Sine-LoRA and sine-DoRA: a sine-activated low-rank delta of a frozen weight (sine_lowrank.txt, A.2.1).

    D  = scaling * sin(omega * B A) / gain            sine-LoRA: W' = W + D
    W' = m * (W + D) / |W + D|                        sine-DoRA (use_dora=True); | | of each row, not differentiated

The layers are peft's own LoRA layers (`adapters.sine`), so that names, inits and whatever peft does with LoRA are its
own; docs/sine-lora.md has the table of tensors and inits. d_in is the width that |.| runs over: in_features,
`weight.shape[0]` of a Conv1D, channels times kernel size of a convolution, embedding_dim of an embedding (whose d_out
is the number of tokens).

omega, gain and scaling are settings and not trained. At the zero start the gradient of B is omega * scaling / gain
times that of LoRA, so the learning rates of the two differ.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from peft import LoraConfig, LoraModel, PeftType
from peft.tuners import lora
from peft.utils.hotswap import CONFIG_KEYS_TO_CHECK
from peft.utils.quantization_utils import ForwardOnlyQuantizationBackend, get_quantization_kwargs
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.adapters.config import NamedConfig
from nonlinear_lowrank.adapters.quantized import backend_of
from nonlinear_lowrank.adapters.sine import (
    ParamWrapper,
    SineConv1d,
    SineConv2d,
    SineConv3d,
    SineLayer,
    SineLinear,
    SineMultiheadAttention,
)
from nonlinear_lowrank.adapters.tuner import CheckedTuner, register_adapter
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.matrix import is_hooked, matrix_of
from nonlinear_lowrank.ops.sine import added
from nonlinear_lowrank.validation import check_integer, check_number, check_share

from .op import embedding_delta, sine_embedding

_NOT_SINE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "megatron_config", "monteclora_config", "use_bdlora",
    "use_qalora", "velora_config",
)  # fmt: skip


@dataclass
class SineLoraConfig(NamedConfig, LoraConfig):
    """Settings of sine-LoRA and sine-DoRA, for `peft.get_peft_model`: those of `peft.LoraConfig`, and these.

    Settings of LoRA variants other than DoRA, and inits that subtract a part of the weight, are refused.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    type_name: ClassVar[str] = "NLR_SINE_LORA"
    patterns: ClassVar[Mapping[str, str]] = {
        "r": "rank_pattern",
        "lora_alpha": "alpha_pattern",
        "omega": "omega_pattern",
    }

    lora_alpha: float | None = None  # type: ignore[assignment]
    """The delta is scaled by lora_alpha / r (by lora_alpha / sqrt(r) with use_rslora), as LoRA's. None: by 1, the
    paper's equation (3) as it stands; a sine is bounded whatever the rank, so there is nothing for 1 / r to balance."""
    omega: float = 200.0
    """Frequency. Published: 200 at every rank for DeBERTa, 800 to 200 from rank 4 to 32 for Llama-3-8B."""
    gain: float | None = None
    """The divisor g of the sine. None: the square root of the input width (sine_lowrank.txt, A.2)."""
    omega_pattern: dict[str, float] = field(default_factory=dict)
    """{module name or regular expression: omega} where it differs."""
    activation_sine: bool = False
    """Train sine-DoRA as the paper's released code does, with scaling * sin(omega * x A^T B^T / gain) in place of x D^T
    and the norm still of W + D. Evaluated and merged it has the sine of the weight, as there: the two functions differ.
    For linears only."""
    cached_weights: int = 4
    """Number of weights with adapters in them that a layer keeps in evaluation of up to 1,024 tokens at once, one for
    each adapter called; a generated token then costs as with a merged model. Each is as large as the layer's weight.
    0: none."""

    def __post_init__(self) -> None:
        for name in _NOT_SINE:
            if getattr(self, name):
                raise UserError(f"{name} belongs to another LoRA variant, which has no sine; omit it")
        if self.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
            raise UserError(
                f"init_lora_weights={self.init_lora_weights!r} starts from B A as the delta, and here it is inside a "
                "sine; use True, 'gaussian', 'orthogonal' or False"
            )
        if self.activation_sine and not self.use_dora:
            raise UserError("activation_sine is a way to train sine-DoRA; set use_dora=True, or omit it")
        check_integer("cached_weights", self.cached_weights, minimum=0)
        check_share("lora_dropout", self.lora_dropout)
        self.check_fields()
        for name in ("lora_alpha", "gain"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        super().__post_init__()
        self.peft_type = PeftType(self.type_name)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, lora_alpha as the number that other tools read."""
        filled = copy.copy(self)
        filled.fill_alpha()
        return super(SineLoraConfig, filled).to_dict()

    def fill_alpha(self) -> None:
        """Put a scale of 1 in place of a lora_alpha of None, at the ranks that the config has by now."""
        if self.lora_alpha is not None:
            return

        def alpha(r: int) -> float:
            return r**0.5 if self.use_rslora else float(r)

        self.lora_alpha = alpha(self.r)
        given, by_rank = self.alpha_pattern or {}, self.rank_pattern or {}
        # The user's come first: peft takes the first pattern that matches.
        self.alpha_pattern = given | {name: alpha(r) for name, r in by_rank.items() if name not in given}

    def check_value(self, name: str, value: Any, where: str) -> None:
        if name == "r":
            check_integer(where, value, minimum=1)
        elif value is not None or name == "omega":
            check_number(where, value, above=0)


class SineEmbedding(SineLayer, lora.Embedding):
    """Around an embedding; only rows that are looked up are formed."""

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """Return B (tokens, r) and A (r, embedding_dim), views."""
        return self.lora_embedding_A[name].t(), self.lora_embedding_B[name].t()

    @torch.no_grad()
    def start(self, name: str, config: Any) -> None:
        """See `SineLayer`; A is drawn as a linear's, where LoRA's is N(0, 1): its phases would be omega rad."""
        _, down = self.matrices(name)
        nn.init.uniform_(down, -(down.shape[-1] ** -0.5), down.shape[-1] ** -0.5)
        super().start(name, config)

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """Indices (...) -> (..., embedding_dim)."""
        base = self.get_base_layer()
        # Which classes look up plainly was checked before they were wrapped.
        plain = type(self.base_layer.weight) is nn.Parameter and not is_hooked(self.base_layer)
        factors = [self.factors(name) for name in names]
        rows = sine_embedding(x, self.original_weight(), factors, padding_idx=base.padding_idx, base=plain)
        scale = getattr(base, "embed_scale", None)  # of Gemma, BART, ...: the module multiplies its rows by it
        if scale is not None:
            rows = rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)
        return rows if plain else self.base_layer(x, *args, **kwargs) + rows

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        total = None
        for name in names:
            total = added(total, embedding_delta(weight, self.factors(name)), weight)
        assert total is not None
        return total.to(weight.dtype)

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        return embedding_delta(self.original_weight(), self.factors(adapter))


_LAYERS: Mapping[type[nn.Module], type[SineLayer]] = {
    nn.Embedding: SineEmbedding,
    nn.Conv1d: SineConv1d,
    nn.Conv2d: SineConv2d,
    nn.Conv3d: SineConv3d,
    nn.MultiheadAttention: SineMultiheadAttention,
}


@register_adapter(SineLoraConfig)
class SineLoraModel(CheckedTuner, LoraModel):
    """peft's tuner for sine-LoRA and sine-DoRA."""

    prefix = "lora_"
    tuner_layer_cls = SineLayer  # type: ignore[assignment]

    def check_target(self, name: str, base: nn.Module, config: SineLoraConfig) -> None:
        hint = "name it in exclude_modules"
        if isinstance(base, tuple(_LAYERS)):
            if config.activation_sine:
                raise UserError(f"{name} is not a linear, which activation_sine needs; {hint}")
            groups = getattr(base, "groups", 1)
            if config.r % groups:
                raise UserError(
                    f"{name} is a convolution in {groups} groups; choose an r that {groups} divides, or {hint}"
                )
        elif isinstance(matrix := matrix_of(base), str):
            raise UserError(f"{name} {matrix}; take it out of target_modules, or {hint}")
        if isinstance(base, nn.MultiheadAttention):
            wrong = "use_dora" if config.use_dora else "lora_dropout" if config.lora_dropout else None
            if wrong or not base._qkv_same_embed_dim:
                why = f"{wrong} cannot be used" if wrong else "its queries, keys and values must have one width"
                raise UserError(f"{name} is an nn.MultiheadAttention: {why}; {hint}")
        if config.use_dora and not isinstance(base, nn.Conv1d | nn.Conv3d | nn.MultiheadAttention):
            backend = backend_of(base, get_quantization_kwargs(self.model))
            if isinstance(backend, ForwardOnlyQuantizationBackend):
                raise UserError(
                    f"sine-DoRA needs the norms of {name}, whose {backend.backend_name} weights cannot be read; "
                    "set use_dora=False"
                )
        if isinstance(base, nn.Embedding):
            own = type(base).forward is not nn.Embedding.forward and not hasattr(base, "embed_scale")
            if own or base.max_norm is not None or config.lora_bias:
                what = f"is a {type(base).__name__} with a lookup of its own" if own else "has max_norm"
                what = "is an embedding, which takes no lora_bias" if config.lora_bias else what
                raise UserError(f"{name} {what}; SineLoraConfig takes plain embeddings, so {hint}")

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        for name in ("use_dora", "lora_dropout", "lora_bias") if peft_config.target_parameters else ():
            if getattr(peft_config, name):
                raise UserError(f"target_parameters cannot be used with {name}; omit one of them")
        super()._prepare_model(peft_config, model)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        peft_config.fill_alpha()
        # Experts that LoRA adapts by target_parameters: peft makes them so for its own type only.
        peft_config.peft_type = PeftType.LORA
        convert_peft_config_for_transformers(peft_config, model=self.model, conversions=None)
        peft_config.peft_type = PeftType(peft_config.type_name)
        return super()._prepare_adapter_config(peft_config, model_config)

    def _create_and_replace(self, lora_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super()._create_and_replace(lora_config.resolve(kwargs["current_key"]), adapter_name, *args, **kwargs)

    def _create_new_module(  # type: ignore[override]
        self, lora_config: Any, adapter_name: str, target: Any, **kwargs: Any
    ) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, SineLayer) else target
        options = {name: kwargs[name] for name in ("r", "lora_alpha", "target_name", "tied_adapter")}
        lora_config.fan_in_fan_out = isinstance(base, Conv1D)
        if kwargs["parameter_name"] is not None:
            options.pop("tied_adapter")
            return ParamWrapper(target, adapter_name, kwargs["parameter_name"], config=lora_config, **options)
        for kind, layer in _LAYERS.items():
            if isinstance(base, kind):
                return layer(target, adapter_name, config=lora_config, **options)
        quantization = get_quantization_kwargs(self.model)
        return SineLinear(target, adapter_name, config=lora_config, quantization=quantization, **options)

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]  # all are given by name
        cls, model: Any, config: Any, adapter_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        # peft's DoRA drops the magnitudes' ".weight" and puts it back in loading; transformers' own loading does not,
        # and would continue with untrained ones. peft reads both.
        found = super()._get_adapter_state_dict(model, config, adapter_name, **kwargs)
        magnitude = f"lora_magnitude_vector.{adapter_name}"
        return {f"{name}.weight" if name.endswith(magnitude) else name: value for name, value in found.items()}

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Raise UserError: a sum of sines is not a sine of a product."""
        configs: Any = self.peft_config.values()
        if any(config.target_parameters for config in configs):
            raise UserError("add_weighted_adapter does not support targeting nn.Parameter")
        instead = (
            "" if any(config.use_dora for config in configs) else ", or make them LoRA's with convert_to_lora first"
        )
        raise UserError(
            "sine adapters cannot be combined: a sum of sines is not a sine of a product; activate several with "
            f"base_model.set_adapter([...]){instead}"
        )


_KEYS = ["omega", "gain", "omega_pattern", "activation_sine"]
CONFIG_KEYS_TO_CHECK[PeftType(SineLoraConfig.type_name)] = CONFIG_KEYS_TO_CHECK[PeftType.LORA] + _KEYS
