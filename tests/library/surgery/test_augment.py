"""Surgery: what is swapped, what is left, what is refused before anything changes."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, EncoderDecoderConfig, EncoderDecoderModel
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.analysis import layer_importance, select_layers
from nonlinear_lowrank.hub import load_model
from refusals import assert_refused


def snapshot(model):
    """Names, kinds and tensors, which stay the same objects with the same values."""
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return modules, {name: (id(value), value.tolist()) for name, value in model.named_parameters()}


def test_auto_init_tells_a_loaded_config_from_a_loaded_model(tmp_path):
    family = type(FAMILIES["glm"]())
    FAMILIES["glm"]().save_pretrained(tmp_path)

    def init_of(model):
        return nlr.augment(model, NobleConfig(rank=4), verbose=False).config.init

    fresh = family(AutoConfig.from_pretrained(tmp_path))
    assert fresh.config._name_or_path
    assert init_of(fresh) == "scratch"
    assert fresh.model.layers[0].self_attn.q_proj.noble_up.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nlr.augment(family(AutoConfig.from_pretrained(tmp_path)), nlr.SineLowRankConfig(rank=4), verbose=False)

    loaded = family.from_pretrained(tmp_path)
    kept, redrawn = copy.deepcopy(loaded), copy.deepcopy(loaded)
    assert init_of(kept) == "pretrained"
    nlr.augment(redrawn, NobleConfig(rank=4, init="scratch"), verbose=False)
    plain, kept, redrawn = (each.model.layers[0].self_attn.q_proj.weight for each in (loaded, kept, redrawn))
    assert torch.equal(kept, plain)
    assert not torch.equal(redrawn, plain)
    assert redrawn.std().item() == pytest.approx(0.5 / 32**0.5, rel=0.15)
    assert init_of(copy.deepcopy(loaded).to(torch.bfloat16)) == "pretrained"
    assert init_of(family.from_pretrained(tmp_path).model) == "pretrained"
    nlr.augment(loaded, NobleConfig(rank=4), include=r".*q_proj", verbose=False)
    loaded.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert nlr.augment(again, NobleConfig(rank=4), include=r".*gate_up_proj", verbose=False).config.init == "pretrained"
    wrapped = get_peft_model(family.from_pretrained(tmp_path), LoraConfig(target_modules=["q_proj"]))
    wrapped.requires_grad_(True)
    assert nlr.augment(wrapped, NobleConfig(rank=4), include=r".*k_proj", verbose=False).config.init == "pretrained"


def test_auto_init_keeps_weights_that_training_has_changed(tmp_path):
    FAMILIES["glm"]().save_pretrained(tmp_path)
    family = type(FAMILIES["glm"]())
    loaded = family.from_pretrained(tmp_path)

    def init_of(model):
        return nlr.augment(model, NobleConfig(rank=4), verbose=False).config.init

    for around in (nn.Sequential(copy.deepcopy(loaded)), AveragedModel(loaded)):
        assert init_of(around) == "pretrained"
    with pytest.warns(UserWarning, match="new, random weights"):
        nlr.augment(nn.Sequential(copy.deepcopy(loaded)), nlr.SineLowRankConfig(rank=4), verbose=False)
    trained, filled = (family(AutoConfig.from_pretrained(tmp_path)) for _ in range(2))
    with torch.no_grad():
        trained.model.norm.weight[0] += 0.1
    filled.load_state_dict(trained.state_dict())
    assert init_of(filled) == "pretrained"


def test_linears_that_the_model_ties_to_others_are_skipped_and_the_rest_reloads(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 67, "adapter_rank": 4}
    mamba = {"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4}
    blocks = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_mem_blocks": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **sizes, **mamba, **blocks)).eval()
    report = nlr.augment(model, NobleConfig(rank=2), verbose=False)
    assert any("ties it to another, with" in why for why in report.skipped.values())
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value), alpha=0.1 * ("noble" in name))
    inputs = {"input_ids": torch.arange(4, 16)[None], "use_cache": False}
    before = model(**inputs).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(**inputs).logits, before)
    model.resize_token_embeddings(67)
    assert torch.equal(model(**inputs).logits, before)
    with pytest.raises(UserError, match=r"nothing to swap .*act_fn .the model ties it to another"):
        nlr.augment(model, nlr.RationalConfig(groups=4), verbose=False)


def test_a_pooler_that_the_decoder_never_reads_is_skipped():
    part = BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99)
    both = EncoderDecoderConfig.from_encoder_decoder_configs(part, copy.deepcopy(part))
    report = nlr.augment(EncoderDecoderModel(both), NobleConfig(rank=4), verbose=False)
    assert "encoder.pooler.dense" in report.skipped


def test_include_and_exclude_choose_by_whole_names():
    model = FAMILIES["glm"]()
    report = nlr.augment(model, NobleConfig(rank=4), include=r".*mlp\..*", exclude=[r".*layers\.1\..*"], verbose=False)
    assert report.swapped == ["model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"]
    assert report.skipped["model.layers.1.mlp.down_proj"] == "in exclude"
    # The rest may follow with another rank; what is augmented already may not.
    nlr.augment(model, NobleConfig(rank=2), include=r".*self_attn\..*", verbose=False)
    assert_refused("augmented with noble already", nlr.augment, model, NobleConfig(rank=2), verbose=False)


def quantized(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


REFUSED = {
    "rank": ({"config": NobleConfig(rank=32)}, "rank 32 is too high"),
    "no config": ({"config": {"rank": 2}}, "not the config of a method"),
    "class": ({"config": nlr.NobleConfig}, r"not its class: NobleConfig\(...\)"),
    "adapter's": ({"config": nlr.SineLoraConfig()}, "give it to peft.get_peft_model"),
    "include": ({"include": "nothing.*"}, "matches no linear"),
    "exclude": ({"exclude": ["nothing.*"]}, "matches no linear"),
    "expression": ({"include": "("}, "not a regular expression"),
    "head": ({"include": "lm_head"}, "nothing to swap"),
    "frozen": ({"prepare": lambda layer: layer.requires_grad_(False)}, "frozen"),
    "quantized": ({"prepare": quantized}, "quantized"),
    "hooked": ({"prepare": hooked}, "hooks"),
    "budget": ({"config": NobleConfig(), "budget": "0.1%"}, "rank 1 in 12 linears adds"),
    "budget of 0": ({"config": NobleConfig(), "budget": "0%"}, "cannot read the budget"),
    "budget of words": ({"config": NobleConfig(), "budget": "much"}, "write '5%'"),
    "budget as number": ({"config": NobleConfig(), "budget": 0.05}, "write '5%'"),
    "no ranks": ({"config": nlr.SineLowRankConfig(rank=4), "budget": "5%"}, "give the rank itself"),
    "select": ({"select": ["lm_head", "9"]}, "'9', which is not a linear"),
    "select by pattern": ({"select": "0"}, "pass patterns as include="),
    "select nothing": ({"select": []}, "not in select"),
}


@pytest.mark.parametrize(("arguments", "word"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_changes(arguments, word):
    model = FAMILIES["glm"]()
    prepare = arguments.get("prepare", lambda layer: layer)
    model.model.layers[1].mlp.down_proj = prepare(model.model.layers[1].mlp.down_proj)
    before = snapshot(model)
    given = {"config": NobleConfig(rank=4), **{name: arguments[name] for name in arguments.keys() - {"prepare"}}}
    assert_refused(word, nlr.augment, model, **given)
    assert snapshot(model) == before


class Bag(nn.Module):
    """An embedding of its own making, tied to a linear, and linears that share a weight and a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Bilinear(3, 3, 3)  # any module that is no linear and no nn.Embedding
        self.table.weight = nn.Parameter(torch.randn(40, 32))
        self.reader = nn.Linear(32, 40, bias=False)
        self.reader.weight = self.table.weight
        self.a, self.b, self.left = (nn.Linear(32, 32) for _ in range(3))
        self.b.weight = self.left.weight = self.a.weight
        self.b.bias = self.a.bias


@pytest.mark.parametrize("marked", [False, True], ids=["built", "loaded"])
def test_from_scratch_shared_weights_stay_shared_and_are_drawn_anew(marked):
    net = Bag()
    for parameter in net.parameters():
        if marked:
            parameter._is_hf_initialized = True  # as from_pretrained leaves it
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters(remove_duplicate=False)}
    report = nlr.augment(net, NobleConfig(rank=4, init="scratch"), exclude="left", verbose=False)
    assert report.swapped == ["reader", "a", "b"]
    assert net.reader.weight is net.table.weight
    assert net.a.weight is net.b.weight is net.left.weight
    assert net.a.bias is net.b.bias
    for name in ("a", "reader"):
        drawn = net.get_submodule(name).weight
        assert not torch.equal(drawn, before[f"{name}.weight"])
        assert drawn.std().item() == pytest.approx(0.5 / 32**0.5, rel=0.15)
    assert not net.a.bias.any()
    assert torch.equal(net.left.bias, before["left.bias"])
    assert sum(p.numel() for p in net.parameters()) == report.parameters_before + report.parameters_added


def test_report_prints_and_counts(capsys):
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 12))
    with pytest.raises(UserError, match="no branches"), nlr.branches_disabled(model):
        pass
    report = nlr.augment(model, NobleConfig(rank=2))
    assert "2 linears swapped" in capsys.readouterr().out
    assert report.flops_before == 2 * (16 * 8 + 8 * 12)
    assert report.flops_added == 2 * (2 * (16 + 8) + 2 * 2) + 2 * (2 * (8 + 12) + 2 * 2)


VARIANTS = [
    NobleConfig(),
    NobleConfig(activation="gelu", depth=1),
    NobleConfig(activation="silu", depth=1, fusion="gated", up_bias=True),
]


def wide():
    return nn.Sequential(nn.Linear(96, 200), nn.Linear(200, 64), nn.Linear(64, 48))


@pytest.mark.parametrize("budget", ["5%", "12.5 % parameters", "20% of flops", "9% FLOPs"])
@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: f"{config.activation}-{config.fusion}")
def test_the_budget_is_kept_and_used_up(config, budget):
    report = nlr.augment(wide(), config, budget=budget, verbose=False)
    share, kind = float(budget.split("%")[0]) / 100, "flops" if "flops" in budget.lower() else "parameters"

    def used(found):
        return getattr(found, f"{kind}_added") / getattr(found, f"{kind}_before")

    assert 0 < used(report) <= share
    ratio = report.config.rank_ratio
    ranks = [int(min(shape) * ratio) for shape in ((96, 200), (200, 64), (64, 48))]
    next_ratio = min((rank + 1 + 1e-6) / width for rank, width in zip(ranks, (96, 64, 48), strict=True))
    more = nlr.augment(wide(), NobleConfig(**{**vars(report.config), "rank_ratio": next_ratio}), verbose=False)
    assert used(more) > share, "one step more is too much"


class Tied(nn.Module):
    def __init__(self, conv=False):
        super().__init__()
        self.a, self.b, self.body = (Conv1D(48, 48) if conv else nn.Linear(48, 48) for _ in range(3))
        self.b.weight = self.a.weight


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("init", ["scratch", "pretrained"])
def test_the_budget_holds_where_linears_share_a_weight(init, conv):
    model = Tied(conv)
    report = nlr.augment(model, NobleConfig(init=init), budget="20%", verbose=False)
    assert model.a.weight is model.b.weight
    added = sum(parameter.numel() for parameter in model.parameters()) - report.parameters_before
    assert 0 < added == report.parameters_added <= 0.2 * report.parameters_before


def test_chosen_layers_within_a_budget_are_swapped_and_saved(tmp_path):
    model = FAMILIES["llama"]()
    inputs = batch(model)
    chosen = select_layers(layer_importance(model, [{**inputs, "labels": inputs["input_ids"]}]), 70)
    report = nlr.augment(model, NobleConfig(), select=chosen, budget="30%", verbose=False)
    assert sorted(report.swapped) == sorted(chosen)
    assert "not in select" in report.skipped.values()
    model.save_pretrained(tmp_path)
    again = nlr.hub.load_model(tmp_path)
    assert sum(p.numel() for p in again.parameters()) == report.parameters_before + report.parameters_added
