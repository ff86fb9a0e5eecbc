"""NobleLinear and NobleConv1D as modules: init, names, meta, copies, compile, checkpoints of plain layers."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank import NobleConfig, NobleConv1D, NobleLinear, UserError

CONFIGS = [
    *(
        NobleConfig(rank=4, activation=activation, depth=depth)
        for activation in ("cosine", "tanh", "leaky_relu", "gelu", "silu")
        for depth in (1, 2)
    ),
    NobleConfig(rank=4, depth=3),
]
IDS = [f"{config.activation}{config.depth}" for config in CONFIGS]


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


def test_parameter_count_is_the_papers():
    layer = NobleLinear(96, 80, bias=False, config=NobleConfig(rank=16))
    added = sum(p.numel() for n, p in layer.named_parameters() if n != "weight")
    assert added == 16 * (96 + 80) + 16 * 16 + 4 * 16


def test_init_follows_the_table():
    d_in, d_out, r = 512, 400, 128
    layer = NobleLinear(d_in, d_out, config=NobleConfig(rank=r))
    expected_std = {
        "weight": 0.5 / d_in**0.5,
        "noble_down": d_in**-0.5,
        "noble_up": 0.01 / r**0.5,
        "noble_mix1": (2 / (r + r)) ** 0.5,
        "noble_frequency1": 0.4 / 12**0.5,
        "noble_frequency2": 0.4 / 12**0.5,
        "noble_phase1": 0.1,
        "noble_phase2": 0.1,
    }
    parameters = dict(layer.named_parameters())
    assert not parameters.pop("bias").any()
    assert set(parameters) == set(expected_std)
    for name, std in expected_std.items():
        tolerance = 6 / (2 * parameters[name].numel()) ** 0.5
        assert parameters[name].std().item() == pytest.approx(std, rel=tolerance), name
    for frequency in (layer.noble_frequency1, layer.noble_frequency2):
        assert frequency.min() >= 0.8
        assert frequency.max() <= 1.2
        assert frequency.mean().item() == pytest.approx(1.0, abs=0.06)


def test_meta_then_to_empty_then_reset(config):
    layer = NobleLinear(12, 10, config=config, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    y = layer(torch.randn(4, 12, device="meta"))
    assert y.shape == (4, 10)
    y.sum().backward()
    assert layer.noble_up.grad.shape == (10, 4)
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(torch.randn(4, 12)).isfinite().all()


def test_deepcopy_functional_call_and_state_dict(config):
    layer = NobleLinear(12, 10, config=config)
    x = torch.randn(4, 12)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    twin = NobleLinear(12, 10, config=config)
    state = layer.state_dict()
    assert torch.equal(torch.func.functional_call(twin, state, (x,)), layer(x))
    twin.load_state_dict(state)
    assert torch.equal(twin(x), layer(x))


def test_compiles_fullgraph_in_a_module(config):
    torch.compiler.reset()
    layer = NobleLinear(12, 10, config=config)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 12)
    for module in (layer, compiled):
        module(x).square().sum().backward()
    for ours, reference in zip(compiled.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad)


def test_bfloat16_module_and_autocast(config):
    layer = NobleLinear(12, 10, config=config)
    x = torch.randn(4, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), layer(x).float())
        assert layer(x).dtype == torch.bfloat16
    low = copy.deepcopy(layer).to(torch.bfloat16)
    y = low(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -3}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"activation": "sine"}, "activation"),
        ({"activation": "gelu", "depth": 3}, "depth"),
        ({"depth": 0}, "depth"),
        ({"init": "zero"}, "init"),
        ({"frequency_range": (2.0, 1.0)}, "frequency_range"),
        ({"up_scale": float("nan")}, "up_scale"),
        ({"phase_lr": 0.0}, "phase_lr"),
    ],
)
def test_bad_settings_are_one_clear_line(settings, word):
    with pytest.raises(UserError, match=word) as caught:
        NobleConfig(**settings)
    assert "\n" not in str(caught.value)


def test_rank_must_be_low():
    with pytest.raises(UserError, match="rank 10 is not low"):
        NobleLinear(12, 10, config=NobleConfig(rank=10))
