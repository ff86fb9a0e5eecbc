"""Arms, training settings and recipes: their short forms, JSON, the command line, and what is refused."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

from nlr_lab.training import Arm, Recipe, TrainConfig
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleLinear
from training_helpers import make_recipe

BOTH = "nonlinear-query+noble:rank=4"
FORMS = {
    "baseline": Arm(),
    "baseline:init=noble": Arm(dense_init="noble"),
    "baseline:init=kaiming,lr=0.003": Arm(dense_init="kaiming", lr=3e-3),
    "noble": Arm(method="noble"),
    "noble:rank=64": Arm(method="noble", settings={"rank": 64}),
    "noble:rank=64,activation=gelu,depth=1,lr=0.003,name=mine": Arm(
        name="mine", method="noble", settings={"rank": 64, "activation": "gelu", "depth": 1}, lr=3e-3
    ),
    "noble:init=pretrained,frequency_range=0.5/1.5,dense_init=kaiming": Arm(
        method="noble", settings={"init": "pretrained", "frequency_range": [0.5, 1.5]}, dense_init="kaiming"
    ),
    "noble:rank=2,include=5,exclude=true": Arm(method="noble", settings={"rank": 2, "include": "5", "exclude": "true"}),
    "wide-mlp:match=8": Arm(method="wide-mlp", settings={"match": "8"}),
    "rational": Arm(method="rational"),
    "rational:groups=4,degrees=5/4,anchor=exact": Arm(
        method="rational", settings={"groups": 4, "degrees": [5, 4], "anchor": "exact"}
    ),
    BOTH: Arm(method="nonlinear-query+noble", settings={"nonlinear-query": {}, "noble": {"rank": 4}}),
    "nonlinear-query:scale=1.0+noble:rank=4,init=pretrained,dense_init=kaiming,qk_norm=true,lr=0.003": Arm(
        method="nonlinear-query+noble",
        settings={"nonlinear-query": {"scale": 1.0}, "noble": {"rank": 4, "init": "pretrained"}},
        dense_init="kaiming",
        qk_norm=True,
        lr=3e-3,
    ),
    "noble:rank=16+rational": Arm(method="noble+rational", settings={"noble": {"rank": 16}, "rational": {}}),
    "noble:budget=5%": Arm(method="noble", settings={"budget": "5%"}),
    "noble:select=query/feed_forward,budget=9%flops": Arm(
        method="noble", settings={"select": "query/feed_forward", "budget": "9%flops"}
    ),
    "baseline:init=noble,optimizer=muon,grid=0.001/0.003": Arm(dense_init="noble", optimizer="muon", grid=(1e-3, 3e-3)),
    "nora++:r=2": Arm(method="nora++", settings={"r": 2}),
    "training_helpers:poison": Arm(method="training_helpers:poison"),
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
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_names_tell_arms_apart():
    names = [Arm.parse(text).name for text in FORMS if "lr=" not in text]
    names += [Arm.parse(f"noble:rank={rank},activation={a}").name for rank in (16, 32) for a in ("gelu", "tanh")]
    assert len(set(names)) == len(names)
    assert Arm.parse("noble:rank=64").name == "noble-r64"
    assert Arm.parse(BOTH).name == "nonlinear-query-noble-r4"


def test_short_forms_are_read_but_written_otherwise():
    assert str(Arm.parse("nonlinear-query:lr=1e+0+noble:r=4")) == f"{BOTH},lr=1.0"
    assert Arm.parse("nonlinear-query:init=noble + noble:r=4").dense_init == "noble"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nobel:rank=4", "unknown arm|cannot import"),
        ("nobel", "unknown arm"),
        ("", "unknown arm"),
        ("noble:rank", "cannot read 'rank'"),
        ("noble:rank=", "cannot read"),
        ("noble:rank=0", "rank"),
        ("noble:rank=four", "rank"),
        ("noble:activation=relu6", "activation"),
        ("noble:width=3", "no setting 'width'"),
        ("noble:rank=2,up_bias=no", "up_bias must be true or false"),
        ("noble:rank=2,rank=4", "rank is given twice"),
        ("noble:rank=8,rank_ratio=0.25", "rank_ratio takes the place of rank"),
        ("noble:rank=2,r=4", "r of the arm 'noble' is given twice"),
        ("nonlinear-query+noble:rank=2,r=4", "given twice, by two names"),
        ("noble:lr=1e-3,lr=1e-2", "lr is given twice"),
        ("baseline:init=noble,dense_init=stock", "dense_init is given twice"),
        ("noble:lr=fast", "lr must be a number"),
        ("noble:lr=-1", "lr must be"),
        ("baseline:rank=4", "no setting 'rank'"),
        ("rational:rank=4", "no setting 'rank'; it has activation, groups"),
        ("rational:groups=0", "groups must be a positive integer"),
        ("rational:budget=5%", "rational has no setting 'budget'"),
        ("rational:select=query", "rational has no setting 'select'"),
        ("baseline:init=xavier", "unknown init"),
        ("baseline:name=a/b", "name 'a/b'"),
        ("no.such.module:change", "cannot import 'no.such.module'"),
        ("training_helpers:no_such", "no function 'no_such'"),
        ("training_helpers:VOCABULARY", "no function"),
        ("training_helpers:", "unknown arm"),
        ("noble:rank=4+lora:r=2", "lora cannot be one of several"),
        ("baseline+noble:rank=4", "baseline cannot be one of several"),
        ("noble:rank=4+noble:rank=8", "names noble twice"),
        ("noble:rank=4,lr=1+nonlinear-query:lr=1", "lr is of the whole arm"),
        ("nonlinear-query+noble:width=3", "noble has no setting 'width'"),
        ("noble:rank=4,budget=5%", "budget= or rank=, not both"),
        ("noble:budget=5", "cannot read the budget"),
        ("nonlinear-query:budget=5%", "cannot choose ranks for a budget"),
        ("noble:select=head", "names no part of a block; choose from query, key"),
        ("noble:optimizer=sgd", "unknown optimizer .sgd.; choose one of adamw, muon"),
    ],
)
def test_bad_arms(text, message):
    with pytest.raises(UserError, match=message) as caught:
        Arm.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["include", "exclude"])
def test_patterns_are_texts(name):
    for patterns in (5, True, ["q", 1]):
        with pytest.raises(UserError, match=f"{name} must be a pattern of names, or a list of them, got"):
            Arm(method="noble", settings={"rank": 2, name: patterns})


def test_module_that_breaks_on_import(tmp_path, monkeypatch):
    (tmp_path / "broken_change.py").write_text("1 / 0")
    (tmp_path / "good_change.py").write_text("def change(model, to=1):\n    model.to_ = to\n    return model")
    monkeypatch.chdir(tmp_path)  # found in the working folder, as with python -m
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError, match="division by zero"):
        Arm.parse("broken_change:change")
    assert Arm.parse("good_change:change,to=7").apply(nn.Linear(2, 2)).to_ == 7


def test_apply():
    def build():
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    model = build()
    assert Arm().apply(model) is model
    changed = Arm.parse("noble:rank=4,depth=1").apply(model)
    assert all(isinstance(layer, NobleLinear) and layer.noble_config.depth == 1 for layer in changed)
    with pytest.raises(UserError, match="return the changed model"):
        Arm.parse("training_helpers:no_module").apply(build())
    with pytest.raises(UserError, match="rank"):
        Arm.parse("noble:rank=32").apply(build())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("steps", 0), ("steps", -5), ("steps", 1.5), ("batch_size", 0), ("gradient_accumulation", 3)),
        *(("lr", 0.0), ("lr", -1.0), ("lr", float("inf")), ("lr", float("nan")), ("lr", "fast")),
        *(("warmup_steps", 13), ("warmup_steps", -1), ("betas", (0.9,)), ("betas", (0.9, 1.0)), ("weight_decay", -1)),
        *(("schedule", "step"), ("optimizer", "sgd"), ("max_grad_norm", -1.0), ("eval_every", 0)),
        *(("save_every", 0), ("keep_checkpoints", 0), ("log_every", 0), ("seed", -1), ("seed", 2**31), ("threads", 0)),
        *(("eval_batch_size", 0), ("dataloader_workers", -1)),
    ],
)
def test_bad_training_settings(field, value):
    with pytest.raises(UserError, match=field):
        TrainConfig(**{"steps": 12, "batch_size": 4, "lr": 1e-3, field: value})


def test_recipe_survives_json():
    recipe = dataclasses.replace(
        make_recipe("noble:rank=4,frequency_range=0.5/1.5,lr=3e-3", threads=None),
        arms=("baseline", "noble:rank=4"),
        tune_lr=(1e-3, 1 / 3000),
    )
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.to_json() == recipe.to_json()
    assert again.lr == 3e-3
    assert dataclasses.replace(recipe, arm=Arm()).lr == recipe.train.lr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a recipe"),
        ("[]", "must be a JSON object"),
        ('{"name": "x"}', "incomplete"),
        ('{"name": "x", "colour": 1}', "unknown field 'colour'"),
        ('{"name": "x", "task": 3, "train": {}}', "recipe.task must be"),
    ],
)
def test_json_that_is_no_recipe(text, message):
    with pytest.raises(UserError, match=message):
        Recipe.from_json(text)


def test_function_arm_draws_from_the_seed():
    """Arms are applied under the run's seed, so that a user's init repeats."""
    weights = []
    for _ in range(2):
        torch.manual_seed(5)
        weights.append(Arm.parse("noble:rank=4").apply(nn.Sequential(nn.Linear(32, 32)))[0].weight)
    assert torch.equal(*weights)
