"""Arms, training settings and recipes: short forms, JSON, what is refused; what arms build, and whole runs of them."""

import dataclasses
import json
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from adapter_helpers import PEFT_WARNINGS
from model_helpers import FAMILIES, batch
from nlr_lab.tasks.text.language_model import OptBackbone, OptLanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from nlr_lab.training.arms import optimizer_groups
from nlr_lab.training.checkpoints import tensor_names
from nonlinear_lowrank import NonlinearQuery, QKNormProjection, UserError
from nonlinear_lowrank.analysis import part_of
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.methods.noble import NobleLinear
from pretraining_helpers import logits_in_a_fresh_process
from training_helpers import FakeText, cut_back, make_recipe

TEXT = FakeText()
BOTH = "nonlinear-query+noble:rank=4"
FORMS = {
    "baseline": Arm(),
    "baseline:init=noble": Arm(dense_init="noble"),
    "noble": Arm(method="noble"),
    "noble:rank=64,activation=gelu,depth=1,lr=0.003,name=mine": Arm(
        name="mine", method="noble", settings={"rank": 64, "activation": "gelu", "depth": 1}, lr=3e-3
    ),
    "noble:init=pretrained,frequency_range=0.5/1.5,dense_init=kaiming": Arm(
        method="noble", settings={"init": "pretrained", "frequency_range": [0.5, 1.5]}, dense_init="kaiming"
    ),
    "noble:rank=2,include=5,exclude=true": Arm(method="noble", settings={"rank": 2, "include": "5", "exclude": "true"}),
    "wide-mlp:match=8": Arm(method="wide-mlp", settings={"match": "8"}),
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
    "noble:select=query/feed_forward,budget=9%flops": Arm(
        method="noble", settings={"select": "query/feed_forward", "budget": "9%flops"}
    ),
    "baseline:init=noble,optimizer=muon,grid=0.001/0.003": Arm(dense_init="noble", optimizer="muon", grid=(1e-3, 3e-3)),
    **{
        f"{method}:{text}": Arm(method=method, settings=settings)
        for method, text, settings in (
            ("nora++", "r=2", {"r": 2}),
            ("dora", "r=1,plus=16", {"r": 1, "plus": 16}),
            ("peanut", "r=2,depth=1", {"r": 2, "depth": 1}),
            ("lora", "r=4,target_modules=query/value", {"r": 4, "target_modules": ["query", "value"]}),
            ("lora", r"target_modules=.*\.query", {"target_modules": r".*\.query"}),
            ("sine-lora", "r=4,omega=200", {"r": 4, "omega": 200}),
            ("noble-adapter", "r=4", {"r": 4}),
        )
    },
    "full": Arm(method="full"),
    "head": Arm(method="head"),
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
    arm = Arm.parse("lora:r=4,alpha=8,dropout=0.1,targets=query")
    assert arm.settings == {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["query"]}
    assert arm.name == "lora-r4-a8-lora_dropout0.1-on-query"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nobel", "unknown arm"),
        ("", "unknown arm"),
        ("noble:rank", "cannot read 'rank'"),
        ("noble:rank=0", "rank"),
        ("noble:rank=four", "rank"),
        ("noble:activation=relu6", "activation"),
        ("noble:width=3", "no setting 'width'"),
        ("noble:rank=2,up_bias=no", "up_bias must be true or false"),
        ("noble:rank=8,rank_ratio=0.25", "rank_ratio takes the place of rank"),
        ("noble:rank=2,r=4", "r of the arm 'noble' is given twice"),
        ("nonlinear-query+noble:rank=2,r=4", "given twice, by two names"),
        ("baseline:init=noble,dense_init=stock", "dense_init is given twice"),
        ("noble:lr=fast", "lr must be a number"),
        ("noble:lr=-1", "lr must be"),
        ("rational:rank=4", "no setting 'rank'; it has activation, groups"),
        ("rational:groups=0", "groups must be a positive integer"),
        ("rational:budget=5%", "rational has no setting 'budget'"),
        ("baseline:init=xavier", "unknown init"),
        ("baseline:name=a/b", "name 'a/b'"),
        ("no.such.module:change", "cannot import 'no.such.module'"),
        ("training_helpers:no_such", "no function 'no_such'"),
        ("training_helpers:", "unknown arm"),
        ("noble:rank=4+lora:r=2", "lora cannot be one of several"),
        ("noble:rank=4+noble:rank=8", "names noble twice"),
        ("noble:rank=4,lr=1+nonlinear-query:lr=1", "lr is of the whole arm"),
        ("nonlinear-query+noble:width=3", "noble has no setting 'width'"),
        ("noble:rank=4,budget=5%", "budget= or rank=, not both"),
        ("noble:budget=5", "cannot read the budget"),
        ("nonlinear-query:budget=5%", "cannot choose ranks for a budget"),
        ("noble:select=head", "names no part of a block; choose from query, key"),
        ("lora:rank=4", r"lora has no setting 'rank'; it has r, lora_alpha"),
        ("lora:r=0", "r of lora must be a positive integer"),
        ("dora:use_dora=false", "no setting 'use_dora'"),
        ("lora:plus=0.5", "plus of lora"),
        ("peanut:plus=2", "no setting 'plus'"),
        ("full:r=2", "full has no setting 'r'"),
        ("lora:r=2,grid=0.1", "two different learning rates"),
        ("lora:r=2,grid=0.1/0.2,lr=0.1", "no lr beside it"),
        ("lora:r=2,grid=-1/1", "grid must be"),
        ("sine-lora:omega=0", "omega"),
        ("wide-mlp", "wide-mlp:ratio=4.75"),
        ("wide-mlp:ratio=0", "ratio must be"),
        ("wide-mlp:width=3", "needs the MLP's width"),
        ("wide-mlp:hidden=0", "hidden must be a positive integer"),
        ("wide-mlp:match=a,by=size", "unknown by 'size'; choose one of parameters, flops"),
        ("noble:optimizer=sgd", "unknown optimizer .sgd.; choose one of adamw, muon"),
    ],
)
def test_bad_arms(text, message):
    with pytest.raises(UserError, match=message) as caught:
        Arm.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"settings": {name: 5}}, f"{name} must be a pattern") for name in ("include", "exclude")),
        ({"settings": {"include": ["q", 1]}}, "include must be a pattern of names, or a list of them, got"),
        ({"settings": 3}, "must be names with values"),
        ({"name": 3}, "must be texts"),
        ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"method": "noble+rational", "settings": {"rank": 2}}, "'rank' is none of them"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(UserError, match=message):
        Arm(**{"method": "noble", **fields})


def test_module_that_breaks_on_import(tmp_path, monkeypatch):
    (tmp_path / "broken_change.py").write_text("1 / 0")
    (tmp_path / "good_change.py").write_text("def change(model, to=1):\n    model.to_ = to\n    return model")
    monkeypatch.chdir(tmp_path)  # found in the working folder, as with python -m
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError, match="division by zero"):
        Arm.parse("broken_change:change")
    assert Arm.parse("good_change:change,to=7").apply(nn.Linear(2, 2)).to_ == 7


def test_apply():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert Arm().apply(model) is model
    with pytest.raises(UserError, match="return the changed model"):
        Arm.parse("training_helpers:no_module").apply(model)
    with pytest.raises(UserError, match="rank"):
        Arm.parse("noble:rank=32").apply(model)
    changed = Arm.parse("noble:rank=4,depth=1").apply(model)
    assert all(isinstance(layer, NobleLinear) and layer.noble_config.depth == 1 for layer in changed)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *(("steps", (0, -5, 1.5)), ("batch_size", (0,)), ("gradient_accumulation", (3,))),
        *(("lr", (0.0, -1.0, float("inf"), float("nan"), "fast")), ("warmup_steps", (13, -1)), ("epochs", (0,))),
        *(("betas", ((0.9,), (0.9, 1.0))), ("weight_decay", (-1,)), ("schedule", ("step",)), ("optimizer", ("sgd",))),
        *(("max_grad_norm", (-1.0,)), ("eval_every", (0,)), ("save_every", (0,)), ("keep_checkpoints", (0,))),
        *(("log_every", (0,)), ("seed", (-1, 2**31)), ("threads", (0,)), ("eval_batch_size", (0,))),
        *(("dataloader_workers", (-1,)), ("warmup_share", (1.0,))),
    ],
)
def test_bad_training_settings(field, values):
    for value in values:
        with pytest.raises(UserError, match=field):
            TrainConfig(**{"steps": 12, "batch_size": 4, "lr": 1e-3, field: value})
    with pytest.raises(UserError, match="warmup_share"):
        TrainConfig(epochs=1, batch_size=8, lr=1e-3, warmup_share=0.1, warmup_steps=3)


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


# --- several methods in one model, and wider MLPs -------------------------------------------------------------


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


def test_wider_mlp_that_does_not_fit():
    arm = Arm.parse("wide-mlp:ratio=4")
    assert (arm.control, arm.name) == (True, "wide-mlp-4")
    with pytest.raises(UserError, match="does not know the MLPs of GPT2"):
        arm.apply(FAMILIES["gpt2"]())
    with pytest.raises(UserError, match="is resolved by nlr compare"):
        Arm.parse("wide-mlp:match=noble").apply(FAMILIES["opt"]())
    with pytest.raises(UserError, match="leaves no MLP"):
        Arm.parse("wide-mlp:ratio=0.001").apply(FAMILIES["opt"]())


def test_wider_mlp_comes_first_and_norms_come_last():
    model = Arm.parse("noble:rank=4+qk-norm+wide-mlp:ratio=2").apply(FAMILIES["opt"]())
    layer = model.model.decoder.layers[0]
    assert (layer.fc1.out_features, layer.fc1.noble_rank) == (64, 4)
    assert isinstance(layer.self_attn.k_proj, QKNormProjection)
    assert layer.self_attn.k_proj.projection.noble_rank == 4
    assert model(**batch(model)).logits.isfinite().all()


def test_budget_is_kept_and_only_the_selected_parts_have_branches():
    plain = sum(parameter.numel() for parameter in FAMILIES["glm"]().parameters())
    whole = Arm.parse("noble:budget=40%").apply(FAMILIES["glm"]())
    some = Arm.parse("noble:budget=40%,select=query/feed_forward").apply(FAMILIES["glm"]())
    ranks = []
    for model in (whole, some):
        added = sum(parameter.numel() for parameter in model.parameters()) - plain
        assert 0 < added <= 0.4 * plain
        ranks.append(model.model.layers[0].self_attn.q_proj.noble_rank)
    assert ranks[1] > ranks[0], "fewer linears may be wider"
    swapped = {part_of(name) for name, module in some.named_modules() if method_of_layer(module) is not None}
    assert swapped == {"query", "feed_forward"}
    with pytest.raises(UserError, match="cannot be met"):
        Arm.parse("noble:budget=0.01%").apply(FAMILIES["glm"]())
    with pytest.raises(UserError, match="no plain linear of this GPT2LMHeadModel is key"):
        Arm.parse("noble:rank=2,select=key").apply(FAMILIES["gpt2"]())


# --- whole runs -----------------------------------------------------------------------------------------------


OPT = OptLanguageModelTask(
    text=make_recipe().task.text, backbone=OptBackbone(layers=2, width=32, heads=2, hidden=48, dropout=0.1)
)
RUNS = (
    *(f"{BOTH},qk_norm=true", f"{BOTH},optimizer=muon", "noble:budget=30%", "baseline:optimizer=muon"),
    *("noble:rank=4+rational:groups=4", "wide-mlp:ratio=3"),
)


@pytest.mark.parametrize("arm", RUNS)
def test_resuming_gives_the_same_bits_and_the_model_loads_elsewhere(tmp_path, arm):
    recipe, out = replace(make_recipe(arm, save_every=4, keep_checkpoints=9), task=OPT), tmp_path / "out"
    done = run_training(recipe, out, prepared=TEXT, quiet=True)
    cut = cut_back(out, tmp_path / "again", 4)
    again = run_training(recipe, cut, prepared=TEXT, resume=True, quiet=True)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (out, cut)]
    assert weights[0] == weights[1]
    assert replace(again, seconds=0.0) == replace(done, seconds=0.0)
    if arm != RUNS[0]:
        return
    other = replace(recipe, arm=Arm.parse("nonlinear-query+noble:rank=5"))
    with pytest.raises(UserError, match=r"^arm\."):
        run_training(other, out, prepared=TEXT, resume=True, quiet=True)
    model = load_model(out / "model").eval()
    assert sum(isinstance(module, NonlinearQuery) for module in model.modules()) == 2
    inputs = {"input_ids": torch.randint(0, TEXT.vocab_size, (2, 16))}
    name, logits = logits_in_a_fresh_process(out / "model", "AutoModelForCausalLM", inputs)
    assert name == "NonlinearLowrankOPTForCausalLM"
    assert torch.equal(logits, model(**inputs).logits)


# --- Muon -----------------------------------------------------------------------------------------------------


def test_arm_has_its_own_optimizer(tmp_path):
    recipes = {
        "muon": make_recipe(f"{BOTH},optimizer=muon"),
        "adamw": make_recipe("noble:rank=4,optimizer=adamw", optimizer="muon"),
    }
    for name, recipe in recipes.items():
        run_training(recipe, tmp_path / name, prepared=TEXT, quiet=True)
    state = tensor_names(tmp_path / "muon" / "checkpoints" / "step-000012" / "optimizer")
    by_muon = {name.partition("/")[2] for name in state if name.startswith("momentum_buffer/")}
    ends = {name.partition("self_attn.")[2] or name.partition("mlp.")[2] for name in by_muon}
    assert ends == {
        *("q_proj.query_down", "q_proj.query_up"),
        *(f"{name}.dense.weight" for name in ("k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
    }
    state = tensor_names(tmp_path / "adamw" / "checkpoints" / "step-000012" / "optimizer")
    assert not [name for name in state if name.startswith("momentum_buffer/")]
    recipe = json.loads((tmp_path / "muon" / "recipe.json").read_text())["recipe"]
    assert (recipe["arm"]["optimizer"], recipe["train"]["optimizer"]) == ("muon", "adamw")


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_adapters_are_not_muons():
    model = get_peft_model(FAMILIES["llama"](), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="trains an adapter"):
        optimizer_groups(model, make_recipe(), Arm.parse("lora:r=2,optimizer=muon"), 1e-3)
    frozen = FAMILIES["llama"]().requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    with pytest.raises(UserError, match="trains no dense matrices"):
        optimizer_groups(frozen, make_recipe(), Arm.parse("baseline:optimizer=muon"), 1e-3)
