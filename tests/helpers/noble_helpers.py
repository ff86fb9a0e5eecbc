"""Helpers of the tests of NOBLE's operators: random arguments, and all gradients."""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from nonlinear_lowrank.methods.noble.op import Branch

BOTTLENECKS = [
    *((activation, depth) for activation in ("cosine", "tanh", "leaky_relu", "gelu", "silu") for depth in (1, 2)),
    ("cosine", 3),
]


def leaf(*shape, scale=1.0, dtype=torch.float64):
    """Return normal numbers that require gradients."""
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


def make_branch(activation="cosine", depth=2, *, d_in=12, d_out=10, r=4, dtype=torch.float64, down=True):
    """Return a branch of fresh tensors; without `down` where h is given, or another branch has it."""
    cosines = depth if activation == "cosine" else 0
    return Branch(
        leaf(r, d_in, scale=d_in**-0.5, dtype=dtype) if down else None,
        leaf(d_out, r, scale=r**-0.5, dtype=dtype),
        [leaf(r, r, scale=r**-0.5, dtype=dtype) for _ in range(depth - 1)],
        [leaf(r, dtype=dtype) for _ in range(cosines)],
        [leaf(r, dtype=dtype) for _ in range(cosines)],
        activation,
    )


def make_linear(activation="cosine", depth=2, *, batch=(3, 5), bias=True, dtype=torch.float64, **sizes):
    """Return x, weight, bias and branch."""
    branch = make_branch(activation, depth, dtype=dtype, **sizes)
    d_in, d_out = sizes.get("d_in", 12), sizes.get("d_out", 10)
    x, weight = leaf(*batch, d_in, dtype=dtype), leaf(d_out, d_in, scale=d_in**-0.5, dtype=dtype)
    return x, weight, leaf(d_out, dtype=dtype) if bias else None, branch


def tensors(arguments):
    """Return the tensors in nested arguments."""
    return [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]


def changed(change, arguments):
    """Return nested arguments with every tensor changed by a function of lists (`rounding_helpers`)."""
    return tree_map(lambda each: change([each])[0] if isinstance(each, torch.Tensor) else each, arguments)


def outputs_and_gradients(function, arguments, dys):
    """Return the output, or outputs, and the gradients of all tensors in the arguments."""
    ys = function(*arguments)
    ys, dys = ([each] if isinstance(each, torch.Tensor) else list(each) for each in (ys, dys))
    dys = [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)]
    return [*ys, *torch.autograd.grad(ys, tensors(arguments), dys)]
