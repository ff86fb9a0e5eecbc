"""Sine-LoRA and sine-DoRA: a sine-activated low-rank delta of a frozen weight (sine_lowrank.txt, A.2.1).

    D  = scale * sin(omega * up @ down) / gain        sine-LoRA: W' = W + D
    W' = m * (W + D) / |W + D|                        sine-DoRA (use_dora=True); | | of each row, not differentiated

Init and learning-rate table. d_in is the width that |.| runs over: in_features, `weight.shape[0]` of a Conv1D,
embedding_dim of an embedding (whose d_out is the number of tokens).

| tensor                  | shape     | init                              | lr x | decay |
|-------------------------|-----------|-----------------------------------|------|-------|
| nlr_sine_lora_down      | (r, d_in) | U(-1, 1) / sqrt(d_in), as LoRA's A | 1    | yes   |
| nlr_sine_lora_up        | (d_out, r)| 0                                 | 1    | yes   |
| nlr_sine_lora_magnitude | (d_out)   | |W|, with use_dora only           | 1    | no    |

omega, gain and scale are settings and not trained. At the zero start the gradient of `up` is omega * scale / gain
times that of LoRA, so the learning rates of the two differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.utils import align_module_device
from peft.utils.quantization_utils import ForwardOnlyQuantizationBackend, get_quantization_kwargs
from torch import Tensor, nn

from nonlinear_lowrank.adapters.config import AdapterConfig
from nonlinear_lowrank.adapters.quantized import backend_of, unpack
from nonlinear_lowrank.adapters.tuner import AdapterModel, register_adapter
from nonlinear_lowrank.adapters.weights import SineDeltaLayer, WeightLayer
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Role
from nonlinear_lowrank.ops.sine import SineFactors, added, dora_norm, sine_delta
from nonlinear_lowrank.validation import check_integer, check_number, check_share

from .op import embedding_delta, sine_embedding


@dataclass
class SineLoraConfig(AdapterConfig):
    """Settings of sine-LoRA and sine-DoRA, for `peft.get_peft_model`; see also `AdapterConfig`.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    type_name: ClassVar[str] = "NLR_SINE_LORA"
    patterns: ClassVar[Mapping[str, str]] = {"r": "rank_pattern", "omega": "omega_pattern"}

    r: int = 8
    """Rank of the product inside the sine."""
    omega: float = 200.0
    """Frequency. Published: 200 at every rank for DeBERTa, 800 to 200 from rank 4 to 32 for Llama-3-8B."""
    lora_alpha: float | None = None
    """The delta is scaled by lora_alpha / r, as LoRA's. None: by 1, the paper's equation (3) as it stands; a sine
    is bounded whatever the rank, so there is nothing for 1 / r to balance."""
    gain: float | None = None
    """The divisor g of the sine. None: the square root of the input width (sine_lowrank.txt, A.2)."""
    lora_dropout: float = 0.0
    """Dropout of the delta's input in training; embeddings have none."""
    use_dora: bool = False
    """Sine-DoRA: the delta changes a weight's direction, and a trained magnitude its length, row by row."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """{module name or regular expression: r} where it differs."""
    omega_pattern: dict[str, float] = field(default_factory=dict)
    """{module name or regular expression: omega} where it differs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("lora_dropout", self.lora_dropout)
        for name in ("lora_alpha", "gain"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)

    def check_value(self, name: str, value: Any, where: str) -> None:
        """See `AdapterConfig`."""
        if name == "r":
            check_integer(where, value, minimum=1)
        else:
            check_number(where, value, above=0)


class _SineLayer(WeightLayer):
    """Parameters of linears, convolutions and embeddings alike."""

    adapter_layer_names = ("nlr_sine_lora_down", "nlr_sine_lora_up", "nlr_sine_lora_magnitude")
    nlr_sine_lora_down: Any
    nlr_sine_lora_up: Any
    nlr_sine_lora_magnitude: Any

    def add_parameters(self, name: str, config: SineLoraConfig) -> None:
        """Add the tensors of this file's table, undrawn."""
        self.nlr_sine_lora_down[name] = self.parameter(config.r, self.d_in)
        self.nlr_sine_lora_up[name] = self.parameter(self.d_out, config.r)
        if config.use_dora:
            self.nlr_sine_lora_magnitude[name] = self.parameter(self.d_out)

    def reset_adapter(self, name: str) -> None:
        """Draw the table; with init_weights=False the up factor too, for phases of about 1 rad."""
        config: SineLoraConfig = self.configs[name]
        nn.init.uniform_(self.nlr_sine_lora_down[name].weight, -(self.d_in**-0.5), self.d_in**-0.5)
        if config.init_weights:
            nn.init.zeros_(self.nlr_sine_lora_up[name].weight)
        else:
            nn.init.normal_(self.nlr_sine_lora_up[name].weight, std=(3 * self.d_in / config.r) ** 0.5 / config.omega)
        if config.use_dora:
            self.reset_magnitude(name)

    @torch.no_grad()
    def reset_magnitude(self, name: str) -> None:
        """Set an adapter's magnitude to the lengths of the weight's rows."""
        magnitude = self.nlr_sine_lora_magnitude[name].weight
        if not magnitude.is_meta:
            magnitude.copy_(self._lengths())

    @torch.no_grad()
    def magnitude_is_narrow_and_untrained(self, name: str) -> bool:
        """Return whether an adapter's magnitude is just these lengths, rounded to a 16-bit type."""
        if name not in self.nlr_sine_lora_magnitude:
            return False
        magnitude = self.nlr_sine_lora_magnitude[name].weight
        if magnitude.is_meta or magnitude.dtype not in (torch.bfloat16, torch.float16):
            return False
        return torch.equal(magnitude, self._lengths().to(magnitude.dtype))

    def _lengths(self) -> Tensor:
        """Return (d_out), computed as the operators do, for the same bits."""
        return dora_norm(self.original_weight(), transposed=self.matrix.kind == "conv1d")

    def original_weight(self) -> Tensor:
        """Return the weight without adapters, dequantized, in its own layout."""
        if self._kept is not None:
            return self._kept.weight()
        base: Any = self.get_base_layer()
        if self.quantization_backend is not None:
            unpack(base)
            return self.quantization_backend.get_base_weight(base).detach()
        if not hasattr(base, "_hf_hook"):
            return base.weight
        with align_module_device(base):  # offloaded: on meta but for the module's own forward
            return base.weight

    def factors(self, name: str) -> SineFactors:
        """Return an adapter's delta."""
        config: SineLoraConfig = self.configs[name]
        return SineFactors(
            self.nlr_sine_lora_up[name](),
            self.nlr_sine_lora_down[name](),
            config.omega,
            gain=self.d_in**0.5 if config.gain is None else config.gain,
            scale=1.0 if config.lora_alpha is None else config.lora_alpha / config.r,
            magnitude=self.nlr_sine_lora_magnitude[name]() if config.use_dora else None,
        )

    def roles(self, name: str) -> Mapping[str, Role]:
        """Return the roles of this file's table."""
        roles = {"nlr_sine_lora_down": Role("sine_lora.down"), "nlr_sine_lora_up": Role("sine_lora.up")}
        if self.configs[name].use_dora:
            roles["nlr_sine_lora_magnitude"] = Role("sine_lora.magnitude", decay=False)
        return roles


class SineLinear(_SineLayer, SineDeltaLayer):
    """Around nn.Linear, Conv1D and quantized linears: (..., d_in) -> (..., d_out)."""

    def source(self, names: Sequence[str]) -> Tensor | Callable[[], Tensor] | None:
        """Give sine-DoRA the weight: a quantized one is dequantized anew in backward, so as not to be saved."""
        if not any(self.configs[name].use_dora for name in names):
            return None
        return self.original_weight() if self.quantization_backend is None else self.original_weight

    def get_delta_weight(self, name: str) -> Tensor:
        """Return what an adapter adds to the weight, float32 or wider, in its layout; peft's conversion asks."""
        return sine_delta(self.original_weight(), self.factors(name), transposed=self.transposed)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return True: an adapter adds one matrix to the weight."""
        return True


class SineConv2d(SineLinear):
    """Around a 1x1 convolution: (B, d_in, H, W) -> (B, d_out, H', W')."""

    @property
    def stride(self) -> tuple[int, int]:
        """Stride (height, width) of the convolution."""
        base = self.get_base_layer()
        assert isinstance(base, nn.Conv2d)
        return base.stride[0], base.stride[1]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return False: peft's conversion makes linears' factors only."""
        return False


class SineEmbedding(_SineLayer):
    """Around an embedding; rows that are looked up are formed, and no others."""

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """Indices (...) -> (..., embedding_dim)."""
        base: Any = self.get_base_layer()
        factors = [self.factors(name) for name in names]
        plain = self.base_is_plain()
        rows = sine_embedding(x, self.original_weight(), factors, padding_idx=base.padding_idx, base=plain)
        scale = getattr(base, "embed_scale", None)  # of Gemma, BART, ...: the module multiplies its rows by it
        if scale is not None:
            rows = rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)
        return rows if plain else self.base_layer(x, *args, **kwargs) + rows

    def base_is_plain(self) -> bool:
        """See `WeightLayer`; which classes look up plainly was checked before they were wrapped."""
        base = self.base_layer
        hooked = base._forward_hooks or base._forward_pre_hooks or hasattr(base, "_hf_hook")
        return type(base.weight) is nn.Parameter and not hooked

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """See `WeightLayer`."""
        total = None
        for name in names:
            total = added(total, embedding_delta(weight, self.factors(name)), weight)
        assert total is not None
        return total.to(weight.dtype)

    def get_delta_weight(self, name: str) -> Tensor:
        """See `SineLinear.get_delta_weight`."""
        return embedding_delta(self.original_weight(), self.factors(name))


@register_adapter(SineLoraConfig)
class SineLoraModel(AdapterModel):
    """peft's tuner for sine-LoRA and sine-DoRA."""

    prefix = "nlr_sine_lora_"
    layer_classes: ClassVar[Mapping[str, type[WeightLayer]]] = {
        "linear": SineLinear,
        "conv1d": SineLinear,
        "conv2d": SineConv2d,
        "embedding": SineEmbedding,
    }

    def check_target(self, name: str, base: nn.Module, config: SineLoraConfig) -> None:
        """Check also that an embedding looks its rows up as nn.Embedding does."""
        super().check_target(name, base, config)
        if config.use_dora:
            backend = backend_of(base, get_quantization_kwargs(self.model))
            if isinstance(backend, ForwardOnlyQuantizationBackend):
                raise UserError(
                    f"sine-DoRA needs the norms of {name}, whose {backend.backend_name} weights cannot be read; "
                    "set use_dora=False"
                )
        if not isinstance(base, nn.Embedding):
            return
        own = type(base).forward is not nn.Embedding.forward and not hasattr(base, "embed_scale")
        if own or base.max_norm is not None:
            what = f"is a {type(base).__name__} with a lookup of its own" if own else "has max_norm"
            raise UserError(f"{name} {what}; SineLoraConfig takes plain embeddings, so name it in exclude_modules")

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        layers = [module for module in self.model.modules() if isinstance(module, _SineLayer)]
        # Drawn in a low-precision base's type, lengths are rounded; once they are wide they can be exact, and the
        # adapted model starts bit-equal to its base. peft also calls this after an adapter was loaded.
        untrained = [layer for layer in layers if layer.magnitude_is_narrow_and_untrained(adapter_name)]
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for layer in untrained:
            layer.reset_magnitude(adapter_name)
