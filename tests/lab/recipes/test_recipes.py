"""Every recipe builds, its docstring says what it must, its arms fit, and the papers' are the papers'."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from model_helpers import parameters
from nlr_lab.compare.model_trials import resolve_matches
from nlr_lab.recipes import RECIPES, get_recipe, recipe_function
from nlr_lab.training import Arm, Recipe
from nonlinear_lowrank import SineLowRankConfig
from refusals import assert_refused

PRETRAINING = [name for name, entry in RECIPES.items() if entry.command == "train"]
TUNING = [name for name, entry in RECIPES.items() if entry.command == "finetune"]
GPT3 = [name for name in PRETRAINING if name.startswith("gpt3")]
SINE_METHODS = ["baseline", *["low-rank"] * 2, "sigmoid-low-rank", "relu-low-rank", *["sine-lowrank"] * 2]

# noble.txt, table 1 and sections 4.1 and 4.2; the totals follow from the architecture.
SIZES = {
    "llm-base": (12, 1024, 8, 2752, 0),
    "llm-large": (24, 2048, 16, 5504, 0),
    "mlm-base": (12, 768, 12, 2048, 0),
    "image-tokens-base": (12, 1024, 8, 2752, 0),
    "vit-small": (12, 384, 6, 1536, 0),
}
COUNTS = {
    "llm-base": {"baseline": 254_733_312},
    "llm-large": {"baseline": 1_420_204_032},
    "mlm-base": {"baseline": 131_835_648},
    "vit-small": {"baseline": 22_050_664},
    # The base language model, with 8,192 codes in and out and 1,000 classes in, for its 50,257 tokens.
    "image-tokens-base": {"baseline": 254_733_312 + (2 * 8192 + 1000 - 2 * 50257) * 1024},
    "gpt3-small": {
        arm: outside + (50257 + 1026) * 768  # the embeddings
        for arm, outside in {
            "baseline": 84_973_056,
            "nonlinear-query": 85_000_704,
            "residual-linear-query": 85_000_704,
            "residual-query": 84_973_056,
            "identity-query": 84_973_056 - 12 * 768 * 768,
            "wide-mlp:ratio=4.75": 95_589_888,
        }.items()
    },
    "sine-vit-cifar100": {
        "baseline": 21_376_996,
        **{
            rf"{method}:rank={rank},include=.*mlp\.fc[12]": count
            for rank, count in {1: 7_267_300, 5: 7_451_620, 10: 7_682_020, 30: 8_603_620, 60: 9_986_020}.items()
            for method in ("sine-lowrank", "low-rank")
        },
    },
    "sine-convnext-cifar100": {
        "baseline": 27_897_028,
        **{
            rf"{method}:rank={rank},include=.*stages\.3\..*pwconv[12]": count
            for rank, count in {1: 13_764_292, 5: 13_856_452, 20: 14_202_052}.items()
            for method in ("sine-lowrank", "low-rank", "sigmoid-low-rank", "relu-low-rank")
        },
    },
}
PERCENT = {"llm-base": {64: 5.70, 128: 11.63, 256: 24.19}, "llm-large": {64: 4.04, 128: 8.17, 256: 16.68}}
TRAINING = {
    "llm-base": {"steps": 250_000, "batch_size": 64, "lr": 3e-4, "warmup_steps": 2000, "bf16": True, "compile": True},
    "llm-large": {"steps": 200_000, "batch_size": 128, "lr": 2.5e-4, "warmup_steps": 2000, "bf16": True},
    "mlm-base": {"steps": 100_000, "batch_size": 64, "lr": 3e-4, "warmup_steps": 1000},
    "image-tokens-base": {"steps": 250_000, "batch_size": 64, "lr": 3e-4},
    "vit-small": {"epochs": 90, "batch_size": 1024, "lr": 3e-4, "weight_decay": 0.05, "schedule": "cosine"},
    "gpt3-small": {"steps": 60_000, "batch_size": 480, "lr": 6e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    "gpt3-small-best": {"steps": 60_000, "lr": 1.5e-3, "weight_decay": 2**-5, "schedule": "cosine"},
    "gpt3-stability": {"weight_decay": 0.05, "lr": 6e-4, "stop_diverged": True, "warmup_steps": 2000},
    "gpt3-stability-high-lr": {"weight_decay": 2**-5, "lr": 3e-3, "stop_diverged": True, "schedule": "cosine"},
    "sine-vit-cifar100": {"lr": 1e-3, "batch_size": 512, "epochs": 200},
    "sine-vit-base": {"lr": 3e-4, "batch_size": 1024, "epochs": 300},
    "sine-convnext-cifar100": {"lr": 5e-3, "batch_size": 512, "epochs": 150},
}
FLOORS = {"gpt3-small": 6e-5, "gpt3-small-best": 3e-5, "gpt3-stability": 6e-5, "gpt3-stability-high-lr": 3e-5}
"""Learning rates at which the authors' cosines end; those of all others end at 0."""
GPT2_TEXT = {"source": "Skylion007/openwebtext", "tokenizer": "gpt2", "vocab_size": 50257, "sequence_length": 1024}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_and_states_command_hardware_time_and_expectation(name):
    recipe = get_recipe(name)
    assert (recipe.name, recipe.description) == (name, RECIPES[name].summary)
    if RECIPES[name].command != "fit":  # fields: test_fit_command.py
        again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
        assert again == recipe
        assert type(again.task) is type(recipe.task)
    text = recipe_function(name).__doc__
    for label in ("Command", "Hardware", "Time", "Expect"):
        assert re.search(rf"^ *{label}: \S", text, re.MULTILINE), label
    words = [shlex.split(command) for command in re.findall(r"`(?:nlr|torchrun .* -m nlr_lab) ([^`]+)`", text)]
    assert any(each[:2] == [RECIPES[name].command, name] for each in words)
    own = ("train", "compare", "finetune", "fit")
    assert all(each[1] in RECIPES for each in words if each[0] in own and len(each) > 1)


@pytest.mark.parametrize("name", PRETRAINING)
def test_every_arm_fits_the_model(name):
    recipe = get_recipe(name)
    train, arms = recipe.train, resolve_matches(recipe, [Arm.parse(text) for text in recipe.arms])
    if train.steps:
        assert train.warmup_steps <= train.steps / 10
        # The picture leaves out the first fifth, and crossings are interpolated between evaluations.
        assert (train.steps % train.eval_every, train.steps // train.eval_every >= 10) == (0, True)
        if name not in GPT3:
            assert (train.betas, train.weight_decay, train.schedule) == ((0.9, 0.98), 0.01, "linear")
    assert len({arm.name for arm in arms}) == len(arms)
    assert recipe.arm in arms
    before = parameters(recipe.task.build_on_meta())
    counts = []
    for arm in arms:
        changed = arm.apply(recipe.task.build_on_meta())
        assert all(parameter.is_meta for parameter in changed.parameters())
        counts.append(parameters(changed))
    if name.startswith("sine"):
        assert [arm.method for arm in arms] == SINE_METHODS
        assert [arm.control for arm in arms] == [True] * 5 + [False] * 2
        assert len(set(counts[1:])) == 1
        assert counts[1] < before == counts[0]
    elif name in GPT3:
        assert arms[0] == Arm()
        assert [arm.control for arm in arms] == [arm.method != "nonlinear-query" for arm in arms]
    elif name == "llm-moe-demo":
        assert [(arm.method, arm.control) for arm in arms[2:]] == [("wide-mlp", True), ("moe", True)]
        assert {arm.dense_init for arm in arms} == {"noble", None}, "None of NOBLE, whose own init it is"
        assert counts[3] > 2 * counts[1] > 2 * counts[2] > 2 * counts[0] == 2 * before
    else:
        assert [str(arm) for arm in arms[:3]] == ["baseline", "baseline:init=noble", "baseline:init=kaiming"]
        assert [count > before for count in counts] == [arm.method != "baseline" for arm in arms]


@pytest.mark.parametrize("name", TUNING)
def test_tuning_recipes_compare_arms_of_their_own_names(name):
    recipe = get_recipe(name)
    train, arms = recipe.train, [Arm.parse(text) for text in recipe.arms]
    assert len({arm.name for arm in arms}) == len(arms) >= 2
    assert [str(Arm.parse(str(arm))) for arm in arms] == [str(arm) for arm in arms]
    assert (train.epochs is not None) != (train.steps > 0)
    # A warm-up is a share of the steps, or a number that leaves most of a known number of steps.
    assert train.warmup_share <= 0.2
    assert train.steps == 0 or train.warmup_steps <= train.steps / 2


@pytest.mark.parametrize("name", COUNTS)
def test_papers_models_to_the_last_parameter(name):
    task, counts = get_recipe(name).task, COUNTS[name]
    for text, count in counts.items():
        assert parameters(Arm.parse(text).apply(task.build_on_meta())) == count, text
    for rank, percent in PERCENT.get(name, {}).items():
        changed = parameters(Arm.parse(f"noble:rank={rank}").apply(task.build_on_meta()))
        assert round(100 * (changed / counts["baseline"] - 1), 2) == percent


def test_a_masked_model_with_one_embedding_at_both_ends_has_one_less():
    task = get_recipe("mlm-base").task
    tied = replace(task, tie_embeddings=True).build_on_meta()
    tied.tie_weights()
    assert parameters(tied) == COUNTS["mlm-base"]["baseline"] - 30522 * 768 == 108_394_752


@pytest.mark.parametrize("name", TRAINING)
def test_papers_training(name):
    recipe = get_recipe(name)
    train = recipe.train
    assert {each: getattr(train, each) for each in TRAINING[name]} == TRAINING[name]
    assert train.stop_diverged == name.startswith("gpt3-stability")
    assert train.min_lr_share * train.lr == pytest.approx(FLOORS.get(name, 0))
    if name in SIZES:
        backbone = recipe.task.backbone
        assert (backbone.layers, backbone.width, backbone.heads, backbone.hidden, backbone.dropout) == SIZES[name]


def test_papers_data():
    for name in ("llm-base", "llm-large", "gpt3-small"):
        text = get_recipe(name).task.text
        assert {each: getattr(text, each) for each in GPT2_TEXT} == GPT2_TEXT
        assert text.streaming
    text = get_recipe("mlm-base").task.text
    assert (text.tokenizer, text.vocab_size, text.sequence_length) == ("bert-base-uncased", 30522, 1024)
    task = get_recipe("image-tokens-base").task
    tokens = task.tokens
    assert (tokens.tokenizer, tokens.codes, tokens.side, task.sequence_length) == ("amused/amused-512", 8192, 32, 1025)
    model = task.build_on_meta()
    assert model.model.rotary_emb.columns == model.config.grid_rows == 32
    recipe = get_recipe("vit-small")
    assert recipe.train.resolved(1_281_167).warmup_steps == 5 * 1252  # ImageNet's images
    varied = recipe.task.augmentation
    assert (varied.randaugment, varied.magnitude, varied.mixup, varied.cutmix) == (2, 9, 0.8, 1.0)
    assert (recipe.task.size, recipe.task.sequence_length) == (224, 197)
    recipe = get_recipe("sine-convnext-cifar100")
    changed = Arm.parse(str(recipe.arm)).apply(recipe.task.build_on_meta())
    assert len(changed.config.nonlinear_lowrank[0]["modules"]) == 6
    assert recipe.arm.settings["omega"] == SineLowRankConfig(rank=1, omega="convnext-tiny-cifar100").omega


def test_unknown_recipes_name_the_nearest():
    assert_refused("did you mean 'llm-base'", get_recipe, "llm_base")
    assert_refused("nlr recipes lists them", get_recipe, "zzz")
