"""Coordinate networks: sizes, formulas, inits, and what a step costs and keeps."""

import math

import pytest
import torch

from nlr_lab.bench.timing import interleaved_step_times, paired_ratio
from nlr_lab.fields.fit import Stepper, build
from nlr_lab.fields.image import ImageProblem
from nlr_lab.fields.model import Field, FieldConfig, encode, gaussian
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.recipe import FitConfig
from nonlinear_lowrank.errors import UserError
from seeds import rng


def _field(config: FieldConfig, method: FieldMethod | None = None, seed: int = 0) -> Field:
    return Field(config, method or FieldMethod(), torch.Generator().manual_seed(seed))


def _parameters(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def test_factors_every_linear_on_request():
    method = FieldMethod(kind="low-rank", rank=1)
    assert _parameters(_field(FieldConfig(factored="all"), method)) == (3 + 256 + 256) + 2 * (512 + 256) + 256 + 1


@pytest.mark.parametrize("activation", ["gaussian", "relu", "siren"])
def test_field_computes_its_formula(activation):
    config = FieldConfig(width=12, hidden_layers=1, activation=activation, spread=0.3, frequency=7.0, octaves=2)
    field = _field(config).double()
    x = torch.rand(5, 3, dtype=torch.float64) * 2 - 1
    act = {
        "gaussian": lambda z: torch.exp(-(z**2) / (2 * 0.3**2)),
        "relu": lambda z: z * (z > 0),
        "siren": lambda z: torch.sin(7.0 * z),
    }[activation]
    waves = [f(2**i * math.pi * x) for f in (torch.sin, torch.cos) for i in range(2)]
    # the order of the encoding's columns: coordinate by coordinate, octave by octave
    columns = [x, *(torch.stack(pair, -1).flatten(-2) for pair in (waves[:2], waves[2:]))]
    z = torch.cat(columns, -1)
    torch.testing.assert_close(encode(x, 2), z)
    for layer in (field.first, field.hidden[0]):
        z = act(z @ layer.weight.T + layer.bias)
    torch.testing.assert_close(field(x), z @ field.last.weight.T + field.last.bias, rtol=1e-10, atol=1e-12)


def test_gaussian_has_the_gradient_of_its_formula():
    z = (torch.randn(50, dtype=torch.float64) * 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: gaussian(z, 0.07), z)
    assert torch.autograd.gradgradcheck(lambda z: gaussian(z, 0.07), z)
    torch.testing.assert_close(gaussian(z, 0.07), torch.exp(-(z**2) / (2 * 0.07**2)))


@pytest.mark.parametrize(("rank", "low", "high"), [(None, 0.8, 1.25), (8, 0.1, 2.5)])
def test_siren_keeps_the_spread_of_its_signal(rank, low, high):
    """Sitzmann et al., theorem 1.8: without biases the arguments of hidden sines are N(0, 1)."""
    method = FieldMethod() if rank is None else FieldMethod(kind="low-rank", rank=rank)
    field = _field(FieldConfig(width=256, hidden_layers=3, activation="siren"), method)
    z = torch.sin(30 * field.first(torch.rand(2000, 3) * 2 - 1))
    for layer in field.hidden:
        assert low < (30 * (layer(z) - layer.bias)).std() < high
        z = torch.sin(30 * layer(z))
    if rank is None:
        assert field.hidden[0].weight.abs().max() <= math.sqrt(6 / 256) / 30
        assert field.first.weight.abs().max() <= 1 / 3


def test_divides_a_sine_sirens_weight_by_its_frequency():
    config = FieldConfig(width=32, activation="siren", frequency=20.0)
    field = _field(config, FieldMethod(kind="sine", rank=2, omega=40.0))
    layer = field.hidden[0]
    expected = torch.sin(40.0 * layer.sine_up @ layer.sine_down) / (math.sqrt(32) * 20.0)
    torch.testing.assert_close(layer.weight, expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sine_layers_keep_no_weight_for_backward(compiled):
    width, points = 128, 3  # far fewer values pass through than a weight has
    config = FieldConfig(width=width, hidden_layers=2)
    field = _field(config, FieldMethod(kind="sine", rank=2, omega=50.0))
    run = torch.compile(field, dynamic=False) if compiled else field
    with torch.autograd.graph.saved_tensors_hooks(_refuse(width), lambda each: each):
        run(torch.rand(points, 3)).sum().backward()


def _refuse(width: int):
    def check(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.numel() < width * width, f"kept {tuple(tensor.shape)}"
        return tensor

    return check


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width must be a positive integer"),
        ({"hidden_layers": -1}, "hidden_layers must be an integer of at least 0"),
        ({"spread": 0.0}, "spread must be a finite number above 0"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"factored": "some"}, "unknown factored"),
    ],
)
def test_refuses_bad_shapes(settings, message):
    with pytest.raises(UserError, match=message):
        FieldConfig(**settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("rank", [1, 30])
def test_compiled_sine_step_costs_at_most_a_tenth_more(rank):
    """On 2,048 points, optimizer included; steps of the two take turns."""
    pixels = rng().random((64, 64, 3))
    problem = ImageProblem(pixels, points=2048)
    config = FitConfig(compile=True, threads=1, device="cpu")

    def steps(method: FieldMethod):
        stepper = Stepper(problem, build(problem, method, seed=0), config)
        return lambda: stepper.take(0)

    methods = {"dense": FieldMethod(), "sine": FieldMethod(kind="sine", rank=rank)}
    times = interleaved_step_times({name: steps(each) for name, each in methods.items()}, rounds=60, warmup=5)
    assert paired_ratio(times["sine"], times["dense"]).median <= 1.10
