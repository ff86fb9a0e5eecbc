"""Helpers of the tests of the Triton kernels: the way to the kernels on a CPU, and the comparison with the formula."""

import importlib

import torch

from nonlinear_lowrank.methods.noble.op import Branch, noble_linear, noble_linear_reference
from nonlinear_lowrank.methods.rational.op import rational, rational_gated
from nonlinear_lowrank.methods.rational.reference import rational_gated_reference, rational_reference
from nonlinear_lowrank.ops.kernels import load
from rounding_helpers import assert_as_good_as_plain, cast, jittered

CALLERS = ("methods.noble.op", "methods.rational.op", "ops.sine")
"""Modules that ask for kernels."""


def route(monkeypatch, calls):
    """Sends every operator on the CPU to its kernels (in Triton's interpreter), and notes which were asked for."""

    def chosen(name, *tensors):
        calls.append(name)
        return load(name)

    for file in CALLERS:
        monkeypatch.setattr(importlib.import_module(f"nonlinear_lowrank.{file}"), "kernels", chosen)


def with_gradients(function, leaves, dy):
    """y and the gradient of every leaf."""
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def compare(fast, plain, leaves, dy):
    """The fast one twice: within the bound, and two runs equal to the bit. Returns its y and gradients."""
    first, again = (with_gradients(fast, leaves, dy) for _ in range(2))
    reference = with_gradients(plain, leaves, dy)
    exact = with_gradients(plain, cast(leaves, torch.float64), dy)
    moved = with_gradients(plain, jittered(leaves), jittered([dy])[0].detach())
    assert_as_good_as_plain(first, reference, exact, moved)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    return first


def rational_pair(form, tails, gated):
    """The fast rational and the plain one, of flat tensors."""

    def by(function):
        return lambda *tensors: function(*tensors, form, tails)

    return (by(rational_gated), by(rational_gated_reference)) if gated else (by(rational), by(rational_reference))


def cosnet_leaves(tokens, d_in, d_out, rank):
    """x, not contiguous, weight, and the tensors of a branch."""
    leaves = [torch.randn(d_in, tokens).t(), torch.randn(d_out, d_in) / d_in**0.5]
    leaves += [torch.randn(rank, d_in) / d_in**0.5, torch.randn(d_out, rank), torch.randn(rank, rank) / rank**0.5]
    leaves += [*(0.5 + torch.rand(2, rank)), *torch.randn(2, rank)]
    return [each.detach().requires_grad_() for each in leaves]


def cosnet_pair():
    """The fast NOBLE linear and the plain one, of flat tensors."""

    def by(function):
        return lambda x, weight, *flat: function(x, weight, None, Branch.of_flat(flat, "cosine"))

    return by(noble_linear), by(noble_linear_reference)
