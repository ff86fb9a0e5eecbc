"""peft's LoRA layers as bases: their tensors and names, with learning-rate roles and bit-exact merging.

A and B are peft's `lora_A` and `lora_B`, and of an embedding `lora_embedding_B.T` and `lora_embedding_A.T`.

Merging starts from the weight as it was before any adapter, kept on the CPU, and goes through the adapters sorted by
name, in float32, with one rounding at the end. Hence unmerging is bit-equal, and merge(A); merge(B) is bit-equal to
merge([A, B]).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Role

from .quantized import Kept
from .weights import AdapterLayer

_WHATS = {
    "lora_A": "down", "lora_B": "up", "lora_embedding_A": "up", "lora_embedding_B": "down",
    "lora_magnitude_vector": "magnitude",
}  # fmt: skip


class LoraLayer(AdapterLayer):
    """Mixin in front of a peft LoRA layer: calls and merging as in all adapters of this library."""

    weight_name: str = "weight"
    """Name of the parameter that is adapted, in the base module."""
    _kept: Kept | None = None
    _kept_bias: Kept | None = None

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """Return the weight with adapters in it, formed in float32 (float64 for float64), rounded once.

        `weight` is the original in its own layout, not to be written to; `names` are sorted, each present.
        """
        raise NotImplementedError

    role: str = "lora"
    """Beginning of the names of learning-rate roles."""

    def __init__(
        self, base_layer: nn.Module, *args: Any, quantization: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if quantization is not None:
            self.set_quantization(base_layer, quantization)
        super().__init__(base_layer, *args, **kwargs)

    def original_weight(self) -> Tensor:
        """Return the weight without adapters, dequantized, in its own layout."""
        if self._kept is not None:
            return self._kept.weight(getattr(self.get_base_layer(), self.weight_name).device)
        base = self.get_base_layer()
        if self.quantization_backend is not None:
            return self.quantization_backend.get_base_weight(base).detach()
        return read_parameter(base, self.weight_name)

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """Return an adapter's B (d_out, r) and A (r, d_in), views."""
        return read_parameter(self.lora_B[name]).flatten(1), read_parameter(self.lora_A[name]).flatten(1)

    def based(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the base's output, one that may be added to."""
        y = self.base_layer(x, *args, **kwargs)
        return y if self.quantization_backend is None else self.quantization_backend.maybe_clone_base_result(y)

    def with_bias(self, bias: Tensor | None, names: Sequence[str]) -> Tensor | None:
        """Return a bias with those of adapters that train one (lora_bias) added."""
        for name in names:
            if self.lora_bias[name]:
                own = self.scaling[name] * read_parameter(self.lora_B[name], "bias")
                bias = own if bias is None else bias + own.to(bias.dtype)
        return bias

    def parameter_roles(self) -> dict[str, Role]:
        """Return learning-rate roles by the tensors' names in this module; `param_groups` asks for them."""
        roles = {}
        for name, _ in self.named_parameters():
            what = _WHATS.get(name.partition(".")[0])
            if what is not None:
                what = "bias" if name.endswith(".bias") else what
                roles[name] = Role(f"{self.role}.{what}", decay=what in ("down", "up"))
        return roles

    # Merging.

    def merging(self, names: Sequence[str], keep: bool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """See `AdapterLayer`; a bias as well where an adapter trains one."""
        base = self.get_base_layer()
        biased = any(self.lora_bias[name] for name in names)
        if biased and getattr(base, "bias", None) is None:
            raise UserError("an adapter with lora_bias=True cannot be merged into a layer without a bias")
        kept = self._kept or Kept(base, self.quantization_backend, keep, self.weight_name)
        kept_bias = (self._kept_bias or Kept(base, None, name="bias")) if biased else None
        device = getattr(base, self.weight_name).device
        weight = self.merged_weight(kept.weight(device), names)
        bias = None if kept_bias is None else self.with_bias(kept_bias.weight(device), names)

        def put() -> None:
            kept.write(self, weight)
            self._kept = kept if keep else None
            if bias is not None:
                base.bias.copy_(bias)
                self._kept_bias = kept_bias if keep else None

        return [each for each in (weight, bias) if each is not None], put

    @torch.no_grad()
    def unmerge(self) -> None:
        for kept in (self._kept, self._kept_bias):
            if kept is not None:
                kept.restore(self.get_base_layer())
        self._kept, self._kept_bias, self.merged_adapters = None, None, []


def read_parameter(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a module's parameter; an offloaded one is on meta outside the module's own forward."""
    if not hasattr(module, "_hf_hook"):
        return getattr(module, name)
    with align_module_device(module):
        return getattr(module, name)
