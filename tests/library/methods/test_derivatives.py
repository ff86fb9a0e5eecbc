"""Derivatives beyond a plain backward: of gradients, forward-mode, and torch.func, of operators and of whole models."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp

from op_helpers import ROWS, assert_all_close

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # forward mode imports torch.jit

rows = pytest.mark.parametrize("row", ROWS)
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def random_like(tensors):
    return [torch.randn_like(each) for each in tensors]


@rows
def test_gradients_of_gradients_are_the_formulas(row):
    case = ROWS[row]()
    leaves, dys = case.leaves(), [dy.requires_grad_() for dy in case.dys()]
    weights = random_like(leaves)

    def second(function):
        first = torch.autograd.grad(case.run(function), leaves, dys, create_graph=True)
        total = sum((one * weight).sum() for one, weight in zip(first, weights, strict=True))
        return [*first, *torch.autograd.grad(total, [*leaves, *dys], materialize_grads=True)]

    assert_all_close(second(case.fast), second(case.plain), **CLOSE)


@rows
@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no-grad"])
def test_tangents_are_the_formulas(row, enabled):
    case = ROWS[row]()
    leaves = case.leaves()
    tangents = random_like(leaves)

    def dual(function):
        with torch.set_grad_enabled(enabled), forward_ad.dual_level():
            inputs = [
                forward_ad.make_dual(each.detach(), t).requires_grad_(True)
                if enabled else forward_ad.make_dual(each.detach(), t)
                for each, t in zip(leaves, tangents, strict=True)
            ]  # fmt: skip
            return [each.clone() for y in case.run(function, inputs) for each in forward_ad.unpack_dual(y)]

    def transformed(function):
        with torch.set_grad_enabled(enabled):
            primals = tuple(each.detach() for each in leaves)
            return jvp(lambda *some: tuple(case.run(function, list(some))), primals, tuple(tangents))

    assert_all_close(dual(case.fast), dual(case.plain), **CLOSE)
    for one, other in zip(transformed(case.fast), transformed(case.plain), strict=True):
        assert_all_close(one, other, **CLOSE)
