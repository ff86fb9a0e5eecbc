"""Float8 of the dense linears, by torchao, its rounding emulated on a CPU."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nlr_lab.training import run_training
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from training_helpers import FakeText, cut_back, make_recipe

pytestmark = pytest.mark.quantized
TEXT = FakeText(train=400)
LONG = {"steps": 200, "eval_every": 100, "save_every": 200, "bf16": True}


def test_a_run_in_float8_ends_near_one_in_bfloat16_and_every_branch_tensor_moves(tmp_path):
    pytest.importorskip("torchao")
    losses = {}
    for fp8 in (False, True):
        recipe = make_recipe(fp8=fp8, **LONG)
        losses[fp8] = run_training(recipe, tmp_path / str(fp8), prepared=TEXT, quiet=True).final_loss
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.01)
    files = [load_file(tmp_path / str(fp8) / "model" / "model.safetensors") for fp8 in (False, True)]
    assert files[0].keys() == files[1].keys()
    first = make_recipe(fp8=True, **{**LONG, "steps": 1, "warmup_steps": 0, "lr": 1e-12})
    run_training(first, tmp_path / "start", prepared=TEXT, quiet=True)
    start = load_file(tmp_path / "start" / "model" / "model.safetensors")
    branches = [name for name in start if ".noble_" in name]
    assert len(branches) == 7 * 12
    assert not [name for name in branches if torch.equal(start[name], files[1][name])]
    assert {type(each).__name__ for each in load_model(tmp_path / "True" / "model").modules()} >= {
        "NobleLinear",
        "Linear",
    }


def test_a_run_in_float8_resumes_with_the_same_bits(tmp_path):
    pytest.importorskip("torchao")
    recipe = make_recipe(fp8=True, bf16=True, keep_checkpoints=9)
    whole = run_training(recipe, tmp_path / "whole", prepared=TEXT, quiet=True)
    out = cut_back(tmp_path / "whole", tmp_path / "out", 6)
    torch.manual_seed(1)
    assert run_training(recipe, out, resume=True, prepared=TEXT, quiet=True).curve == whole.curve
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (out, tmp_path / "whole")]
    assert weights[0] == weights[1]
    assert json.loads((out / "recipe.json").read_text())["recipe"]["train"]["fp8"]


def test_where_there_is_no_float8_it_says_so(tmp_path):
    pytest.importorskip("torchao")
    with pytest.raises(UserError, match="fp8 is for the dense linears of a run in bfloat16; set bf16 too"):
        make_recipe(fp8=True)
    recipe = make_recipe("baseline", fp8=True, bf16=True)
    narrow = replace(recipe, task=replace(recipe.task, backbone=replace(recipe.task.backbone, width=24, hidden=40)))
    with pytest.raises(UserError, match="finds no linear whose widths are multiples of 16"):
        run_training(narrow, tmp_path, prepared=TEXT, quiet=True)
