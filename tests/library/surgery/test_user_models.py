"""Models that users write: what is swapped acts in training and in evaluation; what is bypassed is skipped by name."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.modeling_outputs import ModelOutput

import nonlinear_lowrank as nlr
from family_checks import RANK, enlarge_branches, train_a_step, without_effect
from nonlinear_lowrank.optim import parameter_roles
from refusals import assert_refused

WIDTH = 32


class Model(nn.Module):
    """Two linears, a list of one, and a loss, in front of which a subclass puts its own code."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        y = self.body(x)
        return ModelOutput(loss=y.square().mean(), y=y)


class InPlace(Model):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU(inplace=True)

    def body(self, x):
        y = self.first(x)
        y += x
        z = self.second(self.activation(y)).mul_(0.5)
        z[..., 0] = 0
        return self.more[0](z).tanh_()


class Sequential(Model):
    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(self.first, nn.ReLU6(inplace=True), self.second, nn.Hardtanh(inplace=True))

    def body(self, x):
        return self.more(x)


class InAList(Model):
    def __init__(self):
        super().__init__()
        self.order = [self.first, nn.ReLU(), self.second]

    def body(self, x):
        for each in self.order:
            x = each(x)
        return self.more[0](x)


class InContainers(Model):
    """Holds its linears in a tuple of pairs and a dict, and one under a second name."""

    def __init__(self):
        super().__init__()
        self.pairs, self.table = ((self.first, 1.0), (self.second, 0.5)), {"more": [self.more[0]]}
        object.__setattr__(self, "alias", self.first)

    def body(self, x):
        for linear, scale in self.pairs:
            x = scale * linear(x)
        return self.table["more"][0](x) + self.alias(x)


class Unpacked(Model):
    def body(self, x):
        weight, bias = self.first.weight, self.first.bias
        return self.second(x @ weight.t() + bias) + self.more[0](x)


class Fused(Model):
    def body(self, x):
        weight = torch.cat([self.first.weight, self.second.weight])
        return F.linear(x, weight).sigmoid() * self.more[0](x).repeat(1, 1, 2)


class FusedInEvaluation(Model):
    def body(self, x):
        y = self.first(x) if self.training else F.linear(x, self.first.weight, self.first.bias)
        return self.second(y) + self.more[0](x)


class Handed(Model):
    """Hands its linears to methods, of which one calls them and one takes a tensor (LayoutLMv3's position tables)."""

    def body(self, x):
        places = x.argmax(-1)
        return self.call(self.second, x) + self.look_up(places, self.first) + self.more[0](x)

    def call(self, linear, x):
        return linear(x)

    def look_up(self, places, table):
        return table.weight[:, places].movedim(0, -1)


class Encoder(Model):
    """torch's encoder, whose fused path in evaluation would take the tensors of its linears."""

    activation = staticmethod(F.relu)

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, 0.0, self.activation, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def body(self, x):
        return self.more[0](self.second(self.encoder(self.first(x))))


class OwnActivationEncoder(Encoder):
    """With an activation that the fused path does not know."""

    activation = staticmethod(F.silu)


class SwitchedEncoder(Encoder):
    """With the fused path switched off by hand."""

    def __init__(self):
        super().__init__()
        for layer in self.encoder.layers:
            layer.activation_relu_or_gelu = 0


MODELS = {
    InPlace: [],
    Sequential: [],
    InAList: [],
    InContainers: [],
    Unpacked: ["first"],
    Fused: ["first", "second"],
    FusedInEvaluation: ["first"],
    Handed: ["first"],
}
MODELS |= {Encoder: [], OwnActivationEncoder: [], SwitchedEncoder: []}


@pytest.mark.parametrize(("kind", "skipped"), MODELS.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_swapped_linear_of_a_users_model_acts(kind, skipped, training):
    model, inputs = kind(), {"x": torch.randn(2, 5, WIDTH)}
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False)
    assert sorted(report.skipped) == sorted(skipped)
    assert all("without calling it" in why for why in report.skipped.values())
    train_a_step(model, torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False)), inputs)
    assert without_effect(enlarge_branches(model.train(training)), inputs) == []


class Wrapped(nn.Module):
    """A transformers model in a module of the user's, with a head beside it."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.score = model, nn.Linear(WIDTH, 3)


SIZES = {"vocab_size": 67, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
WHOLE = {
    "T5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=67, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    ),
    "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=67, n_embd=WIDTH, n_layer=2, n_head=2)),
    "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, intermediate_size=48, tie_word_embeddings=False)),
    "RoBERTa": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES, intermediate_size=48)),
}


@pytest.mark.parametrize(
    "config", [nlr.NobleConfig(rank=RANK), nlr.RationalConfig(groups=2)], ids=["noble", "rational"]
)
@pytest.mark.parametrize("name", WHOLE)
def test_a_transformers_model_inside_another_is_augmented_as_it_is_alone(name, config):
    torch.manual_seed(0)
    alone = WHOLE[name]()
    around = Wrapped(copy.deepcopy(alone))
    expected, found = (nlr.augment(model, config, verbose=False) for model in (alone, around))
    assert found.swapped == [f"inner.{each}" for each in expected.swapped]
    assert {
        each.removeprefix("inner."): why for each, why in found.skipped.items() if each != "score"
    } == expected.skipped
    own = getattr(found.config, "own_init", None)
    assert own == (None if own is None else tuple(f"inner.{each}" for each in expected.config.own_init))
    roles, others = parameter_roles(around), parameter_roles(alone)
    assert {each: role.name for each, role in others.items()} == {
        each.removeprefix("inner."): role.name for each, role in roles.items() if each.startswith("inner.")
    }


NORMS = {"batch": nn.BatchNorm1d(8), "group": nn.GroupNorm(2, 8), "instance": nn.InstanceNorm1d(8, affine=True)}


@pytest.mark.parametrize("norm", NORMS)
def test_a_model_whose_norms_were_trained_keeps_its_weights(norm):
    model = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(NORMS[norm]), nn.Linear(8, 8))
    with torch.no_grad():
        for each in model[1].parameters():  # as MobileViT draws a new BatchNorm's
            each.uniform_()
    drawn = copy.deepcopy(model)
    assert nlr.augment(drawn, nlr.NobleConfig(rank=RANK), verbose=False).config.init == (
        "scratch" if norm == "batch" else "pretrained"
    )
    if norm == "batch":
        model(torch.randn(4, 8))
    before = model[0].weight.clone()
    assert nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False).config.init == "pretrained"
    assert torch.equal(model[0].weight, before)


def test_what_a_swap_would_not_reach_is_refused():
    compiled = nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager"), nn.Linear(8, 8))
    assert_refused("_orig_mod was compiled on its own", nlr.augment, compiled, nlr.NobleConfig(rank=RANK))
    with torch.inference_mode():
        assert_refused("augment outside it", nlr.augment, nn.Sequential(nn.Linear(8, 8)), nlr.NobleConfig(rank=RANK))
    for put in ("register_state_dict_post_hook", "register_load_state_dict_pre_hook"):
        hooked = nn.Sequential(nn.Linear(8, 8))
        getattr(hooked[0], put)(lambda *args: None)
        assert_refused("0 has hooks", nlr.augment, hooked, nlr.NobleConfig(rank=RANK))


def test_activations_beside_a_compiled_module_are_replaced():
    model = nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager"), nn.GELU(), nn.Linear(8, 8))
    assert nlr.augment(model, nlr.RationalConfig(groups=2), verbose=False).swapped == ["1"]
