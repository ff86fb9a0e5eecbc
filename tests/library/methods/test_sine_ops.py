"""The sine operators: bits of merged weights, accuracy of phases; weights that are a function of a low-rank product."""

import pytest
import torch
import torch.nn.functional as F

from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.sine.op import embedding_delta, lowrank_linear, lowrank_weight, sine_embedding
from nonlinear_lowrank.methods.sine.reference import lowrank_linear_reference, sine_embedding_reference
from nonlinear_lowrank.ops.precision import full_precision
from nonlinear_lowrank.ops.sine import dora_norm, effective_weights, sine_delta, sine_layer, sine_layer_reference
from op_helpers import DELTAS, assert_all_close, leaf, lowrank, make_factors
from rounding_helpers import assert_close_by_norm

D_IN, D_OUT = 12, 10
deltas = pytest.mark.parametrize("dora", DELTAS.values(), ids=DELTAS)
PHI = {
    "identity": lambda phase: phase,
    "sine": torch.sin,
    "sigmoid": lambda phase: 1 / (1 + torch.exp(-phase)),
    "relu": lambda phase: phase.clamp(min=0),
}


def tensors(factors):
    return [tensor for each in factors for tensor in (each.up, each.down, each.magnitude) if tensor is not None]


def with_gradients(y, inputs, dy):
    return [y, *torch.autograd.grad(y, inputs, dy.to(y.dtype), allow_unused=True)]


@pytest.mark.parametrize("r", [1, 8, 64])
@pytest.mark.parametrize("rms", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_delta_is_within_1e_5_of_float64(rms, r, transposed):
    (each,) = make_factors([False], d_in=300, d_out=200, r=r, rms=rms, dtype=torch.float32)
    exact = each.scale * lowrank_weight(each.up.double(), each.down.double(), "sine", each.omega, each.gain)
    phase = (each.omega * each.up.double() @ each.down.double()).detach()
    assert 0.5 * rms < phase.square().mean().sqrt() < 2 * rms
    formed = sine_delta(None, each, transposed=transposed)
    assert formed.dtype == torch.float32
    error = (formed.t() if transposed else formed) - exact
    assert error.norm() / exact.norm() <= 1e-5
    rows = embedding_delta(torch.zeros(200, 300), each)
    assert (rows - exact).norm() / exact.norm() <= 1e-5


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d"])
@deltas
def test_merged_and_unmerged_have_equal_bits(dora, kind, dtype, autocast):
    factors = make_factors(dora, d_in=64, d_out=40, r=5, dtype=torch.float32)
    bias = leaf(40, dtype=dtype).detach()
    stride = (1, 1) if kind == "conv2d" else None
    shape = {"linear": (40, 64), "conv1d": (64, 40), "conv2d": (40, 64, 1, 1)}[kind]
    weight = leaf(*shape, scale=0.1, dtype=dtype).detach()
    x = leaf(*((2, 64, 5, 6) if stride else (3, 7, 64)), dtype=dtype)
    transposed = kind == "conv1d"
    formed = effective_weights(weight, factors, transposed=transposed)
    assert formed.dtype == dtype
    assert formed.shape == weight.shape
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        trained = sine_layer(x, weight, bias, factors, transposed=transposed, stride=stride)
        with torch.no_grad():
            evaluated = sine_layer(x, weight, bias, factors, transposed=transposed, stride=stride)
        if kind == "conv1d":
            merged = torch.addmm(bias, x.view(-1, 64), formed).view(3, 7, 40)
        else:
            merged = F.conv2d(x, formed, bias) if stride else F.linear(x, formed, bias)
    assert trained.dtype == (torch.bfloat16 if autocast else dtype)
    assert torch.equal(trained, merged)
    assert torch.equal(evaluated, merged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_up_changes_no_bit(dtype):
    factors = make_factors([False, True], dtype=torch.float32)
    weight = leaf(D_OUT, D_IN, dtype=dtype).detach()
    with torch.no_grad():
        for each in factors:
            each.up.zero_()
        factors[1].magnitude.copy_(dora_norm(weight))
    x = leaf(4, D_IN, dtype=dtype)
    assert torch.equal(sine_layer(x, weight, None, factors), F.linear(x, weight))
    assert torch.equal(effective_weights(weight, factors), weight)
    assert not sine_layer(x, weight, None, factors, base=False).any()


def test_rows_of_zeros_stay_finite():
    (each,) = make_factors([True])
    weight = leaf(D_OUT, D_IN)
    with torch.no_grad():
        weight[3] = 0
        each.up[3] = 0
    y = sine_layer(leaf(4, D_IN), weight, None, [each])
    assert not y[:, 3].any()
    gradients = torch.autograd.grad(y.sum(), [each.up, each.down, each.magnitude, weight])
    assert all(gradient.isfinite().all() for gradient in gradients)


@deltas
def test_a_padding_token_gives_no_gradient(dora):
    factors, weight = make_factors(dora, d_out=30), leaf(30, D_IN)
    indices, dy = torch.randint(0, 10, (4, 9)), torch.randn(4, 9, D_IN, dtype=torch.float64)
    inputs, masked = [weight, *tensors(factors)], dy.masked_fill((indices == 2)[..., None], 0)
    ours = with_gradients(sine_embedding(indices, weight, factors, padding_idx=2), inputs, dy)
    assert_all_close(ours, with_gradients(sine_embedding_reference(indices, weight, factors), inputs, masked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@deltas
def test_an_embedding_row_has_the_bits_of_the_merged_table(dora, dtype):
    factors = make_factors(dora, d_in=67, d_out=300, r=5, rms=30.0, dtype=torch.float32)
    weight = leaf(300, 67, dtype=dtype).detach()
    total = None
    for each in factors:
        delta = embedding_delta(weight, each)
        total = delta + weight if total is None else total + delta
    merged = total.to(dtype)
    for size in (1, 2, 7, 500):
        indices = torch.randint(0, 300, (size,))
        assert torch.equal(sine_embedding(indices, weight, factors), F.embedding(indices, merged))


def test_no_input_or_setting_makes_the_phase_narrow():
    """Autocast and reduced-precision products move no bit of the delta, and the settings come back."""
    (each,) = make_factors([False], d_in=64, d_out=64, r=16, rms=30.0, dtype=torch.float32)
    expected = sine_delta(None, each)
    x, dy = leaf(5, 64, dtype=torch.float32), torch.randn(5, 64)
    gradients = torch.autograd.grad(sine_layer(x, None, None, [each], base=False), tensors([each]), dy)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sine_delta(None, each), expected)
        reference = each.scale * lowrank_weight(each.up, each.down, "sine", each.omega, each.gain)
        assert_close_by_norm(reference, expected, 1e-5)
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    y = sine_layer(x, None, None, [each], base=False)
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            during = [setting.fp32_precision for setting in settings]
            assert torch.equal(sine_delta(None, each), expected)
            assert torch.get_float32_matmul_precision() == precision
            assert [setting.fp32_precision for setting in settings] == during
        reduced = torch.autograd.grad(y, tensors([each]), dy)
        torch.testing.assert_close(reduced, gradients, rtol=0.02, atol=0.02)
    finally:
        torch.set_float32_matmul_precision("highest")
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def test_the_newer_precision_interface_comes_back_too():
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        settings[0].fp32_precision = "tf32"  # legacy getters raise from here on
        with full_precision():
            assert [setting.fp32_precision for setting in settings] == ["ieee", "ieee"]
        assert settings[0].fp32_precision == "tf32"
        with pytest.raises(RuntimeError, match="mine"), full_precision():
            raise RuntimeError("mine")
        assert settings[0].fp32_precision == "tf32"
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


@pytest.mark.parametrize("base", [True, False], ids=["merged", "delta"])
def test_a_weight_that_is_made_on_demand_is_not_saved(base):
    factors = make_factors([True, False], d_in=64, d_out=48)
    x, weight, dy = leaf(7, 64), torch.randn(48, 64, dtype=torch.float64), torch.randn(7, 48, dtype=torch.float64)
    calls = []

    def make():
        calls.append(1)
        return weight.clone()

    def function(x):
        return sine_layer(x, make, None, factors, base=base)

    assert saved_bytes(function, x, parameters=tensors(factors)) == x.nbytes
    assert len(calls) == 1
    inputs = [x, *tensors(factors)]
    ours = with_gradients(function(x), inputs, dy)
    assert_all_close(ours, with_gradients(sine_layer(x, weight, None, factors, base=base), inputs, dy))
    with torch.no_grad():
        torch.testing.assert_close(function(x), ours[0])


@pytest.mark.parametrize("activation", PHI)
def test_lowrank_linear_is_the_formula_written_out(activation):
    x, up, down, bias, *_ = lowrank(activation).arguments
    for omega in (1.0, 7.0):
        weight = PHI[activation](omega * up @ down) / 2.5
        torch.testing.assert_close(lowrank_weight(up, down, activation, omega, 2.5), weight)
        expected = torch.einsum("bti,oi->bto", x, weight) + bias
        for function in (lowrank_linear, lowrank_linear_reference):
            torch.testing.assert_close(function(x, up, down, bias, activation, omega, 2.5), expected)


@pytest.mark.parametrize("activation", PHI)
def test_lowrank_linear_in_bfloat16_is_as_exact_as_a_rounded_weight(activation):
    arguments = [each.detach() for each in lowrank(activation, batch=(50,), d_in=40, d_out=28).leaves()]
    exact = lowrank_linear_reference(*(each.float().double() for each in arguments), activation, 20.0, 6.0)
    x, up, down, bias = (each.float() for each in arguments)
    weight = lowrank_weight(up, down, activation, 20.0, 6.0)
    plain = F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        ours = lowrank_linear(x, up, down, bias, activation, 20.0, 6.0)
    assert ours.dtype == torch.bfloat16
    error, allowed = ((each.double() - exact).norm() for each in (ours, plain))
    assert error <= 2 * allowed + 1e-6


@pytest.mark.parametrize("activation", ["sine", "sigmoid"])
def test_a_large_phase_is_float32(activation):
    """In bfloat16 a phase of 100 rad would be off by up to 0.4 rad."""
    up, down = torch.rand(28, 1) + 0.5, torch.rand(1, 40) + 0.5
    with torch.autocast("cpu", torch.bfloat16):
        y = lowrank_linear(torch.eye(40), up, down, None, activation, 60.0, 1.0)
    exact = PHI[activation](60 * up.double() @ down.double()).t()
    assert (y.double() - exact).abs().max() < 2**-8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_a_trained_weight_under_a_delta_has_the_formulas_gradient(dora, transposed):
    x, weight = torch.randn(5, 12, dtype=torch.float64), leaf(*((12, 10) if transposed else (10, 12)))
    factors = [each._replace(scale=2.0) for each in make_factors([dora])]
    found, expected = (
        torch.autograd.grad(layer(x, weight, None, factors, transposed=transposed).square().sum(), weight)[0]
        for layer in (sine_layer, sine_layer_reference)
    )
    torch.testing.assert_close(found, expected)


def test_the_sum_has_the_weights_type_before_it_has_that_of_x():
    """So that a merged weight gives the same bits."""
    x, weight = torch.randn(5, 64), torch.randn(48, 64).bfloat16()
    factors = make_factors([False], d_in=64, d_out=48, dtype=torch.float32)
    assert torch.equal(sine_layer(x, weight, None, factors), F.linear(x, effective_weights(weight, factors).float()))
