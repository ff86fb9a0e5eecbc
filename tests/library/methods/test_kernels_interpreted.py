"""The logic of every Triton kernel, through the public functions, in Triton's interpreter on the CPU in float32.

torch.empty is NaN here (conftest.py), shapes are odd and inputs are not contiguous, so a mask that is off shows.
"""

import pytest
import torch

from kernel_helpers import compare, rational_pair, route
from nonlinear_lowrank.methods.noble.down_form import use_down_form
from nonlinear_lowrank.methods.noble.group_op import noble_group, noble_group_reference
from nonlinear_lowrank.methods.noble.op import noble_linear, noble_linear_reference
from nonlinear_lowrank.methods.rational.op import LinearTails, denominator_size, rational
from nonlinear_lowrank.methods.rational.reference import rational_reference
from nonlinear_lowrank.methods.sine.delta import SineFactors
from nonlinear_lowrank.methods.sine.op import effective_weight, sine_layer, sine_layer_reference
from nonlinear_lowrank.ops.kernels import load

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
def test_cosnet(calls, monkeypatch, rank, tokens, one_kernel):
    cosnet = load("noble")
    if one_kernel:  # by default 16-bit numbers only; the interpreter knows float32 alone
        chosen = cosnet.backward_variants
        monkeypatch.setattr(cosnet, "backward_variants", lambda rank, dtype: chosen(rank, torch.bfloat16))
        monkeypatch.setattr(cosnet, "processors", lambda device: 1)  # a program then has more than one tile
    x = torch.randn(11, tokens).t()
    leaves = [x, torch.randn(10, 11), torch.randn(10), torch.randn(rank, 11), torch.randn(10, rank)]
    leaves += [torch.randn(rank, rank) / rank**0.5, *(0.5 + torch.rand(2, rank)), *torch.randn(2, rank)]

    def by(function):
        def run(x, weight, bias, down, up, mix, f1, f2, p1, p2):
            return function(x, weight, bias, down, up, [mix], [f1, f2], [p1, p2])

        return run

    leaves = [each.detach().requires_grad_() for each in leaves]
    compare_float32(by(noble_linear), by(noble_linear_reference), leaves, torch.randn(tokens, 10))
    assert calls == ["cosnet"] * 4


@pytest.mark.parametrize(("rank", "tokens", "d_in"), [(5, 37, 11), (33, 70, 75), (1, 1, 32), (128, 3, 40)])
def test_cosnet_with_its_down_projection(calls, monkeypatch, rank, tokens, d_in):
    cosnet, fused = load("noble"), []
    whole = cosnet.down_forward
    monkeypatch.setattr(cosnet, "down_forward", lambda *inputs: fused.append(rank) or whole(*inputs))
    x = torch.randn(d_in, tokens).t()
    leaves = [x, torch.randn(10, d_in), torch.randn(rank, d_in) / d_in**0.5, torch.randn(10, rank)]
    leaves += [torch.randn(rank, rank) / rank**0.5, *(0.5 + torch.rand(2, rank)), *torch.randn(2, rank)]

    def by(function):
        def run(x, weight, down, up, mix, f1, f2, p1, p2):
            return function(x, weight, None, down, up, [mix], [f1, f2], [p1, p2])

        return run

    leaves = [each.detach().requires_grad_() for each in leaves]
    with use_down_form("fused"):
        compare_float32(by(noble_linear), by(noble_linear_reference), leaves, torch.randn(tokens, 10))
        with torch.no_grad():
            assert by(noble_linear)(*(each[:0] if each is leaves[0] else each for each in leaves)).shape == (0, 10)
    assert fused == [rank] * 3
    with use_down_form("separate"):
        by(noble_linear)(*leaves)
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
    formed = effective_weight(weight, up, down, 5.0, 3.0)
    assert torch.equal(sine_layer(x, weight, None, [SineFactors(up, down, 5.0, 3.0)]), formed.t())
    torch.testing.assert_close(formed, weight + torch.sin(5.0 * up @ down) / 3.0)
    assert calls == ["sine"] * 2


def test_sine_and_cosine_of_large_arguments():
    """Through CosNet with M = 0: c2 = cos(p2), at phases up to 10,000 rad."""
    phases = torch.cat([torch.linspace(-1e4, 1e4, 47), torch.linspace(-7, 7, 17)])
    rank = phases.numel()
    h, zero, one = torch.zeros(2, rank), torch.zeros(rank, rank), torch.ones(rank)
    found = load("noble").forward(h, zero, [one, one], [zero[0], phases])
    torch.testing.assert_close(found[1].double(), phases.double().cos(), rtol=0, atol=5e-7)
    *_, dphases = load("noble").backward(h, torch.ones(2, rank), zero, [one, one], [zero[0], phases])
    torch.testing.assert_close(dphases[1].double(), -2 * phases.double().sin(), rtol=0, atol=2e-6)


def test_layers_of_one_input_by_the_kernels_of_each(calls):
    x, dys = torch.randn(9, 7), [torch.randn(9, 5), torch.randn(9, 11)]
    widths, rank = (5, 11), 3

    def leaves(dtype):
        generator = torch.Generator().manual_seed(3)
        shapes = [*((w, 7) for w in widths), *((rank, 7) for _ in widths), *((w, rank) for w in widths)]
        shapes += [(rank, rank)] * 2 + [(rank,)] * 8
        return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]

    def run(function, dtype):
        own = leaves(dtype)
        weights, downs, ups, mixes = own[:2], own[2:4], own[4:6], [[own[6]], [own[7]]]
        frequencies, phases = [own[8:10], own[10:12]], [own[12:14], own[14:16]]
        ys = function(x.to(dtype), weights, [None, None], downs, ups, mixes, frequencies, phases)
        return [*ys, *torch.autograd.grad(ys, own, [dy.to(dtype) for dy in dys])]

    for found, want in zip(run(noble_group, torch.float32), run(noble_group_reference, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)
    assert calls == ["cosnet"] * 4


def test_the_kernels_that_ours_are_measured_against():
    """KAT's way must be right to be a fair comparison."""
    from nlr_lab.bench import kat_kernel

    x, dy = torch.randn(2, 5, 7, 24).unbind()
    a, b = torch.randn(4, 6), torch.randn(4, 4)
    leaves = [each.double().requires_grad_() for each in (x, a, b)]
    expected = rational_reference(*leaves, "sum_of_abs")
    torch.testing.assert_close(kat_kernel.forward(x, a, b).double(), expected, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad(expected, leaves, dy.double())
    for found, want in zip(kat_kernel.backward(dy, x, a, b), wanted, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-3, atol=1e-3)
