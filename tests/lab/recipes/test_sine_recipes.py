"""Recipes of sine low-rank image models: the document's counts and settings, arms that fit, JSON."""

import pytest

from model_helpers import parameters
from nlr_lab.cli import main as cli
from nlr_lab.recipes import RECIPES, get_recipe
from nlr_lab.training import Arm, Recipe
from nonlinear_lowrank import SineLowRankConfig

NAMES = [name for name in RECIPES if name.startswith("sine-")]


def test_counts_and_settings_of_the_document():
    recipe = get_recipe("sine-vit-cifar100")
    assert (recipe.train.lr, recipe.train.batch_size, recipe.train.epochs) == (1e-3, 512, 200)
    assert parameters(recipe.task.build_on_meta()) == 21_376_996
    for rank, count in {1: 7_267_300, 5: 7_451_620, 10: 7_682_020, 30: 8_603_620, 60: 9_986_020}.items():
        for method in ("sine-lowrank", "low-rank"):
            arm = Arm.parse(rf"{method}:rank={rank},include=.*mlp\.fc[12]")
            assert parameters(arm.apply(recipe.task.build_on_meta())) == count
    base = get_recipe("sine-vit-base")
    assert (base.train.lr, base.train.batch_size, base.train.epochs) == (3e-4, 1024, 300)


def test_counts_and_settings_of_the_documents_convnext():
    recipe = get_recipe("sine-convnext-cifar100")
    assert (recipe.train.lr, recipe.train.batch_size, recipe.train.epochs) == (5e-3, 512, 150)
    assert parameters(recipe.task.build_on_meta()) == 27_897_028
    for rank, count in {1: 13_764_292, 5: 13_856_452, 20: 14_202_052}.items():
        for method in ("sine-lowrank", "low-rank", "sigmoid-low-rank", "relu-low-rank"):
            arm = Arm.parse(rf"{method}:rank={rank},include=.*stages\.3\..*pwconv[12]")
            changed = arm.apply(recipe.task.build_on_meta())
            assert parameters(changed) == count
    assert len(changed.config.nonlinear_lowrank[0]["modules"]) == 6
    assert recipe.arm.settings["omega"] == SineLowRankConfig(rank=1, omega="convnext-tiny-cifar100").omega


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_fits_and_survives_json(name):
    recipe = get_recipe(name)
    assert Recipe.from_json(recipe.to_json()) == recipe
    arms = [Arm.parse(text) for text in recipe.arms]
    assert recipe.arm in map(Arm.parse, recipe.arms)
    assert len({arm.name for arm in arms}) == len(arms) == 7
    assert [arm.method for arm in arms] == [
        *("baseline", "low-rank", "low-rank", "sigmoid-low-rank", "relu-low-rank", "sine-lowrank", "sine-lowrank")
    ]
    assert [arm.control for arm in arms] == [True] * 5 + [False] * 2
    full = parameters(recipe.task.build_on_meta())
    sizes = {parameters(arm.apply(recipe.task.build_on_meta())) for arm in arms[1:]}
    assert len(sizes) == 1
    assert sizes.pop() < full


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sine-convnext-demo", "8 pixels do not split into patches of 3, halved 3 times; choose 24"),
        ("sine-vit-demo", "8 pixels do not split into patches of 3; choose 6 or 9"),
    ],
)
def test_the_command_line_has_the_fields_of_the_recipes_own_model(capsys, name, words):
    assert cli.main(["train", name, "--patch", "3"]) == 2
    assert words in capsys.readouterr().err
