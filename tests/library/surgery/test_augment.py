"""Surgery: what is swapped, what is left, what is refused before anything changes."""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.hub import load_model


def snapshot(model):
    return [(name, type(module)) for name, module in model.named_modules()], {
        name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()
    }


def assert_unchanged(model, before):
    modules, parameters = snapshot(model)
    assert modules == before[0]
    assert parameters.keys() == before[1].keys()
    for name, (identity, value) in parameters.items():
        assert identity == before[1][name][0]
        assert torch.equal(value, before[1][name][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_pretrained_init_leaves_the_logits_bit_equal(family):
    model = FAMILIES[family]().eval()
    inputs = batch(model)
    with torch.no_grad():
        before = model(**inputs).logits
        nlr.augment(model, NobleConfig(rank=4, init="pretrained"), verbose=False)
        assert torch.equal(model(**inputs).logits, before)
        for name, parameter in model.named_parameters():
            if name.endswith("noble_up"):
                parameter.normal_()
        assert not torch.equal(model(**inputs).logits, before)
        with nlr.branches_disabled(model):
            assert torch.equal(model(**inputs).logits, before)
        assert not torch.equal(model(**inputs).logits, before)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
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


def test_include_and_exclude_choose_by_whole_names():
    model = FAMILIES["glm"]()
    report = nlr.augment(model, NobleConfig(rank=4), include=r".*mlp\..*", exclude=[r".*layers\.1\..*"], verbose=False)
    assert report.swapped == ["model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"]
    assert report.skipped["model.layers.1.mlp.down_proj"] == "in exclude"
    # The rest may follow with another rank; what is augmented already may not.
    nlr.augment(model, NobleConfig(rank=2), include=r".*self_attn\..*", verbose=False)
    with pytest.raises(UserError, match="augmented with noble already"):
        nlr.augment(model, NobleConfig(rank=2), verbose=False)


def _freeze(model):
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)


def _hook(model):
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)


def _quantize(model):
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


def _subclass(model):
    class Special(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model.model.layers[1].mlp.down_proj = Special(48, 32)


@pytest.mark.parametrize(
    ("settings", "arguments", "prepare", "word"),
    [
        ({"rank": 32}, {}, None, "rank 32 is not low"),
        ({"rank": 4}, {"include": "nothing.*"}, None, "matches no linear"),
        ({"rank": 4}, {"exclude": ["nothing.*"]}, None, "matches no linear"),
        ({"rank": 4}, {"include": "("}, None, "not a regular expression"),
        ({"rank": 4}, {"include": "lm_head"}, None, "nothing to swap"),
        ({"rank": 4}, {}, _freeze, "frozen"),
        ({"rank": 4}, {}, _quantize, "quantized"),
        ({"rank": 4}, {}, _hook, "hooks"),
        ({"rank": 4}, {"include": ".*down_proj"}, _subclass, "cannot replace"),
    ],
)
def test_refused_before_anything_changes(settings, arguments, prepare, word):
    model = FAMILIES["glm"]()
    if prepare:
        prepare(model)
    before = snapshot(model)
    with pytest.raises(UserError, match=word) as caught:
        nlr.augment(model, NobleConfig(**settings), **arguments)
    assert "\n" not in str(caught.value)
    assert_unchanged(model, before)


def test_plain_modules_shared_and_tied_ones():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 16)
            self.first = nn.Linear(16, 16)
            self.again = self.first
            self.attention = nn.MultiheadAttention(16, 2)
            self.output = nn.Linear(16, 11, bias=False)
            self.output.weight = self.embedding.weight
            self.classifier = nn.Linear(16, 3)

    net = Net()
    report = nlr.augment(net, NobleConfig(rank=4), verbose=False)
    assert report.swapped == ["first"]
    assert net.first is net.again
    assert isinstance(net.first, nlr.NobleLinear)
    assert report.skipped["output"] == "tied to an embedding"
    assert report.skipped["classifier"] == "named like an output head"
    assert "without calling it" in report.skipped["attention.out_proj"]


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


def test_wrong_config_and_model_without_branches():
    with pytest.raises(UserError, match="not the config of a method"):
        nlr.augment(nn.Sequential(nn.Linear(4, 4)), {"rank": 2})
    with pytest.raises(UserError, match="no branches"), nlr.branches_disabled(nn.Linear(3, 3)):
        pass


def test_report_prints_and_counts(capsys):
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 12))
    report = nlr.augment(model, NobleConfig(rank=2))
    assert "2 linears swapped" in capsys.readouterr().out
    assert report.flops_before == 2 * (16 * 8 + 8 * 12)
    assert report.flops_added == 2 * (2 * (16 + 8) + 2 * 2) + 2 * (2 * (8 + 12) + 2 * 2)


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "hidden"), [("base", 12, 1024, 8, 2752), ("large", 24, 2048, 16, 5504)]
)
def test_published_parameter_counts_on_meta(name, layers, width, heads, hidden):
    """shared/facts/parameter_counts.json, to the last parameter and printed percentage."""
    from transformers import GlmConfig, GlmForCausalLM

    totals = {"base": 254_733_312, "large": 1_420_204_032}
    percent = {"base": {64: 5.70, 128: 11.63, 256: 24.19}, "large": {64: 4.04, 128: 8.17, 256: 16.68}}
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "head_dim": width // heads}
    heads = {"num_attention_heads": heads, "num_key_value_heads": heads, "attention_bias": False}
    tokens = {"vocab_size": 50257, "pad_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    config = GlmConfig(**sizes, **heads, **tokens, hidden_act="gelu")
    for rank, added in percent[name].items():
        with torch.device("meta"):
            model = GlmForCausalLM(config)
        report = nlr.augment(model, NobleConfig(rank=rank), verbose=False)
        assert report.parameters_before == totals[name]
        assert round(100 * report.parameters_added / report.parameters_before, 2) == added
        shapes = {(width, width): 4, (width, 2 * hidden): 1, (hidden, width): 1}
        exact = layers * sum(n * (rank * sum(shape) + rank * rank + 4 * rank) for shape, n in shapes.items())
        assert report.parameters_added == exact


def test_saved_entry_is_json_and_applies_again():
    from nonlinear_lowrank.surgery.augment import after_augment, apply_saved

    entries = []
    after_augment.append(lambda _, entry: entries.append(entry))
    try:
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 12))
        nlr.augment(model, NobleConfig(rank=2, activation="gelu", depth=1), include="0", verbose=False)
    finally:
        after_augment.pop()
    fresh = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 12))
    apply_saved(fresh, json.loads(json.dumps(entries)))
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(3, 16)
    assert torch.equal(fresh(x), model(x))
    for wrong, word in (({"method": "nope"}, "unknown method"), ({"modules": ["7"]}, "does not have")):
        with pytest.raises(UserError, match=word):
            apply_saved(nn.Sequential(nn.Linear(16, 8)), [{**entries[0], **wrong}])
