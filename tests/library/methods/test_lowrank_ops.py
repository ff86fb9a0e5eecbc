"""Linear maps with a weight that is a function of a low-rank product: formulas, gradients, kept bytes, compile."""

import pytest
import torch
import torch.nn.functional as F

from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.sine.op import WEIGHT_ACTIVATIONS, lowrank_linear, lowrank_weight
from nonlinear_lowrank.methods.sine.reference import lowrank_linear_reference

D_IN, D_OUT, RANK = 40, 28, 3
PHI = {
    "identity": lambda phase: phase,
    "sine": torch.sin,
    "sigmoid": lambda phase: 1 / (1 + torch.exp(-phase)),
    "relu": lambda phase: phase.clamp(min=0),
}


def leaves(dtype=torch.float64, tokens=(2, 5)):
    shapes = ((*tokens, D_IN), (D_OUT, RANK), (RANK, D_IN), (D_OUT,))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.fixture(params=WEIGHT_ACTIVATIONS)
def activation(request):
    return request.param


@pytest.mark.parametrize("omega", [1.0, 7.0])
def test_the_formula_written_out(activation, omega):
    x, up, down, bias = leaves()
    weight = PHI[activation](omega * up @ down) / 2.5
    torch.testing.assert_close(lowrank_weight(up, down, activation, omega, 2.5), weight)
    expected = torch.einsum("bti,oi->bto", x, weight) + bias
    for function in (lowrank_linear, lowrank_linear_reference):
        torch.testing.assert_close(function(x, up, down, bias, activation, omega, 2.5), expected)


@pytest.mark.parametrize("changed", ["nothing", "no bias", 0, 1, 2, 3], ids=str)  # a number: what is frozen
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_the_references(activation, changed, compiled):
    torch.compiler.reset()
    inputs = leaves()
    if changed == "no bias":
        inputs[3] = None
    elif changed != "nothing":
        inputs[changed] = inputs[changed].detach()
    used = [each for each in inputs if each is not None and each.requires_grad]
    run = torch.compile(lowrank_linear, backend="aot_eager", fullgraph=True) if compiled else lowrank_linear
    y = run(*inputs, activation, 3.0, 1.7)
    expected = lowrank_linear_reference(*inputs, activation, 3.0, 1.7)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(torch.autograd.grad(y, used, dy), torch.autograd.grad(expected, used, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_saves_no_weight(activation, backend, bf16):
    torch.compiler.reset()
    x, up, down, bias = leaves(torch.float32, (64,))

    def function(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return lowrank_linear(x, up, down, bias, activation, 3.0, 1.7)

    run = torch.compile(function, backend=backend, fullgraph=True) if backend else function
    narrow = RANK if activation == "identity" else 0
    size = 2 if bf16 else 4
    kept = saved_bytes(run, x, parameters=[up, down, bias])
    if activation == "identity" and bf16:  # the factors' casts are not told from activations there
        assert kept <= 64 * (D_IN + narrow) * size + (D_IN + D_OUT) * RANK * size
    else:
        assert kept == 64 * (D_IN + narrow) * size


def test_bfloat16_is_as_exact_as_a_rounded_weight(activation):
    x, up, down, bias = (each.detach() for each in leaves(torch.float32, (50,)))
    exact = lowrank_linear_reference(*(each.double() for each in (x, up, down, bias)), activation, 20.0, 6.0)
    weight = lowrank_weight(up, down, activation, 20.0, 6.0)
    plain = F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        ours = lowrank_linear(x, up, down, bias, activation, 20.0, 6.0)
    assert ours.dtype == torch.bfloat16
    error, allowed = ((each.double() - exact).norm() for each in (ours, plain))
    assert error <= 2 * allowed + 1e-6


def test_a_large_phase_is_float32():
    """In bfloat16 a phase of 100 rad would be off by up to 0.4 rad."""
    up, down = torch.rand(D_OUT, 1) + 0.5, torch.rand(1, D_IN) + 0.5
    x = torch.eye(D_IN)
    for activation in ("sine", "sigmoid"):
        with torch.autocast("cpu", torch.bfloat16):
            y = lowrank_linear(x, up, down, None, activation, 60.0, 1.0)
        exact = PHI[activation](60 * up.double() @ down.double()).t()
        assert (y.double() - exact).abs().max() < 2**-8


def test_second_derivatives_are_refused():
    inputs = leaves()
    y = lowrank_linear(*inputs, "sigmoid", 1.0, 1.0)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), inputs[0], create_graph=True)


def test_runs_on_meta(activation):
    inputs = [each.detach().to("meta").requires_grad_() for each in leaves(torch.float32)]
    y = lowrank_linear(*inputs, activation, 1.0, 1.0)
    y.sum().backward()
    assert y.shape == (2, 5, D_OUT)
    assert [each.grad.shape for each in inputs] == [each.shape for each in inputs]
