"""Sine-LoRA and sine-DoRA on peft's own LoRA layers, on whatever peft's LoRA adapts.

    W' = W + D,  D = scaling * sin(omega * B A) / gain    sine-LoRA
    W' = m * (W + D) / |W + D|                            sine-DoRA; | | of each row, a constant

With activation_sine, the sine of activations, sine-DoRA in training replaces x D^T, as the paper's released code
does, by

    scaling * sin(omega * x A^T B^T / gain)

A matrix is (d_out, d_in): a kernel's d_in is channels times kernel size. A grouped convolution has a delta over all
channels, as peft's LoRA has, and experts one delta each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn
from torch.func import functional_call

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.matrix import Matrix, matrix_of
from nonlinear_lowrank.ops.derivatives import transformed
from nonlinear_lowrank.ops.plain import autocast_input, wide_dtype
from nonlinear_lowrank.ops.precision import no_autocast
from nonlinear_lowrank.ops.sine import (
    SineFactors,
    dora_norm,
    effective_weights,
    sine_delta,
    sine_layer,
    sine_sum_reference,
)

from .lora import LoraLayer, read_parameter
from .weights import AdapterTensor, is_plain


class SineLayer(LoraLayer):
    """The sine of the factors' product as the delta; subclasses say where the weight is used."""

    other_param_names = (*lora.LoraLayer.other_param_names, "omega", "gain", "cached", "activation_sine")
    lora_variants: ClassVar[Mapping[Any, Any]] = {(): None, ("use_dora",): None}
    role = "sine_lora"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.omega: dict[str, float] = {}
        self.gain: dict[str, float | None] = {}
        self.cached: dict[str, int] = {}
        self.activation_sine: dict[str, bool] = {}
        super().__init__(*args, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: Any, config: Any, **kwargs: Any) -> None:
        """Add an adapter as peft does, and initialize it."""
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)  # type: ignore[misc]
        self.start(adapter_name, config)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)  # of the magnitude too

    @torch.no_grad()
    def start(self, name: str, config: Any) -> None:
        """Take the settings; with init_lora_weights=False draw B too, for phases of about 1 rad; set DoRA's lengths."""
        self.omega[name], self.gain[name], self.cached[name] = config.omega, config.gain, config.cached_weights
        self.activation_sine[name] = config.activation_sine
        up, down = self.matrices(name)
        if config.init_lora_weights is False:
            nn.init.uniform_(down, -(down.shape[-1] ** -0.5), down.shape[-1] ** -0.5)
            nn.init.normal_(up, std=(3 * down.shape[-1] / self.r[name]) ** 0.5 / config.omega)
        if config.use_dora:
            self.lora_magnitude_vector[name] = AdapterTensor(
                nn.Parameter(up.new_empty(up.shape[0], dtype=wide_dtype(up)))
            )
            self.reset_magnitude(name)

    def factors(self, name: str) -> SineFactors:
        """Return an adapter's delta."""
        up, down = self.matrices(name)
        gain = self.gain[name]
        return SineFactors(
            up,
            down,
            self.omega[name],
            gain=down.shape[-1] ** 0.5 if gain is None else gain,
            scale=float(self.scaling[name]),
            magnitude=self.lora_magnitude_vector[name]() if name in self.lora_magnitude_vector else None,
        )

    # sine-DoRA's magnitudes.

    @torch.no_grad()
    def reset_magnitude(self, name: str) -> None:
        """Set an adapter's magnitude to the lengths of the weight's rows."""
        magnitude = self.lora_magnitude_vector[name].weight
        if not magnitude.is_meta:
            # Computed as the operators do, for the same bits.
            magnitude.copy_(dora_norm(self.original_weight(), transposed=self.transposed))

    def narrow(self, name: str) -> None:
        """See `AdapterLayer`; also narrow the magnitude, which starts as exact lengths, and loaded tensors."""
        _, dtype = super()._get_base_layer_device_and_dtype(self.get_base_layer())
        for tensors in (getattr(self, each) for each in self.adapter_layer_names):
            if name in tensors and dtype is not None and dtype.is_floating_point:
                own = tensors[name] if isinstance(tensors[name], nn.Parameter) else tensors[name].weight
                own.data = own.data.to(dtype)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[Any, Any]:
        # No type once the adapters are initialized: low_cpu_mem_usage loading would cast them to it.
        device, dtype = super()._get_base_layer_device_and_dtype(base_layer)
        made = {*self.lora_A, *self.lora_embedding_A}
        return device, None if made and made <= self.omega.keys() else dtype

    # The weight.

    @property
    def transposed(self) -> bool:
        """True if the module stores its weight as (d_in, d_out)."""
        return bool(getattr(self, "fan_in_fan_out", False))

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return what an adapter adds to the weight, float32 or wider, in its layout; peft's conversion asks."""
        return sine_delta(self.dense_weight(), self.factors(adapter), transposed=self.transposed)

    def dense_weight(self) -> Tensor:
        """Return the weight without adapters, of the delta's size."""
        return self.original_weight()

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """See `LoraLayer`; formed in the module's layout, as in training."""
        return effective_weights(weight, [self.factors(name) for name in names], transposed=self.transposed)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return True for linears, and sine-LoRA: sine-DoRA scales rows of W, a full-rank change."""
        return isinstance(self, SineLinear) and adapter_name not in self.lora_magnitude_vector


# For more rows of x the weight is formed each time: on the CPU that takes a twentieth of the product's time, and
# evaluation beside training would hold a second copy of every adapted weight.
_FEW_ROWS = 1024


class _Formed(NamedTuple):
    """A weight with adapters in it, and what it was formed from."""

    weight: Tensor
    tensors: list[Tensor]
    stamp: list[Any]
    """The tensors' identities and versions, and the settings."""
    copies: list[Tensor]


class _ProductLayer(SineLayer):
    """Around linears and convolutions: one product, or the base's and the delta's, each with no more saved than x.

    It is one product, with the weight that merging would give, for a plain base and no dropout. In evaluation without
    gradients that weight is kept, by its adapters, until something that it was formed from changes; for an x of many
    rows it is formed each time. Subclasses give `applied`, x through the weight with adapters' deltas (without `base`
    through the deltas alone), and `multiplied`, x through a weight to the same bits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._formed: dict[tuple[str, ...], _Formed] = {}
        super().__init__(*args, **kwargs)

    def _keeps(self, x: Tensor, names: Sequence[str]) -> bool:
        weight = self.base_layer.weight
        changing = torch.is_grad_enabled() or self.training or torch.compiler.is_compiling() or transformed()
        if changing or weight.is_meta or weight.is_inference() or not all(self.cached[name] for name in names):
            return False
        if x.numel() > _FEW_ROWS * x.shape[-1]:
            return False
        if tuple(names) in self._formed:  # its factors were checked when it was formed
            return True
        factors = (each[name].weight for name in names for each in (self.lora_A, self.lora_B))
        return not any(each.is_inference() for each in factors)  # they count no writes

    def formed(self, names: Sequence[str]) -> Tensor:
        """Return the weight with these adapters in it, in the base's layout and type; formed again after a change.

        It detects writes that autograd counts and, to an adapter on the CPU, others (`.data`); saving, loading and
        moving the module, and a call with gradients, also drop what was kept. A `.data` write to the base's weight, or
        to an adapter on a GPU, is not seen.
        """
        key, held = tuple(names), (self.lora_B, self.lora_A, self.lora_magnitude_vector)
        tensors = [self.base_layer.weight, *(each[name].weight for name in names for each in held if name in each)]
        stamp: list[Any] = [(id(each), each._version) for each in tensors]
        # A scaling may be a tensor that is written in place (peft's compiled hotswap).
        stamp += [each for name in names for each in (self.omega[name], self.gain[name], float(self.scaling[name]))]
        known = self._formed.get(key)
        if known is None or known.stamp != stamp or not all(map(_unwritten, tensors[1:], known.copies)):
            weight = self.merged_weight(tensors[0], names)
            copies = [each.detach() if each.is_cuda else each.detach().clone() for each in tensors[1:]]
            known = _Formed(weight, tensors, stamp, copies)
            self._formed.pop(key, None)
            while len(self._formed) >= max(self.cached[name] for name in names):
                del self._formed[next(iter(self._formed))]
            self._formed[key] = known
        return known.weight

    def merging(self, names: Sequence[str], keep: bool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """See `LoraLayer`; drops the kept weights."""
        self._formed.clear()
        return super().merging(names, keep)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._formed.clear()  # peft's hotswap reads the state, and then writes to `.data`
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._formed.clear()
        return super()._apply(*args, **kwargs)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter as peft does, and drop the kept weights."""
        self._formed.clear()
        super().delete_adapter(adapter_name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_formed": {}}

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        # Each with an x or a formula of its own.
        apart = [name for name in names if self.training and self._is_apart(name)]
        rest = [name for name in names if name not in apart]
        base = self.base_layer
        if torch.is_grad_enabled() or self.training:
            self._formed.clear()
        if not apart and is_plain(base) and getattr(base, "groups", 1) == 1:
            if self._keeps(x, names):
                return self.multiplied(x, self.formed(names), self.with_bias(base.bias, names))
            return self.applied(x, base.weight, self.with_bias(base.bias, names), names, base=True)
        y = self.based(x, *args, **kwargs)
        parts = [(x, rest)] if rest else []
        parts += [(self.lora_dropout[name](x), [name]) for name in apart]
        for part, together in parts:
            bias = self.with_bias(None, together)
            y = y + self.applied(part, self._source(together), bias, together, base=False).to(y.dtype)
        return y

    def _is_apart(self, name: str) -> bool:
        return isinstance(self.lora_dropout[name], nn.Dropout) or self.activation_sine[name]

    def _source(self, names: Sequence[str]) -> Tensor | Callable[[], Tensor] | None:
        """Give sine-DoRA the weight: a quantized one is dequantized again in backward, so as not to be saved."""
        if not any(name in self.lora_magnitude_vector for name in names):
            return None
        return self.dense_weight() if self.quantization_backend is None else self.original_weight


def _unwritten(now: Tensor, then: Tensor) -> bool:
    return now.data_ptr() == then.data_ptr() if then.is_cuda else torch.equal(now, then)


class SineLinear(_ProductLayer, lora.Linear):
    """Around nn.Linear, Conv1D and quantized linears: (..., d_in) -> (..., d_out)."""

    def applied(self, x: Tensor, source: Any, bias: Tensor | None, names: Sequence[str], *, base: bool) -> Tensor:
        factors = [self.factors(name) for name in names]
        if self.training and self.activation_sine[names[0]]:
            return self._by_activations(x, source, bias, factors[0])
        return sine_layer(x, source, bias, factors, base=base, transposed=self.transposed)

    def _by_activations(self, x: Tensor, source: Any, bias: Tensor | None, own: SineFactors) -> Tensor:
        """Return what sine-DoRA adds to the base's output, with the sine of the activations; float32 or wider."""
        x, weight = autocast_input(x), source() if callable(source) else source
        dtype, side = wide_dtype(x, own.up), {"transposed": self.transposed}
        with torch.no_grad():
            length = dora_norm(_sum(weight.to(dtype), [own._replace(magnitude=None)], **side), **side)
        assert own.magnitude is not None
        ratio = torch.where(length > 0, own.magnitude / length, 1.0)
        plain = F.linear(x, (weight.t() if self.transposed else weight).to(x.dtype))
        with no_autocast(x):
            y = F.linear(F.linear(x.to(dtype), own.down.to(dtype)), own.up.to(dtype))
            y = ratio * own.scale * torch.sin(own.omega / own.gain * y) + (ratio - 1) * plain
        return y if bias is None else y + bias

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = autocast_input(x)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if not self.transposed:
            return F.linear(x, weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        y = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
        return y.view(*x.shape[:-1], weight.shape[1])


class _Convolution(_ProductLayer):
    """Around a convolution of any size: (B, d_in, ...) -> (B, d_out, ...)."""

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """See `SineLayer`; with groups B is block-diagonal."""
        up, down = super().matrices(name)
        groups = self.get_base_layer().groups
        return up if groups == 1 else torch.block_diag(*up.chunk(groups)), down

    def applied(self, x: Tensor, source: Any, bias: Tensor | None, names: Sequence[str], *, base: bool) -> Tensor:
        conv = self.get_base_layer()
        factors = [self.factors(name) for name in names]
        if isinstance(matrix_of(conv), Matrix):
            if x.ndim == 3:  # one image, without a batch
                return self.applied(x[None], source, bias, names, base=base)[0]
            return sine_layer(x, source, bias, factors, base=base, stride=conv.stride)
        weight = _sum(source, factors, base=base)
        return self.multiplied(x, weight if base else weight.unflatten(1, (-1, *conv.kernel_size)), bias)

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv = self.get_base_layer()
        x, padding = autocast_input(x), conv.padding
        if conv.padding_mode != "zeros":
            x, padding = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        bias = None if bias is None else bias.to(x.dtype)
        y: Tensor = self.conv_fn(x, weight.to(x.dtype), bias, conv.stride, padding, conv.dilation)
        return y

    def dense_weight(self) -> Tensor:
        """See `SineLayer`; of a convolution in groups (d_out, d_in), zero between them."""
        weight = self.original_weight()
        groups = self.get_base_layer().groups
        return weight if groups == 1 else torch.block_diag(*weight.flatten(1).chunk(groups))

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """See `LoraLayer`; refuse groups, whose weight lacks the delta's channels."""
        base = self.get_base_layer()
        if base.groups > 1:
            raise UserError("an adapter on a convolution with groups cannot be merged; keep it as an adapter")
        if isinstance(matrix_of(base), Matrix):
            return super().merged_weight(weight, names)
        return _sum(weight, [self.factors(name) for name in names]).view_as(weight)


class SineConv1d(_Convolution, lora.layer.Conv1d):
    """Around nn.Conv1d."""


class SineConv2d(_Convolution, lora.layer.Conv2d):
    """Around nn.Conv2d."""


class SineConv3d(_Convolution, lora.layer.Conv3d):
    """Around nn.Conv3d."""


class _ParameterLayer(SineLayer):
    """Around a module that reads a parameter itself: it is called with the sum in the parameter's place."""

    def sums(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what to put in the place of which parameters of the base layer."""
        base, path = self.base_layer, ""
        while base is not self.get_base_layer():
            base, path = base.base_layer, f"{path}base_layer."
        return {f"{path}{self.weight_name}": self.merged_weight(self.original_weight(), names)}

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """See `LoraLayer`; differentiable."""
        return _sum(weight, [self.factors(name) for name in names], transposed=self.transposed)

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        sums = self.sums(names)
        owners = [(vars(self.base_layer.get_submodule(path.rpartition(".")[0])), path) for path in sums]
        # FSDP1 hides parameters behind attributes of their names, which functional_call does not reach.
        hidden = [(owner, name, path) for owner, path in owners if (name := path.rpartition(".")[2]) in owner]
        before = [owner[name] for owner, name, _ in hidden]
        try:
            for owner, name, path in hidden:
                owner[name] = sums[path]
            result: Tensor = functional_call(self.base_layer, sums, (x, *args), kwargs)
        finally:
            for (owner, name, _), value in zip(hidden, before, strict=True):
                owner[name] = value
        return result

    def _mixed(self, x: Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        kind, base = type(self).__name__, type(self.get_base_layer()).__name__
        raise UserError(f"lora.{kind} does not support mixed adapter batches yet. Call a {base} with one adapter.")


class SineMultiheadAttention(_ParameterLayer, lora.layer.MultiheadAttention):
    """Around nn.MultiheadAttention, on in_proj_weight and out_proj, as peft's."""

    weight_name = "in_proj_weight"

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, r: int, lora_alpha: float, **rest: Any):
        super().__init__(base_layer, adapter_name, config, r, lora_alpha, **rest)
        plain = base_layer.out_proj.get_base_layer()  # type: ignore[union-attr,operator]
        base_layer.out_proj = SineLinear(plain, adapter_name, config, r, lora_alpha, **rest)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return False  # or nn.TransformerEncoderLayer reads the weights instead of calling this module

    def sums(self, names: Sequence[str]) -> dict[str, Tensor]:
        out = self.base_layer.out_proj
        weight = _sum(out.original_weight(), [out.factors(name) for name in names])
        return super().sums(names) | {"out_proj.base_layer.weight": weight}

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Call the module; query by position or name."""
        return super().forward(query, *args, **kwargs)

    def unmerge(self) -> None:
        """See `LoraLayer`; out_proj merges by itself, and is a part of this module."""
        super().unmerge()
        self.base_layer.out_proj.unmerge()

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super().unload_and_optionally_merge_module(*args, **kwargs)
        base.out_proj = base.out_proj.unload_and_optionally_merge_module(*args, **kwargs)
        return base

    def _restore_weights(self) -> None:
        """Do nothing: the weights never leave their places."""


class ParamWrapper(_ParameterLayer, lora.layer.ParamWrapper):
    """Around a module's matrix, or experts (E, d_in, d_out) or (E, d_out, d_in); peft goes by the class's name."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, parameter_name: str, *args: Any, **kwargs: Any):
        self.weight_name = parameter_name
        super().__init__(base_layer, adapter_name, parameter_name, *args, **kwargs)

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """Return B (d_out, r) and A (r, d_in), or (E, d_out, r) and (E, r, d_in) of experts."""
        up, down = read_parameter(self.lora_B[name]), read_parameter(self.lora_A[name])
        if self._param_ndim == 2:
            return up, down
        experts: int = self.num_experts
        return up.unflatten(1, (-1, experts)).permute(2, 0, 1), down.unflatten(0, (experts, -1))

    @property
    def transposed(self) -> bool:
        """True if experts are stored as (E, d_in, d_out)."""
        return self._param_ndim == 3 and not self._did_swap_in_out_features

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> Any:
        """See `LoraLayer`; adapters on other parameters of the module are in the base layer."""
        super().unload_and_optionally_merge_module(*args, **kwargs)
        inner = self.base_layer
        return inner.unload_and_optionally_merge_module(*args, **kwargs) if isinstance(inner, ParamWrapper) else inner

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        delta = _sum(None, [self.factors(adapter)], base=False)
        return delta.mT if self.transposed else delta


def _sum(
    weight: Tensor | None, factors: Sequence[SineFactors], *, base: bool = True, transposed: bool = False
) -> Tensor:
    """Return the weight with deltas in its layout and type, or without base the deltas alone (d_out, d_in), wide."""
    matrix = None
    if weight is not None:
        matrix = weight.mT if transposed else weight.flatten(1) if factors[0].up.ndim == 2 else weight
    total = sine_sum_reference(matrix, factors, base=base)
    if weight is None or not base:
        return total
    return total.mT if transposed else total.view_as(weight)
