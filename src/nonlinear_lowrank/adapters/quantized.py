"""Weights of wrapped modules, quantized or not: read in float, copied, written, and restored bit-equal.

peft's backends (`resolve_quantization_backend`) know the formats; what they get wrong when a weight is merged,
unmerged and merged again is fixed here:

- bitsandbytes 4-bit: a no-grad forward on a CPU with AVX512-BF16 packs the weight in place, and dequantizing
  the packed form gives garbage. The packed form also has no gradient with respect to the input, and
  bitsandbytes' own unpacking leaves the scales transposed. Packing rounds the scales to bfloat16, so unpacking is
  not bit-exact: a module with an adapter is never packed.
- torchao: dequantizing and quantizing again drifts, so unmerging restores the kept weight, never a new one.
"""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from peft.utils.quantization_utils import QuantizationBackend, resolve_quantization_backend
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError


def backend_of(base: nn.Module, model_options: Mapping[str, Any]) -> QuantizationBackend | None:
    """Return peft's backend for a weight, given the model's `get_quantization_kwargs`; None for a plain one."""
    # A model quantized by hand has no config to quantize again with; only merging needs it, and is refused.
    by_hand = "get_apply_tensor_subclass" not in model_options
    backend = resolve_quantization_backend(base, **{"get_apply_tensor_subclass": lambda: None, **model_options})
    if backend is not None and backend.backend_name == "torchao" and by_hand:
        backend.supports_merge = False
    return backend


def keep_unpacked(base: Any) -> None:
    """Undo what no-grad forwards do to a 4-bit weight on some CPUs, and keep the module from doing it again."""
    if getattr(base, _PACKS, False):
        setattr(base, _PACKS, False)
        if getattr(base.weight.quant_state, "packing_format_for_cpu", False):
            base.weight.data, base.weight.quant_state = _unpacked(base.weight.data, base.weight.quant_state)


class Kept:
    """A copy of a module's original weight, on the CPU; without `copy_plain` a plain one is the weight itself.

    Raises:
        UserError: the format cannot be dequantized or quantized again.
    """

    def __init__(
        self, base: nn.Module, backend: QuantizationBackend | None, copy_plain: bool = True, name: str = "weight"
    ) -> None:
        if backend is not None and (backend.backend_name not in _KINDS or not backend.supports_merge):
            raise UserError(
                f"adapters cannot be merged into {backend.backend_name or type(base).__name__} weights; load them "
                "unquantized"
            )
        self._backend, self._name = backend, name
        weight: Any = getattr(base, name)
        if backend is None:
            self._weight: Any = weight.detach().to("cpu", copy=True) if copy_plain else weight.detach()
            return
        self._weight = self._copied(weight, "cpu", getattr(base, "state", None))

    def _copied(self, weight: Any, device: Any, state: Any = None) -> Any:
        """Return a copy of a quantized weight on a device; bitsandbytes' own `to` depends on its version."""
        assert self._backend is not None
        if self._backend.backend_name == "torchao":  # never written in place: writing replaces it
            return nn.Parameter(weight.detach().to(device), requires_grad=False)
        if self._backend.backend_name == "bnb 8bit":
            data = weight.data.to(device, copy=True)
            scales = (state.SCB if weight.SCB is None else weight.SCB).to(device, copy=True)
            options = {"requires_grad": False, "has_fp16_weights": weight.has_fp16_weights}
            return type(weight)(data, CB=data, SCB=scales, **options)
        copied = copy.deepcopy(weight)
        copied.data = copied.data.to(device)
        copied.quant_state.to(device)
        return copied

    def weight(self, device: torch.device) -> Tensor:
        """Return the weight in float, on a device; not to be written to."""
        if self._backend is None:
            return self._weight.to(device)
        state = SimpleNamespace(SCB=None)
        base: Any = SimpleNamespace(weight=self._copied(self._weight, device), state=state)
        return self._backend.get_base_weight(base)

    def restore(self, base: Any) -> None:
        """Restore the weight bit-exactly."""
        old = getattr(base, self._name)
        if self._backend is None:
            old.data.copy_(self._weight)
            return
        base.weight = self._copied(self._weight, old.device)
        if self._backend.backend_name == "bnb 4bit":
            base.quant_state = base.weight.quant_state
        elif self._backend.backend_name == "bnb 8bit":
            base.state.reset_grads()

    def write(self, layer: Any, weight: Tensor) -> None:
        """Write another weight, in float, to the module inside an adapter layer, quantized like its own."""
        if self._backend is None:
            getattr(layer.get_base_layer(), self._name).data.copy_(weight)
        else:
            self._backend.set_base_weight(layer, weight)


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
