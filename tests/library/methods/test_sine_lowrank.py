"""Sine low-rank weights: the formula, init, counts of the documents, ranks, types."""

import copy

import pytest
import torch
from torch import nn
from transformers import ViTForImageClassification
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from family_helpers import FAMILIES as EVERY_FAMILY
from model_helpers import FAMILIES, parameters
from nlr_lab.plan.inspect import format_cost
from nonlinear_lowrank import SineLowRankConfig, SineLowRankLinear, UserError
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.methods.sine.layer import OMEGA_BY_RANK
from refusals import assert_refused

ACTIVATIONS = ("sine", "identity", "sigmoid", "relu")


@pytest.fixture(params=ACTIVATIONS)
def config(request):
    return SineLowRankConfig(rank=4, activation=request.param)


def test_it_is_a_linear_with_its_weight(config):
    # In float64: a sine's argument of a hundred leaves float32 too few digits for the usual tolerance.
    layer = SineLowRankLinear(24, 18, config=config).double()
    with torch.no_grad():
        layer.bias.normal_()
    x = torch.randn(2, 3, 24).double()
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {"sine_up": (18, 4), "sine_down": (4, 24), "bias": (18,)}
    assert "rank=4" in repr(layer)


def test_the_weight_is_the_papers_formula():
    layer = SineLowRankLinear(24, 18, config=SineLowRankConfig(rank=4, omega=300))
    expected = torch.sin(300 * layer.sine_up.double() @ layer.sine_down.double()) / 24**0.5
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-3, atol=1e-4)
    plain = SineLowRankLinear(24, 18, config=SineLowRankConfig(rank=4, activation="identity"))
    torch.testing.assert_close(plain.weight, plain.sine_up @ plain.sine_down)
    own = SineLowRankLinear(24, 18, config=SineLowRankConfig(rank=4, omega=2, gain=5, activation="sigmoid"))
    torch.testing.assert_close(own.weight, torch.sigmoid(2 * own.sine_up @ own.sine_down) / 5)


@pytest.mark.parametrize(("name", "a"), [("kaiming_sqrt5", 5**0.5), ("kaiming_zero", 0.0)])
def test_init_is_torchs_kaiming_with_each_factors_own_fan(name, a):
    layer = SineLowRankLinear(700, 900, config=SineLowRankConfig(rank=30, init=name))
    assert not layer.bias.any()
    for factor, fan in ((layer.sine_up, 30), (layer.sine_down, 700)):
        expected = nn.init.kaiming_uniform_(torch.empty_like(factor), a=a)
        bound = (6 / ((1 + a * a) * fan)) ** 0.5
        assert factor.abs().max() <= bound
        assert factor.abs().max() > 0.99 * bound
        assert factor.std().item() == pytest.approx(expected.std().item(), rel=0.03)
    product = (layer.sine_up @ layer.sine_down).std().item()
    assert product == pytest.approx((1 / 3 if a else 2) / 700**0.5, rel=0.1)


def test_published_frequencies_by_rank():
    cases = [(1, 500), (4, 500), (5, 500), (8, 500), (10, 300), (64, 300)]
    assert [(rank, SineLowRankConfig(rank=rank).omega) for rank, _ in cases] == cases
    assert SineLowRankConfig(rank=60, omega="vit-base-imagenet").omega == 200
    assert SineLowRankConfig(rank=3, omega="occupancy").omega == 100
    assert SineLowRankConfig(rank=1, omega="convnext-tiny-cifar100").omega == 400
    assert SineLowRankConfig(rank=1, activation="identity").omega == 1
    assert all(min(table) == 1 for table in OMEGA_BY_RANK.values())


def nerf():
    layers = {f"trunk{i}": nn.Linear(3 if i == 0 else 256, 256) for i in range(8)}
    tail = {"alpha": (256, 1), "feature": (256, 256), "view": (259, 128), "rgb": (128, 3)}
    return nn.ModuleDict({**layers, **{name: nn.Linear(*shape) for name, shape in tail.items()}})


def test_where_a_rank_saves_nothing_the_linear_stays():
    model = nerf()
    report = nlr.augment(model, SineLowRankConfig(rank=30), exclude="alpha", verbose=False)
    assert report.skipped["trunk0"].startswith("rank 30 saves no parameters (3 -> 256: 7,770 for 768)")
    assert type(model["trunk0"]) is nn.Linear
    cost = model_cost(model, 65)
    added = 138_334 - 561_284  # of shared/facts/parameter_counts.json
    assert (report.parameters_added, cost.branch_parameters, cost.parameters) == (added, added, parameters(model))
    assert (report.parameters_before, parameters(model), cost.flop_ratio) == (561_284, 138_334, 1)
    with pytest.raises(UserError, match="trunk0: rank 30 saves no parameters"):
        nlr.augment(nerf(), SineLowRankConfig(rank=30), include="trunk0")
    assert_refused("saves no parameters", SineLowRankLinear, 3, 256, config=SineLowRankConfig(rank=30))
    assert_refused("nothing to swap", nlr.augment, nn.Sequential(nn.Linear(4, 4)), SineLowRankConfig(rank=2))


def test_costs_of_plain_low_rank_are_its_two_thin_products(capsys):
    model = nn.Sequential(nn.Linear(32, 48))
    report = nlr.augment(model, SineLowRankConfig(rank=3, activation="identity"))
    assert "- " in capsys.readouterr().out
    assert report.flops_before + report.flops_added == 2 * 3 * (32 + 48)
    cost = model_cost(model, 1)
    assert cost.flops == 2 * 3 * (32 + 48)
    assert cost.flop_ratio == pytest.approx(3 * 80 / (32 * 48))
    assert "the method changes -" in format_cost(cost)


def test_factors_stay_float32_in_a_16_bit_model():
    layer = SineLowRankLinear(96, 80, config=SineLowRankConfig(rank=4, omega=900))
    low = copy.deepcopy(layer).to(torch.bfloat16)
    assert (low.sine_up.dtype, low.sine_down.dtype, low.bias.dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    assert torch.equal(low.weight, layer.weight)
    y = low(torch.eye(96, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    # One rounding of an entry of at most 1 / sqrt(96); bfloat16 factors would be off by whole radians here.
    torch.testing.assert_close(y.float(), layer.weight.t(), rtol=0, atol=2**-8 / 96**0.5)
    assert copy.deepcopy(layer).double().sine_up.dtype == torch.float64
    assert SineLowRankLinear(96, 80, config=SineLowRankConfig(), dtype=torch.bfloat16).sine_up.dtype == torch.float32


def test_conv1d_and_missing_biases():
    model = nn.ModuleDict({"a": Conv1D(18, 24), "b": nn.Linear(24, 18, bias=False)})
    nlr.augment(model, SineLowRankConfig(rank=3), verbose=False)
    for layer in model.values():
        assert isinstance(layer, SineLowRankLinear)
        assert layer(torch.randn(5, 24)).shape == (5, 18)
    assert model["a"].bias is not None
    assert model["b"].bias is None


def test_trained_weights_are_not_done_away_with_in_silence(tmp_path):
    FAMILIES["vit"]().save_pretrained(tmp_path / "plain")
    model = ViTForImageClassification.from_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match="random weights in the place of 4 trained ones"):
        nlr.augment(model, SineLowRankConfig(rank=2), include=r".*mlp\.fc[12]", verbose=False)


def test_factors_that_fsdp_has_rounded_are_refused():
    layer = SineLowRankLinear(16, 16, config=SineLowRankConfig(rank=2, omega=30))
    assert layer.bfloat16().sine_up.dtype == torch.float32
    layer.sine_up.data = layer.sine_up.data.bfloat16()
    assert_refused("param_dtype=torch.float32", layer, torch.randn(2, 16))
    model = EVERY_FAMILY["mixtral"].build()
    nlr.augment(model, SineLowRankConfig(rank=2, omega=30), include=r".*experts", verbose=False)
    for name, factor in model.named_parameters():
        if "sine_" in name:
            factor.data = factor.data.bfloat16()
    assert_refused("param_dtype=torch.float32", model, torch.arange(5)[None])
