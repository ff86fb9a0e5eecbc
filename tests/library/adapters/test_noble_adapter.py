"""NOBLE adapters: the published formula beside frozen layers, init, learning rates, counts, saved activations."""

import peft
import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.noble.op import Branch, noble_linear_reference
from op_helpers import BOTTLENECKS


def adapted(base, **options):
    """A layer with an adapter, from a model that has nothing else."""
    options = {"r": 4, "init_weights": False, **options}
    config = nlr.NobleAdapterConfig(target_modules=["0"], **options)
    return get_peft_model(nn.Sequential(base), config).eval().base_model.model[0]


def branch(layer, name="default", activation="cosine"):
    """The branch of an adapter, float64."""
    tensors = [
        getattr(layer, f"nlr_noble_{each}")[name].weight.detach().double()
        if name in getattr(layer, f"nlr_noble_{each}")
        else ()
        for each in ("down", "up", "mix", "frequency", "phase")
    ]
    return Branch(*tensors[:2], *(list(each) for each in tensors[2:]), activation)


def weight_and_bias(base):
    weight = base.weight.t() if isinstance(base, Conv1D) else base.weight.flatten(1)
    return weight.double(), None if base.bias is None else base.bias.double()


@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_adapting_computes_the_papers_formula(activation, depth):
    for base in (nn.Linear(12, 10), nn.Linear(12, 10, bias=False), Conv1D(10, 12)):
        layer = adapted(base, activation=activation, depth=depth)
        x = torch.randn(3, 5, 12)
        expected = noble_linear_reference(x.double(), *weight_and_bias(base), branch(layer, activation=activation))
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_adapting_a_one_by_one_convolution_is_a_linear_on_every_pixel(stride):
    base = nn.Conv2d(12, 10, 1, stride=stride)
    layer = adapted(base)
    x = torch.randn(2, 12, 5, 6)
    pixels = x[:, :, ::stride, ::stride].movedim(1, -1).double()
    expected = noble_linear_reference(pixels, *weight_and_bias(base), branch(layer)).movedim(-1, 1)
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


def test_dropout_is_on_the_branchs_input_and_in_training_only():
    base = nn.Linear(64, 64)
    layer = adapted(base, dropout=0.5)
    x = torch.randn(1, 64).expand(2, 64)
    assert torch.equal(layer(x)[0], layer(x)[1])
    layer.train()
    first, second = layer(x)
    assert not torch.equal(first, second)
    with torch.no_grad():
        layer.nlr_noble_up["default"].weight.zero_()
    torch.testing.assert_close(layer(x), base(x))  # what is left has none


def test_init_is_the_papers_but_for_the_zero_up():
    torch.manual_seed(0)
    layer = adapted(nn.Linear(512, 256), r=128, depth=3, init_weights=True)
    down, up, mixes, frequencies, phases, _ = branch(layer)
    assert down.std() == pytest.approx(512**-0.5, rel=0.02)
    assert not up.any()
    bound = (6 / 256) ** 0.5
    for mix in mixes:
        assert mix.abs().max() <= bound
        assert mix.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    low, high = torch.cat(frequencies).aminmax()
    assert 0.8 <= low < 0.83
    assert 1.17 < high <= 1.2
    assert torch.cat(phases).std() == pytest.approx(0.1, rel=0.15)


def test_learning_rates_are_the_papers_table():
    model = get_peft_model(nn.Sequential(nn.Linear(96, 48)), nlr.NobleAdapterConfig(r=8, target_modules=["0"]))
    groups = nlr.param_groups(model, lr=2e-3, weight_decay=0.01, verbose=False)
    prefix, ratio = "base_model.model.0.nlr_noble_", 48 / 8
    found = {
        name.removeprefix(prefix): (group["lr"] / 2e-3, group["weight_decay"], group["role"])
        for group in groups
        for name, _ in group["params"]
    }
    assert found == {
        "down.default.weight": (pytest.approx(1), 0.01, "noble.down"),
        "up.default.weight": (pytest.approx(ratio**0.6), 0.01, "noble.up"),
        "mix.default.weight": (pytest.approx(ratio**0.45), 0.01, "noble.mix"),
        "frequency.default.weight": (pytest.approx(3), 0.0, "noble.frequency"),
        "phase.default.weight": (pytest.approx(5), 0.0, "noble.phase"),
    }


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("bf16", [False, True])
def test_saves_the_input_and_h_alone_for_backward(backend, bf16):
    torch._dynamo.reset()
    tokens, r = 96, 16
    layer = adapted(nn.Linear(64, 80), r=r)
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return run(x)

    kept = saved_bytes(forward, torch.randn(tokens, 64, requires_grad=True), parameters=list(layer.parameters()))
    assert kept == tokens * (64 + r) * (2 if bf16 else 4)


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Linear(8, 4), "r=4 is too high for 0"),
        (nn.Conv2d(8, 8, 3), r"kernel \(3, 3\)"),
        (nn.Conv2d(8, 8, 1, groups=2), "2 groups"),
        (nn.Conv2d(8, 8, 1, padding=1), "padding"),
        (nn.Embedding(8, 8), "0 is a Embedding.*adapts linear"),
        (nn.LayerNorm(8), "0 is a LayerNorm"),
    ],
)
def test_adding_refuses_modules_that_cannot_have_a_branch(module, word):
    with pytest.raises(UserError, match=word):
        get_peft_model(nn.Sequential(module), nlr.NobleAdapterConfig(r=4, target_modules=["0"]))


def test_pefts_own_tables_reach_the_config():
    config = peft.get_peft_config({"peft_type": "NLR_NOBLE", "r": 3})
    assert isinstance(config, nlr.NobleAdapterConfig)
    assert config.to_dict()["frequency_range"] == [0.8, 1.2]  # as its JSON has it
