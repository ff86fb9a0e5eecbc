"""NOBLE layers for inference: one product for the dense outputs and the branches' inputs of all layers that read x.

    [y1 | y2 | ... | z1 | z2 | ...] = x [W1; W2; ...; w1 D1; w1 D2; ...]^T + [b1 | b2 | ... | p1 | p1 | ...]
    y_i += cos((w2 M_i) cos(z_i) + p2) up_i^T, in place

Frequencies and phases of the cosines are in the matrices and biases before them, so that a branch is two cosines, one
product r x r and one that is added to y; other activations have no frequencies. At one token a linear is bound by
reading its weights and by the number of calls: that is why. Weights are moved, not copied. Query, key and value are a
group, and so are the gate and up projections of a gated feed-forward.

The first layer of a group that is called computes for all and hands the others theirs, by the identity of x, as in
noble_sharing.py; one that is given another tensor (keys of a cross-attention) computes its own rows.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.methods.matrix import replace_modules

from .group import input_groups
from .layer import NobleConv1D, NobleLinear
from .op import bottleneck_activation


class _Tensors(NamedTuple):
    """Of a module's forward pass, looked up once: attributes of modules are slow to read."""

    weight: Tensor
    bias: Tensor | None
    mixes: list[Tensor]
    """Transposed, (layers, r, r), for each further activation."""
    phases: list[Tensor | None]
    """(layers, 1, r)."""
    ups: list[Tensor]
    """Transposed, (r, d_out)."""
    up_biases: list[Tensor | None]
    gates: list[Tensor] | None


class FusedNoble(nn.Module):
    """The tensors of a group and its product; its `FusedNobleLinear` stand where the layers stood.

    Args:
        layers: NOBLE layers of one input width, rank, activation and depth; their tensors are taken over.
    """

    def __init__(self, layers: Sequence[NobleLinear | NobleConv1D]) -> None:
        super().__init__()
        first = layers[0]
        self.rank, self.scale = first.noble_rank, first.noble_config.scale
        self.widths = [layer.noble_shape[1] for layer in layers]
        self.dense = sum(self.widths)
        self.depth = first.noble_config.depth
        self.activation = bottleneck_activation(first.noble_config.activation)
        with torch.no_grad():
            self._take(layers)
        # What the group computed for one x, until all have theirs: (x, outputs, places served).
        self._held: list[tuple[Tensor, list[Tensor], int] | None] = [None]
        self._tensors: list[_Tensors] = []
        self.together = len(layers) > 1

    def _take(self, layers: Sequence[Any]) -> None:
        """Registers this group's tensors as buffers."""
        lists = [layer._branch_lists() for layer in layers]
        shared = layers[0].noble_shared
        dense = [layer.dense_weight() for layer in layers]
        downs = [shared.owner.noble_down if shared is not None else layer.noble_down for layer in layers]
        zeros = dense[0].new_zeros
        firsts = [zeros(self.rank) for _ in layers]
        cosine = bool(lists[0][1])
        if cosine:
            downs = [_scaled(down, frequencies[0]) for down, (_, frequencies, _) in zip(downs, lists, strict=True)]
            firsts = [phases[0].to(dense[0].dtype) for _, _, phases in lists]
        self.register_buffer("fused_weight", torch.cat([*dense, *downs]))
        biases = [
            zeros(width) if layer.bias is None else layer.bias for layer, width in zip(layers, self.widths, strict=True)
        ]
        has_bias = cosine or any(layer.bias is not None for layer in layers)
        self.register_buffer("fused_bias", torch.cat([*biases, *firsts]) if has_bias else None)
        for depth in range(1, self.depth):
            mixes = [_scaled(m[depth - 1], f[depth]) if cosine else m[depth - 1] for m, f, _ in lists]
            self.register_buffer(f"mix{depth}", torch.stack([mix.t() for mix in mixes]).contiguous())
            phase = torch.stack([p[depth].to(dense[0].dtype)[None] for _, _, p in lists]) if cosine else None
            self.register_buffer(f"phase{depth}", phase)
        for place, layer in enumerate(layers):
            self.register_buffer(f"up{place}", layer.noble_up.detach().t().contiguous())
            self.register_buffer(
                f"up_bias{place}", None if layer.noble_up_bias is None else layer.noble_up_bias.detach()
            )
            gate = None if layer.noble_fusion is None else torch.sigmoid(layer.noble_fusion)
            self.register_buffer(f"gate{place}", gate)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: never the tensors of a forward pass."""
        return {**self.__dict__, "_held": [None], "_tensors": []}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._tensors.clear()
        return super()._apply(fn, recurse)

    def _found(self) -> _Tensors:
        if not self._tensors:
            places, depths = range(len(self.widths)), range(1, self.depth)
            gates = [self.get_buffer(f"gate{place}") for place in places] if self.gate0 is not None else None
            found = _Tensors(
                weight=self.get_buffer("fused_weight"),
                bias=self.fused_bias,  # type: ignore[arg-type]
                mixes=[self.get_buffer(f"mix{depth}") for depth in depths],
                phases=[getattr(self, f"phase{depth}") for depth in depths],
                ups=[self.get_buffer(f"up{place}") for place in places],
                up_biases=[getattr(self, f"up_bias{place}") for place in places],
                gates=gates,
            )
            if torch.compiler.is_compiling():
                return found
            self._tensors.append(found)
        return self._tensors[0]

    def outputs(self, x: Tensor, place: int) -> Tensor:
        """y (..., d_out) of the layer at this place."""
        if not self.together:
            return self._of(x, [place])[0]
        held = self._held[0]
        if held is None or held[0] is not x or held[2] >> place & 1:
            if held is not None and held[0] is not x and not torch.compiler.is_compiling():
                # The others are waiting for theirs: this group does not read one tensor.
                self._held[0], self.together = None, False
                return self._of(x, [place])[0]
            held = (x, self._of(x, range(len(self.widths))), 0)
        served = held[2] | 1 << place
        self._held[0] = None if served == (1 << len(self.widths)) - 1 else (held[0], held[1], served)
        return held[1][place]

    def _of(self, x: Tensor, places: Collection[int]) -> list[Tensor]:
        """y of these places: of all, views of one product, or of one."""
        found = self._found()
        mixes, phases = found.mixes, found.phases
        x_TI = x.reshape(-1, x.shape[-1])
        if len(places) == len(self.widths):
            product = F.linear(x_TI, found.weight, found.bias)
            *ys, z = product.split([*self.widths, self.rank * len(places)], 1)
            u = z if len(places) == 1 else z.view(-1, len(places), self.rank).transpose(0, 1)
        else:
            (place,) = places
            start, branch = sum(self.widths[:place]), self.dense + place * self.rank
            rows = [slice(start, start + self.widths[place]), slice(branch, branch + self.rank)]
            ys = [F.linear(x_TI, found.weight[rows[0]], None if found.bias is None else found.bias[rows[0]])]
            u = F.linear(x_TI, found.weight[rows[1]], None if found.bias is None else found.bias[rows[1]])
            mixes = [mix[place : place + 1] for mix in mixes]
            phases = [None if phase is None else phase[place : place + 1] for phase in phases]
        u = self.activation(u)
        for mix, phase in zip(mixes, phases, strict=True):
            if u.ndim == 2:
                u = u @ mix[0] if phase is None else torch.addmm(phase[0], u, mix[0])
            else:
                u = torch.bmm(u, mix) if phase is None else torch.baddbmm(phase, u, mix)
            u = self.activation(u)
        us = [u] if u.ndim == 2 else u.unbind(0)
        joined = [self._joined(found, place, y, each) for place, y, each in zip(places, ys, us, strict=True)]
        return [y.view(*x.shape[:-1], y.shape[1]) for y in joined]

    def _joined(self, found: _Tensors, place: int, y: Tensor, u: Tensor) -> Tensor:
        up_bias = found.up_biases[place]
        if found.gates is None:
            y.addmm_(u, found.ups[place])
            if up_bias is not None:
                y += up_bias
        else:
            branch = u @ found.ups[place]
            if up_bias is not None:
                branch += up_bias
            gate = found.gates[place]
            y = gate * y + (1 - gate) * branch
        return y if self.scale == 1 else y * self.scale


def _scaled(matrix: Tensor, rows: Tensor) -> Tensor:
    """Every row times its number, rounded once."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (matrix.to(wide) * rows.to(wide)[:, None]).to(matrix.dtype)


class FusedNobleLinear(nn.Module):
    """One layer of a `FusedNoble`: (..., in_features) -> (..., out_features)."""

    def __init__(self, fused: FusedNoble, place: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.place = in_features, fused.widths[place], place
        if place == 0:
            self.fused = fused
        self._group = (fused,)  # not a submodule of the others, so that its tensors have one name

    def _rows(self) -> slice:
        start = sum(self._group[0].widths[: self.place])
        return slice(start, start + self.out_features)

    @property
    def weight(self) -> Tensor:
        """The dense weight (out_features, in_features)."""
        return self._group[0].get_buffer("fused_weight")[self._rows()]

    @property
    def bias(self) -> Tensor | None:
        """The dense bias (out_features), zeros where the layer had none."""
        bias = self._group[0]._found().bias
        return None if bias is None else bias[self._rows()]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self._group[0].outputs(x, self.place)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        group = self._group[0]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={group.rank}, "
            f"place {self.place + 1} of {len(group.widths)}"
        )


def fuse(model: nn.Module, *, shared_inputs: bool) -> int:
    """Puts `FusedNobleLinear` in the place of every NOBLE layer of a model.

    Args:
        model: changed in place.
        shared_inputs: one product for query, key and value, and for gate and up projections.

    Returns:
        How many layers were replaced.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, NobleLinear | NobleConv1D)}
    count = len(layers)
    groups = _groups(layers) if shared_inputs else []
    grouped = {name for group in groups for name in group}
    for group in [*groups, *([name] for name in layers if name not in grouped)]:
        # Out of the list: the tensors of one group at a time are there twice.
        taken = [layers.pop(name) for name in group]
        fused = FusedNoble(taken)
        replace_modules(
            model,
            {
                layer: FusedNobleLinear(fused, place, layer.noble_shape[0]).train(layer.training)
                for place, layer in enumerate(taken)
            },
        )
    return count


def _groups(layers: dict[str, Any]) -> list[list[str]]:
    """Layers that read one input and have bottlenecks of one kind."""
    found = input_groups(list(layers))
    return [list(group) for group in found if len({_kind(layers[name]) for name in group}) == 1]


def _kind(layer: Any) -> tuple[Any, ...]:
    config = layer.noble_config
    form = (config.activation, config.depth, config.fusion, config.up_bias, config.scale, type(layer))
    return (layer.noble_shape[0], layer.noble_rank, layer.weight.dtype, layer.weight.device, *form)
