"""Experts that one module holds as 3-D parameters, as in transformers; S is tokens x experts of a token."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from nonlinear_lowrank.methods.expert_layouts import layout_of

from .core import METHODS, replace, with_state


class SortedExperts(nn.Module):
    """Plain experts that tell their activation which rows are whose."""

    def forward(self, *inputs: Any) -> Tensor:
        """Return the experts' output for their inputs, mostly (T, d), (T, k), (T, k) -> (T, d)."""
        layout = layout_of(self)
        return layout.forward(self, partial(layout.linear, self), *inputs)


def subclass_of(own: type, experts: Any) -> Any:
    """Return `own` as a subclass of the experts' class too, so that the model's init knows it; it has their tensors."""
    made: Any = type(f"{own.__name__}{type(experts).__name__}", (own, type(experts)), {})
    return with_state(made.__new__(made), experts)


def sort_rows(model: nn.Module, name: str) -> None:
    """Make plain experts of this name `SortedExperts`; layers that replace experts sort anyway."""
    if not isinstance(model.get_submodule(name), SortedExperts):
        replace(model, [name], lambda _, module: subclass_of(SortedExperts, module))


def take_experts(method: str, build: Callable[[Any, dict[str, Any]], nn.Module]) -> None:
    """Make a method of `METHODS` put `build(experts, settings)` in the place of experts, the rest as before."""
    put_others = METHODS[method]

    def put(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
        modules = {name: model.get_submodule(name) for name in names}
        experts = [name for name, module in modules.items() if layout_of(module).projections(module)]
        replace(model, experts, lambda _, module: build(module, settings))
        put_others(model, [name for name in names if name not in experts], settings)

    METHODS[method] = put
