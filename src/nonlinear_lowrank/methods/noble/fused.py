"""NOBLE layers for inference: one product for the dense outputs and the branches' inputs of all layers that read x.

    [y1 | y2 | ... | z1 | z2 | ...] = x [W1; W2; ...; w1 D1; w1 D2; ...]^T + [b1 | b2 | ... | p1 | p1 | ...]
    y_i += cos((w2 M_i) cos(z_i) + p2) up_i^T, in place

Frequencies and phases of the cosines are folded into the matrices and biases before them, so a branch is two cosines,
one product r x r and one that is added to y; other activations have no frequencies. At one token a linear is bound by
reading its weights and by the number of calls. Weights are moved, not copied. Query, key and value are a
group, and so are the gate and up projections of a gated feed-forward; the first that is called computes for all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.methods.matrix import is_hooked, replace_modules
from nonlinear_lowrank.ops.derivatives import transformed
from nonlinear_lowrank.ops.native import native
from nonlinear_lowrank.ops.plain import wide

from .branch import BRANCH_ACTIVATIONS
from .inputs import HandOff, input_groups
from .layer import NobleConv1D, NobleLinear


class FusedNoble(nn.Module):
    """The tensors of a group and its product; its `FusedNobleLinear` stand where the layers stood.

    Buffers, for n layers of rank r, in the order in which C++ reads them: fused_weight (d_out_1 + ... + n r, d_in) and
    fused_bias; for each further activation k mix{k} (n, r, r) and phase{k} (n, 1, r); for each layer i, counted from
    0, up{i} (r, d_out_i), and of a gated one up_bias{i} (d_out_i) and gate{i} (1). Mixes and up projections are
    transposed; what a layer does not have is None.

    Args:
        layers: NOBLE layers of one input width, rank, activation and depth; their tensors are taken over.
    """

    def __init__(self, layers: Sequence[NobleLinear | NobleConv1D]) -> None:
        super().__init__()
        first = layers[0]
        self.rank, self.scale, self.depth = first.noble_rank, first.noble_config.scale, first.noble_config.depth
        self.activation = BRANCH_ACTIVATIONS[first.noble_config.activation]
        self.cosine = first.noble_config.activation == "cosine" and first.noble_config.fusion == "add"
        self.widths = [layer.noble_shape[1] for layer in layers]
        self.shared = len(layers) > 1
        self.hand_off = HandOff(len(layers))
        with torch.no_grad():
            self._register(layers)

    def _register(self, layers: Sequence[Any]) -> None:
        branches = [layer.branch() for layer in layers]
        dense = [layer.weight.t() if isinstance(layer, NobleConv1D) else layer.weight for layer in layers]
        zeros, dtype, cosine = dense[0].new_zeros, dense[0].dtype, bool(branches[0].frequencies)
        downs = [(layer.noble_shared.owner if layer.noble_shared else layer).noble_down for layer in layers]
        firsts = [zeros(self.rank) for _ in layers]
        if cosine:
            downs = [_scaled(down, branch.frequencies[0]) for down, branch in zip(downs, branches, strict=True)]
            firsts = [branch.phases[0].to(dtype) for branch in branches]
        given = [layer.whole_bias() if layer.noble_fusion is None else layer.bias for layer in layers]
        biases = [
            zeros(layer.noble_shape[1]) if bias is None else bias for layer, bias in zip(layers, given, strict=True)
        ]
        self.dense_bias = any(bias is not None for bias in given)
        self.register_buffer("fused_weight", torch.cat([*dense, *downs]))
        self.register_buffer("fused_bias", torch.cat([*biases, *firsts]) if cosine or self.dense_bias else None)
        for k in range(1, self.depth):
            mixes = [
                _scaled(each.mixes[k - 1], each.frequencies[k]) if cosine else each.mixes[k - 1] for each in branches
            ]
            phase = torch.stack([each.phases[k].to(dtype)[None] for each in branches]) if cosine else None
            self.register_buffer(f"mix{k}", torch.stack([mix.t() for mix in mixes]).contiguous())
            self.register_buffer(f"phase{k}", phase)
        for place, layer in enumerate(layers):
            fusion = layer.noble_fusion
            up_bias = None if fusion is None else layer.noble_up_bias  # else it is in fused_bias
            self.register_buffer(f"up{place}", layer.noble_up.detach().t().contiguous())
            self.register_buffer(f"up_bias{place}", None if up_bias is None else up_bias.detach())
            self.register_buffer(f"gate{place}", None if fusion is None else torch.sigmoid(fusion))

    def output(self, x: Tensor, place: int) -> Tensor:
        """Return y (..., d_out) of the layer at this place, one of several."""
        if self.hand_off.apart(x):
            return self._compute(x, place)[0]
        changes = None if torch.compiler.is_compiling() or x.is_inference() else x._version
        y: Tensor = self.hand_off.take(x, place, self._compute, changes)[place]
        return y

    def rows(self, place: int) -> slice:
        """Return where a layer's dense weight and bias are."""
        start = sum(self.widths[:place])
        return slice(start, start + self.widths[place])

    def _compute(self, x: Tensor, alone: int | None = None) -> list[Tensor]:
        """Return y of all layers, views of one product, or of one alone."""
        own: Any = self._buffers  # attributes of modules are slow to read
        weight, bias, n, r = own["fused_weight"], own["fused_bias"], len(self.widths), self.rank
        differentiated = transformed() or (torch.is_grad_enabled() and x.requires_grad)
        plain = alone is None and self.cosine and not torch.compiler.is_compiling() and not differentiated
        if plain and (fast := native(x, weight)) is not None:
            ys: list[Tensor] = fast.noble_decode.default(x, list(own.values()), n, self.dense_bias)
            if ys:  # none under autocast
                return ys if self.scale == 1 else [y * self.scale for y in ys]
        x_TI = x.reshape(-1, x.shape[-1])
        if alone is None:
            places: Sequence[int] = range(n)
            *ys, u = F.linear(x_TI, weight, bias).split([*self.widths, n * r], 1)
            if n > 1:
                u = u.view(-1, n, r).transpose(0, 1)
        else:
            places, start = [alone], sum(self.widths) + alone * r
            y, u = (
                F.linear(x_TI, weight[rows], None if bias is None else bias[rows])
                for rows in (self.rows(alone), slice(start, start + r))
            )
            ys = [y]
        u = self.activation(u)
        for k in range(1, self.depth):
            mix, phase = own[f"mix{k}"], own[f"phase{k}"]
            if u.ndim == 2:
                mix, phase = mix[places[0]], None if phase is None else phase[places[0]]
                u = u @ mix if phase is None else torch.addmm(phase, u, mix)
            else:
                u = torch.bmm(u, mix) if phase is None else torch.baddbmm(phase, u, mix)
            u = self.activation(u)
        us = [u] if u.ndim == 2 else u.unbind(0)
        joined = [self._join(own, place, y, u) for place, y, u in zip(places, ys, us, strict=True)]
        return [y.view(*x.shape[:-1], y.shape[1]) for y in joined]

    def _join(self, own: Any, place: int, y: Tensor, u: Tensor) -> Tensor:
        up, up_bias, gate = own[f"up{place}"], own[f"up_bias{place}"], own[f"gate{place}"]
        if gate is None:
            written = y.dtype == up.dtype and not u.requires_grad and not transformed()
            y = y.addmm_(u, up) if written else torch.addmm(y, u, up)  # autocast knows the latter alone
        else:
            y = gate * y + (1 - gate) * (u @ up if up_bias is None else torch.addmm(up_bias, u, up))
        return y if self.scale == 1 else y * self.scale


def _scaled(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return every row times its number, rounded once."""
    return (wide(matrix) * wide(rows)[:, None]).to(matrix.dtype)


class FusedNobleLinear(nn.Module):
    """One layer of a `FusedNoble`: (..., in_features) -> (..., out_features)."""

    def __init__(self, fused: FusedNoble, place: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.place = in_features, fused.widths[place], place
        if place == 0:
            self.fused = fused
        self._group = (fused,)  # not a submodule of the others, so that its tensors have one name

    @property
    def weight(self) -> Tensor:
        """The dense weight (out_features, in_features)."""
        return self._group[0].get_buffer("fused_weight")[self._group[0].rows(self.place)]

    @property
    def bias(self) -> Tensor | None:
        """The bias (out_features), the branch's own with it unless gated; zeros where the layer had none."""
        bias: Any = self._group[0].fused_bias
        return None if bias is None else bias[self._group[0].rows(self.place)]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        group = self._group[0]
        return group.output(x, self.place) if group.shared else group._compute(x)[0]

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        group = self._group[0]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={group.rank}, "
            f"place {self.place + 1} of {len(group.widths)}"
        )


def fuse(model: nn.Module, *, shared_inputs: bool) -> bool:
    """Put `FusedNobleLinear` in the place of NOBLE layers, one product for those of one input if asked to.

    Layers stay if they are hooked, not plain inside (an adapter on the dense part), have their branch switched off, or
    share the down projection of such a layer. Return whether any was replaced.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, NobleLinear | NobleConv1D)}
    kept = {each.noble_shared for each in found.values() if not _is_plain(each)} - {None}
    layers = {name: each for name, each in found.items() if _is_plain(each) and each.noble_shared not in kept}
    changed = bool(layers)
    groups = input_groups(layers, _kind) if shared_inputs else []
    grouped = {name for group in groups for name in group}
    for group in [*groups, *((name,) for name in layers if name not in grouped)]:
        # Popped, so that only one group's tensors at a time exist twice.
        taken = [layers.pop(name) for name in group]
        fused = FusedNoble(taken)
        pairs = ((each, FusedNobleLinear(fused, place, each.noble_shape[0])) for place, each in enumerate(taken))
        replace_modules(model, {layer: new.train(layer.training) for layer, new in pairs})
    return changed


def _is_plain(layer: NobleLinear | NobleConv1D) -> bool:
    return layer.branch_enabled and layer.plain_weight() is not None and not is_hooked(layer)


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return what the layers of a group have in common: one input and bottlenecks of one form."""
    config = layer.noble_config
    form = (config.activation, config.depth, config.fusion, config.up_bias, config.scale, type(layer))
    return (layer.noble_shape[0], layer.noble_rank, layer.weight.dtype, layer.weight.device, *form)
