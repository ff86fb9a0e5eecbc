"""Low-rank factors fitted to trained weights: how close they come, what is kept, saved and refused."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES
from nonlinear_lowrank import SineLowRankConfig
from nonlinear_lowrank.methods.sine.fit import fit_factors
from refusals import assert_refused
from travel_helpers import MODELS

MLP = r".*mlp\.(gate|up|down)_proj"


def fitted(model, activation="sine", rank=6, **options):
    config = SineLowRankConfig(rank=rank, activation=activation, init="fit")
    return nlr.augment(model, config, verbose=False, **options)


def relative_error(weight, found):
    return ((weight.double() - found.double()).norm() / weight.double().norm()).item()


@pytest.mark.parametrize("transposed", [False, True])
def test_identity_is_the_truncated_decomposition(transposed):
    plain = Conv1D(18, 24) if transposed else nn.Linear(24, 18)
    weight = (plain.weight.t() if transposed else plain.weight).detach().double()
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    model = nn.ModuleDict({"a": copy.deepcopy(plain)})
    fitted(model, "identity")
    torch.testing.assert_close(model["a"].weight.double(), (u[:, :6] * s[:6]) @ v[:6], rtol=1e-4, atol=1e-5)
    assert torch.equal(model["a"].bias, plain.bias)


@pytest.mark.parametrize(("low", "ratio"), [(0.0, 0.95), (30.0, 1.01)])
def test_a_sine_comes_closer_than_the_decomposition_where_singular_values_hardly_fall(low, ratio):
    """And as close where a weight is noise beside one of low rank: the ratio was at most 1.003 in 25 draws."""
    weight = torch.randn(96, 64) + low * torch.randn(96, 3) @ torch.randn(3, 64) / 64
    layers = {}
    for activation in ("identity", "sine"):
        model = nn.ModuleDict({"a": nn.Linear(64, 96, bias=False)})
        model["a"].weight.data = weight.clone()
        report = fitted(model, activation, rank=12)
        layers[activation] = model["a"]
        error = relative_error(weight, model["a"].weight)
        assert model["a"].fit_error == pytest.approx(error, rel=1e-3)
        assert f"relative error of the fit {error:.3f}" in str(report)
    assert layers["sine"].fit_error < ratio * layers["identity"].fit_error


def test_a_fit_does_not_depend_on_scale_or_omega():
    weight = torch.randn(40, 24, dtype=torch.float64)
    small, large = fit_factors(1e-3 * weight, 6, "sine"), fit_factors(1e3 * weight, 6, "sine")
    assert small.error == pytest.approx(large.error, rel=1e-6)
    for omega in (1.0, 300.0):
        model = nn.ModuleDict({"a": nn.Linear(24, 40, dtype=torch.float64)})
        model["a"].weight.data = weight.clone()
        nlr.augment(model, SineLowRankConfig(rank=6, omega=omega, init="fit"), verbose=False)
        assert relative_error(weight, model["a"].weight) == pytest.approx(small.error, rel=1e-6)


def test_a_weight_of_zeros_stays_one():
    model = nn.ModuleDict({"a": nn.Linear(24, 18)})
    nn.init.zeros_(model["a"].weight)
    fitted(model)
    assert not model["a"].weight.any()


def test_a_compressed_model_is_saved_with_the_gain_of_each_layer(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()  # no warning: no weight is discarded
    report = fitted(model, include=MLP)
    gains = {name: model.get_submodule(name).sine_config.gain for name in report.swapped}
    assert len(set(gains.values())) == len(gains)
    model.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    assert {name: again.get_submodule(name).sine_config.gain for name in gains} == gains
    ids = torch.randint(model.config.vocab_size, (2, 7))
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_convert_compresses_a_checkpoint(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path / "plain")
    report = nlr.hub.convert(tmp_path / "plain", tmp_path / "small", SineLowRankConfig(rank=6), include=MLP)
    assert report.augmented.parameters_added < 0
    assert not report.bit_equal
    assert "relative error of the fit" in str(report)
    card = (tmp_path / "small" / "README.md").read_text()
    assert card.count("## Method: sine-lowrank") == 1  # one list of settings, not one a layer
    assert re.search(r"gain \| [\d.]+ to [\d.]+ ", card)
    assert re.search(r"layers \| 6 ", card)


def test_compression_on_meta_costs_nothing():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(24, 18)})
    assert fitted(model).parameters_added == 6 * (24 + 18) - 24 * 18
    assert model["a"].sine_up.is_meta


def test_what_cannot_be_fitted_is_refused_by_name():
    assert_refused("init='fit' is for sine and identity", SineLowRankConfig, init="fit", activation="relu")
    assert_refused("gain is found by the fit", SineLowRankConfig, init="fit", gain=3.0)
    assert_refused("use kaiming_sqrt5", nlr.SineLowRankLinear, 24, 18, config=SineLowRankConfig(rank=2, init="fit"))
    model = nn.ModuleDict({"a": nn.Linear(24, 18), "b": nn.Linear(24, 18)})
    model["b"].weight.data[0, 0] = float("nan")
    assert_refused("b: its weight has values that are not finite", fitted, model)
    assert type(model["a"]) is nn.Linear


def test_experts_are_skipped_and_listed_or_refused_by_name():
    report = fitted(MODELS["mixtral"][0](), rank=2)
    assert report.swapped
    assert any("not for experts" in why for why in report.skipped.values())
    model = MODELS["mixtral"][0]()
    assert_refused("not for experts; leave it out", fitted, model, rank=2, include=r".*experts")


def test_a_fit_is_kept_once():
    model = nn.ModuleDict({"a": nn.Linear(24, 18)})
    fitted(model)
    before = model["a"].weight.detach()
    model["a"].reset_parameters()
    assert not torch.equal(model["a"].weight, before)
