"""Layers of all fine-tuning methods, so that a method's file holds only its formula.

A method is a config (`config.AdapterConfig`), a layer (`WeightLayer`, or `TensorLayer` around modules without a
matrix) and a tuner (`tuner.AdapterModel`); docs/add-a-method.md has an example. A method whose tensors are LoRA's takes
peft's LoRA layers instead, see `lora`.

Rules that peft's own machinery imposes:

- A parameter is `<prefix><what>.<adapter>.weight`, in a module of its own (`AdapterTensor`) as LoRA's factors are:
  trl copies reference adapters by the name part `.<adapter>.`, and offloading acts when a module is called.
- Class names: a layer over a linear has "Linear" in its name, no other has ("all-linear" of a second adapter
  relies on it).
- Adapters are float32 beside a bfloat16 base unless autocast_adapter_dtype=False: cast the small matrices to
  the input's type for products, never the input to float32.
- `names` of `adapted` are sorted, so that results do not depend on the order of loading.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import MultiplierLayer, Role
from nonlinear_lowrank.methods.matrix import is_hooked, matrix_of
from nonlinear_lowrank.ops.precision import all_finite

from .config import BASE_ROWS, AdapterConfig
from .quantized import backend_of, keep_unpacked

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AdapterTensor(nn.Module):
    """One trained tensor of one adapter; call it for the tensor, so that hooks that load it run."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> Tensor:
        """Return the tensor."""
        return self.weight


class AdapterLayer(MultiplierLayer, nn.Module, BaseTunerLayer):
    """A module with adapters around it, called with the active ones or with one per row."""

    base_layer: Any

    if TYPE_CHECKING:  # torch's own say only Tensor or Module

        def __getattr__(self, name: str) -> Any: ...

        def get_base_layer(self) -> Any: ...

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's output with these adapters (at least one, each present, sorted)."""
        raise NotImplementedError

    def merging(self, names: Sequence[str], keep: bool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Return the base's tensors with these adapters in them, and the step that puts them there.

        `names` are sorted, each present; without `keep` the merge is never undone.
        """
        raise NotImplementedError

    def narrow(self, name: str) -> None:
        """Give an adapter's tensors that are drawn wide the base's type, with autocast_adapter_dtype=False."""

    def unmerge(self) -> None:
        """Restore the base bit-exactly; do nothing where nothing is merged."""

    def present(self, names: Sequence[str]) -> list[str]:
        """Return those of the adapters that this module has, sorted."""
        settings = getattr(self, self.other_param_names[0])  # a dict: looking into modules takes as long as a product
        return sorted(name for name in names if name in settings)

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """Call the base module, on x with its batch first, with the active adapters.

        `adapter_names` instead names one adapter per row of x, or "__base__" for none; UserError where they do not fit
        x, or adapters are merged.
        """
        if self.disable_adapters and self.merged:
            self.unmerge()
        if adapter_names is not None and not self.disable_adapters:
            return self._mixed(x, adapter_names, *args, **kwargs)
        names = [] if self.disable_adapters or self.merged else self.present(self.active_adapters)
        return self.adapted(x, names, *args, **kwargs) if names else self.base_layer(x, *args, **kwargs)

    def _mixed(self, x: Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        if len(x) != len(adapter_names):
            raise UserError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(x)} respectively; give one name per row"
            )
        if self.merged:
            raise UserError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(adapter_names):
            rows.setdefault(name if self.present([name]) else BASE_ROWS, []).append(row)
        parts = [
            self.base_layer(x[each], *args, **kwargs)
            if name == BASE_ROWS
            else self.adapted(x[each], [name], *args, **kwargs)
            for name, each in rows.items()
        ]
        order = torch.tensor([row for indices in rows.values() for row in indices])
        return torch.cat(parts)[order.argsort().to(x.device)]

    def set_quantization(self, base: nn.Module, model_options: Mapping[str, Any]) -> None:
        """Take peft's backend for the base, by the model's `get_quantization_kwargs`."""
        self.quantization_backend = backend_of(base, model_options)
        if self.quantization_backend is not None:
            keep_unpacked(base)

    # Merging.

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None, *, keep: bool = True) -> None:
        """Put adapters, by default the active ones, into the base beside those that are merged already.

        Raises:
            UserError: the base or the adapters cannot be merged, or with safe_merge give anything not finite; nothing
                is changed then.
        """
        if names := self.present(check_adapters_to_merge(self, adapter_names)):
            self._checked_merging(names, check=safe_merge, keep=keep)()
            self.merged_adapters = [*self.merged_adapters, *names]

    @torch.no_grad()
    def check_merge(self, adapter_names: list[str] | None) -> None:
        """Raise UserError where `merge` with safe_merge would; changes nothing."""
        wanted = self.active_adapters if adapter_names is None else adapter_names
        if names := [name for name in self.present(wanted) if name not in self.merged_adapters]:
            self._checked_merging(names, check=True, keep=False)

    def _checked_merging(self, names: Sequence[str], *, check: bool, keep: bool) -> Callable[[], None]:
        tensors, put = self.merging(sorted({*self.merged_adapters, *names}), keep)
        if check and not all(map(all_finite, tensors)):
            raise UserError(
                f"NaNs detected in the merged weights. The adapter {' or '.join(names)} seems to be broken: the sum is "
                "not finite; none is merged"
            )
        return put

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base module, with the adapters in it or as it was; peft calls it. No original is kept."""
        if merge:
            self.merge(safe_merge, adapter_names, keep=False)
        else:
            self.unmerge()
        return self.get_base_layer()

    def __repr__(self) -> str:
        return f"nlr.{super().__repr__()}"


class TensorLayer(AdapterLayer):
    """A module with adapters whose tensors are a method's own; subclasses give the formula."""

    adapter_layer_names: tuple[str, ...] = ()
    """Names of the ModuleDicts that hold the trainable tensors, an `AdapterTensor` an adapter."""
    other_param_names: tuple[str, ...] = ("configs",)

    def __init__(self, base_layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.base_layer = base_layer
        self.configs: dict[str, Any] = {}
        """Each adapter's config, with the values of this very module filled in from the patterns."""
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ModuleDict())
        self.merged_adapters: list[str] = []

    def set_scale(self, adapter: str, scale: float) -> None:
        """Raise UserError for another scale than 1; diffusers asks for one."""
        if scale != 1 and adapter in self.configs:
            raise UserError(f"{type(self).__name__} has no scale to be set: give {adapter!r} the weight 1, not {scale}")

    # What a method writes.

    def add_parameters(self, name: str, config: Any) -> None:
        """Put the adapter's tensors, undrawn, into the ModuleDicts; `self.parameter(*shape)` makes one."""
        raise NotImplementedError

    def reset_adapter(self, name: str) -> None:
        """Draw the adapter's tensors in place, as its config says; must work on the meta device."""
        raise NotImplementedError

    def roles(self, name: str) -> Mapping[str, Role]:
        """Return learning-rate roles of an adapter's tensors, by ModuleDict; others have no multipliers."""
        return {}

    # What it gets.

    def original(self) -> nn.Module:
        """Return the module that adapters were put around, as it was before any."""
        return self.get_base_layer()

    def update_layer(self, name: str, config: AdapterConfig) -> None:
        """Add an adapter; its config has this module's values, see `AdapterConfig.resolve`."""
        self.configs[name] = config
        self.add_parameters(name, config)
        with torch.no_grad():
            self.reset_adapter(name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def parameter(self, *shape: int) -> AdapterTensor:
        """Return an undrawn tensor on the base's device, in its type if that is a common float type, else float32."""
        device, _ = self._get_base_layer_device_and_dtype(self.get_base_layer())
        _, dtype = super()._get_base_layer_device_and_dtype(self.get_base_layer())
        dtype = dtype if dtype in _FLOATS else torch.float32
        return AdapterTensor(nn.Parameter(torch.empty(*shape, device=device, dtype=dtype)))

    def parameter_roles(self) -> dict[str, Role]:
        """Return learning-rate roles by the tensors' names in this module; `param_groups` asks for them."""
        return {f"{tensor}.{name}.weight": role for name in self.configs for tensor, role in self.roles(name).items()}

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[Any, Any]:
        # No type: peft would cast loaded tensors to it.
        return super()._get_base_layer_device_and_dtype(base_layer)[0], None


class WeightLayer(TensorLayer):
    """Adapters around one matrix, quantized or not; subclasses give `adapted`.

    `quantization` is that of the whole model, by peft's `get_quantization_kwargs`.
    """

    def __init__(self, base_layer: nn.Module, quantization: Mapping[str, Any]) -> None:
        super().__init__(base_layer)
        matrix: Any = matrix_of(base_layer)
        self.matrix, self.d_out, self.d_in = matrix, matrix.d_out, matrix.d_in
        self.set_quantization(base_layer, quantization)
        # Read by code that expects the plain module.
        for name in ("in_features", "out_features", "num_embeddings", "embedding_dim", "nf", "nx"):
            if hasattr(base_layer, name):
                setattr(self, name, getattr(base_layer, name))


def is_plain(base: nn.Module) -> bool:
    """Return whether reading a module's weight and bias gives what calling it would use."""
    # FSDP1 puts views of its flat parameter, plain tensors, in the parameters' places for the time of a call.
    return type(base) in _PLAIN and type(base.weight) in (nn.Parameter, Tensor) and not is_hooked(base)


_PLAIN = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
