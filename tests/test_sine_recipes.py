"""Recipes of sine low-rank vision transformers: the document's counts and settings, arms that fit, JSON."""

import pytest

from nonlinear_lowrank.recipes import RECIPES, get_recipe
from nonlinear_lowrank.training import Arm, Recipe

NAMES = [name for name in RECIPES if name.startswith("sine-vit")]


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


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


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_fits_and_survives_json(name):
    recipe = get_recipe(name)
    assert Recipe.from_json(recipe.to_json()) == recipe
    arms = [Arm.parse(text) for text in recipe.arms]
    assert str(recipe.arm) in recipe.arms
    assert len({arm.name for arm in arms}) == len(arms) == 5
    assert [arm.control for arm in arms] == [True, True, True, False, False]
    full = parameters(recipe.task.build_on_meta())
    sizes = {parameters(arm.apply(recipe.task.build_on_meta())) for arm in arms[1:]}
    assert len(sizes) == 1
    assert sizes.pop() < full
