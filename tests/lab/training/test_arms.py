"""Arms, training settings and recipes: short forms, JSON, what is refused, and what arms build."""

import dataclasses
import json
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from model_helpers import FAMILIES, batch
from nlr_lab.training import Arm, Recipe
from nlr_lab.training.arms import apply_arm, build_model, optimizer_groups
from nonlinear_lowrank import QKNormProjection
from nonlinear_lowrank.analysis import part_of
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.methods.noble import NobleLinear
from refusals import assert_refused
from training_helpers import FakeText, make_recipe

BOTH = "nonlinear-query+noble:rank=4"
FORMS = {
    "baseline": Arm(),
    "noble": Arm(method="noble"),
    "noble:rank=64,activation=gelu,depth=1,lr=0.003,name=mine": Arm(
        name="mine", method="noble", settings={"rank": 64, "activation": "gelu", "depth": 1}, lr=3e-3
    ),
    "noble:init=pretrained,frequency_range=0.5/1.5,dense_init=kaiming": Arm(
        method="noble", settings={"init": "pretrained", "frequency_range": [0.5, 1.5]}, dense_init="kaiming"
    ),
    "noble:rank=2,include=5,exclude=true": Arm(method="noble", settings={"rank": 2, "include": "5", "exclude": "true"}),
    "moe:match=8,experts=4,aux_loss=0.02+noble:rank=4": Arm(
        method="moe+noble", settings={"moe": {"match": "8", "experts": 4, "aux_loss": 0.02}, "noble": {"rank": 4}}
    ),
    "cola:rank_ratio=0.5": Arm(method="cola", settings={"rank_ratio": 0.5}),
    "sltrain:density=0.1,scale=0.5": Arm(method="sltrain", settings={"density": 0.1, "scale": 0.5}),
    "moe:hidden=16,active=1": Arm(method="moe", settings={"hidden": 16, "active": 1}),
    "wide-mlp:match=8": Arm(method="wide-mlp", settings={"match": "8"}),
    BOTH: Arm(method="nonlinear-query+noble", settings={"nonlinear-query": {}, "noble": {"rank": 4}}),
    "nonlinear-query:scale=1.0+noble:rank=4,init=pretrained,dense_init=kaiming,qk_norm=true,lr=0.003": Arm(
        method="nonlinear-query+noble",
        settings={"nonlinear-query": {"scale": 1.0}, "noble": {"rank": 4, "init": "pretrained"}},
        dense_init="kaiming",
        qk_norm=True,
        lr=3e-3,
    ),
    "noble:select=query/feed_forward,budget=9%flops": Arm(
        method="noble", settings={"select": "query/feed_forward", "budget": "9%flops"}
    ),
    "lora:r=2,head_lr=0.001/0.01": Arm(method="lora", settings={"r": 2}, head_lr=(1e-3, 1e-2)),
    "baseline:init=noble,optimizer=muon,grid=0.001/0.003": Arm(dense_init="noble", optimizer="muon", grid=(1e-3, 3e-3)),
    "nora++:r=2": Arm(method="nora++", settings={"r": 2}),
    "dora:r=1,plus=16": Arm(method="dora", settings={"r": 1, "plus": 16}),
    "lora:target_modules=query/value": Arm(method="lora", settings={"target_modules": ["query", "value"]}),
    r"lora:target_modules=.*\.query": Arm(method="lora", settings={"target_modules": r".*\.query"}),
    "head": Arm(method="head"),
    "training_helpers:poison,at=3,init=noble,lr=1e-05": Arm(
        method="training_helpers:poison", settings={"at": 3}, dense_init="noble", lr=1e-5
    ),
}


@pytest.mark.parametrize("text", FORMS)
def test_short_forms(text):
    arm = Arm.parse(text)
    assert arm == FORMS[text]
    assert str(arm) == text
    assert Arm.parse(str(arm)) == arm
    assert hash(arm) == hash(FORMS[text])
    recipe = dataclasses.replace(make_recipe(), arm=arm)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_names_tell_arms_apart():
    names = [Arm.parse(text).name for text in FORMS if "lr=" not in text]
    names += [Arm.parse(f"noble:rank={rank},activation={a}").name for rank in (16, 32) for a in ("gelu", "tanh")]
    assert len(set(names)) == len(names)
    assert Arm.parse(BOTH).name == "nonlinear-query-noble-r4"


def test_short_forms_are_read_but_written_otherwise():
    assert str(Arm.parse("nonlinear-query:lr=1e+0+noble:r=4")) == f"{BOTH},lr=1.0"
    assert Arm.parse("nonlinear-query:init=noble + noble:r=4").dense_init == "noble"
    arm = Arm.parse("lora:r=4,alpha=8,dropout=0.1,targets=query")
    assert arm.settings == {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["query"]}
    assert arm.name == "lora-r4-a8-lora_dropout0.1-on-query"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nobel", "unknown arm 'nobel'; did you mean 'noble'"),
        ("nobel:rank=4", "did you mean 'noble'"),
        ("NOBLE:rank=4", "did you mean 'noble'"),
        ("plain", "unknown arm 'plain'; did you mean 'baseline'"),
        ("noble:rnk=4", "no setting 'rnk'; did you mean 'rank'"),
        ("baseline,noble:rank=8", "put a space between arms"),
        ("", "unknown arm"),
        ("noble:rank", "cannot read 'rank'"),
        ("noble:rank=four", "rank"),
        ("noble:width=3", "no setting 'width'"),
        ("noble:rank=8,rank_ratio=0.25", "rank_ratio replaces rank"),
        ("noble:rank=4,budget=5%", "budget replaces rank"),
        ("noble:budget=5", "cannot read the budget"),
        ("noble:rank=2,rank=4", "rank is given twice"),
        ("noble:rank=2,r=4", "given twice, by two names"),
        ("baseline:init=noble,dense_init=stock", "dense_init is given twice"),
        ("noble:rank=4,lr=1+nonlinear-query:lr=1", "lr is given twice"),
        ("noble:lr=fast", "lr must be a finite number above 0"),
        ("noble:optimizer=sgd", "unknown optimizer .sgd.; choose one of adamw, muon"),
        ("noble:split_fused=yes", "split_fused must be true or false, got 'yes'"),
        ("noble:split_fused=true,select=query", "give split_fused with include instead"),
        ("rational:split_fused=true", "rational has no setting 'split_fused'"),
        ("noble:select=head", "names no part of a block; choose from query, key"),
        ("rational:budget=5%", "rational has no setting 'budget'; it has activation, groups"),
        ("nonlinear-query:budget=5%", "no setting 'budget'"),
        ("baseline:init=xavier", "unknown init"),
        ("baseline:name=a/b", "name 'a/b'"),
        ("no.such.module:change", "cannot import 'no.such.module'"),
        ("training_helpers:no_such", "no function 'no_such'"),
        ("training_helpers:", "unknown arm"),
        ("noble:rank=4+lora:r=2", "lora cannot be one of several"),
        ("noble:rank=4+noble:depth=1", "names noble twice"),
        ("nonlinear-query+noble:width=3", "noble has no setting 'width'"),
        ("identity-query:rank=4", "rank=4 does nothing"),
        ("cola:rank=4", "cola has no setting 'rank'; it has rank_ratio"),
        ("cola:rank_ratio=1.5", "rank_ratio must be at least 0 and below 1, got 1.5"),
        ("cola+noble:rank=4", "cola cannot be one of several methods"),
        ("sltrain:density=0", "density must be .*above 0"),
        ("sltrain:scale=-1", "scale must be .*above 0"),
        ("lora:rank=4", r"lora has no setting 'rank'; it has r, lora_alpha"),
        ("lora:r=0", "r of lora must be a positive integer"),
        ("dora:use_dora=false", "no setting 'use_dora'"),
        ("lora:plus=0.5", "plus of lora"),
        ("peanut:plus=2", "no setting 'plus'"),
        ("full:r=2", "full has no setting 'r'"),
        ("lora:r=2,grid=0.1", "two different learning rates"),
        ("lora:r=2,grid=0.1/0.2,lr=0.1", "no lr beside it"),
        ("lora:r=2,grid=-1/1", "grid must be"),
        ("lora:r=2,head_lr=0.1/0", "head_lr must be"),
        ("head:head_lr=0.1", "give it lr, or grid, instead of head_lr"),
        ("full:include=(", "not a regular expression"),
        ("full:rank=2", "full has no setting 'rank'; it takes include=, lr=, grid= and name="),
        ("wide-mlp:width=3", "needs the MLP's width"),
        ("wide-mlp:ratio=2,hidden=3", "needs the MLP's width"),
        ("wide-mlp:ratio=0", "ratio must be"),
        ("wide-mlp:hidden=0", "hidden must be a positive integer"),
        ("moe:experts=4", "moe needs the width of an expert, or an arm to match"),
        ("moe:hidden=8,by=flops", "moe needs the width"),
        ("moe:hidden=12", "hidden of moe must be a multiple of 8, got 12"),
        ("moe:hidden=8,experts=1", "experts must be an integer of at least 2, got 1"),
        ("moe:hidden=8,experts=2,active=3", "active must not exceed experts, got 3 of 2"),
        ("moe:hidden=8,aux_loss=-1", "aux_loss must be"),
        ("moe:hidden=8,ratio=2", "moe has no setting 'ratio'"),
        ("moe:match=a,by=size", "unknown by 'size'"),
        ("wide-mlp:match=a,by=size", "unknown by 'size'; choose one of parameters, flops"),
    ],
)
def test_bad_arms(text, message):
    assert_refused(message, Arm.parse, text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"settings": {name: 5}}, f"{name} must be one pattern of names, got 5; join")
            for name in ("include", "exclude")
        ),
        ({"method": "noble", "settings": {"include": ["q", "k"]}}, "include must be one pattern of names, got"),
        ({"settings": 3}, "must be names with values"),
        ({"name": 3}, "must be strings"),
        ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"method": "noble+rational", "settings": {"rank": 2}}, "must be names with values"),
        ({"method": "noble+rational", "settings": {"sine": {}}}, "'sine' is not one of them"),
    ],
)
def test_bad_fields(fields, message):
    assert_refused(message, Arm, **{"method": "noble", **fields})


def test_function_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "broken_change.py").write_text("1 / 0")
    (tmp_path / "good_change.py").write_text("def change(model, to=1):\n    model.to_ = to\n    return model")
    monkeypatch.chdir(tmp_path)  # found in the working folder, as with python -m
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert_refused("division by zero", Arm.parse, "broken_change:change")
    assert Arm.parse("good_change:change,to=7").apply(nn.Linear(2, 2)).to_ == 7


def test_apply():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert Arm().apply(model) is model
    changed = Arm.parse("noble:rank=4,depth=1").apply(model)
    assert all(isinstance(layer, NobleLinear) and layer.noble_config.depth == 1 for layer in changed)


def test_recipe_survives_json():
    recipe = make_recipe("noble:rank=4,frequency_range=0.5/1.5,lr=3e-3", threads=None)
    recipe = dataclasses.replace(recipe, arms=("baseline", "noble:rank=4"), tune_lr=(1e-3, 1 / 3000))
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert (again, again.lr) == (recipe, 3e-3)
    assert json.dumps(again.to_dict()) == json.dumps(recipe.to_dict())
    assert dataclasses.replace(recipe, arm=Arm()).lr == recipe.train.lr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be a JSON object"),
        ({"name": "x"}, "incomplete"),
        ({"name": "x", "colour": 1}, "unknown field 'colour'"),
        ({"name": "x", "task": 3, "train": {}}, "recipe.task must be"),
    ],
)
def test_json_that_is_no_recipe(data, message):
    assert_refused(message, Recipe.from_dict, data)


@pytest.mark.parametrize("text", [BOTH, "rational:groups=4+noble:rank=4+nonlinear-query"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_share_out_the_modules(family, text):
    def kinds(text):
        model = Arm.parse(text).apply(FAMILIES[family]())
        return model, {name: found.name for name, each in model.named_modules() if (found := method_of_layer(each))}

    both, found = kinds(text)
    expected = {name: "nonlinear-query" if part_of(name) == "query" else "noble" for name in kinds("noble:rank=4")[1]}
    assert found == expected | (kinds("rational:groups=4")[1] if "rational" in text else {})
    both(**batch(both)).logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in both.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("family", ["opt", "vit", "glm", "llama", "eurobert"])
def test_wider_mlp_is_a_plain_model_of_that_width(family, tmp_path):
    model = FAMILIES[family]().eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    changed = Arm.parse("wide-mlp:ratio=2.5").apply(model)
    assert type(changed) is type(FAMILIES[family]())
    inputs = batch(changed)
    logits = changed(**inputs).logits
    changed.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(again(**inputs).logits, logits)
    widths = {size for parameter in changed.parameters() for size in parameter.shape}
    assert (80 in widths, 160 in widths) == (True, family == "glm")
    for name, parameter in changed.named_parameters():
        if parameter.shape == before[name].shape:
            assert torch.equal(parameter, before[name])
        elif parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)


def test_wider_mlp_comes_first_and_norms_come_last():
    assert Arm.parse("wide-mlp:ratio=4").control
    model = Arm.parse("noble:rank=4+qk-norm+wide-mlp:ratio=2").apply(FAMILIES["opt"]())
    layer = model.model.decoder.layers[0]
    assert (layer.fc1.out_features, layer.fc1.noble_rank) == (64, 4)
    assert isinstance(layer.self_attn.k_proj, QKNormProjection)
    assert layer.self_attn.k_proj.projection.noble_rank == 4
    assert model(**batch(model)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "text", "words"),
    [
        ("gpt2", "wide-mlp:ratio=4", "does not know the MLPs of GPT2"),
        ("opt", "wide-mlp:match=noble", "is resolved by nlr compare"),
        ("opt", "wide-mlp:ratio=0.001", "leaves no MLP"),
        ("opt", "moe:hidden=8", "moe does not know the blocks of OPTForCausalLM"),
        ("glm", "moe:hidden=8", "moe does not know the blocks of Glm.*all of a head rotary"),
        ("llama", "moe:match=noble", "is resolved by nlr compare"),
        ("llama", "moe:hidden=8+wide-mlp:hidden=8", "does not know the MLPs of Mixtral"),
        ("glm", "noble:budget=0.01%", "cannot be met"),
        ("gpt2", "noble:rank=2,select=key", "no plain linear of this GPT2LMHeadModel is key"),
        ("opt", "noble:rank=32", "rank"),
        ("opt", "sine-lowrank:rank=2,include=nothing", "no linear's whole name"),
        ("opt", "training_helpers:no_module", "return the changed model"),
    ],
)
def test_arms_that_do_not_fit(family, text, words):
    assert_refused(words, Arm.parse(text).apply, FAMILIES[family]())


def test_budget_and_select_are_those_of_augment():
    plain = sum(parameter.numel() for parameter in FAMILIES["glm"]().parameters())
    model = Arm.parse("noble:budget=40%,select=query/feed_forward").apply(FAMILIES["glm"]())
    assert 0 < sum(parameter.numel() for parameter in model.parameters()) - plain <= 0.4 * plain
    swapped = {part_of(name) for name, module in model.named_modules() if method_of_layer(module) is not None}
    assert swapped == {"query", "feed_forward"}


def test_split_fused_is_that_of_augment():
    assert Arm.parse("noble:rank=4,split_fused=true").name == "noble-r4-split_fused-true"
    model = Arm.parse("noble:rank=4,split_fused=true,exclude=.*attn.*").apply(FAMILIES["glm"]())
    names = {name.partition(".mlp.")[2] for name, each in model.named_modules() if method_of_layer(each) is not None}
    assert names == {"gate_up_proj.gate_proj", "gate_up_proj.up_proj", "down_proj"}


def test_arm_has_its_own_optimizer():
    def by_muon(text, **settings):
        recipe = make_recipe(text, **settings)
        model = apply_arm(recipe, recipe.arm, build_model(recipe, FakeText()))
        groups = optimizer_groups(model, recipe, recipe.arm, 1e-3)
        names = [name for group in groups if group.get("optimizer") == "muon" for name, _ in group["params"]]
        return {name.partition("self_attn.")[2] or name.partition("mlp.")[2] for name in names}

    assert by_muon("noble:rank=4,optimizer=adamw", optimizer="muon") == set()
    assert by_muon(f"{BOTH},optimizer=muon") == {
        *("q_proj.query_down", "q_proj.query_up"),
        *(f"{name}.dense.weight" for name in ("k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
    }


def test_adapters_are_not_muons():
    model = get_peft_model(FAMILIES["llama"](), LoraConfig(r=2, target_modules=["q_proj"]))
    recipe, lora, plain = make_recipe(), Arm.parse("lora:r=2,optimizer=muon"), Arm.parse("baseline:optimizer=muon")
    assert_refused("trains an adapter", optimizer_groups, model, recipe, lora, 1e-3)
    frozen = FAMILIES["llama"]().requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    assert_refused("trains no dense matrices", optimizer_groups, frozen, recipe, plain, 1e-3)
