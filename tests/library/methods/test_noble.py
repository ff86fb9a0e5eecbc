"""NobleLinear and NobleConv1D as modules: init, names, meta, copies, compile, checkpoints of plain layers."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import NobleConfig, NobleConv1D, NobleLinear, UserError

CONFIGS = {
    "cosnet": NobleConfig(rank=4),
    "gated": NobleConfig(rank_ratio=0.45, activation="silu", depth=1, fusion="gated", up_bias=True),
    "biased": NobleConfig(rank=4, depth=3, up_bias=True),
    "official": NobleConfig.official(rank=4),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_plain_checkpoint_loads_and_disabled_branch_is_the_plain_layer(config, kind):
    if kind == "linear":
        plain, layer = nn.Linear(12, 10), NobleLinear(12, 10, config=config)
    else:
        plain, layer = Conv1D(10, 12), NobleConv1D(10, 12, config=config)
    missing, unexpected = layer.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("noble_") for name in missing)
    x = torch.randn(2, 3, 12)
    assert not torch.equal(layer(x), plain(x))
    layer.branch_enabled = False
    assert torch.equal(layer(x), plain(x))


def test_init_follows_the_table():
    d_in, d_out, r = 512, 400, 128
    layer = NobleLinear(d_in, d_out, config=NobleConfig(rank=r))
    expected_std = {
        "dense.weight": 0.5 / d_in**0.5,
        "noble_down": d_in**-0.5,
        "noble_up": 0.01 / r**0.5,
        "noble_mix1": (2 / (r + r)) ** 0.5,
        "noble_frequency1": 0.4 / 12**0.5,
        "noble_frequency2": 0.4 / 12**0.5,
        "noble_phase1": 0.1,
        "noble_phase2": 0.1,
    }
    parameters = dict(layer.named_parameters())
    assert not parameters.pop("dense.bias").any()
    assert set(parameters) == set(expected_std)
    for name, std in expected_std.items():
        tolerance = 6 / (2 * parameters[name].numel()) ** 0.5
        assert parameters[name].std().item() == pytest.approx(std, rel=tolerance), name
    for frequency in (layer.noble_frequency1, layer.noble_frequency2):
        assert frequency.min() >= 0.8
        assert frequency.max() <= 1.2
        assert frequency.mean().item() == pytest.approx(1.0, abs=0.06)


def test_official_settings_draw_the_bottleneck_in_the_releases_way():
    d_in, d_out, r = 512, 400, 128
    layer = NobleLinear(d_in, d_out, config=NobleConfig.official(rank=r, depth=3))
    for k in (1, 2):
        assert getattr(layer, f"noble_mix{k}").std().item() == pytest.approx(0.5 / r**0.5, rel=0.05)
    assert not layer.noble_bias1.any()
    for k in (2, 3):
        bias = getattr(layer, f"noble_bias{k}")
        assert bias.abs().max() <= r**-0.5
        assert bias.std().item() == pytest.approx((3 * r) ** -0.5, rel=0.3)
    found = {name: group["lr"] for group in nlr.param_groups(layer, lr=1.0) for name, _ in group["params"]}
    ratio = d_out / r
    expected = {"noble_up": ratio**0.4, "noble_mix1": 1.0, "noble_frequency1": 2.0, "noble_phase1": 4.0}
    expected |= {"noble_bias1": 1.0, "noble_down": 1.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_rank_must_be_low():
    with pytest.raises(UserError, match="rank 10 is too high"):
        NobleLinear(12, 10, config=NobleConfig(rank=10))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gated_variant_is_the_notes_formula(kind, activation):
    settings = {"fusion": "gated", "up_bias": True, "dropout": 0.2, "output_scale": 0.7}
    config = NobleConfig(rank_ratio=0.25, activation=activation, depth=1, **settings)
    layer = NobleLinear(16, 24, config=config) if kind == "linear" else NobleConv1D(24, 16, config=config)
    layer = layer.double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(5, 16, dtype=torch.float64)
    main = x @ (layer.weight.t() if kind == "linear" else layer.weight) + layer.bias
    function = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}[activation]
    branch = function(x @ layer.noble_down.t()) @ layer.noble_up.t() + layer.noble_up_bias
    w = torch.sigmoid(layer.noble_fusion)
    assert layer.noble_down.shape == (4, 16), "a quarter of the smaller width"
    torch.testing.assert_close(layer(x), 0.7 * (w * main + (1 - w) * branch))


@pytest.mark.parametrize("fusion", ["add", "gated"])
def test_dropout_is_on_the_bottleneck_in_training_only(fusion):
    settings = {"rank": 4, "fusion": fusion, "up_bias": True}
    layer = NobleLinear(12, 8, config=NobleConfig(**settings, dropout=0.5))
    plain = NobleLinear(12, 8, config=NobleConfig(**settings))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(3, 12)
    torch.testing.assert_close(layer.eval()(x), plain(x))
    seen = torch.stack([layer.train()(x) for _ in range(3000)])
    kinds = {tuple(row) for row in (seen[:, 0] * 1e4).round().tolist()}
    assert len(kinds) == 2**4, "each of four outputs is there, doubled, or not"
    spread = seen.std(0) / 3000**0.5
    assert ((seen.mean(0) - plain(x)).abs() <= 6 * spread).all()
    layer(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_gated_model_starts_as_it_was():
    model = FAMILIES["llama"]().eval()
    inputs = batch(model)
    config = NobleConfig(rank_ratio=0.25, activation="silu", depth=1, fusion="gated", up_bias=True, init="pretrained")
    with torch.no_grad():
        before = model(**inputs).logits
        nlr.augment(model, config, verbose=False)
        assert torch.equal(model(**inputs).logits, before)
        branch = {name: each for name, each in model.named_parameters() if "noble_" in name}
        for parameter in branch.values():
            parameter.normal_()
        assert not torch.equal(model(**inputs).logits, before)


def test_branches_disabled_before_stay_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nlr.augment(model, NobleConfig(rank=2), verbose=False)
    model[0].branch_enabled = False
    with nlr.branches_disabled(model):
        assert not model[1].branch_enabled
    assert [layer.branch_enabled for layer in model] == [False, True]
