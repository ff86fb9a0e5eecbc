"""Experts that transformers holds as 3-D parameters (its `use_experts_implementation`): their shapes and their forward.

In names of tensors S is tokens x experts of a token, sorted by expert; E is the number of experts, I is d_in, O d_out.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError

from .matrix import linear_shape, replace_modules

# Experts that a token goes through, in the module or its config.
_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts"),
    *("top_k", "moe_top_k", "moe_topk", "moe_k"),
)
Linear = Callable[[str, Tensor, Tensor, Tensor], Tensor]
"""(parameter's name, x_SI, expert_S, ends_E) -> the experts' products with this parameter, (S, O)."""


class Projection(NamedTuple):
    """One of the linears that each expert has."""

    name: str
    """The parameter: (E, d_out, d_in), or (E, d_in, d_out) where the experts are `is_transposed`."""
    d_in: int
    d_out: int
    """Gate and up together where they are one parameter."""


def projections(module: Any) -> list[Projection]:
    """Return the linears of the experts that a module of transformers holds, in the order of use; else none."""
    if known := getattr(module, "expert_projections", None):  # of a layer that has factors in their place
        return list(known)
    if not (hasattr(module, "is_transposed") and "down_proj" in module._parameters):
        return []
    found = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        _, rows, columns = module._parameters[name].shape
        found.append(Projection(name, *((rows, columns) if module.is_transposed else (columns, rows))))
    return found


def first_integer(sources: Iterable[Any], names: Iterable[str]) -> int | None:
    """Return the first attribute of these names that is an integer, source by source; None where none is."""
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((each for each in values if isinstance(each, int) and not isinstance(each, bool)), None)


def active_experts(module: Any, *configs: Any) -> int | None:
    """Return how many experts a token goes through; None where neither the module nor a config says it."""
    return first_integer((module, getattr(module, "config", None), *configs), _ACTIVE)


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert, (S, O); `ends_E` (int32) is where the rows of each end."""
    if _has_kernel(x_SI, weight_EIO):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    if torch.compiler.is_exporting():  # ops that other formats know: a matrix for every row, as "batched_mm" does
        expert_S = (torch.arange(x_SI.shape[0], device=x_SI.device)[:, None] >= ends_E).sum(1)
        return torch.bmm(x_SI[:, None], weight_EIO[expert_S])[:, 0]
    fallback: Any = torch.ops.transformers.grouped_mm_fallback
    return cast(Tensor, fallback(x_SI, weight_EIO, ends_E))


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's `grouped_mm` takes these: types, strides of whole 16 bytes, devices."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        return False
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    return aligned and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (8, 0))


def plain_linear(module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    """Return the plain experts' `Linear`."""
    weight = getattr(module, name)
    x_SI = x_SI.to(weight.dtype)  # grouped_mm knows no autocast
    y_SO = grouped_product(x_SI, weight if module.is_transposed else weight.transpose(1, 2), ends_E)
    return y_SO + getattr(module, f"{name}_bias")[expert_S] if module.has_bias else y_SO


def experts_forward(
    module: Any, linear: Linear, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return what transformers' experts return by its "grouped_mm", with a method's products.

    Args:
        module: the experts.
        linear: see `Linear`.
        hidden_states: (T, d).
        top_k_index: (T, k), the experts of each token.
        top_k_weights: (T, k).
    """
    (tokens, k), (first, second) = top_k_index.shape, projections(module)
    expert_S, order_S = top_k_index.reshape(-1).sort()
    numbers_E = torch.arange(module.num_experts, device=expert_S.device)
    if torch.compiler.is_exporting():
        ends_E = (expert_S <= numbers_E[:, None]).sum(1, dtype=torch.int32)
    else:
        ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
    z_SO = linear(first.name, hidden_states[order_S // k], expert_S, ends_E)
    with _rows_of_experts(module, ends_E):
        u_SI = module._apply_gate(z_SO) if module.has_gate else module.act_fn(z_SO)
    y_SO = linear(second.name, u_SI, expert_S, ends_E)
    if module.has_post_expert_norm:
        y_SO = module.post_expert_norm(y_SO)
    y_SO = y_SO * top_k_weights.reshape(-1)[order_S, None]
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return y_SO[back_S].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


@contextmanager
def _rows_of_experts(module: Any, ends_E: Tensor) -> Iterator[None]:
    """Tell an activation with coefficients for each expert where the rows of each end."""
    needing = _with_tensors_of_experts(module)
    ends = ends_E.tolist() if needing else None
    try:
        for each in needing:
            each.expert_ends = ends
        yield
    finally:
        for each in needing:
            each.expert_ends = None


def _with_tensors_of_experts(experts: Any) -> list[Any]:
    """Return the modules of the experts' activation that have tensors for each expert."""
    activation = getattr(experts, "act_fn", None)
    found = activation.modules() if isinstance(activation, nn.Module) else ()
    return [each for each in found if getattr(each, "num_experts", None) is not None]


def by_expert(function: Callable[..., Tensor], x_SI: Tensor, ends: list[int] | None, *tensors: Tensor | None) -> Tensor:
    """Return `function(rows of an expert, its part of each tensor)`, expert by expert, (S, O).

    Raises:
        UserError: `ends` is None: the module is not called by its experts.
    """
    if ends is None:
        raise UserError("a module with tensors for each expert must be called by the experts that it was put into")
    parts = zip(*([None] * len(ends) if each is None else each.unbind(0) for each in tensors), strict=True)
    if torch.compiler.is_exporting():  # numbers of rows are not known: every expert computes them all
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

    So a model's init, plans and conversions know it as what it was, and its tensors keep their names. By itself it is
    the experts, and tells an activation that has `num_experts` which rows are whose.
    """

    act_fn: Any

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the plain experts' output; (T, d), (T, k), (T, k) -> (T, d)."""
        if _with_tensors_of_experts(self):
            return experts_forward(
                self, functools.partial(plain_linear, self), hidden_states, top_k_index, top_k_weights
            )
        plain: Any = super()
        output: Tensor = plain.forward(hidden_states, top_k_index, top_k_weights)
        return output

    @classmethod
    def in_place_of(cls, plain: nn.Module) -> Any:
        """Return a layer with the parameters and settings of these experts."""
        return with_state(_rebuilt(cls, type(plain)), plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the two classes: the one they make together has no name to import."""
        own, plain = type(self).__bases__
        return _rebuilt, (own, plain), self.__getstate__()


def tell_rows(model: nn.Module, experts: nn.Module) -> None:
    """Put a layer in place of plain experts of a model that tells their activation which rows are whose."""
    if not (isinstance(experts, ExpertsLayer) or hasattr(experts, "expert_projections")):
        replace_modules(model, {experts: ExpertsLayer.in_place_of(experts).train(experts.training)})


def forget_rows(model: nn.Module) -> None:
    """Undo `tell_rows` where no activation needs it any more."""
    told = [each for each in model.modules() if type(each).__bases__[0] is ExpertsLayer]
    idle = [each for each in told if not _with_tensors_of_experts(each)]
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
