"""DBRX's experts."""

from operator import attrgetter
from typing import Any

from torch import Tensor

from nonlinear_lowrank.methods.expert_layouts import LAYOUTS, Layout, Linear, Projection


class DbrxLayout(Layout):
    """The child `mlp` has w1 (gate), v1 (up) and w2 (down), each (E x f, d)."""

    def held(self, module: Any) -> list[Projection]:
        """Return the linears whose parameters the module holds."""
        width, hidden = module.hidden_size, module.ffn_hidden_size
        return [Projection("mlp.w1", width, 2 * hidden, ("mlp.v1",)), Projection("mlp.w2", hidden, width)]

    def matrices(self, module: Any, name: str) -> list[Tensor]:
        """Return views (E, I, O) of the parameters of a projection, whose outputs are side by side."""
        names = ("mlp.w1", "mlp.v1") if name == "mlp.w1" else (name,)
        weights = [attrgetter(each)(module).unflatten(0, (module.num_experts, -1)) for each in names]
        return weights if name == "mlp.w2" else [each.transpose(1, 2) for each in weights]

    def activation(self, module: Any) -> Any:
        """Return the activation between the linears."""
        return module.mlp.activation_fn

    def forward(self, module: Any, linear: Linear, *inputs: Any) -> Tensor:
        """See `Layout.forward`; hidden states are (..., d)."""
        hidden_states, *routing = inputs
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(module, linear, flat, *routing).view(hidden_states.shape)


LAYOUTS["DbrxExperts"] = DbrxLayout()
