"""Layers are drop-ins: their outputs may be changed in place, with the results of the same operation out of place."""

import functools

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from adapter_helpers import PEFT_WARNINGS
from nonlinear_lowrank.methods.noble import NobleConv1D, NobleLinear
from nonlinear_lowrank.methods.rational import RationalActivation
from nonlinear_lowrank.methods.sine import SineLowRankLinear

pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS)

WIDTH, TOKENS = 16, 20


class Trio(nn.Module):
    """Query, key and value of one input, each changed before the next one is computed."""

    def __init__(self, **options):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        nlr.augment(self, nlr.NobleConfig(rank=4, **options), verbose=False)

    def forward(self, x, change):
        return torch.cat([change(layer(x), x) for layer in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)


class Single(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, change):
        return change(self.layer(x), x)


def noble(cls=NobleLinear, **options):
    return Single(cls(WIDTH, WIDTH, config=nlr.NobleConfig(rank=4, **options)))


def sine(activation):
    config = nlr.SineLowRankConfig(rank=2, omega=30.0, activation=activation)
    return Single(SineLowRankLinear(WIDTH, WIDTH, config=config))


def activation(**options):
    return Single(RationalActivation(nlr.RationalConfig(activation="gelu", groups=4, **options)))


def adapted(config_class, base, **options):
    """A layer with an adapter that changes its outputs."""
    config = config_class(init_weights=False, target_modules=["0"], **options)
    return Single(get_peft_model(nn.Sequential(base), config).base_model.model[0])


def nora(**options):
    base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    return Single(get_peft_model(base, nlr.NoraConfig(init_weights=False, groups=4, **options)))


LAYERS = {
    "noble": noble,
    "noble-output-scale": lambda: noble(output_scale=2.0),
    "noble-tanh-depth-1": lambda: noble(activation="tanh", depth=1),
    "noble-gated": lambda: noble(fusion="gated", up_bias=True),
    "noble-dropout": lambda: noble(dropout=0.3),
    "noble-conv1d": lambda: noble(NobleConv1D),
    "noble-shared-down": lambda: Trio(share_down="qkv"),
    "noble-fused-inputs": lambda: Trio(fuse_shared_inputs=True),
    "sine": lambda: sine("sine"),
    "sigmoid": lambda: sine("sigmoid"),
    "identity": lambda: sine("identity"),
    "query": lambda: Single(nlr.NonlinearQuery(WIDTH, config=nlr.NonlinearQueryConfig())),
    "rational": activation,
    "rational-exact": lambda: activation(anchor="exact", form="sum_of_abs"),
    "rational-behind-batch": lambda: activation(channel_dim=1, tails="rational"),
    "adapter-noble": lambda: adapted(nlr.NobleAdapterConfig, nn.Linear(WIDTH, WIDTH), r=4),
    "adapter-noble-conv1d": lambda: adapted(nlr.NobleAdapterConfig, Conv1D(WIDTH, WIDTH), r=4),
    "adapter-noble-dropout": lambda: adapted(nlr.NobleAdapterConfig, nn.Linear(WIDTH, WIDTH), r=4, dropout=0.3),
    "adapter-sine-lora": lambda: adapted(nlr.SineLoraConfig, nn.Linear(WIDTH, WIDTH), r=2),
    "adapter-sine-dora": lambda: adapted(nlr.SineLoraConfig, nn.Linear(WIDTH, WIDTH), r=2, use_dora=True),
    "adapter-sine-conv1d": lambda: adapted(nlr.SineLoraConfig, Conv1D(WIDTH, WIDTH), r=2),
    "adapter-sine-conv2d": lambda: adapted(nlr.SineLoraConfig, nn.Conv2d(WIDTH, WIDTH, 1), r=2),
    "adapter-sine-embedding": lambda: adapted(nlr.SineLoraConfig, nn.Embedding(TOKENS, WIDTH), r=2),
    "adapter-nora": nora,
    "adapter-nora-exact": lambda: nora(anchor="exact", lora_r=2, lora_target_modules=["0"]),
}


def input_of(name):
    if name == "adapter-sine-embedding":
        return torch.randint(TOKENS, (2, 5))
    spatial = name in ("adapter-sine-conv2d", "rational-behind-batch")
    return torch.randn(2, *((WIDTH, 3, 5) if spatial else (5, WIDTH)), dtype=torch.float64, requires_grad=True)


def beside(y, x):
    """A residual of y's shape."""
    return x if x.is_floating_point() else torch.ones_like(y)


def assigned(y, x):
    y[..., :2] = 0.5
    return y


# name: (in place, out of place)
CHANGES = {
    "mul": (lambda y, x: y.mul_(2), lambda y, x: y * 2),
    "add": (lambda y, x: y.add_(beside(y, x)), lambda y, x: y + beside(y, x)),
    "slice": (assigned, lambda y, x: torch.cat([torch.full_like(y[..., :2], 0.5), y[..., 2:]], dim=-1)),
    # Last: like any activation that keeps its output, it may not be followed by another change.
    "relu": (lambda y, x: nn.ReLU(inplace=True)(y), lambda y, x: y.relu()),
}


def outcome(run, model, x, change):
    """Output and all gradients of a training step; dropout draws the same at every call."""
    torch.manual_seed(0)
    y = run(x, change)
    wanted = [each for each in (x, *model.parameters()) if each.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_change_in_place_equals_change_out_of_place(name, change):
    model, x = LAYERS[name]().double().train(), input_of(name)
    in_place, out_of_place = (outcome(model, model, x, each) for each in CHANGES[change])
    torch.testing.assert_close(in_place, out_of_place, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["noble", "noble-fused-inputs", "sine", "rational", "adapter-sine-conv1d"])
def test_compiled_change_in_place_equals_change_out_of_place(name):
    torch.compiler.reset()
    model, x = LAYERS[name]().double().train(), input_of(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def every(y, x, place):
        return functools.reduce(lambda y, change: change[place](y, x), CHANGES.values(), y)

    inside = outcome(compiled, model, x, functools.partial(every, place=0))
    after = outcome(lambda x, change: change(compiled(x, lambda y, x: y), x), model, x, lambda y, x: y.mul_(2))
    expected = outcome(model, model, x, functools.partial(every, place=1))
    torch.testing.assert_close(inside, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, outcome(model, model, x, CHANGES["mul"][1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("adapter")])
def test_input_changed_before_backward_raises(name):
    model = LAYERS[name]().double().train()
    x = input_of(name) * 1
    y = model(x, lambda y, x: y)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
