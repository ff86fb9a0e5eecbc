"""Modules that `augment` skips, since a layer there would not act or cannot be, and its messages."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, JambaConfig, Qwen3MoeConfig, WavLMConfig, WavLMModel

import nonlinear_lowrank as nlr
from nlr_lab.plan.inspect import inspect_model
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.analysis.cost import model_cost

NOBLE = NobleConfig(rank=4)
every_method = pytest.mark.parametrize(
    "config", [NOBLE, nlr.SineLowRankConfig(rank=4)], ids=lambda config: config.method
)
every_adapter = pytest.mark.parametrize("config", [nlr.SineLoraConfig, nlr.NobleAdapterConfig])


class Reading(nn.Module):
    """Takes one linear's weight itself, looks at another's, and calls the rest."""

    def __init__(self):
        super().__init__()
        self.taken = nn.Linear(16, 16)
        self.looked = nn.Linear(16, 16)
        self.called = nn.Linear(16, 16)

    def forward(self, x):
        if isinstance(self.looked.weight, torch.Tensor) and self.looked.weight.dtype != x.dtype:
            x = x.to(self.looked.weight.dtype)
        if self.looked.bias is not None:
            x = x + 0.0
        return self.called(self.looked(self._inner(x)))

    def _inner(self, x):
        return F.linear(x, self.taken.weight, self.taken.bias)


class Outer(nn.Module):
    """Takes the weight of a linear that is called elsewhere."""

    def __init__(self):
        super().__init__()
        self.out, self.block = nn.Linear(16, 16), Reading()

    def forward(self, x):
        return self.out(self.block(x) @ self.block.called.weight)


class Same(nn.Linear):
    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Router(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.softmax(-1), y


class Dropping(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, nn.functional.dropout(self.weight, 0.5, self.training), self.bias)


class Masked(nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.first = nn.Embedding(11, 16), nn.Linear(16, 16)
        self.again = self.first
        self.attention = nn.MultiheadAttention(16, 2)
        self.attention.register_forward_hook(lambda *_: None)  # so that it stays torch's
        self.output = nn.Linear(16, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.classifier = nn.Linear(16, 3)


TAKEN = "the forward of Reading takes its bias and weight without calling it"
MODELS = {
    "taken": (Reading, ["looked", "called"], {"taken": TAKEN}, r"taken would have no effect: .* exclude="),
    "taken around the parent": (
        Outer,
        ["out", "block.looked"],
        {"block.taken": TAKEN, "block.called": "the forward of Outer takes its weight"},
        r"block\.taken would have no effect",
    ),
    "subclasses": (
        lambda: nn.ModuleDict({"same": Same(16, 16), "free": Same(16, 16, bias=False), "router": Router(16, 8)}),
        ["same", "free"],
        {"router": "is a Router, a linear with a forward of its own"},
        r"router is a .*Router, which .* cannot replace",
    ),
    "not plain": (
        lambda: nn.ModuleDict({"same": Same(16, 16), "a": Dropping(16, 16), "b": Masked(16, 16)}),
        ["same"],
        dict.fromkeys("ab", "a linear with a forward of its own"),
        r"a is a .*Dropping, which .* cannot replace",
    ),
    "small": (
        lambda: nn.ModuleDict({"wide": nn.Linear(32, 32), "gate": nn.Linear(32, 1), "narrow": nn.Linear(32, 4)}),
        ["wide"],
        {"gate": "rank 4 ", "narrow": "rank 4 "},
        r"rank 4 is too high for gate \(32 -> 1\); choose|gate: rank 4 .*; choose",
    ),
    "tied": (
        Tied,
        ["first"],
        {
            "attention.out_proj": "without calling it",
            "attention": "has hooks",
            "output": "tied to an",
            "classifier": "named like an output head",
        },
        r"attention\.out_proj would have no effect",
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("make", "swapped", "skipped", "refusal"), MODELS.values(), ids=MODELS)
@every_method
def test_where_a_layer_would_not_act_or_fit_it_is_skipped_and_refused_by_name(
    config, make, swapped, skipped, refusal, device
):
    with torch.device(device):
        model, other = make(), make()
    state = torch.random.get_rng_state()
    report = nlr.augment(other, config, verbose=False)
    assert device == "cpu" or torch.equal(torch.random.get_rng_state(), state), "a look at a class draws no numbers"
    assert report.swapped == swapped
    assert report.skipped.keys() == skipped.keys()
    assert all(why in report.skipped[name] for name, why in skipped.items())
    with pytest.raises(UserError, match=refusal):
        nlr.augment(model, config, include=rf"(.*\.)?{next(iter(skipped)).rpartition('.')[2]}", verbose=False)


def test_a_linear_in_two_places_is_one_layer():
    model = Tied()
    nlr.augment(model, NOBLE, verbose=False)
    assert model.first is model.again
    assert isinstance(model.first, nlr.NobleLinear)


def test_branches_that_get_no_gradient_are_warned_of_at_the_first_step():
    """In a loop the name in the code is no longer the child's."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.last = nn.Linear(16, 16)

        def forward(self, x):
            for layer in self.layers:
                x = F.linear(x, layer.weight)
            return self.last(x)

    model = Loop()
    assert len(nlr.augment(model, NOBLE, verbose=False).swapped) == 4
    optimizer = torch.optim.SGD(nlr.param_groups(model, lr=1e-2, verbose=False))
    model(torch.randn(4, 16)).sum().backward()
    with pytest.warns(UserWarning, match=r"3 branches have no effect: .* \(NobleLinear 16 -> 16\)"):
        optimizer.step()
    optimizer.step()  # once


@every_method
def test_encoder_layers_whose_attention_stays_torchs_are_refused_with_the_fix(config):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"nothing to swap .*set activation_relu_or_gelu = 0 on that layer"):
        nlr.augment(encoder, config, verbose=False)
    with pytest.raises(UserError, match="would have no effect"):
        nlr.augment(encoder, config, include=r".*linear1", verbose=False)


def test_one_bypassed_activation_refuses_no_model():
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 9, "expert_layer_offset": 8}
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 1}
    config = JambaConfig(**SIZES, **HEADS, **layers, **mamba)
    report = nlr.augment(AutoModelForCausalLM.from_config(config), nlr.RationalConfig(groups=4), verbose=False)
    assert report.swapped == [f"model.layers.{layer}.feed_forward.act_fn" for layer in (0, 1)]
    assert "is bypassed" in report.skipped["model.layers.0.mamba.act"]
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"mamba\.act is bypassed"):
        nlr.augment(model, nlr.RationalConfig(groups=4), include=r".*mamba\.act", verbose=False)


@every_adapter
def test_adapters_go_where_they_act(config):
    sizes = {**SIZES, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = WavLMModel(WavLMConfig(**sizes, conv_dim=[16] * 7, num_conv_pos_embeddings=4, apply_spec_augment=False))
    with pytest.warns(UserWarning, match=r"4 linears get no adapter: .* WavLMAttention takes"):
        adapted = get_peft_model(copy.deepcopy(model), config(r=2, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert "q_proj" not in name
            nn.init.normal_(parameter)
    adapted(torch.randn(1, 800)).last_hidden_state.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapted.parameters() if p.requires_grad)
    with pytest.raises(UserError, match=r"an adapter on encoder.layers.0.attention.q_proj would have no effect"):
        get_peft_model(model, config(r=2, target_modules=["q_proj"]))


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def _mixture():
    experts = {"moe_intermediate_size": 16, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **HEADS, **experts))


def test_experts_held_as_tensors_are_listed_and_counted(capfd):
    model = _mixture()
    plain = model_cost(model, 1)
    experts = 8 * 3 * 32 * 16  # gate, up and down of a layer
    body = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n)
    names = {f"model.layers.{layer}.mlp.experts" for layer in (0, 1)}
    listed = nlr.augment(_mixture(), nlr.QKNormConfig(), verbose=False).skipped
    assert names == {name for name, why in listed.items() if "3-D parameters" in why}
    report = nlr.augment(model, NOBLE, exclude=r".*experts")
    assert names == {name for name, why in report.skipped.items() if why == "in exclude"}
    linears = 2 * 4 * 32 * 32  # q, k, v and o of both layers
    assert report.flops_before == 2 * (linears + 2 * 8 * 32 + 32 * 50) + 2 * 2 * experts // 4  # 2 of 8
    assert (report.reached_parameters, report.body_parameters) == (linears, body)
    assert f"reaches {100 * linears / body:.2f} % of the body's {body:,} parameters" in capfd.readouterr().out
    rows = {row.name: row.flops for row in plain.rows}
    assert rows["model.layers.1.mlp.experts"] == 2 * experts // 4
    assert model.config._experts_implementation == "grouped_mm"
    assert inspect_model(model, 8).notes == []
    model.set_experts_implementation("eager")
    cost = inspect_model(model, 8)
    assert any("routes no token to an expert" in note for note in cost.notes)
    assert "Error" not in capfd.readouterr().err


def test_all_linear_says_that_experts_get_no_adapter():
    with pytest.warns(UserWarning, match=r"the experts in model\.layers\.\*\.mlp\.experts, \d+ % of the model's param"):
        get_peft_model(_mixture(), nlr.NobleAdapterConfig(r=2, target_modules="all-linear"))


def test_branches_that_no_optimizer_trains_are_warned_of_once():
    def steps(*optimizers):
        for _ in range(3):
            model(x).sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()

    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(2, 16)
    early = torch.optim.SGD(model.parameters(), lr=1e-3)
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    with pytest.warns(UserWarning, match="2 branches are in no optimizer.*after nlr.augment") as warned:
        steps(early)
    assert len(warned) == 1
    branches = [each for name, each in model.named_parameters() if ".noble_" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nlr.LearningRateWarning)
        steps(torch.optim.SGD([each.weight for each in model], lr=1e-3), torch.optim.SGD(branches, lr=1e-3))
    for each in branches:
        each.requires_grad_(False)
        each.grad = None
    steps(torch.optim.SGD([each.weight for each in model], lr=1e-3))


def test_linears_that_share_a_weight_keep_it():
    def make():
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        model[2].weight = model[0].weight
        return model

    beside, replaced = make(), make()
    nlr.augment(beside, nlr.NobleConfig(rank=4), verbose=False)
    assert beside[0].weight is beside[2].weight
    report = nlr.augment(replaced, nlr.SineLowRankConfig(rank=4, omega=30), verbose=False)
    assert (report.swapped, report.skipped) == (
        ["1"],
        {"0": "shares its weight with 2", "2": "shares its weight with 0"},
    )
