"""Experts that one module holds as 3-D parameters, as transformers has them; S is tokens x experts of a token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .core import replace, with_state


def projections(module: Any) -> list[tuple[str, int, int]]:
    """Return (parameter, d_in, d_out) of both linears of an expert, in the order of use; none where there are none."""
    if known := getattr(module, "expert_projections", None):  # factors in their place
        return list(known)
    if not (hasattr(module, "is_transposed") and "down_proj" in module._parameters):
        return []
    found = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        _, rows, columns = module._parameters[name].shape
        found.append((name, *((rows, columns) if module.is_transposed else (columns, rows))))
    return found


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert, (S, O); `ends_E` (int32) is where the rows of each end."""
    aligned = all(width * x_SI.element_size() % 16 == 0 for width in weight_EIO.shape[1:])
    typed = x_SI.dtype == torch.bfloat16 or (
        x_SI.dtype in (torch.float16, torch.float32) and not torch.compiler.is_compiling()
    )
    modern = x_SI.device.type != "cuda" or torch.cuda.get_device_capability(x_SI.device) >= (8, 0)
    if aligned and typed and modern:
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, ends_E)
    return product


def plain_product(experts: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    """Return the plain experts' linear of this name: (S, d_in) -> (S, d_out)."""
    weight = getattr(experts, name)
    y = grouped_product(x_SI.to(weight.dtype), weight if experts.is_transposed else weight.transpose(1, 2), ends_E)
    return y + getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else y


def experts_forward(experts: Any, linear: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Route tokens (T, d) to their experts (T, k) and sum the outputs by weights (T, k).

    `linear(name, x_SI, expert_S, ends_E)` is the experts' product with a parameter; rows are sorted by expert.
    """
    (tokens, k), ((first, *_), (second, *_)) = index.shape, projections(experts)
    expert_S, order_S = index.reshape(-1).sort()
    numbers_E = torch.arange(experts.num_experts, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
    z_SO = linear(first, hidden_states[order_S // k], expert_S, ends_E)
    if hasattr(experts.act_fn, "expert_of_row"):  # coefficients for each expert
        experts.act_fn.expert_of_row = expert_S
    u_SI = experts._apply_gate(z_SO) if experts.has_gate else experts.act_fn(z_SO)
    y_SO = linear(second, u_SI, expert_S, ends_E)
    if experts.has_post_expert_norm:
        y_SO = experts.post_expert_norm(y_SO)
    y_SO = y_SO * weights.reshape(-1)[order_S, None]
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return y_SO[back_S].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def subclass_of(own: type, experts: Any) -> Any:
    """Return `own` as a subclass of the experts' class too, so that the model's init knows it; it has their tensors."""
    made: Any = type(f"{own.__name__}{type(experts).__name__}", (own, type(experts)), {})
    return with_state(made.__new__(made), experts)


class SortedExperts(nn.Module):
    """Plain experts that tell their activation which rows are whose."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, d), (T, k), (T, k) -> (T, d)."""

        def linear(*inputs: Any) -> Tensor:
            return plain_product(self, *inputs)

        return experts_forward(self, linear, hidden_states, top_k_index, top_k_weights)


def sort_rows(model: nn.Module, names: list[str]) -> None:
    """Make plain experts of these names `SortedExperts`; layers that replace experts sort anyway."""
    plain = [name for name in names if not isinstance(model.get_submodule(name), SortedExperts)]
    replace(model, plain, lambda name, module: subclass_of(SortedExperts, module))
