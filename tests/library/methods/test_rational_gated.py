"""R(gate) * up: against the float64 formula, eager and compiled, and what it keeps."""

import pytest
import torch

from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.rational.gated import rational_gated, rational_gated_reference
from nonlinear_lowrank.methods.rational.op import FORMS, LinearTails, denominator_size

TAILS = LinearTails(-1.5, 2.0, 0.1, 0.9)


def make(form, *, batch=(3, 5), channels=12, groups=4, dtype=torch.float64):
    shapes = [(*batch, channels)] * 2 + [(groups, 6), (groups, denominator_size(4, form))]
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    return [(each * (0.3 if index > 1 else 1)).to(dtype).requires_grad_() for index, each in enumerate(leaves)]


def outputs(function, leaves, *rest):
    y = function(*leaves, *rest)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("tails", [None, TAILS], ids=["rational", "linear"])
@pytest.mark.parametrize("form", FORMS)
def test_matches_the_plain_formula_in_float64(form, tails, compiled):
    torch.compiler.reset()
    leaves = make(form)
    function = torch.compile(rational_gated, fullgraph=True, backend="aot_eager") if compiled else rational_gated
    for ours, expected in zip(
        outputs(function, leaves, form, tails), outputs(rational_gated_reference, leaves, form, tails), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_keeps_its_inputs_alone():
    leaves = make("abs_of_sum", batch=(64,), dtype=torch.float32)
    kept = saved_bytes(rational_gated, *leaves, parameters=leaves[2:])
    assert kept == leaves[0].nbytes + leaves[1].nbytes
    assert saved_bytes(rational_gated_reference, *leaves, parameters=leaves[2:]) > 3 * kept


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_only_what_is_asked_for(wanted):
    leaves = make("sum_of_abs")
    expected = outputs(rational_gated_reference, leaves, "sum_of_abs")[1 + wanted]
    only = [each.detach().requires_grad_(index == wanted) for index, each in enumerate(leaves)]
    y = rational_gated(*only, "sum_of_abs")
    found = torch.autograd.grad(y, only[wanted], torch.ones_like(y).cumsum(-1))[0]
    torch.testing.assert_close(found, expected)


def test_wrong_inputs_and_second_derivatives():
    leaves = make("abs_of_sum")
    with pytest.raises(UserError, match="one shape and type"):
        rational_gated(leaves[0], leaves[1][..., :4], *leaves[2:])
    with pytest.raises(UserError, match="do not divide"):
        rational_gated(leaves[0][..., :10], leaves[1][..., :10], *leaves[2:])
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(rational_gated(*leaves).sum(), leaves[0], create_graph=True)
