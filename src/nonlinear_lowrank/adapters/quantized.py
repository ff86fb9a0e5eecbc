"""Weights of wrapped modules, quantized or not: read in float, copied, written, and restored bit-equal.

peft's backends (`resolve_quantization_backend`) know the formats; what they get wrong when a weight is merged,
unmerged and merged again is fixed here:

- bitsandbytes 4-bit: a no-grad forward on a CPU with AVX512-BF16 packs the weight in place, and dequantizing
  the packed form gives garbage. The packed form also has no gradient with respect to the input, and
  bitsandbytes' own way back leaves the scales transposed. Packing rounds the scales to bfloat16, so the way back is
  not to the bit: a module with an adapter is kept from being packed at all.
- bitsandbytes 4-bit: peft's `set_base_weight` marks the old weight, which is kept here, as unquantized.
- torchao: dequantizing and quantizing again drifts, so an unmerged weight is the kept one, never a new one.
"""

import copy
from collections.abc import Mapping
from typing import Any

from peft.utils.quantization_utils import QuantizationBackend, resolve_quantization_backend
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError


def backend_of(base: nn.Module, model_options: Mapping[str, Any]) -> QuantizationBackend | None:
    """Return peft's backend for a weight, given the model's `get_quantization_kwargs`; None for a plain one."""
    # A model quantized by hand has no config to quantize again by; it is needed for merging only, which is refused.
    by_hand = "get_apply_tensor_subclass" not in model_options
    backend = resolve_quantization_backend(base, **{"get_apply_tensor_subclass": lambda: None, **model_options})
    if backend is not None and backend.backend_name == "torchao" and by_hand:
        backend.supports_merge = False
    return backend


def keep_unpacked(base: nn.Module) -> None:
    """Undo a 4-bit weight's packing and have it never packed again; the module then computes as with a gradient."""
    unpack(base)
    if getattr(base, _PACKS, False):
        setattr(base, _PACKS, False)


def unpack(base: nn.Module) -> None:
    """Undo, in place, what a no-grad forward did to a 4-bit weight on this kind of CPU; else nothing.

    Called before a weight is read, too: versions of bitsandbytes without a switch to turn off pack it all the same.
    """
    weight: Any = base.weight
    state = getattr(weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        weight.data, weight.quant_state = _unpacked(weight.data, state)


class Kept:
    """A copy of a module's original weight, on the CPU; without `copy_plain` a plain one is the weight itself.

    Raises:
        UserError: the format cannot be dequantized or quantized again.
    """

    def __init__(
        self, base: nn.Module, backend: QuantizationBackend | None, copy_plain: bool = True, name: str = "weight"
    ) -> None:
        self._kind = backend.backend_name if backend else "plain"
        if backend is not None and (self._kind not in _KINDS or not backend.supports_merge):
            raise UserError(
                f"adapters cannot be merged into {self._kind or type(base).__name__} weights; load them wide"
            )
        self._backend, self._name = backend, name
        weight: Any = getattr(base, name)
        self._device = weight.device
        if self._kind == "bnb 4bit":
            self._state = copy.deepcopy(weight.quant_state)
            self._state.to("cpu")
            self._data = weight.data.cpu().clone()
        elif self._kind == "bnb 8bit":
            state: Any = base.state
            scales = weight.SCB if weight.SCB is not None else state.SCB
            self._data, self._state = weight.data.cpu().clone(), scales.cpu().clone()
        elif self._kind == "torchao":
            # The tensor is never written to: writing puts another in its place.
            self._data = weight.detach().cpu()
        else:
            self._data = weight.detach().to("cpu", copy=True) if copy_plain else weight.detach()

    def weight(self) -> Tensor:
        """Return the weight in float, on the module's device; not to be written to."""
        if self._kind == "bnb 4bit":
            from bitsandbytes.functional import dequantize_4bit

            state, data = copy.deepcopy(self._state), self._data
            if getattr(state, "packing_format_for_cpu", False):
                data, state = _unpacked(data, state)
            state.to(self._device)
            return dequantize_4bit(data.to(self._device), state)
        if self._kind == "bnb 8bit":
            from bitsandbytes.functional import int8_vectorwise_dequant

            return int8_vectorwise_dequant(self._data.to(self._device), self._state.to(self._device))
        if self._kind == "torchao":
            return self._data.to(self._device).dequantize()
        return self._data.to(self._device)

    def restore(self, base: nn.Module) -> None:
        """Put the weight back, every bit of it."""
        old: Any = getattr(base, self._name)
        if self._kind == "bnb 4bit":
            state = copy.deepcopy(self._state)
            state.to(old.device)
            base.weight = _like_4bit(old, self._data.clone().to(old.device), quant_state=state, bnb_quantized=True)
            base.quant_state = state
        elif self._kind == "bnb 8bit":
            data, scales = self._data.clone().to(old.device), self._state.clone().to(old.device)
            options = {"requires_grad": False, "has_fp16_weights": old.has_fp16_weights}
            base.weight = type(old)(data, CB=data, SCB=scales, **options)
            base.state.reset_grads()  # type: ignore[union-attr,operator]
        elif self._kind == "torchao":
            base.weight = nn.Parameter(self._data.to(old.device), requires_grad=False)
        else:
            old.data.copy_(self._data)

    def write(self, layer: Any, weight: Tensor) -> None:
        """Write another weight, in float, to the module inside an adapter layer, quantized like its own."""
        base = layer.get_base_layer()
        if self._kind == "bnb 4bit":
            device = base.weight.device
            base.weight = _like_4bit(base.weight, weight.cpu(), bnb_quantized=False).to(device)
            base.quant_state = base.weight.quant_state
        elif self._backend is not None:
            self._backend.set_base_weight(layer, weight)
        else:
            getattr(base, self._name).data.copy_(weight)


_KINDS = ("bnb 4bit", "bnb 8bit", "torchao")
_PACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


def _unpacked(data: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Undo bitsandbytes' packing; `state` is changed in place."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as inverse

    data, state = inverse(data, state)
    if state.absmax.ndim == 2:
        # bitsandbytes (0.50) forgets the scales that are not quantized themselves: still (blocks of a row, rows).
        state.absmax = state.absmax.t().reshape(-1).float()
    return data, state


def _like_4bit(weight: Any, data: Tensor, **options: Any) -> Any:
    same = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")
    return type(weight)(data, requires_grad=False, **{name: getattr(weight, name) for name in same}, **options)
