"""The rational operators: both denominators, anchors to the bit, tails, and the formulas of activations."""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F

from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.rational import op
from nonlinear_lowrank.methods.rational.op import FORMS, LinearTails, rational, rational_anchored, rational_gated
from nonlinear_lowrank.methods.rational.reference import FORMULAS, activation, activation_gradient, rational_reference
from op_helpers import TAILS, assert_all_close
from op_helpers import rational as case_of

forms = pytest.mark.parametrize("form", FORMS)


def test_the_two_denominators_are_the_papers_equation_6_and_kats():
    x = torch.randn(7, 6, dtype=torch.float64)
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    expected_6, expected_kat = torch.empty_like(x), torch.empty_like(x)
    for channel in range(6):
        g, z = channel // 3, x[:, channel]
        p = a[g, 0] + a[g, 1] * z + a[g, 2] * z * z
        expected_6[:, channel] = p / (1 + (b[g, 0] + b[g, 1] * z + b[g, 2] * z * z).abs())
        absolute = z.abs()
        q = 1 + b[g, 0].abs() * absolute + b[g, 1].abs() * absolute**2 + b[g, 2].abs() * absolute**3
        expected_kat[:, channel] = p / q
    torch.testing.assert_close(rational(x, a, b, "abs_of_sum"), expected_6)
    torch.testing.assert_close(rational(x, a, b, "sum_of_abs"), expected_kat)


def test_compiles_with_a_changing_batch():
    torch.compiler.reset()
    compiled = torch.compile(rational, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 7, 11):
        case = case_of(batch=(batch,), dtype=torch.float32)
        dys = case.dys()
        assert_all_close(case.gradients(compiled, dys), case.gradients(rational, dys), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forms
def test_anchored_starts_bit_equal(formula, dtype, form):
    x = (4 * torch.randn(50, 12)).to(dtype)
    _, numerator, denominator = case_of(form=form, dtype=torch.float32).leaves()
    base = (numerator.detach(), denominator.detach())
    y = rational_anchored(x, numerator, denominator, *base, formula, form, TAILS)
    assert torch.equal(y, activation(x, formula))


@pytest.mark.parametrize("formula", FORMULAS)
def test_gradients_of_the_formulas(formula):
    x, dy = torch.randn(200, dtype=torch.float64, requires_grad=True), torch.randn(200, dtype=torch.float64)
    (expected,) = torch.autograd.grad(activation(x, formula), x, dy)
    # gelu_fast rounds sqrt(2 / pi) to ten digits
    torch.testing.assert_close(activation_gradient(dy, x.detach(), formula), expected, rtol=1e-8, atol=1e-9)


def test_pieces_of_eager_mode_add_up(monkeypatch):
    case = case_of("rational", "sum_of_abs", TAILS, batch=(23,))
    dys = case.dys()
    whole = case.gradients(rational, dys)
    monkeypatch.setattr(op, "_PIECE_CPU", 5 * 12)  # 4 pieces of 5 rows and one of 3
    assert_all_close(case.gradients(rational, dys), whole)


def test_zero_coefficients_of_the_sum_of_abs_can_move():
    """sign(0) = 0 would freeze a denominator that starts at zero."""
    x = torch.randn(40, 4)
    denominator = torch.zeros(2, 4, requires_grad=True)
    rational(x, torch.ones(2, 2), denominator, "sum_of_abs").square().sum().backward()
    assert (denominator.grad != 0).all()


@forms
def test_tails_are_straight_and_joined_with_the_slope_of_the_function(form):
    _, *coefficients = case_of(form=form, channels=1, groups=1).leaves()
    tails = LinearTails(-2.0, 3.0, 0.25, -1.5)

    def at(*points, function=rational, tails=tails):
        x = torch.tensor(points, dtype=torch.float64)[:, None].requires_grad_()
        y = function(x, *coefficients, form, tails)
        return y[:, 0].detach(), torch.autograd.grad(y.sum(), x)[0][:, 0]

    inside, slopes = at(-2.0, 3.0, tails=None)
    for function in (rational, rational_reference):
        y, slope = at(-2.0, 3.0, function=function)
        torch.testing.assert_close(y, inside)
        torch.testing.assert_close(slope, slopes)
    torch.testing.assert_close(at(-12.0, 103.0)[0], inside + torch.tensor([-2.5, -150.0], dtype=torch.float64))
    assert at(1e30, -1e30)[0].isfinite().all()


def test_wrong_inputs_are_one_clear_line():
    x, numerator, denominator = case_of().leaves()
    base = [numerator[:1], denominator[:1]]
    for run, message in [
        (lambda: rational(x, numerator, denominator, "eq6"), "form 'eq6'; choose one of abs_of_sum, sum_of_abs"),
        (lambda: rational(x[..., :10], numerator, denominator), "10 channels do not divide into 4 groups"),
        (lambda: rational(x, numerator, denominator[:2]), "as many groups above as below"),
        (lambda: rational_gated(x, x[..., :4], numerator, denominator), "one shape and type"),
        (lambda: rational_anchored(x, numerator, denominator, *base, "gelou"), "unknown activation 'gelou'"),
    ]:
        with pytest.raises(UserError, match=message):
            run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rational", "rational_anchored"])
@pytest.mark.parametrize("groups", [8, 64])
@forms
def test_compiled_time_beside_gelu(form, groups, kind):
    """Forward and backward of [4096, 3072] float32 on one thread: at most 2.0 x F.gelu, anchored 2.5 x."""
    torch.compiler.reset()
    case = case_of(kind, form, batch=(4096,), channels=3072, groups=groups, dtype=torch.float32)
    x, *coefficients = case.leaves()
    ours, gelu = torch.compile(case.fast, fullgraph=True), torch.compile(lambda x: F.gelu(x))
    dy = torch.randn_like(x)
    assert saved_bytes(lambda: case.run(ours), parameters=coefficients) <= 1.01 * x.nbytes

    def seconds(step):
        began = time.process_time()
        step()
        return time.process_time() - began

    ratios = [
        seconds(lambda: case.gradients(ours, [dy])) / seconds(lambda: torch.autograd.grad(gelu(x), x, dy))
        for _ in range(10)
    ]
    assert statistics.median(ratios[2:]) <= (2.5 if kind == "rational_anchored" else 2.0)
