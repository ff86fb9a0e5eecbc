"""NobleLinear and NobleConv1D as modules: init, names, meta, copies, compile, checkpoints of plain layers."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import NobleConfig, NobleConv1D, NobleLinear, UserError

CONFIGS = [
    *(
        NobleConfig(rank=4, activation=activation, depth=depth)
        for activation in ("cosine", "tanh", "leaky_relu", "gelu", "silu")
        for depth in (1, 2)
    ),
    NobleConfig(rank=4, depth=3),
    NobleConfig(rank_ratio=0.45, activation="silu", depth=1, fusion="gated", up_bias=True),
    NobleConfig(rank=4, fusion="gated", output_scale=1.5),
    NobleConfig(rank=4, up_bias=True),
]
IDS = [f"{config.activation}{config.depth}-{config.fusion}{'-biased' if config.up_bias else ''}" for config in CONFIGS]


@pytest.fixture(params=CONFIGS, ids=IDS)
def config(request):
    return request.param


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


def test_layer_on_meta_is_drawn_after_to_empty(config):
    layer = NobleLinear(12, 10, config=config, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    y = layer(torch.randn(4, 12, device="meta"))
    assert y.shape == (4, 10)
    y.sum().backward()
    assert layer.noble_up.grad.shape == (10, 4)
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(torch.randn(4, 12)).isfinite().all()


def test_copies_functional_calls_and_loaded_states_give_the_same_output(config):
    layer = NobleLinear(12, 10, config=config)
    x = torch.randn(4, 12)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    twin = NobleLinear(12, 10, config=config)
    state = layer.state_dict()
    assert torch.equal(torch.func.functional_call(twin, dict(layer.named_parameters()), (x,)), layer(x))
    assert {"weight", "bias"} < state.keys()
    assert not any(name.startswith("dense.") for name in state)
    twin.load_state_dict(state)
    assert torch.equal(twin(x), layer(x))


def test_compiled_layer_has_equal_gradients(config):
    torch.compiler.reset()
    layer = NobleLinear(12, 10, config=config)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 12)
    for module in (layer, compiled):
        module(x).square().sum().backward()
    for ours, reference in zip(compiled.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad)


def test_bfloat16_and_autocast_stay_close_to_float32(config):
    layer = NobleLinear(12, 10, config=config)
    x = torch.randn(4, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)
    low = copy.deepcopy(layer).to(torch.bfloat16)
    y = low(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rank": 0}, "rank"),
        ({"activation": "sine"}, "activation"),
        ({"activation": "gelu", "depth": 3}, "depth"),
        ({"depth": 0}, "depth"),
        ({"init": "zero"}, "init"),
        ({"frequency_range": (2.0, 1.0)}, "frequency_range"),
        ({"up_scale": float("nan")}, "up_scale"),
        ({"phase_lr": 0.0}, "phase_lr"),
        ({"rank_ratio": 1.0}, "rank_ratio"),
        ({"fusion": "mul"}, "fusion"),
        ({"dropout": 1.0}, "dropout"),
        ({"output_scale": "2"}, "output_scale must be a finite number"),
        ({"dropout": float("nan"), "fuse_shared_inputs": True}, "dropout must be at least 0"),
        ({"up_lr_power": 1e5}, "up_lr_power must be at most 10"),
        ({"mix_lr_power": float("nan")}, "mix_lr_power must be a finite number of at least -10"),
        ({"frequency_range": 1}, "frequency_range must be two"),
        ({"frequency_range": (float("nan"), 1)}, "frequency_range must be two"),
        ({"depth": 2.0}, "depth"),
        ({"up_bias": "no"}, "up_bias must be true or false, got 'no'"),
        ({"fuse_shared_inputs": "off"}, "fuse_shared_inputs must be true or false"),
    ],
)
def test_bad_setting_raises_in_one_line(settings, word):
    with pytest.raises(UserError, match=word) as caught:
        NobleConfig(**settings)
    assert "\n" not in str(caught.value)


def test_rank_must_be_low():
    with pytest.raises(UserError, match="rank 10 is not low"):
        NobleLinear(12, 10, config=NobleConfig(rank=10))


# --- the variant of the notes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gated_variant_is_the_notes_formula(kind, activation):
    config = NobleConfig(
        rank_ratio=0.25, activation=activation, depth=1, fusion="gated", up_bias=True, dropout=0.2, output_scale=0.7
    )
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


def test_gated_model_starts_as_it_was_and_does_not_decay_its_gates():
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
    groups = nlr.param_groups(model, 1.0, 0.1, verbose=False)
    settings = {name: (group["lr"], group["weight_decay"]) for group in groups for name, _ in group["params"]}
    gates = [name for name in settings if name.endswith(("noble_fusion", "noble_up_bias"))]
    assert gates
    assert {settings[name] for name in gates} == {(1.0, 0.0)}
