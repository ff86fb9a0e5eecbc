"""recipes/: every recipe builds, its docstring says what it must, and the paper's are the paper's."""

import re
import shlex

import pytest

from model_helpers import parameters
from nlr_lab.recipes import RECIPES, get_recipe, recipe_function
from nlr_lab.training import Arm, Recipe
from nonlinear_lowrank import UserError

# noble.txt, table 1 and section 4.1.1; the totals follow from the architecture.
PAPER = {
    "llm-base": {
        "total": 254_733_312,
        "percent": {64: 5.70, 128: 11.63, 256: 24.19},
        "sizes": (12, 1024, 8, 2752),
        "train": (250_000, 64, 3e-4),
    },
    "llm-large": {
        "total": 1_420_204_032,
        "percent": {64: 4.04, 128: 8.17, 256: 16.68},
        "sizes": (24, 2048, 16, 5504),
        "train": (200_000, 128, 2.5e-4),
    },
}

_OTHERS = ("gpt3", "sine")  # methods with controls of their own, tested by themselves
MODELS = [name for name, entry in RECIPES.items() if entry.command != "fit"]  # fields: test_fit_command.py
PRETRAINING = [name for name, entry in RECIPES.items() if entry.command == "train" and not name.startswith(_OTHERS)]
TUNING = [name for name, entry in RECIPES.items() if entry.command == "finetune"]


@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_builds_and_survives_json(name):
    recipe = get_recipe(name)
    assert recipe.name == name
    assert recipe.description == RECIPES[name].summary
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("name", MODELS)
def test_docstrings_state_command_hardware_time_and_expectation(name):
    text = recipe_function(name).__doc__
    for label in ("Command", "Hardware", "Time", "Expect"):
        assert re.search(rf"^ *{label}: \S", text, re.MULTILINE), label
    commands = re.findall(r"`(?:nlr|torchrun .* -m nlr_lab) ([^`]+)`", text)
    words = [shlex.split(command) for command in commands]
    assert any(each[1:2] == [name] for each in words)
    assert all(each[1] in RECIPES for each in words if each[0] in ("train", "compare", "finetune") and len(each) > 1)


@pytest.mark.parametrize("name", PRETRAINING)
def test_every_arm_fits_the_model(name):
    recipe = get_recipe(name)
    arms = [Arm.parse(text) for text in recipe.arms]
    assert [str(arm) for arm in arms[:3]] == ["baseline", "baseline:init=noble", "baseline:init=kaiming"]
    assert len({arm.name for arm in arms}) == len(arms)
    assert recipe.arm in map(Arm.parse, recipe.arms)
    for arm in arms:
        plain = recipe.task.build_on_meta()
        before = parameters(plain)
        changed = arm.apply(plain)
        assert (parameters(changed) > before) == (arm.method != "baseline")
        assert all(parameter.is_meta for parameter in changed.parameters())


@pytest.mark.parametrize("name", [name for name in PRETRAINING if not name.startswith("vit-")])
def test_rates_and_intervals_suit_the_length(name):
    train = get_recipe(name).train
    assert train.warmup_steps <= train.steps / 10
    assert train.steps % train.eval_every == 0
    # The picture leaves out the first fifth, and crossings are interpolated between evaluations.
    assert train.steps / train.eval_every >= 10
    assert (train.betas, train.weight_decay, train.schedule) == ((0.9, 0.98), 0.01, "linear")


@pytest.mark.parametrize("name", TUNING)
def test_tuning_recipes_compare_arms_of_their_own_names(name):
    recipe = get_recipe(name)
    arms = [Arm.parse(text) for text in recipe.arms]
    assert len(arms) >= 2
    assert len({arm.name for arm in arms}) == len(arms)
    assert [str(Arm.parse(str(arm))) for arm in arms] == [str(arm) for arm in arms]
    train = recipe.train
    assert (train.epochs > 0) != (train.steps > 0)
    # A warm-up is a share of the steps, or a number that leaves most of a known number of steps.
    assert train.warmup_share <= 0.2
    assert train.steps == 0 or train.warmup_steps <= train.steps / 2


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_to_the_last_parameter(name):
    recipe, paper = get_recipe(name), PAPER[name]
    backbone, train, text = recipe.task.backbone, recipe.train, recipe.task.text
    assert (backbone.layers, backbone.width, backbone.heads, backbone.hidden) == paper["sizes"]
    assert (train.steps, train.batch_size, train.lr) == paper["train"]
    assert (train.warmup_steps, train.bf16, train.compile) == (2000, True, True)
    assert (text.source, text.tokenizer, text.vocab_size) == ("Skylion007/openwebtext", "gpt2", 50257)
    assert (text.sequence_length, text.streaming) == (1024, True)
    assert parameters(recipe.task.build_on_meta()) == paper["total"]
    for rank, percent in paper["percent"].items():
        changed = Arm.parse(f"noble:rank={rank}").apply(recipe.task.build_on_meta())
        assert round(100 * (parameters(changed) / paper["total"] - 1), 2) == percent


def test_the_papers_masked_language_model():
    recipe = get_recipe("mlm-base")
    backbone, train, text = recipe.task.backbone, recipe.train, recipe.task.text
    assert (backbone.layers, backbone.width, backbone.heads, backbone.hidden) == (12, 768, 12, 2048)
    assert (train.steps, train.batch_size, train.lr, train.warmup_steps) == (100_000, 64, 3e-4, 1000)
    assert (text.tokenizer, text.vocab_size, text.sequence_length) == ("bert-base-uncased", 30522, 1024)
    assert parameters(recipe.task.build_on_meta()) == 131_835_648


def test_the_papers_vision_transformer():
    recipe = get_recipe("vit-small")
    task, train, varied = recipe.task, recipe.train, recipe.task.augmentation
    assert (train.epochs, train.batch_size, train.lr, train.weight_decay) == (90, 1024, 3e-4, 0.05)
    assert (train.betas, train.schedule) == ((0.9, 0.98), "cosine")
    # ImageNet's 1,281,167 images.
    assert train.resolved(1_281_167).warmup_steps == 5 * 1252
    assert (varied.randaugment, varied.magnitude, varied.mixup, varied.cutmix) == (2, 9, 0.8, 1.0)
    assert (task.size, task.sequence_length) == (224, 197)
    assert parameters(task.build_on_meta()) == 22_050_664


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llm-base'"):
        get_recipe("llm_base")
    with pytest.raises(UserError, match="there are llm-demo, "):
        get_recipe("zzz")
