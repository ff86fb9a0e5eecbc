"""Several linears with NOBLE branches that read one input: query, key and value, or gate and up projections.

    h = x [D1; D2; ...]^T                                   one product for all branches
    y_i = x W_i^T + b_i + bottleneck_i(h_i) up_i^T          i = 1 .. n, as in reference.py
    dx  = sum_i dy_i W_i + [dh_1 | dh_2 | ...] [D1; D2; ...]    accumulated in place

Beside n calls of op.py, x is read n - 1 times less in forward and in the gradient of D, and the gradients of x are not
n tensors that autograd adds up: 12 bytes less a token and input channel for three layers in 16 bits. Kept for backward:
x and h.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.one_op import as_one_op
from nonlinear_lowrank.ops.reshaped import reshaped

from .op import autocast_dtype, bottleneck_backward, bottleneck_forward, main_plus_up
from .reference import Branch


def noble_group(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], branches: Sequence[Branch]
) -> list[Tensor]:
    """Return `noble_linear` of each layer, [(..., d_out_1), ...]; keeps x and h (tokens x n r) for backward.

    Args:
        x: (..., d_in).
        weights: n matrices (d_out_i, d_in).
        biases: n vectors (d_out_i), or None.
        branches: n of one rank, depth and activation; all but the first have no `down` where they share its.

    Raises:
        RuntimeError: second derivatives are asked for.
    """
    if (dtype := autocast_dtype(x)) is not None:
        x, weights = x.to(dtype), [each.to(dtype) for each in weights]
        biases = [None if each is None else each.to(dtype) for each in biases]
        branches = [each.with_matrices(dtype) for each in branches]
    n, activation = len(weights), branches[0].activation
    tensors = [each for branch in branches for each in branch.flat()]
    if torch.is_grad_enabled():
        *ys, _ = _NobleGroup.apply(x, n, activation, *weights, *biases, *tensors)
        return ys
    run = _forward_op if as_one_op() else _forward
    return run(x, list(weights), list(biases), tensors, activation)[:-1]


class _NobleGroup(torch.autograd.Function):
    """Saves x, h and the parameters."""

    @staticmethod
    def forward(x, n, activation, *tensors):
        run = _forward_op if as_one_op() else _forward
        dense, branches = (list(each) for each in (tensors[: 2 * n], tensors[2 * n :]))
        return tuple(run(x, dense[:n], dense[n:], branches, activation, training=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.n, ctx.activation, *tensors = inputs
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(x, output[-1], *tensors[: ctx.n], *tensors[2 * ctx.n :])

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives through noble_group are not defined; use noble_linear_reference")
        x, h, *tensors = ctx.saved_tensors
        weights, branches = list(tensors[: ctx.n]), list(tensors[ctx.n :])
        needs = [bool(need) for need in ctx.needs_input_grad]
        wanted = [needs[0], *needs[3 : 3 + 2 * ctx.n]]  # x, weights, biases
        dys = [
            x.new_zeros(*x.shape[:-1], weight.shape[0]) if dy is None else dy
            for dy, weight in zip(gradients, weights, strict=False)
        ]
        run = _backward_op if torch.compiler.is_compiling() else _backward
        found = run(dys, x, h, weights, branches, ctx.activation, wanted)
        dx, *dense = (each if want else None for each, want in zip(found, wanted, strict=False))
        rest = iter(found[len(wanted) :])
        return dx, None, None, *dense, *(None if each is None else next(rest) for each in branches)


def _branches(tensors: Sequence[Tensor | None], n: int, activation: str) -> list[Branch]:
    size = len(tensors) // n
    return [Branch.of_flat(tensors[start : start + size], activation) for start in range(0, n * size, size)]


def _downs(branches: Sequence[Branch]) -> list[Tensor]:
    """Return the n down projections, or the one that all share."""
    return [branch.down for branch in branches if branch.down is not None]


def _own(h_TR: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
    """Return h of each layer, (T, r), contiguous."""
    m = len(_downs(branches))
    return [each.contiguous() for each in h_TR.chunk(m, 1)] * (len(branches) // m)


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    activation: str,
    training: bool = False,
) -> list[Tensor]:
    """Return y of each layer, then h (T, m r) of the m down projections."""
    x_TI, branches = x.reshape(-1, x.shape[-1]), _branches(tensors, len(weights), activation)
    h_TR = F.linear(x_TI, _joined(_downs(branches)))
    ys = []
    for weight, bias, branch, h in zip(weights, biases, branches, _own(h_TR, branches), strict=True):
        u_TR = bottleneck_forward(h, branch)
        y_TO = main_plus_up(x_TI, weight, bias, u_TR, branch.up, training=training)
        ys.append(reshaped(y_TO, (*x.shape[:-1], branch.up.shape[0])))
    return [*ys, h_TR]


def _joined(downs: list[Tensor]) -> Tensor:
    return torch.cat(downs) if len(downs) > 1 else downs[0]


def _backward(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    weights: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    activation: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of x, weights, biases (these empty where `wanted` says no) and the branches' tensors."""
    n, branches = len(weights), _branches(tensors, len(weights), activation)
    x_TI, nothing = x.reshape(-1, x.shape[-1]), x.new_empty(0)
    dx_TI: Tensor | None = None
    dweights, dbiases, dhs, dothers = [], [], [], []
    for index, (dy, weight, branch, own) in enumerate(zip(dys, weights, branches, _own(h, branches), strict=True)):
        dy_TO = dy.reshape(-1, dy.shape[-1])
        u, dh, dinner = bottleneck_backward(own, dy_TO @ branch.up, branch)
        dothers.append([dy_TO.t() @ u, *dinner])
        dhs.append(dh)
        if wanted[0]:
            dx_TI = torch.mm(dy_TO, weight) if dx_TI is None else dx_TI.addmm_(dy_TO, weight)
        dweights.append(dy_TO.t() @ x_TI if wanted[1 + index] else nothing.clone())
        dbiases.append(dy_TO.sum(0) if wanted[1 + n + index] else nothing.clone())
    downs = _downs(branches)
    dh_TR = torch.cat(dhs, 1) if len(downs) > 1 else sum(dhs[1:], dhs[0])
    if dx_TI is not None:
        dx_TI.addmm_(dh_TR, _joined(downs))
    ddown = dh_TR.t() @ x_TI
    ddowns = [ddown] if len(downs) == 1 else [each.clone() for each in ddown.split(downs[0].shape[0])]
    dbranches: list[Tensor] = []
    for index, dother in enumerate(dothers):
        dbranches += [*ddowns[index : index + 1], *dother]
    return [nothing if dx_TI is None else dx_TI.view(x.shape), *dweights, *dbiases, *dbranches]


# Plain registrations, as in op.py.
_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_LIBRARY.define(
    "noble_group_forward(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] tensors, str activation, "
    "bool training=False) -> Tensor[]"
)
_LIBRARY.define(
    "noble_group_backward(Tensor[] dys, Tensor x, Tensor h, Tensor[] weights, Tensor?[] tensors, str activation, "
    "bool[] wanted) -> Tensor[]"
)
_LIBRARY.impl("noble_group_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("noble_group_backward", _backward, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.noble_group_forward.default
_backward_op = torch.ops.nonlinear_lowrank.noble_group_backward.default


@torch.library.register_fake("nonlinear_lowrank::noble_group_forward")
def _(x, weights, biases, tensors, activation, training=False):
    branches = _branches(tensors, len(weights), activation)
    ys = [x.new_empty(*x.shape[:-1], branch.up.shape[0]) for branch in branches]
    return [*ys, x.new_empty(x.numel() // x.shape[-1], sum(each.shape[0] for each in _downs(branches)))]


@torch.library.register_fake("nonlinear_lowrank::noble_group_backward")
def _(dys, x, h, weights, tensors, activation, wanted):
    dx = x.new_empty(x.shape if wanted[0] else 0)
    n = len(weights)
    dweights = [each.new_empty(each.shape if want else 0) for each, want in zip(weights, wanted[1:], strict=False)]
    dbiases = [x.new_empty(each.shape[0] if want else 0) for each, want in zip(weights, wanted[1 + n :], strict=True)]
    return [dx, *dweights, *dbiases, *(each.new_empty(each.shape) for each in tensors if each is not None)]
