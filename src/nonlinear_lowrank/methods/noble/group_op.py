"""Several linears with NOBLE branches that read one input: query, key and value, or gate and up projections.

    h = x [D1; D2; ...]^T                                   one product for all branches
    y_i = x W_i^T + b_i + bottleneck_i(h_i) up_i^T          i = 1 .. n, as in cosnet.py
    dx  = sum_i dy_i W_i + [dh_1 | dh_2 | ...] [D1; D2; ...]    accumulated in place

Beside n layers of cosnet.py, x is read n - 1 times less in forward and in the gradient of D, and the gradients of x are
not n tensors that autograd adds up: 12 bytes less a token and input channel for three layers in 16 bits. Kept for
backward: x and h.

Shapes as in cosnet.py; every layer has the rank r, the depth and the activation of the others. `downs` are n matrices
(r, d_in), or one that all share (noble_sharing.py): then every h_i is the same.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.one_op import as_one_op
from nonlinear_lowrank.ops.reshaped import reshaped

from .op import bottleneck_backward, bottleneck_forward, noble_linear_reference
from .up_form import main_plus_up


def noble_group_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    mixes: Sequence[Sequence[Tensor]],
    frequencies: Sequence[Sequence[Tensor]],
    phases: Sequence[Sequence[Tensor]],
    activation: str = "cosine",
) -> list[Tensor]:
    """`noble_linear_reference` of each layer: [(..., d_out_1), ...]."""
    own = downs if len(downs) > 1 else [downs[0]] * len(weights)
    return [
        noble_linear_reference(x, weight, bias, down, up, mix, frequency, phase, activation)
        for weight, bias, down, up, mix, frequency, phase in zip(
            weights, biases, own, ups, mixes, frequencies, phases, strict=True
        )
    ]


def noble_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    mixes: Sequence[Sequence[Tensor]],
    frequencies: Sequence[Sequence[Tensor]],
    phases: Sequence[Sequence[Tensor]],
    activation: str = "cosine",
) -> list[Tensor]:
    """`noble_group_reference` that keeps x and h (tokens x n r) for backward.

    Autocast and second derivatives as in `noble_linear`.

    Args:
        x: (..., d_in).
        weights: n matrices (d_out_i, d_in).
        biases: n vectors (d_out_i), or None.
        downs: n matrices (r, d_in), or one.
        ups: n matrices (d_out_i, r).
        mixes: for each layer depth - 1 matrices (r, r).
        frequencies: for each layer depth vectors (r) for "cosine", else none.
        phases: like `frequencies`.
        activation: one of `cosnet.ACTIVATIONS`.

    Returns:
        [(..., d_out_1), ...].
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        weights, downs, ups = ([each.to(dtype) for each in tensors] for tensors in (weights, downs, ups))
        biases = [None if each is None else each.to(dtype) for each in biases]
        mixes = [[mix.to(dtype) for mix in own] for own in mixes]
    counts = len(weights), len(downs), len(mixes[0]), len(frequencies[0])
    flat = [each for lists in (mixes, frequencies, phases) for own in lists for each in own]
    if torch.is_grad_enabled():
        *ys, _ = _NobleGroup.apply(x, activation, counts, *weights, *biases, *downs, *ups, *flat)
        return ys
    run = _forward_op if as_one_op() else _forward
    return run(x, list(weights), list(biases), list(downs), list(ups), flat, list(counts), activation)[:-1]


class _NobleGroup(torch.autograd.Function):
    """Saves x, h and the parameters."""

    @staticmethod
    def forward(x, activation, counts, *tensors):
        run = _forward_op if as_one_op() else _forward
        return tuple(run(x, *_parted(tensors, counts), list(counts), activation, training=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.activation, ctx.counts, *tensors = inputs
        ctx.mark_non_differentiable(output[-1])
        weights, _biases, downs, ups, flat = _parted(tensors, ctx.counts)
        ctx.save_for_backward(x, output[-1], *weights, *downs, *ups, *flat)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives through noble_group are not defined; use noble_group_reference")
        x, h, *tensors = ctx.saved_tensors
        n, m = ctx.counts[:2]
        needs = [bool(need) for need in ctx.needs_input_grad]
        wanted = [needs[0], *needs[3 : 3 + 2 * n]]  # x, weights, biases
        run = _backward_op if torch.compiler.is_compiling() else _backward
        dys = [
            x.new_zeros(*x.shape[:-1], weight.shape[0]) if dy is None else dy
            for dy, weight in zip(gradients[:-1], tensors[:n], strict=True)
        ]
        weights, downs, ups, flat = (
            list(tensors[start:end]) for start, end in itertools.pairwise((0, n, n + m, 2 * n + m, len(tensors)))
        )
        dx, *others = run(dys, x, h, weights, downs, ups, flat, list(ctx.counts), ctx.activation, wanted)
        optional = [each if want else None for each, want in zip(others[: 2 * n], wanted[1:], strict=True)]
        return dx if wanted[0] else None, None, None, *optional, *others[2 * n :]


def _parted(
    tensors: Sequence[Tensor | None], counts: Sequence[int]
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor], list[Tensor], list[Tensor]]:
    """weights, biases, downs, ups and the bottlenecks' tensors, out of one flat sequence (autograd takes no lists)."""
    n, m = counts[:2]
    ends = (0, n, 2 * n, 2 * n + m, 3 * n + m, len(tensors))
    return tuple(list(tensors[start:end]) for start, end in itertools.pairwise(ends))  # type: ignore[return-value]


def _bottlenecks(flat: list[Tensor], counts: Sequence[int]) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """mixes, frequencies and phases of each layer."""
    n, _, mixes, cosines = counts
    lists = [flat[: n * mixes], flat[n * mixes : n * (mixes + cosines)], flat[n * (mixes + cosines) :]]
    sizes = (mixes, cosines, cosines)
    return [
        tuple(own[index * size : (index + 1) * size] for own, size in zip(lists, sizes, strict=True))  # type: ignore[misc]
        for index in range(n)
    ]


def _own(h_TR: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """h of each layer, (T, r), contiguous."""
    n, m = counts[:2]
    return [each.contiguous() for each in h_TR.chunk(m, 1)] * (n // m)


def _forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    downs: list[Tensor],
    ups: list[Tensor],
    flat: list[Tensor],
    counts: list[int],
    activation: str,
    training: bool = False,
) -> list[Tensor]:
    """y of each layer (its up projection as `up_form` says), then h (T, m r)."""
    x_TI = x.reshape(-1, x.shape[-1])
    h_TR = F.linear(x_TI, torch.cat(downs) if len(downs) > 1 else downs[0])
    found = []
    rows = zip(weights, biases, ups, _own(h_TR, counts), _bottlenecks(flat, counts), strict=True)
    for weight, bias, up, h, lists in rows:
        u_TR = bottleneck_forward(h, *lists, activation)
        y_TO = main_plus_up(x_TI, weight, bias, u_TR, up, training=training)
        found.append(reshaped(y_TO, (*x.shape[:-1], up.shape[0])))
    return [*found, h_TR]


def _backward(
    dys: list[Tensor],
    x: Tensor,
    h: Tensor,
    weights: list[Tensor],
    downs: list[Tensor],
    ups: list[Tensor],
    flat: list[Tensor],
    counts: list[int],
    activation: str,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of x, weights, biases (these empty where `wanted` says no), downs, ups, mixes, frequencies, phases."""
    n = len(weights)
    x_TI, nothing = x.reshape(-1, x.shape[-1]), x.new_empty(0)
    dx_TI: Tensor | None = None
    dweights, dbiases, dhs, dups = [], [], [], []
    inner: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    rows = zip(dys, weights, ups, _own(h, counts), _bottlenecks(flat, counts), strict=True)
    for index, (dy, weight, up, own, lists) in enumerate(rows):
        dy_TO = dy.reshape(-1, dy.shape[-1])
        u, dh, *rest = bottleneck_backward(own, dy_TO @ up, *lists, activation)
        dups.append(dy_TO.t() @ u)
        dhs.append(dh)
        for kind, gradients in zip(inner, rest, strict=True):
            kind.extend(gradients)  # type: ignore[arg-type]
        if wanted[0]:
            dx_TI = torch.mm(dy_TO, weight) if dx_TI is None else dx_TI.addmm_(dy_TO, weight)
        dweights.append(dy_TO.t() @ x_TI if wanted[1 + index] else nothing.clone())
        dbiases.append(dy_TO.sum(0) if wanted[1 + n + index] else nothing.clone())
    if len(downs) > 1:
        dh_TR, down = torch.cat(dhs, 1), torch.cat(downs)
    else:
        dh_TR, down = sum(dhs[1:], dhs[0]), downs[0]
    if dx_TI is not None:
        dx_TI.addmm_(dh_TR, down)
    ddown = dh_TR.t() @ x_TI
    ddowns = [each.clone() for each in ddown.split(down.shape[0] // len(downs))] if len(downs) > 1 else [ddown]
    dx = nothing if dx_TI is None else dx_TI.view(x.shape)
    return [dx, *dweights, *dbiases, *ddowns, *dups, *inner[0], *inner[1], *inner[2]]


# Plain registrations, as in cosnet.py.
_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_BRANCHES = "Tensor[] downs, Tensor[] ups, Tensor[] flat, int[] counts, str activation"
_LIBRARY.define(
    f"noble_group_forward(Tensor x, Tensor[] weights, Tensor?[] biases, {_BRANCHES}, bool training=False) -> Tensor[]"
)
_LIBRARY.define(
    f"noble_group_backward(Tensor[] dys, Tensor x, Tensor h, Tensor[] weights, {_BRANCHES}, bool[] wanted) -> Tensor[]"
)
_LIBRARY.impl("noble_group_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("noble_group_backward", _backward, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.noble_group_forward.default
_backward_op = torch.ops.nonlinear_lowrank.noble_group_backward.default


@torch.library.register_fake("nonlinear_lowrank::noble_group_forward")
def _(x, weights, biases, downs, ups, flat, counts, activation, training=False):
    ys = [x.new_empty(*x.shape[:-1], up.shape[0]) for up in ups]
    return [*ys, x.new_empty(x.numel() // x.shape[-1], sum(each.shape[0] for each in downs))]


@torch.library.register_fake("nonlinear_lowrank::noble_group_backward")
def _(dys, x, h, weights, downs, ups, flat, counts, activation, wanted):
    n = len(weights)
    dx = x.new_empty(x.shape if wanted[0] else 0)
    dweights = [each.new_empty(each.shape if want else 0) for each, want in zip(weights, wanted[1:], strict=False)]
    dbiases = [x.new_empty(each.shape[0] if want else 0) for each, want in zip(weights, wanted[1 + n :], strict=True)]
    return [dx, *dweights, *dbiases, *(each.new_empty(each.shape) for each in (*downs, *ups, *flat))]
