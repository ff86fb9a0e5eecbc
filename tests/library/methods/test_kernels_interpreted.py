"""The logic of every Triton kernel, through the public functions, in Triton's interpreter on the CPU in float32.

torch.empty is NaN here (conftest.py), shapes are odd and inputs are not contiguous, so a mask that is off shows.
"""

import importlib
from functools import partial

import pytest
import torch

import op_helpers as ops
from nonlinear_lowrank.methods.noble import op as noble_op
from nonlinear_lowrank.methods.noble.op import Branch
from nonlinear_lowrank.methods.rational.op import LinearTails, rational, rational_anchored
from nonlinear_lowrank.methods.rational.reference import rational_reference
from nonlinear_lowrank.ops.kernels import load
from nonlinear_lowrank.ops.sine import SineFactors, effective_weights, sine_layer

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
noble = partial(ops.noble, form="no-bias", d_out=10, dtype=torch.float32)


@pytest.fixture
def calls(monkeypatch):
    """Send every operator to its kernels; the names of those that were asked for."""
    asked = []

    def chosen(name, *tensors):
        asked.append(name)
        return load(name)

    for file in ("methods.noble.op", "methods.rational.op", "ops.sine"):
        module = importlib.import_module(f"nonlinear_lowrank.{file}")
        monkeypatch.setattr(module, "kernels", chosen)
        monkeypatch.setattr(module, "native", lambda *tensors: None)  # float32 on a CPU is C++'s
    return asked


def assert_as_good_as_plain_float32(case):
    """`compare`, of float32 and to float32, with strided inputs and gradients."""
    dys = [ops.strided(dy).detach() for dy in case.dys()]
    assert {each.dtype for each in ops.compare(case, dys, strided_input=True)} == {torch.float32}


@pytest.mark.parametrize(("rank", "tokens"), [(5, 37), (33, 70), (7, 130), (140, 9)])
def test_noble_kernels_equal_the_formula(calls, rank, tokens):
    assert_as_good_as_plain_float32(noble(batch=(tokens,), d_in=11, r=rank))
    assert calls == ["noble"] * 4


@pytest.mark.parametrize(("rank", "tokens", "d_in"), [(5, 37, 11), (33, 70, 75), (1, 1, 32), (128, 3, 40)])
def test_noble_kernel_takes_the_down_projection(calls, monkeypatch, rank, tokens, d_in):
    kernel, fused = load("noble"), []
    whole = kernel.down_forward
    monkeypatch.setattr(kernel, "down_forward", lambda *inputs: fused.append(rank) or whole(*inputs))
    monkeypatch.setattr(noble_op, "FUSE_DOWN", True)
    assert_as_good_as_plain_float32(noble(batch=(tokens,), d_in=d_in, r=rank))
    empty = noble(batch=(0,), d_in=d_in, r=rank)
    with torch.no_grad():
        assert empty.run(empty.fast)[0].shape == (0, 10)
    assert fused == [rank] * 3
    monkeypatch.setattr(noble_op, "FUSE_DOWN", False)
    empty.run(empty.fast)
    assert len(fused) == 3


def test_noble_linears_of_one_input_equal_the_formula(calls):
    assert_as_good_as_plain_float32(ops.noble(form="group", batch=(9,), d_in=7, d_out=5, r=3, dtype=torch.float32))
    assert calls == ["noble"] * 12


@pytest.mark.parametrize("form", ["abs_of_sum", "sum_of_abs"])
@pytest.mark.parametrize(("groups", "channels"), [(4, 12), (2, 74), (12, 12)], ids=["narrow", "wide", "channels"])
@pytest.mark.parametrize("kind", ["rational", "rational_gated", "rational_anchored"])
def test_rational(calls, form, groups, channels, kind):
    slopes = (0.0, 0.0) if kind == "rational_anchored" else (0.25, -1.5)
    tails = None if kind == "rational" else LinearTails(-2.0, 1.5, *slopes)
    sizes = {"batch": (11,), "groups": groups, "channels": channels, "scale": 0.3}
    assert_as_good_as_plain_float32(ops.rational(kind, form, tails, **sizes, dtype=torch.float32))
    assert calls == ["rational"] * 4


@pytest.mark.parametrize("tails", [LinearTails(-1.0, 1.0, 0.0, 0.0), None], ids=["tails", "no tails"])
def test_anchored_starts_bit_equal(calls, tails):
    x, a, b = 3 * torch.randn(9, 6), 0.3 * torch.randn(2, 6), 0.3 * torch.randn(2, 5)
    assert torch.equal(rational_anchored(x, a, b, a, b, "gelu", tails=tails), torch.nn.functional.gelu(x))
    assert calls == ["rational"]


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


@pytest.mark.parametrize("kind", ["merged", "delta", "conv1d", "delta-conv1d"])
@pytest.mark.parametrize("dora", [False, True])
def test_sine(calls, dora, kind):
    sizes = {"batch": (5,), "d_in": 70, "d_out": 37, "r": 17, "rms": 10.0}
    assert_as_good_as_plain_float32(ops.sine((dora,), kind, **sizes, dtype=torch.float32))
    assert calls == ["sine"] * 4


@pytest.mark.parametrize("rank", [4, 17, 60])
def test_sine_gradients_of_programs_that_share_rows(calls, monkeypatch, rank):
    kernel = load("sine")
    monkeypatch.setattr(kernel, "SHARE", 1 / rank)  # else a small weight has one program a row
    grids = []
    run = kernel.Variant.launch
    monkeypatch.setattr(kernel.Variant, "launch", lambda *given: grids.append(given[1]) or run(*given))
    sizes = {"batch": (3,), "d_in": 70, "d_out": 37, "r": rank, "rms": 10.0}
    assert_as_good_as_plain_float32(ops.sine((True,), **sizes, dtype=torch.float32))
    assert max(shares for _, shares in grids) > 1


@pytest.mark.parametrize(("m", "n"), [(14336, 4096), (4096, 14336), (1024, 1024)])
@pytest.mark.parametrize("rank", [4, 16, 64])
def test_partial_sums_of_sine_gradients_are_few(monkeypatch, m, n, rank):
    kernel, parts = load("sine"), []
    monkeypatch.setattr(kernel, "processors", lambda device: 132)
    monkeypatch.setattr(kernel.Variant, "launch", lambda *given: parts.append(given[2 + 5]))
    with torch.device("meta"):
        weight = torch.empty(m, n, dtype=torch.bfloat16)
        factors = SineFactors(torch.empty(m, rank), torch.empty(rank, n), 5.0, 3.0)
        kernel.factor_gradients(weight, weight, factors, None)
    for each, size in zip(parts, (m, n), strict=True):
        assert each.numel() % (size * rank) == 0
        assert each.numel() == size * rank or each.nbytes <= weight.nbytes / 16


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
