"""NOBLE's formula, a linear map plus a nonlinear low-rank branch (noble.txt, sections 3.1 and 3.2), and its operator.

    u = bottleneck(x down^T)                      CosNet: cos(f2 * (M cos(f1 * h + p1)) + p2)
    y = x weight^T + bias + u up^T

`noble_linears_reference` is the formula: the operator is tested against it, and runs it where `ops.derivatives` says.
The operator, of n linears that read one input:

    h = x [D1; D2; ...]^T                                       one product for all branches
    y_i = x W_i^T + b_i + bottleneck_i(h_i) up_i^T              i = 1 .. n
    dx  = sum_i dy_i W_i + [dh_1 | dh_2 | ...] [D1; D2; ...]    accumulated in place

It saves x and h (tokens x r a branch) for backward: everything else in a branch is r wide and cheap to recompute. On
NVIDIA GPUs CosNet between its projections is a kernel (`kernel.py`); float32 on a CPU is C++, the node of autograd
included (`ops/noble.h`). Under torch.compile the whole forward and the whole backward are opaque custom ops: the
compiler's partitioner would otherwise decide again what to save, and saves more. T tokens; in names of tensors I is
d_in, O is d_out, R is r.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.derivatives import differentiated, formula_gradients, transformed
from nonlinear_lowrank.ops.kernels import as_one_op, custom_op, fake_gradients, filled, kernels, processors, reshaped
from nonlinear_lowrank.ops.native import native
from nonlinear_lowrank.ops.plain import autocast_dtype, wide

from .branch import BRANCH_ACTIVATIONS, LEAKY_SLOPE

Tensors = Sequence[Tensor | None]

JOIN_UP: bool | None = None
"""True: training computes `[x | u] [weight | up]^T` instead of `x weight^T`, then `+= u up^T` in place. None: on GPUs
where that moves fewer numbers, d_in + r < T d_out / (T + d_out), and rows are aligned. Never without gradients: a
branch that starts at zero has to leave the plain output to the bit."""

JOIN_DOWN: bool | None = None
"""True: backward of one linear that is trained computes `dx = [dy | dh] [weight; down]` and `[dweight; ddown] =
[dy | dh]^T x` instead of two products each. None: on GPUs where that moves fewer numbers, by the rule of `JOIN_UP` with
d_in and d_out exchanged."""

FUSE_DOWN: bool | None = None
"""True: CosNet's kernel takes the down projection as well, up to rank `FUSED_DOWN_RANK`. None: for 16-bit numbers in
aligned rows, where every processor gets a tile of tokens."""
FUSED_DOWN_RANK = 128
TILE = 64  # tokens of a program of the kernels


_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda du, z: torch.ops.aten.tanh_backward(du, torch.tanh(z)),
    "leaky_relu": lambda du, z: torch.ops.aten.leaky_relu_backward(du, z, LEAKY_SLOPE, False),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}


class Branch(NamedTuple):
    """The tensors of a branch beside a linear d_in -> d_out, of rank r and depth n.

    The last mix, frequency and phase may have some of the r rows alone, and `up` as many columns.
    """

    down: Tensor | None
    """(r, d_in); None where h is given, or the first branch of a group has it."""
    up: Tensor
    """(d_out, r)"""
    mixes: Sequence[Tensor] = ()
    """n - 1 matrices (r, r)."""
    frequencies: Sequence[Tensor] = ()
    """n vectors (r) for "cosine", else none."""
    phases: Sequence[Tensor] = ()
    """Like `frequencies`."""
    activation: str = "cosine"
    """One of `config.Activation`."""

    def flat(self) -> list[Tensor | None]:
        """Return the tensors in one list, for autograd and custom ops, which take no tuples of lists."""
        return [self.down, self.up, *self.mixes, *self.frequencies, *self.phases]

    @classmethod
    def of_flat(cls, tensors: Tensors, activation: str) -> Self:
        """Return the branch whose `flat` this is."""
        n = (len(tensors) - 1) // 3 if activation == "cosine" else len(tensors) - 1
        mixes, frequencies, phases = tensors[2 : n + 1], tensors[n + 1 : 2 * n + 1], tensors[2 * n + 1 :]
        return cls(tensors[0], tensors[1], mixes, frequencies, phases, activation)  # type: ignore[arg-type]

    def with_matrices(self, dtype: torch.dtype) -> Self:
        """Return it with matrices of this type; frequencies and phases stay as they are."""
        down = None if self.down is None else self.down.to(dtype)
        return self._replace(down=down, up=self.up.to(dtype), mixes=[mix.to(dtype) for mix in self.mixes])


def _argument(z: Tensor, branch: Branch, layer: int) -> Tensor:
    """Return what an activation is given, float32 or wider; a new tensor for the cosine."""
    if branch.activation == "cosine":
        return torch.addcmul(wide(branch.phases[layer]), wide(z), wide(branch.frequencies[layer]))
    return wide(z)


def bottleneck(h: Tensor, branch: Branch) -> Tensor:
    """Return the branch between its two projections: (..., r) -> (..., r), in the type of h.

    Source: noble.txt, equation (2) and appendix A (5)-(7); other activations: Table 5.
    """
    function = BRANCH_ACTIVATIONS[branch.activation]
    if branch.activation == "cosine" and not (torch.is_grad_enabled() or torch.jit.is_tracing()):
        function = torch.cos_  # on r-wide tensors memory is the cost
    u = h
    for layer in range(len(branch.mixes) + 1):
        if layer > 0:
            u = F.linear(u, branch.mixes[layer - 1])
        u = function(_argument(u, branch, layer)).to(h.dtype)
    return u


def noble_linear_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, branch: Branch, h: Tensor | None = None
) -> Tensor:
    """Return the plain formula, term by term; arguments as in `op.noble_linear`."""
    if h is None:
        assert branch.down is not None
        h = F.linear(x, branch.down)
    u_up = F.linear(bottleneck(h, branch), branch.up)
    return u_up if weight is None else F.linear(x, weight, bias) + u_up


def noble_linears_reference(
    x: Tensor, weights: Tensors, biases: Tensors, branches: Sequence[Branch], h: Tensor | None = None
) -> list[Tensor]:
    """Return the plain formula of n linears; arguments as in `op.noble_linears`."""
    if h is None and any(branch.down is None for branch in branches):
        assert branches[0].down is not None
        h = F.linear(x, branches[0].down)
    rows = zip(weights, biases, branches, strict=True)
    return [noble_linear_reference(x, weight, bias, branch, h) for weight, bias, branch in rows]


def noble_linears(
    x: Tensor, weights: Tensors, biases: Tensors, branches: Sequence[Branch], h: Tensor | None = None
) -> list[Tensor]:
    """Return `x weight^T + bias + bottleneck(x down^T) up^T` of n linears, [(..., d_out_1), ...].

    Under autocast x, h and every matrix are in the autocast type, frequencies and phases stay as they are.

    Args:
        x: (..., d_in).
        weights: n matrices (d_out_i, d_in); None: the branch alone.
        biases: n vectors (d_out_i), or None.
        branches: n of one rank, depth and activation; all but the first have no `down` where they share its.
        h: (..., r), in place of x down^T.
    """
    if (dtype := autocast_dtype(x)) is not None:
        # Cast once, out here: backward runs outside autocast, and two linears on one float32 x would
        # each save a copy of their own.
        x, branches = x.to(dtype), [branch.with_matrices(dtype) for branch in branches]
        h, *dense = (None if each is None else each.to(dtype) for each in (h, *weights, *biases))
        weights, biases = dense[: len(weights)], dense[len(weights) :]
    if h is not None:
        branches = [branch._replace(down=None) for branch in branches]
    fused = len(branches) == 1 and torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if fused or transformed():
        return noble_linears_reference(x, weights, biases, branches, h)
    activation, tensors = branches[0].activation, [each for branch in branches for each in branch.flat()]
    if torch.is_grad_enabled():
        fast = None if torch.compiler.is_compiling() else _native(activation, x, h, weights, tensors)
        if fast is not None:
            found: list[Tensor] = fast.noble_linears(x, h, weights, biases, tensors)
            return found
        return list(_NobleLinears.apply(len(weights), activation, x, h, *weights, *biases, *tensors)[:-1])
    run = _forward_op if as_one_op() else _forward
    return run(x, h, weights, biases, tensors, activation)[:-1]


def noble_linear(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, branch: Branch, h: Tensor | None = None
) -> Tensor:
    """Return `noble_linears` of one, (..., d_out)."""
    return noble_linears(x, [weight], [bias], [branch], h)[0]


def noble_branch(x: Tensor, branch: Branch, h: Tensor | None = None) -> Tensor:
    """Return the branch alone, (..., d_out), for a linear whose weight is not at hand (quantized, hooked)."""
    return noble_linear(x, None, None, branch, h)


class _NobleLinears(torch.autograd.Function):
    """Saves x, h and the parameters. Tensors are n weights, n biases and the branches' (autograd takes no lists)."""

    @staticmethod
    def forward(ctx: Any, n: Any, activation: Any, x: Any, h: Any, *tensors: Any) -> Any:
        run = _forward_op if as_one_op() else _forward
        output = tuple(run(x, h, tensors[:n], tensors[n : 2 * n], tensors[2 * n :], activation, training=True))
        ctx.n, ctx.activation = n, activation
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(x, output[-1] if h is None else h, *tensors[:n], *tensors[2 * n :])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        n = ctx.n
        x, h, *tensors = ctx.saved_tensors
        weights, tensors = tensors[:n], tensors[n:]
        wanted = list(ctx.needs_input_grad[2 : 4 + 2 * n])  # x, h, weights, biases
        wanted[0] &= weights[0] is not None or tensors[0] is not None  # else y does not depend on x
        inputs = gradients[:-1], x, h, weights, tensors, ctx.activation, wanted
        if differentiated(*gradients[:-1]):
            return None, None, *_formula_gradients(*inputs, ctx.needs_input_grad[4 + 2 * n :])
        if not torch.compiler.is_compiling():
            return None, None, *_backward(*inputs)
        wanted = [*wanted, *(each is not None for each in tensors)]
        found = zip(_backward_op(*inputs), wanted, strict=True)
        return None, None, *(each if want else None for each, want in found)


def _formula_gradients(
    dys: Sequence[Tensor], x: Tensor, h: Tensor, weights: Tensors, tensors: Tensors, activation: str,
    wanted: Sequence[bool], tensors_wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return what `_backward` returns, differentiable."""
    n = len(weights)
    # Gradients do not depend on the biases, which are not saved.
    biases = [dy.new_zeros(dy.shape[-1]) if want else None for dy, want in zip(dys, wanted[2 + n :], strict=True)]
    given = h if tensors[0] is None else None

    def formula(x: Any, h: Any, *rest: Any) -> tuple[Tensor, ...]:
        branches = _branches(rest[2 * n :], n, activation)
        return tuple(noble_linears_reference(x, rest[:n], rest[n : 2 * n], branches, h))

    return formula_gradients(formula, [x, given, *weights, *biases, *tensors], [*wanted, *tensors_wanted], dys)


def _branches(tensors: Tensors, n: int, activation: str) -> list[Branch]:
    """Return the n branches of these tensors."""
    size = len(tensors) // n
    return [Branch.of_flat(tensors[start : start + size], activation) for start in range(0, n * size, size)]


def _downs(branches: Sequence[Branch]) -> list[Tensor]:
    """Return the down projections: one for each branch, one that all share, or none."""
    return [branch.down for branch in branches if branch.down is not None]


def _forward(
    x: Any, h: Any, weights: Any, biases: Any, tensors: Any, activation: str, training: bool = False
) -> list[Tensor]:
    """Return y (..., d_out) of each linear, then h (T, m r) of the m down projections, empty where it was given."""
    if (fast := _native(activation, x, h, weights, tensors)) is not None:
        found: list[Tensor] = fast.noble_forward(x, h, weights, biases, tensors)
        return found
    branches = _branches(tensors, len(weights), activation)
    downs = _downs(branches)
    x_TI = x.reshape(-1, x.shape[-1])
    us_TR: Iterable[Tensor]
    if len(branches) == 1 and downs and (kernel := _down_kernel(x_TI, branches[0])) is not None:
        h_TR, *us_TR = kernel.down_forward(x_TI, branches[0])
    else:
        h_TR = F.linear(x, _joined(downs)) if h is None else h
        h_TR = h_TR.reshape(-1, h_TR.shape[-1])
        us_TR = map(_bottleneck_forward, _parted(h_TR, downs, len(branches)), branches)
    ys = []
    for weight, bias, branch, u_TR in zip(weights, biases, branches, us_TR, strict=True):
        y_TO = _main_plus_up(x_TI, weight, bias, u_TR, branch.up, training=training)
        ys.append(reshaped(y_TO, (*x.shape[:-1], branch.up.shape[0])))
    return [*ys, h_TR if h is None else x.new_empty(0)]


def _joined(downs: list[Tensor]) -> Tensor:
    return torch.cat(downs) if len(downs) > 1 else downs[0]


def _parted(h_TR: Tensor, downs: list[Tensor], n: int) -> list[Tensor]:
    """Return h of each of n branches, contiguous where each has its own."""
    return [each.contiguous() for each in h_TR.chunk(n, 1)] if len(downs) > 1 else [h_TR] * n


def _backward(
    dys: Sequence[Tensor], x: Tensor, h: Tensor, weights: Tensors, tensors: Tensors, activation: str, wanted: list[bool]
) -> list[Tensor | None]:
    """Return the gradients of x, h, weights, biases (None where `wanted` says no), and of the branches' tensors."""
    if (fast := _native(activation, x, h, weights, tensors)) is not None:
        found: list[Tensor | None] = fast.noble_backward(dys, x, h, weights, tensors, wanted)
        return found
    n = len(weights)
    branches = _branches(tensors, n, activation)
    downs = _downs(branches)
    x_TI, h_TR = x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1])
    dx_TI: Tensor | None = None
    join = n == 1 and bool(downs) and weights[0] is not None and wanted[0] and wanted[2]
    join = join and _copies(JOIN_DOWN, x_TI, dys[0].shape[-1] + h_TR.shape[1], x_TI.shape[1])
    dweights, dbiases, dhs, dbranches = [], [], [], []
    rows = zip(dys, weights, branches, _parted(h_TR, downs, n), wanted[2 : 2 + n], wanted[2 + n :], strict=True)
    for dy, weight, branch, own, weight_wanted, bias_wanted in rows:
        dy_TO = dy.reshape(-1, dy.shape[-1])
        u, dh, dinner = _bottleneck_backward(own, dy_TO @ branch.up, branch)
        dhs.append(dh)
        dbranches.append([None, dy_TO.t() @ u, *dinner])
        del u
        if wanted[0] and weight is not None and not join:
            dx_TI = torch.mm(dy_TO, weight) if dx_TI is None else dx_TI.addmm_(dy_TO, weight)
        dweights.append(dy_TO.t() @ x_TI if weight_wanted and not join else None)
        dbiases.append(dy_TO.sum(0) if bias_wanted else None)
    dh_TR = torch.cat(dhs, 1) if len(downs) > 1 else sum(dhs[1:], dhs[0])
    if join:
        both_TOR = torch.cat((dy_TO, dh_TR), dim=1)
        dx_TI = both_TOR @ torch.cat((weight, downs[0]))
        dweight, ddown = (both_TOR.t() @ x_TI).split((dy_TO.shape[1], dh_TR.shape[1]))
        dweights, dbranches[0][0] = [dweight], ddown.clone()  # results of an op share no memory
    elif downs:
        if wanted[0]:
            down = _joined(downs)
            dx_TI = dh_TR @ down if dx_TI is None else dx_TI.addmm_(dh_TR, down)
        ddown = dh_TR.t() @ x_TI
        ddowns = [ddown] if len(downs) == 1 else [each.clone() for each in ddown.chunk(n)]
        for dbranch, own in zip(dbranches, ddowns, strict=False):  # the first alone where it is shared
            dbranch[0] = own
    # Elementwise steps keep the layout of an h that is given; the op's results are contiguous.
    dgiven = dh_TR.reshape(h.shape).contiguous() if wanted[1] else None
    dx = None if dx_TI is None else dx_TI.view(x.shape)
    return [dx, dgiven, *dweights, *dbiases, *itertools.chain(*dbranches)]


def _main_plus_up(
    x_TI: Tensor, weight: Tensor | None, bias: Tensor | None, u_TR: Tensor, up: Tensor, *, training: bool
) -> Tensor:
    """Return `x weight^T + bias + u up^T` (T, d_out) without autograd, in one product or two (`JOIN_UP`)."""
    if weight is None:
        return F.linear(u_TR, up)
    if training and _copies(JOIN_UP, x_TI, x_TI.shape[1] + up.shape[1], up.shape[0]):
        return F.linear(torch.cat((x_TI, u_TR), dim=1), torch.cat((weight, up), dim=1), bias)
    return F.linear(x_TI, weight, bias).addmm_(u_TR, up.t())


def _copies(constant: bool | None, x_TI: Tensor, width: int, across: int) -> bool:
    """Return whether to copy T and `across` rows of `width` numbers into one, or to pass twice over (T, across)."""
    if constant is not None:
        return constant
    tokens, aligned = x_TI.shape[0], x_TI.dtype.itemsize * width % 16 == 0  # for the matrix units
    return x_TI.is_cuda and aligned and width * (tokens + across) < tokens * across


def _bottleneck_forward(h_TR: Tensor, branch: Branch) -> Tensor:
    """Return `bottleneck` (T, r) without autograd, by the kernel where it can be."""
    kernel = _kernel(h_TR, h_TR.shape[-1], branch)
    return (kernel.forward if kernel else bottleneck)(h_TR, branch)


def _bottleneck_backward(h_TR: Tensor, du_TR: Tensor, branch: Branch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return u (recomputed), the gradient of h, and those of mixes, frequencies and phases in one list."""
    if (kernel := _kernel(h_TR, h_TR.shape[-1], branch)) is not None:
        return kernel.backward(h_TR, du_TR, branch)
    function, cosine = BRANCH_ACTIVATIONS[branch.activation], branch.activation == "cosine"
    inputs, arguments, outputs = [], [], []  # of each activation, (T, r)
    u = h_TR
    for layer in range(len(branch.mixes) + 1):
        if layer > 0:
            u = F.linear(u, branch.mixes[layer - 1])
        inputs.append(u)
        arguments.append(_argument(u, branch, layer))
        u = function(arguments[-1]).to(h_TR.dtype)
        outputs.append(u)

    du = du_TR
    dmixes: list[Tensor] = []
    dfrequencies: list[Tensor] = []
    dphases: list[Tensor] = []
    for layer in reversed(range(len(branch.mixes) + 1)):
        du_wide = wide(du)
        if cosine:
            frequency, phase = branch.frequencies[layer], branch.phases[layer]
            dargument = arguments[layer].sin_().mul_(du_wide).neg_()
            dphases.insert(0, dargument.sum(0).to(phase.dtype))
            # du is not needed again: its memory takes the product.
            scaled = torch.mul(dargument, wide(inputs[layer]), out=du_wide)
            dfrequencies.insert(0, scaled.sum(0).to(frequency.dtype))
            du = dargument.mul_(wide(frequency)).to(h_TR.dtype)
        else:
            du = _GRADIENTS[branch.activation](du_wide, arguments[layer]).to(h_TR.dtype)
        if layer > 0:
            dmixes.insert(0, du.t() @ outputs[layer - 1])
            du = du @ branch.mixes[layer - 1]
    return outputs[-1], du, [*dmixes, *dfrequencies, *dphases]


def _native(activation: str, x: Tensor, h: Tensor | None, weights: Tensors, tensors: Tensors) -> Any:
    """Return the C++ operators where these tensors, one of each kind, are theirs to read."""
    ours = activation == "cosine" and not (JOIN_UP or JOIN_DOWN)
    return native(x, h, weights[0], tensors[1], tensors[-1]) if ours else None


def _kernel(x: Tensor, rank: int, branch: Branch, *down: Tensor) -> ModuleType | None:
    """Return `kernel.py` where this bottleneck is its formula and its numbers are a GPU's."""
    mixes = branch.mixes
    cosnet = branch.activation == "cosine" and len(mixes) == 1 and mixes[0].shape[0] == rank
    if not cosnet or any(each.dtype != x.dtype for each in (*mixes, *down)):
        return None
    return kernels("noble", x, *down, *mixes, *branch.frequencies, *branch.phases)


def _down_kernel(x_TI: Tensor, branch: Branch) -> ModuleType | None:
    """Return the same where it also takes the down projection (`FUSE_DOWN`)."""
    down, fuse = branch.down, FUSE_DOWN
    assert down is not None
    (tokens, d_in), rank = x_TI.shape, down.shape[0]
    if fuse is None:
        aligned = x_TI.dtype.itemsize == 2 and d_in % 8 == 0
        fuse = x_TI.is_cuda and aligned and -(-tokens // TILE) >= processors(x_TI.device)
    return _kernel(x_TI, rank, branch, down) if fuse and rank <= FUSED_DOWN_RANK else None


def _backward_body(dys: Sequence[Tensor], x: Tensor, *rest: Any) -> list[Tensor]:
    return filled(_backward(dys, x, *rest), x)


def _fake_forward(
    x: Any, h: Any, weights: Any, biases: Any, tensors: Any, activation: Any, training: Any = False
) -> Any:
    branches = _branches(tensors, len(weights), activation)
    ys = [x.new_empty(*x.shape[:-1], branch.up.shape[0]) for branch in branches]
    saved = (0,) if h is not None else (x.numel() // x.shape[-1], sum(down.shape[0] for down in _downs(branches)))
    return [*ys, x.new_empty(saved)]


def _fake_backward(dys: Any, x: Any, h: Any, weights: Any, tensors: Any, activation: Any, wanted: Any) -> Any:
    biases = [dy.new_empty(dy.shape[-1]) for dy in dys]
    wanted = [*wanted, *(each is not None for each in tensors)]
    return fake_gradients([x, h, *weights, *biases, *tensors], wanted, x)


_forward_op = custom_op(
    "noble_forward(Tensor x, Tensor? h, Tensor?[] weights, Tensor?[] biases, Tensor?[] tensors, str activation, "
    "bool training=False) -> Tensor[]",
    _forward,
    _fake_forward,
)
_backward_op = custom_op(
    "noble_backward(Tensor[] dys, Tensor x, Tensor h, Tensor?[] weights, Tensor?[] tensors, str activation, "
    "bool[] wanted) -> Tensor[]",
    _backward_body,
    _fake_backward,
)
