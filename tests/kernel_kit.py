"""What the tests of the Triton kernels share: the way to the kernels on a CPU, and the bound on their errors."""

import importlib

import torch

from nonlinear_lowrank.ops import rational, rational_gated, rational_gated_reference, rational_reference
from nonlinear_lowrank.ops.kernels import load

CALLERS = ("cosnet", "rational_gpu", "sine")
"""Files of `ops` that ask for kernels."""


def route(monkeypatch, calls):
    """Sends every operator on the CPU to its kernels (in Triton's interpreter), and notes which were asked for."""

    def chosen(name, *tensors):
        calls.append(name)
        return load(name)

    for file in CALLERS:
        monkeypatch.setattr(importlib.import_module(f"nonlinear_lowrank.ops.{file}"), "kernels", chosen)


def with_gradients(function, leaves, dy):
    """y and the gradient of every leaf."""
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def cast(tensors, dtype):
    """Leaves of a type with the same numbers, in the same layout."""
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def jittered(tensors):
    """Float64 leaves moved by a unit in float32's last place, up or down by chance."""
    return cast([each.double() * (1 + 2**-23 * torch.randn_like(each).sign()) for each in tensors], torch.float64)


def assert_as_good_as_plain(fast, plain, exact, moved):
    """err(fast) <= 2 (err(plain) + err(moved)) + 1e-6, all against float64, relative to the largest entry.

    `moved` is the exact answer for numbers that float32 hardly tells from the given ones. Where the terms of a sum
    cancel, the plain formula's rounding may come out near zero by luck; that the data ask for more shows there.
    """
    for index, (ours, reference, truth, near) in enumerate(zip(fast, plain, exact, moved, strict=True)):
        scale = truth.abs().max().clamp(min=1e-30)
        error, rounding, condition = ((each.double() - truth).norm() / scale for each in (ours, reference, near))
        assert error <= 2 * (rounding + condition) + 1e-6, (
            f"number {index}: {error:.2e}, the plain formula {rounding:.2e}, the data's own {condition:.2e}"
        )


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
