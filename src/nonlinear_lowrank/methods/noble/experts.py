"""NOBLE branches beside experts: for each expert and each of its linears, one of the formula of `layer.py`.

Tensors of a projection P, "in" (gate and up, or up, or the only one) or "out" (down), d_in -> d_out, of E experts;
init, learning rate and decay are those of the same tensor in the table of `layer.py`, with fans of one expert.

| tensor                | shape          |                                                |
|-----------------------|----------------|------------------------------------------------|
| noble_P_down          | (E, r, d_in)   | (r, d_in) with expert_down="shared"            |
| noble_P_up            | (E, d_out, r)  |                                                |
| noble_P_mix{k}        | (E, r, r)      |                                                |
| noble_P_frequency{k}  | (E, r)         |                                                |
| noble_P_phase{k}      | (E, r)         |                                                |
| noble_P_bias{k}       | (E, r)         | with bottleneck_bias only                      |
| noble_P_up_bias       | (E, d_out)     | with up_bias only                              |
| noble_P_fusion        | (E)            | with fusion="gated" only                       |

An expert without tokens has no output and no gradient (zeros). Products are grouped by expert. Saved for backward: x, h
and the bottleneck's output, r wide each; the rest is computed again.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from nonlinear_lowrank.methods.base import MultiplierLayer
from nonlinear_lowrank.methods.expert_layouts import Projection, grouped_product, layout_of
from nonlinear_lowrank.methods.experts import ExpertsLayer, expert_count, projections
from nonlinear_lowrank.ops.plain import exporting, wide

from .branch import BRANCH_ACTIVATIONS, draw_branch, joined
from .config import NobleConfig

_ENDS = ("in", "out")


class NobleExperts(MultiplierLayer, ExpertsLayer):
    """Experts with branches: their inputs, mostly (T, d), (T, k) experts and (T, k) weights of each token, -> (T, d).

    The experts' own parameters keep their names; with `branch_enabled` off, forward is the experts'
    own.

    Source: noble.txt, section 3.1, equation (1), for every expert.
    """

    noble_config: NobleConfig
    branch_enabled: bool

    @classmethod
    def beside(cls, plain: nn.Module, config: NobleConfig) -> Any:
        """Return the layer of these experts, branch tensors undrawn."""
        layer = cls.in_place_of(plain)
        layer.noble_config, layer.branch_enabled = config, True
        like: Tensor = attrgetter(projections(plain)[0].name)(plain)
        for name, shape in branch_shapes(plain, config).items():
            layer.register_parameter(name, nn.Parameter(torch.empty(shape, device=like.device, dtype=like.dtype)))
        return layer

    def ends(self) -> Iterator[tuple[str, Projection]]:
        """Yield "in" and "out" with their projections; "in" alone where there is one."""
        yield from zip(_ENDS, projections(self), strict=False)

    def reset_parameters(self) -> None:
        """Draw the table; the experts' own tensors only from scratch."""
        config = self.noble_config
        for _, each in self.ends() if config.init != "pretrained" else ():
            for name in each.parameters:
                init.normal_(attrgetter(name)(self), std=config.dense_scale / each.d_in**0.5)
            if (bias := getattr(self, f"{each.name}_bias", None)) is not None:
                init.zeros_(bias)
        for end, each in self.ends():
            names = (name for name in config.shapes(each.d_in, each.d_out) if name != "up")
            draw_branch({name: self._own(end, name) for name in names}, config, each.d_in)
        for end, each in self.ends():
            draw_branch({"up": self._own(end, "up")}, config, each.d_in)

    def _own(self, end: str, name: str) -> Tensor:
        tensor: Tensor = getattr(self, f"noble_{end}_{name}")
        return tensor

    def forward(self, *inputs: Any) -> Tensor:
        """See the class; by transformers' "grouped_mm", whichever the model's `experts_implementation` is."""
        if not self.branch_enabled:
            return super().forward(*inputs)
        layout, ends = layout_of(self), {each.name: end for end, each in self.ends()}

        def linear(name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
            y_SO = layout.linear(self, name, x_SI, expert_S, ends_E)
            return self._joined(ends[name], y_SO, x_SI.to(y_SO.dtype), expert_S, ends_E)

        return layout.forward(self, linear, *inputs)

    def _joined(self, end: str, y_SO: Tensor, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        config, down = self.noble_config, self._own(end, "down")
        # Grouped products know no autocast: everything is in the type of the experts.
        h_SR = F.linear(x_SI, down) if down.ndim == 2 else grouped_product(x_SI, down.transpose(1, 2), ends_E)
        inner = [self._own(end, f"mix{k}") for k in range(1, config.depth)]
        for vector in ("frequency", "phase") if config.activation == "cosine" else ():
            inner += [self._own(end, f"{vector}{k}") for k in range(1, config.depth + 1)]
        for k in range(1, config.depth + 1) if config.bottleneck_bias else ():  # as in `layer`
            frequency, bias = (wide(self._own(end, f"{vector}{k}")) for vector in ("frequency", "bias"))
            inner[k - 1 - config.depth] = wide(inner[k - 1 - config.depth]) + frequency * bias
        inputs: Any = (h_SR.to(y_SO.dtype), expert_S, ends_E, config.activation, *inner)
        if torch.is_grad_enabled() and not exporting():
            u_SR: Any = checkpoint(bottlenecks, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            u_SR = bottlenecks(*inputs)
        if config.dropout and self.training:
            u_SR = F.dropout(u_SR, config.dropout)
        added_SO = grouped_product(u_SR, self._own(end, "up").transpose(1, 2), ends_E)
        if config.up_bias:
            added_SO = added_SO + self._own(end, "up_bias")[expert_S]
        gated = config.fusion == "gated"
        gate_S1 = torch.sigmoid(self._own(end, "fusion"))[expert_S, None] if gated else None
        return joined(y_SO, added_SO, gate_S1, config.scale)


def branch_shapes(experts: Any, config: NobleConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of this file's table, for experts with or without branches."""
    count = expert_count(experts)
    shapes: dict[str, tuple[int, ...]] = {}
    for end, each in zip(_ENDS, projections(experts), strict=False):
        own = config.shapes_of_experts(count, each.d_in, each.d_out)
        shapes |= {f"noble_{end}_{name}": shape for name, shape in own.items()}
    return shapes


def bottlenecks(h_SR: Tensor, expert_S: Tensor, ends_E: Tensor, activation: str, *inner: Tensor) -> Tensor:
    """Return `op.bottleneck` of every row with the tensors of its expert: (S, r) -> (S, r).

    Args:
        h_SR: rows sorted by expert.
        expert_S: the expert of each.
        ends_E: where the rows of each expert end, int32.
        activation: one of `config.Activation`.
        inner: n - 1 mixes (E, r, r), and for "cosine" n frequencies and n phases (E, r).
    """
    function, cosine = BRANCH_ACTIVATIONS[activation], activation == "cosine"
    depth = (len(inner) + 1) // 3 if cosine else len(inner) + 1
    mixes, frequencies, phases = inner[: depth - 1], inner[depth - 1 : 2 * depth - 1], inner[2 * depth - 1 :]
    u_SR = h_SR
    for layer in range(depth):
        if layer > 0:
            u_SR = grouped_product(u_SR, mixes[layer - 1].transpose(1, 2), ends_E)
        z_SR = wide(u_SR)
        if cosine:
            z_SR = torch.addcmul(wide(phases[layer])[expert_S], z_SR, wide(frequencies[layer])[expert_S])
        u_SR = function(z_SR).to(h_SR.dtype)
    return u_SR
