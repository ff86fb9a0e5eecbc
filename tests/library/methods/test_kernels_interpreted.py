"""The logic of every Triton kernel, through the public functions, in Triton's interpreter on the CPU in float32.

torch.empty is NaN here (conftest.py), shapes are odd and inputs are not contiguous, so a mask that is off shows.
"""

import pytest
import torch

from kernel_helpers import compare, cosnet_leaves, cosnet_pair, rational_pair, route
from noble_helpers import changed, make_branch, outputs_and_gradients
from nonlinear_lowrank.methods.noble import op as noble_op
from nonlinear_lowrank.methods.noble.op import Branch, noble_linear_reference, noble_linears
from nonlinear_lowrank.methods.rational.op import LinearTails, denominator_size, rational
from nonlinear_lowrank.methods.rational.reference import rational_reference
from nonlinear_lowrank.methods.sine.reference import sine_layer_reference
from nonlinear_lowrank.ops.kernels import load
from nonlinear_lowrank.ops.sine import SineFactors, effective_weights, sine_layer
from rounding_helpers import cast

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels that were asked for."""
    asked = []
    route(monkeypatch, asked)
    return asked


def compare_float32(fast, plain, leaves, dy):
    """`compare`, of float32 and to float32."""
    assert {each.dtype for each in compare(fast, plain, leaves, dy)} == {torch.float32}


@pytest.mark.parametrize(
    ("rank", "tokens", "one_kernel"), [(5, 37, True), (33, 70, True), (7, 67, False), (140, 9, False)]
)
def test_noble_kernels_equal_the_formula(calls, monkeypatch, rank, tokens, one_kernel):
    kernel = load("noble")
    if one_kernel:  # by default 16-bit numbers only; the interpreter knows float32 alone
        chosen = kernel.backward_variants
        monkeypatch.setattr(kernel, "backward_variants", lambda rank, dtype: chosen(rank, torch.bfloat16))
        monkeypatch.setattr(kernel, "processors", lambda device: 1)  # a program then has more than one tile
    compare_float32(*cosnet_pair(), cosnet_leaves(tokens, 11, 10, rank), torch.randn(tokens, 10))
    assert calls == ["noble"] * 4


@pytest.mark.parametrize(("rank", "tokens", "d_in"), [(5, 37, 11), (33, 70, 75), (1, 1, 32), (128, 3, 40)])
def test_noble_kernel_takes_the_down_projection(calls, monkeypatch, rank, tokens, d_in):
    kernel, fused = load("noble"), []
    whole = kernel.down_forward
    monkeypatch.setattr(kernel, "down_forward", lambda *inputs: fused.append(rank) or whole(*inputs))
    leaves = cosnet_leaves(tokens, d_in, 10, rank)
    monkeypatch.setattr(noble_op, "FUSE_DOWN", True)
    compare_float32(*cosnet_pair(), leaves, torch.randn(tokens, 10))
    with torch.no_grad():
        assert cosnet_pair()[0](leaves[0][:0], *leaves[1:]).shape == (0, 10)
    assert fused == [rank] * 3
    monkeypatch.setattr(noble_op, "FUSE_DOWN", False)
    cosnet_pair()[0](*leaves)
    assert len(fused) == 3


@pytest.mark.parametrize("form", ["abs_of_sum", "sum_of_abs"])
@pytest.mark.parametrize(("groups", "channels"), [(4, 12), (2, 74), (12, 12)], ids=["narrow", "wide", "channels"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_rational(calls, form, groups, channels, gated):
    tails = LinearTails(-2.0, 1.5, 0.25, -1.5) if gated else None
    tokens = 11
    both = torch.randn(tokens, 2 * channels)  # halves of one projection: rows lie apart
    leaves = [both[:, :channels], both[:, channels:]][: 1 + gated]
    leaves += [0.3 * torch.randn(groups, 6), 0.3 * torch.randn(groups, denominator_size(4, form))]
    leaves = [each.detach().requires_grad_() for each in leaves]
    fast, plain = rational_pair(form, tails, gated)
    compare_float32(fast, plain, leaves, torch.randn(channels, tokens).t())
    assert calls == ["rational"] * 4


@pytest.mark.parametrize("limits", [LinearTails(-1.0, 1.0, 0.25, 2.0), None], ids=["tails", "no tails"])
def test_rational_of_frozen_coefficients_and_of_nothing(calls, limits):
    x, dy = torch.randn(9, 6, requires_grad=True), torch.randn(9, 6)
    a, b = 0.3 * torch.randn(2, 6), 0.3 * torch.randn(2, 5)
    found = torch.autograd.grad(rational(x, a, b, tails=limits), x, dy)
    expected = torch.autograd.grad(rational_reference(x, a, b, tails=limits), x, dy)
    torch.testing.assert_close(found, expected)
    nothing = torch.randn(0, 6, requires_grad=True)
    a.requires_grad_()
    y = rational(nothing, a, b)
    assert [tuple(each.shape) for each in (y, *torch.autograd.grad(y.sum(), [nothing, a]))] == [(0, 6), (0, 6), (2, 6)]


@pytest.mark.parametrize(
    ("base", "dora", "transposed"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True), (False, True, True)],
)
def test_sine(calls, base, dora, transposed):
    d_in, d_out, rank, tokens = 70, 37, 17, 5
    weight = torch.randn(d_out, d_in)
    leaves = [
        torch.randn(d_in, tokens).t(),
        weight,
        torch.randn(d_out),
        torch.randn(d_out, rank),
        torch.randn(rank, d_in),
    ]
    leaves += [0.5 + torch.rand(d_out)] * dora
    omega, gain = 10 / rank**0.5, d_in**0.5

    def factors(up, down, magnitude=None):
        return [SineFactors(up, down, omega, gain, 1.5, magnitude)]

    def fast(x, weight, bias, *flat):
        stored = weight.t() if transposed else weight
        return sine_layer(x, stored, bias, factors(*flat), base=base, transposed=transposed)

    def plain(x, weight, bias, *flat):
        # a delta alone has no use of the weight but for its norms
        return sine_layer_reference(x, weight, bias, factors(*flat), base=base) + (0 * weight).sum()

    leaves = [each.detach().requires_grad_() for each in leaves]
    if not base and not dora:
        fast_without = fast

        def fast(*tensors):
            return fast_without(*tensors) + (0 * tensors[1]).sum()

    compare_float32(fast, plain, leaves, torch.randn(tokens, d_out))
    assert calls == ["sine"] * 4


def test_formed_weight_has_the_bits_of_training(calls):
    x, weight = torch.eye(9), torch.randn(7, 9)
    up, down = torch.randn(7, 3), torch.randn(3, 9)
    formed = effective_weights(weight, [SineFactors(up, down, 5.0, 3.0)])
    assert torch.equal(sine_layer(x, weight, None, [SineFactors(up, down, 5.0, 3.0)]), formed.t())
    torch.testing.assert_close(formed, weight + torch.sin(5.0 * up @ down) / 3.0)
    assert calls == ["sine"] * 2


def test_sine_and_cosine_of_large_arguments():
    """Through CosNet with M = 0: c2 = cos(p2), at phases up to 10,000 rad."""
    phases = torch.cat([torch.linspace(-1e4, 1e4, 47), torch.linspace(-7, 7, 17)])
    rank = phases.numel()
    h, zero, one = torch.zeros(2, rank), torch.zeros(rank, rank), torch.ones(rank)
    branch = Branch(None, zero, [zero], [one, one], [zero[0], phases])
    found = load("noble").forward(h, branch)
    torch.testing.assert_close(found[1].double(), phases.double().cos(), rtol=0, atol=5e-7)
    *_, (*_, dphase) = load("noble").backward(h, torch.ones(2, rank), branch)
    torch.testing.assert_close(dphase.double(), -2 * phases.double().sin(), rtol=0, atol=2e-6)


def test_noble_linears_of_one_input_equal_the_formula(calls):
    x, dys = torch.randn(9, 7), [torch.randn(9, 5), torch.randn(9, 11)]
    branches = [make_branch(d_in=7, d_out=width, r=3, dtype=torch.float32) for width in (5, 11)]
    weights = [torch.randn(width, 7) for width in (5, 11)]

    def plain(x, weights, branches):
        return [noble_linear_reference(x, weight, None, own) for weight, own in zip(weights, branches, strict=True)]

    found = outputs_and_gradients(
        lambda x, weights, branches: noble_linears(x, weights, [None] * 2, branches),
        changed(lambda each: cast(each, torch.float32), (x, weights, branches)),
        dys,
    )
    wanted = outputs_and_gradients(plain, changed(lambda each: cast(each, torch.float64), (x, weights, branches)), dys)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-4)
    assert calls == ["noble"] * 4


def test_the_kernels_that_ours_are_measured_against():
    """KAT's way must be right to be a fair comparison."""
    from nlr_lab.bench.kat_kernel import KatRational

    x, dy = torch.randn(2, 5, 7, 24).unbind()
    own = [each.requires_grad_() for each in (x, torch.randn(4, 6), torch.randn(4, 4))]
    leaves = [each.detach().double().requires_grad_() for each in own]
    expected, y = rational_reference(*leaves, "sum_of_abs"), KatRational.apply(*own)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad(expected, leaves, dy.double())
    for found, want in zip(torch.autograd.grad(y, own, dy), wanted, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-3, atol=1e-3)
