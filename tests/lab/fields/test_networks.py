"""Linears and networks of fields: sizes, formulas, draws, short forms, and what a step costs and saves."""

import math

import pytest
import torch
from torch import nn

from nlr_lab.bench.timing import interleaved_step_times, paired_ratio
from nlr_lab.fields.fit import Stepper, build
from nlr_lab.fields.image import ImageProblem
from nlr_lab.fields.model import Field, RadianceNet, encode, gaussian
from nlr_lab.fields.problem import FieldArm, FieldMethod
from nlr_lab.fields.settings import FieldConfig, FitConfig, RadianceConfig
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear
from refusals import assert_refused
from seeds import rng


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _field(config: FieldConfig, method: FieldMethod | None = None) -> Field:
    return Field(config, method or FieldMethod(), _generator())


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("init", ["kaiming_sqrt5", "kaiming_zero"])
@pytest.mark.parametrize("kind", ["dense", "low-rank", "sine"])
def test_draws_a_linear_from_its_generator_within_kaimings_bounds(kind, init):
    rank = None if kind == "dense" else 3
    method = FieldMethod(kind=kind, rank=rank, omega=50.0 if kind == "sine" else None, init=init)
    one, same, other = (method.linear(40, 60, generator=_generator(seed)) for seed in (5, 5, 6))
    slope = {"kaiming_sqrt5": 5, "kaiming_zero": 0}[init]
    fans = {"weight": 40, "sine_up": 3, "sine_down": 40}
    for name, value in one.named_parameters():
        assert torch.equal(value, same.get_parameter(name))
        assert not torch.equal(value, other.get_parameter(name))
        bound = 1 / math.sqrt(40) if name == "bias" else math.sqrt(6 / ((1 + slope) * fans[name]))
        assert 0.7 * bound < value.abs().max() <= bound


@pytest.mark.parametrize(
    ("text", "nerf", "occupancy"),
    [("sine:rank=5", 800, 50), ("sine:rank=5,omega=7", 7, 7), ("sine:rank=5,omega=nerf", 800, 800),
     ("low-rank:rank=5", None, None)],
)  # fmt: skip
def test_takes_omega_from_a_published_table(text, nerf, occupancy):
    method = FieldMethod.parse(text)
    assert (method.resolved("nerf").omega, method.resolved("occupancy").omega) == (nerf, occupancy)


@pytest.mark.parametrize(
    "text",
    ["dense", "dense:init=kaiming_zero", "low-rank:rank=5", "sine:rank=1,omega=200,gain=12.5,init=kaiming_zero",
     "sine:rank=3,omega=nerf", "sine:rank=3"],
)  # fmt: skip
def test_reads_and_writes_the_short_form(text):
    assert str(FieldMethod.parse(text)) == text
    assert str(FieldMethod.parse(text.replace(",", ", ").replace(":", ": "))) == text
    arm = FieldArm.parse(f"{text},lr=1e-3,name=mine" if ":" in text else f"{text}:lr=1e-3,name=mine")
    assert (arm.name, arm.lr, len(arm.inits)) == ("mine", 1e-3, 1 if "init" in text else 2)
    assert arm.method == FieldMethod.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fourier:rank=1", "unknown kind 'fourier'"),
        ("dense:init=xavier", "unknown init"),
        ("dense:rank=3", "rank has no meaning"),
        ("low-rank", "low-rank linears need a rank"),
        ("low-rank:rank=3,omega=3", "omega has no meaning"),
        ("sine:rank=0", "rank must be a positive integer"),
        ("sine:rank=1.5,omega=3", "rank must be a positive integer"),
        ("sine:rank=2,omega=-1", "omega must be a finite number above 0"),
        ("sine:rank=2,omega=nurf", "omega must be a number or one of"),
        ("sine:rank=1,gain=big", "gain must be a finite number"),
        ("sine:rank", "cannot read 'rank'"),
        ("sine:rnk=1", "cannot read 'rnk=1'"),
        ("sine:rank=1,rank=2", "cannot read 'rank=2' .* each once"),
        ("sine:rank=5,lr=fast", "lr must be a .*number.*, got 'fast'"),
        ("sine:rank=5,lr=-1", "lr must be a finite number above 0"),
        ("sine:rank=5,name=a/b", "must be made of letters"),
    ],
)
def test_refuses_short_forms_that_make_no_sense(text, message):
    for parse in (FieldArm.parse,) if "lr=" in text or "name=" in text else (FieldArm.parse, FieldMethod.parse):
        assert_refused(message, parse, text)


def test_arm_tries_both_inits_unless_told():
    arm = FieldArm.parse("sine:rank=5,omega=50")
    assert (arm.name, arm.lr, arm.inits) == ("sine-k5-w50", None, ("kaiming_sqrt5", "kaiming_zero"))
    assert_refused("inits must be one or more", FieldArm, method=FieldMethod(), inits=("orthogonal",))


def test_factors_every_linear_that_gets_smaller_on_request():
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
    z = torch.cat([x, *(torch.stack(pair, -1).flatten(-2) for pair in (waves[:2], waves[2:]))], -1)
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
    layer = _field(config, FieldMethod(kind="sine", rank=2, omega=40.0)).hidden[0]
    expected = torch.sin(40.0 * layer.sine_up @ layer.sine_down) / (math.sqrt(32) * 20.0)
    torch.testing.assert_close(layer.weight, expected)


@pytest.mark.parametrize(
    ("rank", "parameters", "printed"),
    [(None, 561_284, 100), (1, 7_565, 1.3), (5, 26_259, 4.7), (10, 48_674, 8.7), (30, 138_334, 24.6),
     (60, 272_824, 48.6)],
)  # fmt: skip
def test_radiance_field_has_the_papers_counts(rank, parameters, printed):
    for text in ("dense",) if rank is None else (f"low-rank:rank={rank}", f"sine:rank={rank},omega=nerf"):
        net = RadianceNet(RadianceConfig(), FieldMethod.parse(text), _generator())
        assert _parameters(net) == parameters
        assert abs(100 * parameters / 561_284 - printed) < 0.1  # 1.3 is cut off, not rounded
        assert not isinstance(net.alpha, SineLowRankLinear)
        assert isinstance(net.layers[4], SineLowRankLinear) == (rank is not None)


@pytest.mark.parametrize("density_of", ["softplus", "relu"])
def test_radiance_field_computes_the_formula(density_of):
    config = RadianceConfig(width=16, layers=3, view_width=8, spread=0.3, density=density_of)
    net = RadianceNet(config, FieldMethod(), _generator()).double()
    points, views = torch.randn(5, 4, 3).double(), torch.randn(5, 4, 3).double()
    density, colour = net(points, views)
    hidden = points
    for layer in net.layers:
        hidden = torch.exp(-((hidden @ layer.weight.T + layer.bias) ** 2) / (2 * 0.3**2))
    raw = hidden @ net.alpha.weight.T + net.alpha.bias
    seen = torch.cat([hidden @ net.feature.weight.T + net.feature.bias, views], -1)
    seen = torch.exp(-((seen @ net.view.weight.T + net.view.bias) ** 2) / (2 * 0.3**2))
    expected = raw.clamp_min(0) if density_of == "relu" else torch.log(1 + raw.exp())
    assert density.allclose(expected[..., 0])
    assert colour.allclose(1 / (1 + torch.exp(-(seen @ net.rgb.weight.T + net.rgb.bias))))


def test_encodings_widen_the_inputs_of_a_radiance_field_alone():
    net = RadianceNet(RadianceConfig(width=8, octaves=10, view_octaves=4), FieldMethod(), _generator())
    assert (net.layers[0].in_features, net.view.in_features) == (63, 8 + 27)
    assert net(torch.randn(2, 3), torch.randn(2, 3))[1].shape == (2, 3)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sine_layers_save_no_weight_for_backward(compiled):
    width, points = 128, 3  # far fewer values pass through than a weight has
    field = _field(FieldConfig(width=width, hidden_layers=2), FieldMethod(kind="sine", rank=2, omega=50.0))
    run = torch.compile(field, dynamic=False) if compiled else field

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.numel() < width * width, f"saved {tuple(tensor.shape)}"
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda each: each):
        run(torch.rand(points, 3)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 30])
def test_compiled_sine_step_costs_at_most_a_tenth_more(rank):
    """On 2,048 points, optimizer included; steps of the two take turns."""
    problem = ImageProblem(rng().random((64, 64, 3)), points=2048)
    config = FitConfig(compile=True, threads=1, device="cpu")

    def steps(method: FieldMethod):
        stepper = Stepper(problem, build(problem, method, seed=0), config)
        return lambda: stepper.take(0)

    methods = {"dense": FieldMethod(), "sine": FieldMethod(kind="sine", rank=rank)}
    times = interleaved_step_times({name: steps(each) for name, each in methods.items()}, rounds=60, warmup=5)
    assert paired_ratio(times["sine"], times["dense"]).median <= 1.10


def test_dense_ends_have_the_methods_init():
    field = _field(FieldConfig(), FieldMethod(kind="sine", rank=2, omega=40.0, init="kaiming_zero"))
    for layer in (field.first, field.last):
        bound = math.sqrt(6 / layer.in_features)
        assert 0.7 * bound < layer.weight.abs().max() <= bound
