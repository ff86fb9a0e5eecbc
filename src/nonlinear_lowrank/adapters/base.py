"""Base of the layers of all fine-tuning methods, so that a method's file holds only its formula.

A method is three classes:

    @dataclass
    class MyConfig(AdapterConfig):                  # fields; see `config.AdapterConfig`
        type_name: ClassVar[str] = "NLR_MINE"
        r: int = 8
        rank_pattern: dict[str, int] = field(default_factory=dict)
        patterns: ClassVar[dict[str, str]] = {"r": "rank_pattern"}
        def check_value(self, name, value, where): check_integer(where, value, minimum=1)

    class MyLinear(WeightLayer):                    # see `weights.WeightLayer`; or AdapterLayer for other modules
        adapter_layer_names = ("nlr_mine_down", "nlr_mine_up")      # flat ParameterDicts, made by the base class
        def add_parameters(self, name, config): self.nlr_mine_down[name] = self.parameter(config.r, self.d_in); ...
        def reset_adapter(self, name): ...          # draws them, in place, also on meta
        def adapted(self, x, names): ...            # forward with these adapters, in the order given
        def merged_weight(self, weight, names): ... # (d_out, d_in) -> the same, formed in float32, rounded once

    @register_adapter(MyConfig)
    class MyModel(AdapterModel):                    # see `tuner.AdapterModel`
        prefix = "nlr_mine_"
        layer_classes = {"linear": MyLinear, "conv1d": MyLinear}

in the module that its `Method.adapter` names. Several adapters, batches that mix them (`adapter_names`, with `__base__`
rows), merging from a copy of the original, quantized bases, patterns per module, checks before anything is
changed, saving and loading follow from that.

Rules that peft's own machinery imposes:

- A parameter is called `<prefix><what>` and lives in a flat ParameterDict, keyed by the adapter: names nested
  deeper are lost when a saved adapter is loaded under another name.
- Class names: a layer over a linear has "Linear" in its name, any other has not ("all-linear" of a second
  adapter goes by it).
- Adapters are float32 beside a bfloat16 base unless autocast_adapter_dtype=False: cast the small matrices to
  the input's type for products, never the input to float32.
- `names` of `adapted` and `merged_weight` are sorted, so that results do not depend on the order of loading.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Role
from nonlinear_lowrank.methods.learning_rates import MultiplierLayer

from .config import AdapterConfig

BASE_ROWS = "__base__"
"""Name, in `adapter_names`, for rows that no adapter touches."""

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AdapterLayer(MultiplierLayer, nn.Module, BaseTunerLayer):
    """A module with adapters around it; subclasses give the formula."""

    adapter_layer_names: tuple[str, ...] = ()
    """Names of the ParameterDicts that hold the trainable tensors."""
    other_param_names: tuple[str, ...] = ("configs",)

    def __init__(self, base_layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.base_layer = base_layer
        self.configs: dict[str, Any] = {}
        """Each adapter's config, with the values of this very module filled in from the patterns."""
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ParameterDict())
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    # What a method writes.

    def add_parameters(self, name: str, config: Any) -> None:
        """Put the adapter's tensors, undrawn, into the ParameterDicts; `self.parameter(*shape)` makes one."""
        raise NotImplementedError

    def reset_adapter(self, name: str) -> None:
        """Draw the adapter's tensors in place, as its config says; must do on the meta device."""
        raise NotImplementedError

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's output with these adapters (at least one, each present, sorted)."""
        raise NotImplementedError

    def roles(self, name: str) -> Mapping[str, Role]:
        """Return learning-rate roles of an adapter's tensors, by ParameterDict; others have no multipliers."""
        return {}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put adapters into the base module; raises where a method cannot."""
        raise NotImplementedError

    def unmerge(self) -> None:
        """Take every merged adapter out again."""
        raise NotImplementedError

    def check_merge(self, adapter_names: list[str] | None) -> None:
        """Raise UserError where merging these adapters would give anything not finite; changes nothing."""

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

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an undrawn tensor on the base's device, in its type if that is a common float type, else float32."""
        device, dtype = self._get_base_layer_device_and_dtype(self.get_base_layer())
        return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype if dtype in _FLOATS else torch.float32))

    def present(self, names: Sequence[str]) -> list[str]:
        """Return those of the adapters that this module has, sorted."""
        return sorted(name for name in names if name in self.configs)

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """Call the base module with the active adapters.

        Args:
            x: the base module's input, batch first.
            *args: for the base module.
            adapter_names: one adapter a row of x, or "__base__" for none, instead of the active ones.
            **kwargs: for the base module.

        Raises:
            UserError: adapter_names do not fit x, or adapters are merged.
        """
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        if adapter_names is not None:
            return self._mixed(x, adapter_names, *args, **kwargs)
        names = self.present(self.active_adapters)
        if self.merged or not names:
            return self.base_layer(x, *args, **kwargs)
        return self.adapted(x, names, *args, **kwargs)

    def _mixed(self, x: Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        if len(x) != len(adapter_names):
            raise UserError(
                f"adapter_names has {len(adapter_names)} names and {type(self).__name__} is given {len(x)} rows; "
                "give one name a row"
            )
        if self.merged:
            raise UserError("adapter_names cannot be used while adapters are merged; call unmerge_adapter() first")
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(adapter_names):
            rows.setdefault(name if name in self.configs else BASE_ROWS, []).append(row)
        parts = [
            self.base_layer(x[each], *args, **kwargs)
            if name == BASE_ROWS
            else self.adapted(x[each], [name], *args, **kwargs)
            for name, each in rows.items()
        ]
        order = torch.tensor([row for indices in rows.values() for row in indices])
        return torch.cat(parts)[order.argsort().to(x.device)]

    def parameter_roles(self) -> dict[str, Role]:
        """Return learning-rate roles by the tensors' names in this module; `param_groups` asks for them."""
        return {f"{tensor}.{name}": role for name in self.configs for tensor, role in self.roles(name).items()}

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move the tensors as peft does, but keep the objects, their types and `requires_grad`."""
        if device is None:
            device, _ = self._get_base_layer_device_and_dtype(self.get_base_layer())
        for name in self.adapter_layer_names:
            tensors = getattr(self, name)
            if device is not None and adapter_name in tensors and not tensors[adapter_name].is_meta:
                tensors[adapter_name].data = tensors[adapter_name].data.to(device)

    def __repr__(self) -> str:
        return f"nlr.{nn.Module.__repr__(self)}"


def check_adapter_name(name: str) -> None:
    """Raise UserError for a name that cannot be an adapter's."""
    # A ParameterDict keeps its entries as attributes: "keys" would hide its method, "a.b" cannot be one.
    if name == BASE_ROWS or not name or "." in name or hasattr(nn.ParameterDict(), name):
        raise UserError(f"an adapter cannot be called {name!r}; choose a plain word without dots, such as 'default'")
