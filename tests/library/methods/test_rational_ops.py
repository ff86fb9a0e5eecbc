"""The rational operators: both denominators, tails, anchor and gate, against the float64 formula."""

import itertools
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import activations as hf

from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.rational import op
from nonlinear_lowrank.methods.rational.op import (
    FORMS,
    LinearTails,
    denominator_size,
    rational,
    rational_anchored,
    rational_gated,
)
from nonlinear_lowrank.methods.rational.reference import (
    FORMULAS,
    activation,
    activation_slope,
    rational_anchored_reference,
    rational_gated_reference,
    rational_reference,
)
from rounding_helpers import assert_as_good_as_plain, cast, jittered

TAILS = LinearTails(-1.2, 0.9, 0.1, 0.8)
OPERATORS = {
    "plain": (rational, rational_reference),
    "anchored": (rational_anchored, rational_anchored_reference),
    "gated": (rational_gated, rational_gated_reference),
}
kinds = pytest.mark.parametrize("kind", OPERATORS)
forms = pytest.mark.parametrize("form", FORMS)
tails = pytest.mark.parametrize("tails", [None, TAILS], ids=["rational", "linear"])


def make_inputs(form, *, batch=(3, 5), channels=12, groups=4, degrees=(5, 4), dtype=torch.float64, gated=False):
    """A fresh random x, up where gated, numerator and denominator; leaves that require grad."""

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()

    x = [leaf(*batch, channels) for _ in range(1 + gated)]
    return [*x, leaf(groups, degrees[0] + 1), leaf(groups, denominator_size(degrees[1], form), scale=0.7)]


def make(kind, form, tails=None, formula="gelu", **sizes):
    """An operator and its plain formula as functions of leaves, and the leaves."""
    inputs = make_inputs(form, gated=kind == "gated", **sizes)
    rest = (form, tails)
    if kind == "anchored":  # base coefficients near the shifted ones, one row for all groups
        base = [(each[:1] + 0.1 * torch.randn_like(each[:1])).detach() for each in inputs[-2:]]
        rest = (*base, formula, form, tails)
    fast, plain = (lambda *leaves, f=function: f(*leaves, *rest) for function in OPERATORS[kind])
    return fast, plain, inputs


def with_gradients(function, inputs, dy):
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def assert_all_close(ours, expected, **tolerance):
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@kinds
@forms
@tails
@pytest.mark.parametrize("degrees", [(5, 4), (1, 1), (3, 6), (0, 2)])
def test_matches_the_plain_formula_in_float64(kind, form, tails, degrees):
    for formula in ("gelu", "relu", "tanh") if kind == "anchored" else ("gelu",):
        fast, plain, inputs = make(kind, form, tails, formula, degrees=degrees)
        dy = torch.randn_like(inputs[0])
        assert_all_close(with_gradients(fast, inputs, dy), with_gradients(plain, inputs, dy), rtol=1e-9, atol=1e-9)


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


@kinds
@forms
@tails
def test_gradcheck(kind, form, tails):
    fast, _, inputs = make(kind, form, tails, "silu", batch=(3,), channels=4, groups=2, degrees=(3, 2))
    assert torch.autograd.gradcheck(fast, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@forms
@tails
def test_no_worse_than_twice_the_plain_formulas_error(form, tails, dtype):
    fast, plain, (x, *coefficients) = make("plain", form, tails, batch=(64,), channels=48, dtype=torch.float32)
    inputs = [x.detach().to(dtype).requires_grad_(), *coefficients]
    dy = torch.randn(64, 48).to(dtype)
    exact = with_gradients(plain, cast(inputs, torch.float64), dy)
    lean = with_gradients(fast, inputs, dy)
    assert lean[0].dtype == lean[1].dtype == dtype
    assert lean[2].dtype == lean[3].dtype == torch.float32  # coefficients keep their own type
    moved = with_gradients(plain, jittered(inputs), jittered([dy])[0].detach())
    assert_as_good_as_plain(lean, with_gradients(plain, inputs, dy), exact, moved)


@kinds
@forms
@tails
def test_compiles_fullgraph_with_equal_gradients(kind, form, tails):
    torch.compiler.reset()
    fast, _, inputs = make(kind, form, tails, dtype=torch.float32)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    dy = torch.randn(3, 5, 12)
    eager = with_gradients(fast, inputs, dy)
    assert_all_close(with_gradients(compiled, inputs, dy), eager, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), eager[0].detach())


def test_compiles_with_a_changing_batch():
    torch.compiler.reset()
    compiled = torch.compile(rational, fullgraph=True, backend="aot_eager", dynamic=True)
    _, *coefficients = make_inputs("abs_of_sum", dtype=torch.float32)
    for batch in (2, 7, 11):
        inputs = [torch.randn(batch, 12, requires_grad=True), *coefficients]
        expected = with_gradients(rational, inputs, torch.ones(batch, 12))
        assert_all_close(with_gradients(compiled, inputs, torch.ones(batch, 12)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forms
def test_anchored_starts_bit_equal(formula, dtype, form):
    x = (4 * torch.randn(50, 12)).to(dtype)
    _, numerator, denominator = make_inputs(form, dtype=torch.float32)
    base = (numerator.detach(), denominator.detach())
    y = rational_anchored(x, numerator, denominator, *base, formula, form, TAILS)
    assert torch.equal(y, activation(x, formula))


@pytest.mark.parametrize(
    ("formula", "module"),
    [
        ("gelu", nn.GELU()),
        ("gelu", hf.GELUActivation()),
        ("gelu_python", hf.GELUActivation(use_gelu_python=True)),
        ("gelu_tanh", nn.GELU(approximate="tanh")),
        ("gelu_tanh", hf.GELUTanh()),
        ("gelu_new", hf.GELUTanh(use_gelu_tanh_python=True)),
        ("gelu_new", hf.NewGELUActivation()),
        ("gelu_new", hf.AccurateGELUActivation()),
        ("gelu_fast", hf.FastGELUActivation()),
        ("quick_gelu", hf.QuickGELUActivation()),
        ("silu", nn.SiLU()),
        ("silu", hf.SiLUActivation()),
        ("relu", nn.ReLU()),
        ("tanh", nn.Tanh()),
        ("sigmoid", nn.Sigmoid()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_round_like_the_modules_they_stand_for(formula, module, dtype):
    x = (3 * torch.randn(4000)).to(dtype)
    assert torch.equal(activation(x, formula), module(x))


@pytest.mark.parametrize("formula", FORMULAS)
def test_slopes_of_the_formulas(formula):
    x = torch.randn(200, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(activation(x, formula).sum(), x)
    # gelu_fast rounds sqrt(2 / pi) to ten digits
    torch.testing.assert_close(activation_slope(x.detach(), formula), expected, rtol=1e-8, atol=1e-9)


@kinds
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saves_its_inputs_alone(kind, backend, dtype):
    torch.compiler.reset()
    fast, plain, inputs = make(kind, "sum_of_abs", TAILS, batch=(256,), channels=64, dtype=torch.float32)
    *wide, numerator, denominator = inputs
    leaves = [*cast(wide, dtype), numerator, denominator]
    run = fast if backend is None else torch.compile(fast, backend=backend, fullgraph=True)
    kept = saved_bytes(run, *leaves, parameters=[numerator, denominator])
    own = sum(each.nbytes for each in leaves[:-2])
    # Base coefficients, and under compile |b|, a copy of the coefficients, are saved as well.
    assert own <= kept <= own + 2 * (numerator.nbytes + denominator.nbytes)
    assert saved_bytes(plain, *leaves, parameters=[numerator, denominator]) > 3 * kept


def test_autocast_changes_nothing_but_the_input_type():
    x, numerator, denominator = make_inputs("abs_of_sum", batch=(32,), dtype=torch.float32)
    x = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rational(x, numerator, denominator)
        reference = rational_reference(x, numerator, denominator)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, reference)
    y.float().square().mean().backward()
    assert x.grad.dtype == torch.bfloat16
    assert numerator.grad.dtype == denominator.grad.dtype == torch.float32
    assert numerator.grad.isfinite().all()


def test_pieces_of_eager_mode_add_up(monkeypatch):
    fast, _, inputs = make("plain", "sum_of_abs", TAILS, batch=(23,))
    dy = torch.randn(23, 12, dtype=torch.float64)
    whole = with_gradients(fast, inputs, dy)
    monkeypatch.setattr(op, "_PIECE_CPU", 5 * 12)  # 4 pieces of 5 rows and one of 3
    assert_all_close(with_gradients(fast, inputs, dy), whole)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_only_what_is_asked_for_is_computed(kind):
    fast, _, inputs = make(kind, "abs_of_sum")
    full = torch.autograd.grad(fast(*inputs).sum(), inputs)
    for wanted in itertools.product([False, True], repeat=len(inputs)):
        if any(wanted):
            case = [each.detach().requires_grad_(want) for each, want in zip(inputs, wanted, strict=True)]
            asked = [index for index, want in enumerate(wanted) if want]
            found = torch.autograd.grad(fast(*case).sum(), [case[index] for index in asked])
            torch.testing.assert_close(found, tuple(full[index] for index in asked))


def test_noncontiguous_and_empty_inputs():
    _, numerator, denominator = make_inputs("abs_of_sum")
    x = torch.randn(12, 5, 3, dtype=torch.float64, requires_grad=True)
    y = rational(x.permute(2, 1, 0), numerator, denominator)
    reference = rational_reference(x.permute(2, 1, 0), numerator, denominator)
    torch.testing.assert_close(y, reference)
    dy = torch.randn(12, 5, 3, dtype=torch.float64).permute(2, 1, 0)  # a gradient that is not contiguous either
    torch.testing.assert_close(
        torch.autograd.grad(y, [x, numerator], dy), torch.autograd.grad(reference, [x, numerator], dy)
    )
    nothing = torch.randn(0, 12, dtype=torch.float64, requires_grad=True)
    empty = rational(nothing, numerator, denominator)
    dx, da = torch.autograd.grad(empty.sum(), [nothing, numerator])
    assert empty.shape == dx.shape == (0, 12)
    assert torch.equal(da, torch.zeros_like(numerator))


def test_meta_gives_shapes():
    inputs = [each.detach().to("meta").requires_grad_() for each in make_inputs("sum_of_abs")]
    y, *gradients = with_gradients(lambda *each: rational(*each, "sum_of_abs"), inputs, inputs[0])
    assert y.shape == inputs[0].shape
    assert [each.shape for each in gradients] == [each.shape for each in inputs]


def test_zero_coefficients_of_the_sum_of_abs_can_move():
    """sign(0) = 0 would freeze a denominator that starts at zero."""
    x = torch.randn(40, 4)
    denominator = torch.zeros(2, 4, requires_grad=True)
    rational(x, torch.ones(2, 2), denominator, "sum_of_abs").square().sum().backward()
    assert (denominator.grad != 0).all()


@forms
def test_tails_are_straight_and_joined_with_the_slope_of_the_function(form):
    _, *coefficients = make_inputs(form, channels=1, groups=1)
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


@kinds
def test_second_derivatives_are_refused(kind):
    fast, _, inputs = make(kind, "abs_of_sum")
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(fast(*inputs).sum(), inputs[0], create_graph=True)


def test_wrong_inputs_are_one_clear_line():
    x, numerator, denominator = make_inputs("abs_of_sum")
    base = [numerator[:1], denominator[:1]]
    for run, message in [
        (lambda: rational(x, numerator, denominator, "eq6"), "form 'eq6'; choose one of abs_of_sum, sum_of_abs"),
        (lambda: rational(x[..., :10], numerator, denominator), "10 channels do not divide into 4 groups"),
        (lambda: rational(x, numerator, denominator[:2]), "as many groups above as below"),
        (lambda: rational_reference(x, numerator[0], denominator), "must be \\(groups, terms\\)"),
        (lambda: rational_gated(x, x[..., :4], numerator, denominator), "one shape and type"),
        (lambda: rational_anchored(x, numerator, denominator, *base, "gelou"), "unknown activation 'gelou'"),
        (
            lambda: rational_anchored(x, numerator, denominator, base[0][:, :3], base[1], "gelu"),
            r"base coefficients \(1, 3\) do not fit the shifted ones, \(4, 6\)",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            run()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize("groups", [8, 64])
@forms
def test_compiled_time_beside_gelu(form, groups, kind):
    """Forward and backward of [4096, 3072] float32 on one thread: at most 2.0 x F.gelu, anchored 2.5 x."""
    torch.compiler.reset()
    fast, _, inputs = make(kind, form, batch=(4096,), channels=3072, groups=groups, dtype=torch.float32)
    x, *coefficients = inputs
    ours = torch.compile(fast, fullgraph=True)
    gelu = torch.compile(lambda x: F.gelu(x))
    dy = torch.randn_like(x)
    assert saved_bytes(ours, *inputs, parameters=coefficients) <= 1.01 * x.nbytes

    def seconds(function, leaves):
        began = time.process_time()
        torch.autograd.grad(function(*leaves), leaves, dy)
        return time.process_time() - began

    ratios = [seconds(ours, inputs) / seconds(gelu, [x]) for _ in range(10)][2:]
    assert statistics.median(ratios) <= (2.5 if kind == "anchored" else 2.0)
