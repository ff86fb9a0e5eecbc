"""Experts that one module of transformers holds: their linears, products and forward.

`expert_classes` has those of classes without transformers' `use_experts_implementation`. Both are parts of the modeling
file (`hub.modeling_file`) too, and so import torch alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.ops.plain import exporting

Linear = Callable[[str, Tensor, Tensor, Tensor], Tensor]
"""(projection's name, x_SI, expert_S, ends_E) -> the experts' products with this projection, (S, O)."""


class Projection(NamedTuple):
    """One of the linears that each expert has."""

    name: str
    """The parameter; the first where gate and up are two."""
    d_in: int
    d_out: int
    """Gate and up together."""
    others: tuple[str, ...] = ()
    """The other parameters."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters in the module."""
        return (self.name, *self.others)


class Layout:
    """Experts of a class with transformers' `use_experts_implementation`.

    In names of tensors S is tokens x experts of a token, sorted by expert; E is the number of experts, I d_in, O d_out.
    """

    def count(self, module: Any) -> int:
        """Return the number of experts with weights."""
        number: int = module.num_experts
        return number

    def active(self, module: Any, of_token: int) -> float:
        """Return how many experts with weights a token goes through, of those that the router gives it."""
        return of_token

    def projections(self, module: Any) -> list[Projection]:
        """Return the linears, in the order of use; none where the module does not hold them."""
        known = getattr(module, "expert_projections", None)  # of a layer that has factors in their place
        return list(known or self.held(module))

    def held(self, module: Any) -> list[Projection]:
        """Return the linears whose parameters the module holds."""
        if not (hasattr(module, "is_transposed") and "down_proj" in module._parameters):
            return []
        found = []
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            _, rows, columns = module._parameters[name].shape
            found.append(Projection(name, *((rows, columns) if module.is_transposed else (columns, rows))))
        return found

    def matrices(self, module: Any, name: str) -> list[Tensor]:
        """Return views (E, I, O) of the parameters of a projection, whose outputs are side by side."""
        weight = getattr(module, name)
        return [weight if module.is_transposed else weight.transpose(1, 2)]

    def linear(self, module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the plain experts' `Linear`."""
        weights = self.matrices(module, name)
        x_SI = x_SI.to(weights[0].dtype)  # grouped_mm knows no autocast
        found = [grouped_product(x_SI, each, ends_E) for each in weights]
        y_SO = found[0] if len(found) == 1 else torch.cat(found, -1)
        has_bias = getattr(module, "has_bias", False)
        return y_SO + getattr(module, f"{name}_bias")[expert_S] if has_bias else y_SO

    def activation(self, module: Any) -> Any:
        """Return the activation between the linears; None where another module calls it."""
        return getattr(module, "act_fn", None)

    def gate(self, module: Any, z_SO: Tensor) -> Tensor:
        """Return the second linear's input, from the first one's output."""
        if hasattr(module, "has_gate"):
            return cast(Tensor, module._apply_gate(z_SO) if module.has_gate else module.act_fn(z_SO))
        gate, up = z_SO.chunk(2, dim=-1)
        return cast(Tensor, self.activation(module)(gate) * up)

    def mlp(self, module: Any, linear: Linear, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the output of each row's expert, (S, d)."""
        first, second = self.projections(module)
        z_SO = linear(first.name, x_SI, expert_S, ends_E)
        with _rows_of_experts(module, ends_E):
            u_SI = self.gate(module, z_SO)
        y_SO = linear(second.name, u_SI, expert_S, ends_E)
        return module.post_expert_norm(y_SO) if getattr(module, "has_post_expert_norm", False) else y_SO

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """Return what the experts return by transformers' "grouped_mm", with these products.

        Args:
            module: the experts.
            linear: see `Linear`.
            inputs: hidden states (T, d), the experts of each token (T, k), and their weights (T, k).
        """
        hidden_states, top_k_index, top_k_weights = inputs
        tokens, k = top_k_index.shape
        expert_S, order_S = top_k_index.reshape(-1).sort()
        ends_E = self._ends(module, expert_S)
        y_SO = self.mlp(module, linear, hidden_states[order_S // k], expert_S, ends_E)
        y_SO = y_SO * top_k_weights.reshape(-1)[order_S, None]
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
        return y_SO[back_S].view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def _ends(self, module: Any, expert_S: Tensor) -> Tensor:
        numbers_E = torch.arange(self.count(module), device=expert_S.device)
        if exporting():
            return (expert_S <= numbers_E[:, None]).sum(1, dtype=torch.int32)
        return torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)


COMMON = Layout()
LAYOUTS: dict[str, Layout] = {}
"""By the name of a class of transformers that has a layout of its own."""


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of a module's class: its own, or the common one, whose `projections` may be none."""
    for each in getattr(module, "experts_class", type(module)).__mro__:
        if each.__name__ in LAYOUTS and each.__module__.startswith("transformers."):
            return LAYOUTS[each.__name__]
    return COMMON


def remove_weights(experts: Any) -> dict[str, torch.Size]:
    """Delete the parameters of `projections` from a layer that is to have other ones; return their shapes by name.

    A child that holds some becomes a plain module, since the init of its class would look for them.
    """
    shapes = {}
    for name in [name for each in experts.expert_projections for name in each.parameters]:
        path, _, local = name.rpartition(".")
        own = experts.get_submodule(path)
        if path and type(own) is not nn.Module:
            bare: Any = nn.Module()
            vars(bare).update(
                {key: value.copy() if isinstance(value, dict) else value for key, value in vars(own).items()}
            )
            bare.experts_class = type(own)
            experts.set_submodule(path, bare)
            own = bare
        shapes[name] = own._parameters.pop(local).shape
    return shapes


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert, (S, O); `ends_E` (int32) is where the rows of each end."""
    if _has_kernel(x_SI, weight_EIO):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    if exporting():  # ops that other formats know: a matrix for every row, as "batched_mm" does
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


@contextmanager
def _rows_of_experts(module: Any, ends_E: Tensor) -> Iterator[None]:
    """Tell an activation with coefficients for each expert where the rows of each end."""
    needing = with_tensors_of_experts(module)
    ends = ends_E.tolist() if needing else None
    try:
        for each in needing:
            each.expert_ends = ends
        yield
    finally:
        for each in needing:
            each.expert_ends = None


def with_tensors_of_experts(experts: Any) -> list[Any]:
    """Return the modules of the experts' activation that have tensors for each expert."""
    activation = layout_of(experts).activation(experts)
    found = activation.modules() if isinstance(activation, nn.Module) else ()
    return [each for each in found if getattr(each, "num_experts", None) is not None]
