"""Experts that transformers holds as 3-D parameters, of any class in `expert_classes` too, and layers in their place.

In names of tensors S is tokens x experts of a token, sorted by expert; E is the number of experts, I is d_in, O d_out.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.plain import exporting

from . import expert_classes  # noqa: F401  # registers them
from .expert_layouts import Projection, layout_of, with_tensors_of_experts
from .matrix import linear_shape, replace_modules

# Experts that a token goes through, in the module or its config.
_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts"),
    *("top_k", "moe_top_k", "moe_topk", "moe_k"),
)


def projections(module: Any) -> list[Projection]:
    """Return the linears of the experts that a module of transformers holds, in the order of use; else none."""
    return layout_of(module).projections(module)


def expert_count(module: nn.Module) -> int:
    """Return the number of experts with weights in a module that has `projections`."""
    return layout_of(module).count(module)


def first_integer(sources: Iterable[Any], names: Iterable[str]) -> int | None:
    """Return the first attribute of these names that is an integer, source by source; None where none is."""
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((each for each in values if isinstance(each, int) and not isinstance(each, bool)), None)


def active_experts(module: Any, model: Any = None) -> float | None:
    """Return how many experts with weights a token goes through, on average; None where unknown.

    The module or a config says it. Not an integer where some experts are the identity (LongCat-Flash).
    """
    of_token = _experts_of_token(module, model)
    return None if of_token is None else layout_of(module).active(module, of_token)


def _experts_of_token(module: Any, model: Any = None) -> int | None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return first_integer((module, getattr(module, "config", None), text, getattr(text, "ffn_config", None)), _ACTIVE)


def note_active_experts(model: nn.Module) -> None:
    """Copy a config's number of `active_experts` to modules without one: methods see the module alone."""
    for module in model.modules():
        if projections(module) and _experts_of_token(module) is None and (own := _experts_of_token(module, model)):
            module.num_experts_per_tok = own  # type: ignore[assignment]


def by_expert(function: Callable[..., Tensor], x_SI: Tensor, ends: list[int] | None, *tensors: Tensor | None) -> Tensor:
    """Return `function(rows of an expert, its part of each tensor)`, expert by expert, (S, O).

    Raises:
        UserError: `ends` is None: the module is not called by its experts.
    """
    if ends is None:
        raise UserError("a module with tensors for each expert must be called by the experts that it was put into")
    parts = zip(*([None] * len(ends) if each is None else each.unbind(0) for each in tensors), strict=True)
    if exporting():  # numbers of rows are not known: every expert computes them all
        places_S, zero = torch.arange(x_SI.shape[0], device=x_SI.device)[:, None], x_SI.new_zeros(())
        begun = zip([0, *ends], ends, parts, strict=False)
        return sum(  # type: ignore[return-value]
            torch.where((places_S >= first) & (places_S < last), function(x_SI, *part), zero)
            for first, last, part in begun
        )
    rows = [x_SI[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    found = [function(each, *part) for each, part in zip(rows, parts, strict=True) if len(each)]
    return torch.cat(found) if found else function(rows[0], *(each if each is None else each[0] for each in tensors))


class ExpertsLayer(nn.Module):
    """Base of layers in place of experts; `in_place_of` makes one, a subclass of the experts' own class too.

    So a model's init, plans and conversions still recognize it, and its tensors keep their names. By itself it is the
    plain experts, and tells an activation that has `num_experts` which rows are whose.
    """

    act_fn: Any

    def forward(self, *inputs: Any) -> Tensor:
        """Return the plain experts' output for their inputs, mostly (T, d), (T, k), (T, k) -> (T, d)."""
        if with_tensors_of_experts(self):
            layout = layout_of(self)
            return layout.forward(self, functools.partial(layout.linear, self), *inputs)
        plain: Any = super()
        output: Tensor = plain.forward(*inputs)
        return output

    @classmethod
    def in_place_of(cls, plain: nn.Module) -> Any:
        """Return a layer with the parameters and settings of these experts."""
        return with_state(_rebuilt(cls, type(plain)), plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the two classes: the one they make together has no name to import."""
        own, plain = type(self).__bases__
        return _rebuilt, (own, plain), self.__getstate__()


def tell_rows(model: nn.Module, holder: nn.Module) -> None:
    """Put a layer in place of plain experts of a model that tells their activation which rows are whose.

    `holder` has the activation: the experts, or a child of theirs.
    """
    held = (each for each in model.modules() if projections(each) and (each is holder or holder in each.children()))
    experts = next(held)
    if not (isinstance(experts, ExpertsLayer) or hasattr(experts, "expert_projections")):
        replace_modules(model, {experts: ExpertsLayer.in_place_of(experts).train(experts.training)})


def forget_rows(model: nn.Module) -> None:
    """Undo `tell_rows` where no activation needs it any more."""
    told = [each for each in model.modules() if type(each).__bases__[0] is ExpertsLayer]
    idle = [each for each in told if not with_tensors_of_experts(each)]
    plain: dict[nn.Module, Any] = {each: type(each).__bases__[1] for each in idle}
    replace_modules(model, {each: with_state(own.__new__(own), each) for each, own in plain.items()})


def with_state(new: Any, module: nn.Module) -> Any:
    """Return a new module, on which no constructor was run, with what another holds."""
    for name, value in vars(module).items():
        vars(new)[name] = value.copy() if isinstance(value, dict) else value
    vars(new).pop("_is_hf_initialized", None)
    return new


def _rebuilt(own: type, plain: type) -> Any:
    together: Any = _class_of(own, plain)
    return together.__new__(together)


@functools.cache
def _class_of(own: type, plain: type) -> type:
    return type(f"{own.__name__}{plain.__name__}", (own, plain), {})


def linear_shapes(module: nn.Module) -> list[tuple[int, int]]:
    """Return (d_in, d_out) of a linear, or of each linear of an expert."""
    return [(each.d_in, each.d_out) for each in projections(module)] or [linear_shape(module)]
