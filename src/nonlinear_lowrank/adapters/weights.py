"""Adapters around modules that multiply by one matrix: nn.Linear, Conv1D, 1x1 convolutions, embeddings.

Whatever the module stores, a method sees one matrix (d_out, d_in): the weight of a linear, the transpose of a
Conv1D's, a 1x1 kernel without its last two dimensions, an embedding's table as it is (d_out = number of rows).

Merging always starts from the weight as it was before any adapter, kept on the CPU, and goes through the
adapters sorted by name, in float32, with one rounding at the end. Hence unmerging is bit-equal, and
merge(A); merge(B) is bit-equal to merge([A, B]).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.matrix import Matrix, matrix_of

from .base import AdapterLayer
from .quantized import Kept, backend_of, keep_unpacked, unpack


class WeightLayer(AdapterLayer):
    """Adapters around one matrix; subclasses give `adapted` and, where they can merge, `merged_weight`.

    Args:
        base_layer: the module, quantized or not.
        quantization: of the whole model, by peft's `get_quantization_kwargs`.
    """

    def __init__(self, base_layer: nn.Module, quantization: Mapping[str, Any]) -> None:
        super().__init__(base_layer)
        matrix = matrix_of(base_layer)
        assert isinstance(matrix, Matrix)
        self.matrix = matrix
        self.d_out, self.d_in = matrix.d_out, matrix.d_in
        self.quantization_backend = backend_of(base_layer, quantization)
        if self.quantization_backend is not None:
            keep_unpacked(base_layer)
        self._kept: Kept | None = None
        # Read by code that expects the plain module.
        for name in ("in_features", "out_features", "num_embeddings", "embedding_dim", "nf", "nx"):
            if hasattr(base_layer, name):
                setattr(self, name, getattr(base_layer, name))

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """Return the matrix (d_out, d_in) with adapters in it, formed in float32 (float64 for float64), rounded once.

        Args:
            weight: (d_out, d_in), float, the original; not to be written to.
            names: sorted, each present.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the module with its adapters, see `AdapterLayer`."""
        if self.quantization_backend is not None and torch.is_grad_enabled():
            unpack(self.get_base_layer())  # or its gradient with respect to x is lost
        return super().forward(x, *args, **kwargs)

    def base_is_plain(self) -> bool:
        """Return whether reading the base's weight and bias gives what calling it would use."""
        base = self.base_layer
        return (
            type(base) in (nn.Linear, Conv1D, nn.Conv2d, nn.Embedding)
            and type(base.weight) is nn.Parameter
            and not (base._forward_hooks or base._forward_pre_hooks or hasattr(base, "_hf_hook"))
        )

    def base_matrix(self) -> Tensor:
        """Return the matrix (d_out, d_in) of a plain base, a view of its weight."""
        assert isinstance(self.base_layer.weight, Tensor)
        return self.matrix.of(self.base_layer.weight)

    # Merging.

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put adapters into the base weight; the original is kept until `unmerge`.

        Args:
            safe_merge: check first that the result is finite.
            adapter_names: which; None for the active ones. They join those that are merged already.

        Raises:
            UserError: the result is not finite, or the base's format cannot be merged into. The weight is
                unchanged then.
        """
        self._merge(safe_merge, adapter_names, keep=True)

    def _merge(self, safe_merge: bool, adapter_names: list[str] | None, keep: bool) -> None:
        names = self.present(check_adapters_to_merge(self, adapter_names))
        if not names:
            return
        kept = self._kept or Kept(self.get_base_layer(), self.quantization_backend, copy_plain=keep)
        merged = self._merged(kept, names)
        if safe_merge:
            self._check_finite(merged, names)
        kept.write(self, self.matrix.back(merged))
        self._kept = kept if keep else None
        self.merged_adapters = [*self.merged_adapters, *names]

    @torch.no_grad()
    def check_merge(self, adapter_names: list[str] | None) -> None:
        """Raise UserError where the merged matrix would not be finite."""
        wanted = self.active_adapters if adapter_names is None else adapter_names
        names = [name for name in self.present(wanted) if name not in self.merged_adapters]
        if names:
            kept = self._kept or Kept(self.get_base_layer(), self.quantization_backend, copy_plain=False)
            self._check_finite(self._merged(kept, names), names)

    def _merged(self, kept: Kept, names: Sequence[str]) -> Tensor:
        """Return the matrix (d_out, d_in) with these adapters and those that are merged already."""
        return self.merged_weight(self.matrix.of(kept.weight()), sorted({*self.merged_adapters, *names}))

    def _check_finite(self, merged: Tensor, names: Sequence[str]) -> None:
        if not merged.isfinite().all():
            raise UserError(
                f"merging {', '.join(map(repr, names))} would give weights that are not finite (NaN or infinite): "
                "the adapter is broken; nothing was merged"
            )

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the original weight back, bit-equal; does nothing where nothing is merged."""
        if self._kept is not None:
            self._kept.restore(self.get_base_layer())
        self._kept = None
        self.merged_adapters = []

    @torch.no_grad()
    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base module, with the adapters in it or as it was; peft calls it. No original is kept."""
        if merge:
            self._merge(safe_merge, adapter_names, keep=False)
        else:
            self.unmerge()
        return self.get_base_layer()
