"""Experts that one module of transformers holds, class by class: their linears, products and forward.

In names of tensors S is tokens x experts of a token, sorted by expert; E is the number of experts, I is d_in, O d_out.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """Experts of a class with transformers' `use_experts_implementation`."""

    def count(self, module: Any) -> int:
        """Return the number of experts with weights."""
        number: int = module.num_experts
        return number

    def projections(self, module: Any) -> list[Projection]:
        """Return the linears, in the order of use; none where the module does not hold them."""
        if known := getattr(module, "expert_projections", None):  # of a layer that has factors in their place
            return list(known)
        if not (hasattr(module, "is_transposed") and "down_proj" in module._parameters):
            return []
        found = []
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            _, rows, columns = module._parameters[name].shape
            found.append(Projection(name, *((rows, columns) if module.is_transposed else (columns, rows))))
        return found

    def linear(self, module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the plain experts' `Linear`."""
        weight = getattr(module, name)
        x_SI = x_SI.to(weight.dtype)  # grouped_mm knows no autocast
        y_SO = grouped_product(x_SI, weight if module.is_transposed else weight.transpose(1, 2), ends_E)
        return y_SO + getattr(module, f"{name}_bias")[expert_S] if module.has_bias else y_SO

    def gate(self, module: Any, z_SO: Tensor) -> Tensor:
        """Return the second linear's input, of the first one's output."""
        gated: Tensor = module._apply_gate(z_SO) if module.has_gate else module.act_fn(z_SO)
        return gated

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
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return y_SO[back_S].view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def _ends(self, module: Any, expert_S: Tensor) -> Tensor:
        numbers_E = torch.arange(self.count(module), device=expert_S.device)
        if torch.compiler.is_exporting():
            return (expert_S <= numbers_E[:, None]).sum(1, dtype=torch.int32)
        return torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)


class _Llama4(Layout):
    """Llama 4's: every token comes to every expert, as zeros where the router does not send it there."""

    def projections(self, module: Any) -> list[Projection]:
        weights = ((name, module._parameters[name]) for name in ("gate_up_proj", "down_proj"))
        return [Projection(name, *weight.shape[1:]) for name, weight in weights]

    def linear(self, module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        weight = getattr(module, name)
        return grouped_product(x_SI.to(weight.dtype), weight, ends_E)

    def gate(self, module: Any, z_SO: Tensor) -> Tensor:
        gate, up = z_SO.chunk(2, dim=-1)
        return cast(Tensor, up * module.act_fn(gate))

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """(E x T, d), expert by expert -> the same shape; rows of zeros stay, which no branch may fill."""
        (hidden_states,) = inputs
        rows_S = hidden_states.any(-1).nonzero()[:, 0]
        expert_S = rows_S // (len(hidden_states) // self.count(module))
        y_SO = self.mlp(module, linear, hidden_states[rows_S], expert_S, self._ends(module, expert_S))
        return torch.zeros_like(hidden_states).index_copy(0, rows_S, y_SO.to(hidden_states.dtype))


class _JetMoe(Layout):
    """JetMoe's: a module for each linear, called with rows that are sorted by expert."""

    def projections(self, module: Any) -> list[Projection]:
        return [Projection("weight", module.input_size, module.output_size)]

    def linear(self, module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        weight = getattr(module, name)
        return grouped_product(x_SI.to(weight.dtype), weight.transpose(1, 2), ends_E)

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """(S, I), and the number of rows of each expert -> (S, O)."""
        x_SI, sizes = inputs
        numbers_E = torch.arange(len(sizes), device=x_SI.device)
        expert_S = numbers_E.repeat_interleave(torch.tensor(sizes, device=x_SI.device), output_size=len(x_SI))
        ends_E = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=x_SI.device)
        return linear("weight", x_SI, expert_S, ends_E)


class _LongcatFlash(Layout):
    """LongCat-Flash's: experts behind those with weights are the identity, and `gate_up_proj` has rows for them too."""

    def count(self, module: Any) -> int:
        number: int = module.num_routed_experts
        return number

    def projections(self, module: Any) -> list[Projection]:
        weights = ((name, module._parameters[name]) for name in ("gate_up_proj", "down_proj"))
        return [Projection(name, *weight.shape[:0:-1]) for name, weight in weights if weight is not None]

    def linear(self, module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        weight = getattr(module, name)
        return grouped_product(x_SI.to(weight.dtype), weight[: self.count(module)].transpose(1, 2), ends_E)

    def gate(self, module: Any, z_SO: Tensor) -> Tensor:
        gate, up = z_SO.chunk(2, dim=-1)
        return cast(Tensor, module.act_fn(gate) * up)

    def mlp(self, module: Any, linear: Linear, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        routed = int(ends_E[-1])
        y_SO = super().mlp(module, linear, x_SI[:routed], expert_S[:routed], ends_E)
        return torch.cat([y_SO, x_SI[routed:].to(y_SO.dtype)])


class _Dbrx(Layout):
    """DBRX's: its child `mlp` has w1 (gate), v1 (up) and w2 (down), each (E x f, d)."""

    def projections(self, module: Any) -> list[Projection]:
        width, hidden = module.hidden_size, module.ffn_hidden_size
        return [Projection("mlp.w1", width, 2 * hidden, ("mlp.v1",)), Projection("mlp.w2", hidden, width)]

    def linear(self, module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        own = next(each for each in self.projections(module) if each.name == name)
        weights = [attrgetter(each)(module).unflatten(0, (module.num_experts, -1)) for each in own.parameters]
        x_SI = x_SI.to(weights[0].dtype)
        if name == "mlp.w2":
            return grouped_product(x_SI, weights[0], ends_E)
        return torch.cat([grouped_product(x_SI, each.transpose(1, 2), ends_E) for each in weights], -1)

    def gate(self, module: Any, z_SO: Tensor) -> Tensor:
        gate, up = z_SO.chunk(2, dim=-1)
        return cast(Tensor, module.mlp.activation_fn(gate) * up)

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """See `Layout.forward`; hidden states are (..., d)."""
        hidden_states, *routing = inputs
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(module, linear, flat, *routing).view(hidden_states.shape)


COMMON = Layout()
_OWN: dict[str, Layout] = {
    "Llama4TextExperts": _Llama4(),
    "JetMoeParallelExperts": _JetMoe(),
    "LongcatFlashExperts": _LongcatFlash(),
    "DbrxExperts": _Dbrx(),
}


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of a module's class: its own, or the common one, whose `projections` may be none."""
    for each in type(module).__mro__:
        if each.__name__ in _OWN and each.__module__.startswith("transformers."):
            return _OWN[each.__name__]
    return COMMON


def has_own_layout(model_class: type) -> bool:
    """Return whether a class of models is defined beside experts with a layout of their own."""
    return not _OWN.keys().isdisjoint(vars(sys.modules[model_class.__module__]))


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
    activation = getattr(experts, "act_fn", None)
    found = activation.modules() if isinstance(activation, nn.Module) else ()
    return [each for each in found if getattr(each, "num_experts", None) is not None]
