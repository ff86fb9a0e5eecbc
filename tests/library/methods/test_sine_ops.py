"""The sine operators: bits, gradients, accuracy, saved activations, against the float64 formula and plain torch."""

import pytest
import torch
import torch.nn.functional as F

from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.sine.op import embedding_delta, lowrank_weight, sine_embedding
from nonlinear_lowrank.methods.sine.reference import sine_embedding_reference, sine_layer_reference
from nonlinear_lowrank.ops.precision import full_precision
from nonlinear_lowrank.ops.sine import SineFactors, dora_norm, effective_weights, sine_delta, sine_layer
from rounding_helpers import assert_close_by_norm

D_IN, D_OUT, RANK = 12, 10, 3
# name: for each delta, whether it is sine-DoRA's
DELTAS = {"sine": [False], "dora": [True], "sine+dora+sine": [False, True, False]}
deltas = pytest.mark.parametrize("dora", DELTAS.values(), ids=DELTAS)


def leaf(*shape, scale=1.0, dtype=torch.float64):
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


def make_factors(dora, *, d_in=D_IN, d_out=D_OUT, r=RANK, rms=2.0, dtype=torch.float64, scale=1.5):
    """Fresh deltas whose phases have the given root mean square (radians)."""
    return [
        SineFactors(
            up=leaf(d_out, r, dtype=dtype),
            down=leaf(r, d_in, dtype=dtype),
            omega=rms / r**0.5,
            gain=d_in**0.5,
            scale=scale,
            magnitude=(0.5 + torch.rand(d_out, dtype=torch.float64)).to(dtype).requires_grad_() if each else None,
        )
        for each in dora
    ]


def tensors(factors):
    return [tensor for each in factors for tensor in (each.up, each.down, each.magnitude) if tensor is not None]


def cast(factors, dtype):
    def one(tensor):
        return None if tensor is None else tensor.detach().to(dtype).requires_grad_()

    return [each._replace(up=one(each.up), down=one(each.down), magnitude=one(each.magnitude)) for each in factors]


def with_gradients(y, inputs, dy):
    return [y, *torch.autograd.grad(y, inputs, dy.to(y.dtype), allow_unused=True)]


def assert_all_close(ours, expected, **tolerance):
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("base", [True, False], ids=["merged", "delta"])
@deltas
def test_matches_the_plain_formula_in_float64(dora, base, bias, trained):
    factors = make_factors(dora)
    x, weight, dy = leaf(3, 5, D_IN), leaf(D_OUT, D_IN).detach(), torch.randn(3, 5, D_OUT, dtype=torch.float64)
    weight.requires_grad_(trained)
    bias = leaf(D_OUT) if bias else None
    inputs = [x, *tensors(factors)] + [weight] * trained + [bias] * (bias is not None)
    ours = with_gradients(sine_layer(x, weight, bias, factors, base=base), inputs, dy)
    expected = with_gradients(sine_layer_reference(x, weight, bias, factors, base=base), inputs, dy)
    assert_all_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stride", [None, (1, 1), (2, 3)], ids=["conv1d", "conv2d", "conv2d-strided"])
@deltas
def test_other_layouts_are_the_same_map(dora, stride):
    factors, bias = make_factors(dora), leaf(D_OUT)
    if stride is None:
        x, stored = leaf(3, 5, D_IN), leaf(D_IN, D_OUT)
        y = sine_layer(x, stored, bias, factors, transposed=True)
        expected = sine_layer_reference(x, stored.t(), bias, factors)
    else:
        x, stored = leaf(2, D_IN, 7, 8), leaf(D_OUT, D_IN, 1, 1)
        y = sine_layer(x, stored, bias, factors, stride=stride)
        pixels = x[:, :, :: stride[0], :: stride[1]].movedim(1, -1)
        expected = sine_layer_reference(pixels, stored.flatten(1), bias, factors).movedim(-1, 1)
    inputs, dy = [x, stored, bias, *tensors(factors)], torch.randn_like(y)
    assert_all_close(with_gradients(y, inputs, dy), with_gradients(expected, inputs, dy), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", ["merged", "delta", "embedding"])
def test_gradcheck(operator):
    factors = make_factors([False, False], d_in=5, d_out=4, r=2)
    x, weight = leaf(3, 5), leaf(4, 5)

    def function(x, weight, *flat):
        rebuilt = [each._replace(up=flat[2 * i], down=flat[2 * i + 1]) for i, each in enumerate(factors)]
        if operator == "embedding":
            return sine_embedding(torch.tensor([[1, 3, 1], [0, 2, 2]]), weight, rebuilt)
        base = operator == "merged"
        return sine_layer(x, weight if base else None, None, rebuilt, base=base)

    assert torch.autograd.gradcheck(function, (x, weight, *tensors(factors)))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@deltas
def test_gradients_are_no_worse_than_twice_the_formulas(dora, dtype):
    factors = cast(make_factors(dora, d_in=48, d_out=40, r=4), dtype)
    x, weight, bias = leaf(64, 48, dtype=dtype), leaf(40, 48, dtype=dtype), leaf(40, dtype=dtype)
    dy = torch.randn(64, 40).to(dtype)
    exact_inputs = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    exact_factors = cast(factors, torch.float64)
    exact = with_gradients(
        sine_layer_reference(*exact_inputs, exact_factors), [*exact_inputs, *tensors(exact_factors)], dy
    )
    inputs = [x, weight, bias, *tensors(factors)]
    ours = with_gradients(sine_layer(x, weight, bias, factors), inputs, dy)
    plain = with_gradients(sine_layer_reference(x, weight, bias, factors), inputs, dy)
    for mine, formula, truth in zip(ours, plain, exact, strict=True):
        assert mine.dtype == dtype
        scale = truth.norm()
        assert (mine - truth).norm() / scale <= 2 * (formula - truth).norm() / scale + 1e-6


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d"])
@deltas
def test_merged_and_unmerged_have_equal_bits(dora, kind, dtype, autocast):
    factors = cast(make_factors(dora, d_in=64, d_out=40, r=5), torch.float32)
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
    factors = cast(make_factors([False, True]), torch.float32)
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


@pytest.mark.parametrize("kind", ["merged", "delta", "conv1d", "conv2d", "embedding"])
@deltas
def test_compiles_fullgraph_with_equal_gradients(kind, dora):
    torch.compiler.reset()
    factors = make_factors(dora, dtype=torch.float32)
    stride = (1, 1) if kind == "conv2d" else None
    shape = {"conv1d": (D_IN, D_OUT), "conv2d": (D_OUT, D_IN, 1, 1)}.get(kind, (D_OUT, D_IN))
    weight = leaf(*shape, dtype=torch.float32).detach()
    x = leaf(2, D_IN, 4, 4, dtype=torch.float32) if stride else leaf(2, 3, D_IN, dtype=torch.float32)
    inputs = [x, *tensors(factors)]
    if kind == "embedding":
        x, inputs = torch.randint(0, D_OUT, (2, 6)), inputs[1:]

    def function(x):
        if kind == "embedding":
            return sine_embedding(x, weight, factors, padding_idx=1)
        base = kind != "delta"
        return sine_layer(x, weight, None, factors, base=base, transposed=kind == "conv1d", stride=stride)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(function(x))
    eager = with_gradients(function(x), inputs, dy)
    for mine, other in zip(with_gradients(compiled(x), inputs, dy), eager, strict=True):
        assert torch.equal(mine, other)
    with torch.no_grad():
        assert torch.equal(compiled(x), eager[0])


@deltas
def test_embedding_matches_the_plain_formula(dora):
    factors, weight = make_factors(dora, d_out=30), leaf(30, D_IN)
    indices = torch.randint(0, 10, (4, 9))
    dy = torch.randn(4, 9, D_IN, dtype=torch.float64)
    inputs = [weight, *tensors(factors)]
    masked = dy.masked_fill((indices == 2)[..., None], 0)
    for padding, given in ((None, dy), (2, masked)):
        ours = with_gradients(sine_embedding(indices, weight, factors, padding_idx=padding), inputs, dy)
        assert_all_close(ours, with_gradients(sine_embedding_reference(indices, weight, factors), inputs, given))
    only = with_gradients(sine_embedding(indices, weight, factors, base=False), tensors(factors), dy)
    delta = sine_embedding_reference(indices, weight, factors) - F.embedding(indices, weight)
    assert_all_close(only, with_gradients(delta, tensors(factors), dy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@deltas
def test_an_embedding_row_has_the_bits_of_the_merged_table(dora, dtype):
    factors = cast(make_factors(dora, d_in=67, d_out=300, r=5, rms=30.0), torch.float32)
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


def test_autocast_gives_bfloat16_and_float32_gradients():
    factors = make_factors([False, True], dtype=torch.float32)
    x, weight = leaf(32, D_IN, dtype=torch.float32), leaf(D_OUT, D_IN, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = sine_layer(x, weight, None, factors)
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()  # also backward under autocast
    reference = sine_layer_reference(x.detach(), weight.detach(), None, factors)
    torch.testing.assert_close(y.float(), reference, rtol=0.05, atol=0.1)
    for each in (x, weight, *tensors(factors)):
        assert each.grad.dtype == torch.float32
        assert each.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["merged", "delta", "embedding"])
@deltas
def test_saves_its_input_alone(dora, kind, backend):
    torch.compiler.reset()
    factors = make_factors(dora, d_in=64, d_out=48, dtype=torch.float32)
    weight, bias = torch.randn(48, 64), torch.randn(48)
    x = torch.randint(0, 48, (3, 8)) if kind == "embedding" else leaf(7, 64, dtype=torch.float32)

    def function(x):
        if kind == "embedding":
            return sine_embedding(x, weight, factors)
        return sine_layer(x * 1, weight, bias, factors, base=kind == "merged")

    run = torch.compile(function, backend=backend, fullgraph=True) if backend else function
    assert saved_bytes(run, x, parameters=[weight, bias, *tensors(factors)]) == x.nbytes


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


def test_noncontiguous_input():
    (each,) = make_factors([False])
    x, weight, dy = leaf(D_IN, 5, 3), leaf(D_OUT, D_IN), torch.randn(D_OUT, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    inputs = [x, weight, each.up, each.down]
    expected = with_gradients(sine_layer_reference(x.permute(2, 1, 0), weight, None, [each]), inputs, dy)
    for stored, transposed in ((weight, False), (weight.t(), True)):
        y = sine_layer(x.permute(2, 1, 0), stored, None, [each], transposed=transposed)
        assert_all_close(with_gradients(y, inputs, dy), expected)


def test_second_derivatives_are_refused_not_wrong():
    factors, x, weight = make_factors([False]), leaf(3, D_IN), leaf(D_OUT, D_IN)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(sine_layer(x, weight, None, factors).sum(), x, create_graph=True)
    rows = sine_embedding(torch.tensor([1, 2]), weight, factors)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(rows.sum(), factors[0].up, create_graph=True)
