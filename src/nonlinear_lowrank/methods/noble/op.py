"""NOBLE's operator: `reference.noble_linear_reference`, lean.

It keeps only h (tokens x r) for backward beside what a plain linear keeps (its input): everything else in the branch is
r wide and cheap to recompute. On NVIDIA GPUs CosNet between its projections is a kernel (`kernel.py`). Under
torch.compile the whole forward and the whole backward are opaque custom ops: the compiler's partitioner would otherwise
decide again what to keep, and keeps more.

T tokens; in names of tensors I is d_in, O is d_out, R is r.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.kernels import kernels, processors
from nonlinear_lowrank.ops.one_op import as_one_op
from nonlinear_lowrank.ops.reshaped import reshaped

from .reference import LEAKY_SLOPE, Branch, activation_function, argument, bottleneck, noble_linear_reference, wide

JOIN_UP: bool | None = None
"""Whether training computes `[x | u] [weight | up]^T` instead of `x weight^T`, then `+= u up^T` in place. None: on GPUs
where that moves fewer numbers, d_in + r < T d_out / (T + d_out), and rows are aligned. Never without gradients: a
branch that starts at zero has to leave the plain output to the bit. Not measured yet (benchmarks/gpu.py, "forms")."""

FUSE_DOWN: bool | None = None
"""Whether CosNet's kernel takes the down projection as well, up to rank `FUSED_DOWN_RANK`. None: for 16-bit numbers in
aligned rows, where a tile of tokens is there for every processor. Not measured yet (benchmarks/gpu.py, "forms")."""
FUSED_DOWN_RANK = 128
FUSED_DOWN_TOKENS = 64  # in a tile


def noble_linear(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, branch: Branch, h: Tensor | None = None
) -> Tensor:
    """Return `x weight^T + bias + bottleneck(x down^T) up^T`.

    Under autocast x, h and every matrix are in the autocast type, frequencies and phases stay as they are.

    Args:
        x: (..., d_in).
        weight: (d_out, d_in); None: the branch alone.
        bias: (d_out), or None.
        branch: of the weight's widths.
        h: (..., r), in place of x down^T where several branches share one down projection.

    Returns:
        (..., d_out).

    Raises:
        RuntimeError: second derivatives are asked for (the reference has them).
    """
    if (dtype := autocast_dtype(x)) is not None:
        # Cast once, out here: backward runs outside autocast, and two linears on one float32 x would
        # each keep a copy of their own.
        x, branch = x.to(dtype), branch.with_matrices(dtype)
        weight, bias, h = (None if each is None else each.to(dtype) for each in (weight, bias, h))
    if h is not None:
        branch = branch._replace(down=None)
    if torch.is_grad_enabled():
        y, _ = _NobleLinear.apply(x, weight, bias, h, branch.activation, *branch.flat())
        return y
    if torch.compiler.is_compiling():
        return noble_linear_reference(x, weight, bias, branch, h)
    return _forward(x, weight, bias, h, branch.flat(), branch.activation)[0]


def noble_branch(x: Tensor, branch: Branch, h: Tensor | None = None) -> Tensor:
    """Return the branch alone, (..., d_out), for a linear whose weight is not at hand (quantized, hooked)."""
    return noble_linear(x, None, None, branch, h)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast gives a linear of this input, or None."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class _NobleLinear(torch.autograd.Function):
    """Saves x, h and the parameters."""

    @staticmethod
    def forward(x, weight, bias, given, activation, *tensors):
        run = _forward_op if as_one_op() else _forward
        return run(x, weight, bias, given, tensors, activation, training=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _bias, given, ctx.activation, *tensors = inputs
        _, h = output
        ctx.mark_non_differentiable(h)
        ctx.save_for_backward(x, h if given is None else given, weight, *tensors)

    @staticmethod
    def backward(ctx, dy, _dh):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "second derivatives through noble_linear are not defined; use noble_linear_reference for them"
            )
        x, h, weight, down, *others = ctx.saved_tensors
        wanted = [bool(need) for need in ctx.needs_input_grad[:3]]
        wanted[0] &= weight is not None or down is not None  # else y does not depend on x
        run = _backward_op if torch.compiler.is_compiling() else _backward
        found = run(dy, x, h, weight, [down, *others], ctx.activation, wanted)
        dense = [each if want else None for each, want in zip(found, wanted, strict=False)]
        dfirst, *dothers = found[3:]
        return *dense, dfirst if down is None else None, None, None if down is None else dfirst, *dothers


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    h: Tensor | None,
    tensors: Sequence[Tensor | None],
    activation: str,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return y (..., d_out) and h (T, r), which is empty where it was given."""
    branch, x_TI = Branch.of_flat(tensors, activation), x.reshape(-1, x.shape[-1])
    if branch.down is not None and (kernel := _down_kernel(x_TI, branch.down, branch)) is not None:
        h_TR, u_TR = kernel.down_forward(x_TI, branch)
    else:
        h_TR = F.linear(x, branch.down) if h is None else h  # type: ignore[arg-type]
        h_TR = h_TR.reshape(-1, h_TR.shape[-1])
        u_TR = bottleneck_forward(h_TR, branch)
    if weight is None:
        y_TO = F.linear(u_TR, branch.up)
    else:
        y_TO = main_plus_up(x_TI, weight, bias, u_TR, branch.up, training=training)
    return reshaped(y_TO, (*x.shape[:-1], branch.up.shape[0])), h_TR if h is None else x.new_empty(0)


def _backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    weight: Tensor | None,
    tensors: Sequence[Tensor | None],
    activation: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of x, weight, bias, down (of h where there is none) and the branch's other tensors.

    The first three are empty where `wanted` says no: a frozen dense weight costs no product.
    """
    branch = Branch.of_flat(tensors, activation)
    dy_TO, x_TI, h_TR = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1])
    u, dh, dinner = bottleneck_backward(h_TR, dy_TO @ branch.up, branch)
    dup = dy_TO.t() @ u
    del u

    dx = dy.new_empty(0)
    if wanted[0]:
        if weight is None:
            dx_TI = dh @ branch.down  # type: ignore[operator]
        else:
            dx_TI = torch.mm(dy_TO, weight)
            if branch.down is not None:
                dx_TI.addmm_(dh, branch.down)
        dx = dx_TI.view(x.shape)
    dweight = dy_TO.t() @ x_TI if wanted[1] else dy.new_empty(0)
    dbias = dy_TO.sum(0) if wanted[2] else dy.new_empty(0)
    # Elementwise steps keep the layout of an h that is given; the op's results are contiguous.
    dfirst = dh.reshape(h.shape).contiguous() if branch.down is None else dh.t() @ x_TI
    return [dx, dweight, dbias, dfirst, dup, *dinner]


def main_plus_up(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None, u_TR: Tensor, up: Tensor, *, training: bool
) -> Tensor:
    """Return `x weight^T + bias + u up^T` (T, d_out) without autograd, in one product or two (`JOIN_UP`)."""
    (tokens, d_in), (d_out, rank) = x_TI.shape, up.shape
    join = JOIN_UP
    if join is None:
        aligned = x_TI.dtype.itemsize * (d_in + rank) % 16 == 0  # for the matrix units
        join = x_TI.is_cuda and aligned and (d_in + rank) * (tokens + d_out) < tokens * d_out
    if training and join:
        return F.linear(torch.cat((x_TI, u_TR), dim=1), torch.cat((weight, up), dim=1), bias)
    return F.linear(x_TI, weight, bias).addmm_(u_TR, up.t())


def bottleneck_forward(h_TR: Tensor, branch: Branch) -> Tensor:
    """Return `bottleneck` (T, r) without autograd, by the kernel where it can be."""
    kernel = _kernel(h_TR, h_TR.shape[-1], branch)
    return bottleneck(h_TR, branch) if kernel is None else kernel.forward(h_TR, branch)


def bottleneck_backward(h_TR: Tensor, du_TR: Tensor, branch: Branch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return u (recomputed), the gradient of h, and those of mixes, frequencies and phases in one list."""
    if (kernel := _kernel(h_TR, h_TR.shape[-1], branch)) is not None:
        return kernel.backward(h_TR, du_TR, branch)  # type: ignore[no-any-return]
    function, cosine = activation_function(branch.activation), branch.activation == "cosine"
    inputs, arguments, outputs = [], [], []  # of each activation, (T, r)
    u = h_TR
    for layer in range(len(branch.mixes) + 1):
        if layer > 0:
            u = F.linear(u, branch.mixes[layer - 1])
        inputs.append(u)
        arguments.append(argument(u, branch, layer))
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
            du = _activation_gradient(du_wide, arguments[layer], outputs[layer], branch.activation).to(h_TR.dtype)
        if layer > 0:
            dmixes.insert(0, du.t() @ outputs[layer - 1])
            du = du @ branch.mixes[layer - 1]
    return outputs[-1], du, [*dmixes, *dfrequencies, *dphases]


def _activation_gradient(du: Tensor, z: Tensor, u: Tensor, activation: str) -> Tensor:
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(du, torch.tanh(z) if u.dtype != z.dtype else u)
    if activation == "leaky_relu":
        return torch.ops.aten.leaky_relu_backward(du, z, LEAKY_SLOPE, False)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(du, z)
    return torch.ops.aten.silu_backward(du, z)


def _kernel(x: Tensor, rank: int, branch: Branch, *down: Tensor) -> ModuleType | None:
    """Return `kernel.py` where this bottleneck is its formula and its numbers are a GPU's."""
    mixes = branch.mixes
    cosnet = branch.activation == "cosine" and len(mixes) == 1 and mixes[0].shape[0] == rank
    if not cosnet or any(each.dtype != x.dtype for each in (*mixes, *down)):
        return None
    return kernels("noble", x, *down, *mixes, *branch.frequencies, *branch.phases)


def _down_kernel(x_TI: Tensor, down: Tensor, branch: Branch) -> ModuleType | None:
    """Return the same where it also takes the down projection (`FUSE_DOWN`)."""
    (tokens, d_in), rank = x_TI.shape, down.shape[0]
    fuse = FUSE_DOWN
    if fuse is None:
        aligned = x_TI.dtype.itemsize == 2 and d_in % 8 == 0
        fuse = x_TI.is_cuda and aligned and -(-tokens // FUSED_DOWN_TOKENS) >= processors(x_TI.device)
    return _kernel(x_TI, rank, branch, down) if fuse and rank <= FUSED_DOWN_RANK else None


# Plain registrations: torch.library.custom_op wraps every call in checks that take longer than a small
# layer's elementwise part. CompositeExplicitAutograd is any device; autograd is `_NobleLinear`'s.
_LIBRARY = torch.library.Library("nonlinear_lowrank", "FRAGMENT")
_LIBRARY.define(
    "noble_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? h, Tensor?[] tensors, str activation, "
    "bool training=False) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "noble_backward(Tensor dy, Tensor x, Tensor h, Tensor? weight, Tensor?[] tensors, str activation, bool[] wanted) "
    "-> Tensor[]"
)
_LIBRARY.impl("noble_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("noble_backward", _backward, "CompositeExplicitAutograd")
_forward_op = torch.ops.nonlinear_lowrank.noble_forward.default
_backward_op = torch.ops.nonlinear_lowrank.noble_backward.default


@torch.library.register_fake("nonlinear_lowrank::noble_forward")
def _(x, weight, bias, h, tensors, activation, training=False):
    down, up = tensors[:2]
    kept = x.new_empty(x.numel() // x.shape[-1], down.shape[0]) if h is None else x.new_empty(0)
    return x.new_empty(*x.shape[:-1], up.shape[0]), kept


@torch.library.register_fake("nonlinear_lowrank::noble_backward")
def _(dy, x, h, weight, tensors, activation, wanted):
    down, *others = tensors
    return [
        x.new_empty(x.shape) if wanted[0] else dy.new_empty(0),
        dy.new_empty(weight.shape) if wanted[1] else dy.new_empty(0),
        dy.new_empty(weight.shape[0]) if wanted[2] else dy.new_empty(0),
        *(each.new_empty(each.shape) for each in (h if down is None else down, *others)),
    ]
