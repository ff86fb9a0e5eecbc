"""Continued pretraining: runs that start from a model, plain or with branches."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nlr_lab.training import run_training
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.hub import convert, load_model
from training_helpers import FakeText, cut_back, make_recipe

TEXT = FakeText()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A finished run of the plain model."""
    out = tmp_path_factory.mktemp("first") / "out"
    return out, run_training(make_recipe("baseline"), out, prepared=TEXT, quiet=True)


def _from(start, arm="baseline", **settings):
    recipe = make_recipe(arm, **settings)
    return replace(recipe, task=replace(recipe.task, init_from=str(start)))


@pytest.mark.parametrize("arm", ["baseline", "noble:rank=4", "rational:groups=4,anchor=exact"])
def test_a_run_goes_on_from_anothers_weights(first, arm, tmp_path):
    start, before = first
    result = run_training(_from(start, arm, lr=1e-9, warmup_steps=0), tmp_path / "out", prepared=TEXT, quiet=True)
    assert result.final_loss == pytest.approx(before.final_loss, abs=1e-6)  # a branch starts at nothing
    again = run_training(_from(start, arm), tmp_path / "more", prepared=TEXT, quiet=True)
    assert again.final_loss < before.final_loss
    card = (tmp_path / "more" / "model" / "README.md").read_text()
    assert "trained on from out" in card
    assert str(start.parent) not in card


def test_the_checkpoints_architecture_comes_before_the_recipes(first, tmp_path, capsys):
    recipe = _from(first[0])
    wide = replace(recipe, task=replace(recipe.task, backbone=replace(recipe.task.backbone, width=64)))
    result = run_training(wide, tmp_path / "out", prepared=TEXT)
    assert f"from {first[0]}: GlmForCausalLM, {result.parameters:,} parameters, in place" in capsys.readouterr().out
    assert result.parameters == first[1].parameters


def test_a_converted_model_keeps_its_branches_and_resumes_with_the_same_bits(first, tmp_path):
    convert(first[0] / "model", tmp_path / "converted", NobleConfig(rank=4))
    recipe = _from(tmp_path / "converted", keep_checkpoints=9)
    whole = run_training(recipe, tmp_path / "whole", prepared=TEXT, quiet=True)
    trained = load_model(tmp_path / "whole" / "model")
    assert trained.model.layers[0].self_attn.q_proj.noble_up.any()
    out = cut_back(tmp_path / "whole", tmp_path / "out", 4)
    torch.manual_seed(5)
    assert run_training(recipe, out, resume=True, prepared=TEXT, quiet=True).curve == whole.curve
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (out, tmp_path / "whole")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("arm", ["baseline", "noble:rank=4", "noble:rank=4,optimizer=muon"])
def test_the_optimizers_state_goes_on_where_it_is_asked_for(tmp_path, arm):
    """With it and a constant learning rate, a start from a checkpoint and a resume are the same steps."""
    settings = {"schedule": "constant", "warmup_steps": 0, "dropout": 0.0, "keep_checkpoints": 9}
    run_training(make_recipe(arm, **settings), tmp_path / "first", prepared=TEXT, quiet=True)
    start = tmp_path / "first" / "checkpoints" / "step-000006"
    own = "baseline:optimizer=muon" if "muon" in arm else "baseline"
    moments = []
    for state in (True, False):
        recipe = _from(start, own, steps=2, init_optimizer=state, **settings)
        run_training(recipe, tmp_path / f"{state}", prepared=TEXT, quiet=True)
        file = next((tmp_path / f"{state}" / "checkpoints" / "step-000002" / "optimizer").glob("*.safetensors"))
        moments.append(load_file(file))
    counts = [{float(value) for name, value in each.items() if name.startswith("step/")} for each in moments]
    assert counts == [{8.0}, {2.0}]
    before = load_file(next((start / "optimizer").glob("*.safetensors")))
    name = next(name for name in before if "exp_avg_sq/" in name)
    later = [float((each[name] - 0.98**2 * before[name]).min()) for each in moments]
    assert later[0] >= -1e-12 > later[1]  # v = 0.98 v + 0.02 g^2, twice


def test_an_optimizers_state_that_does_not_fit_is_refused(first, tmp_path):
    start = first[0] / "checkpoints" / "step-000012"
    refused = {
        "continues from the checkpoint that --init-from names; give one": make_recipe(init_optimizer=True),
        "there is no .*optimizer; init_from must be a run's checkpoint": _from(first[0], init_optimizer=True),
        "has no state of .*dense.* or --arm baseline": _from(start, "noble:rank=4", init_optimizer=True),
        "it was a different one; use that": _from(start, "baseline:optimizer=muon", init_optimizer=True),
    }
    for words, recipe in refused.items():
        with pytest.raises(UserError, match=words):
            run_training(recipe, tmp_path / "out", prepared=TEXT, quiet=True, overwrite=(tmp_path / "out").exists())


def test_starts_that_do_not_fit_are_refused_before_any_work(first, tmp_path):
    start = first[0]
    short = tmp_path / "short"
    model = AutoModelForCausalLM.from_pretrained(start / "model")
    model.config.max_position_embeddings = 8
    model.save_pretrained(short)
    refused = {
        "is not a folder": _from(tmp_path / "absent"),
        "init=noble would redraw the weights": _from(start, "baseline:init=noble"),
        "wide-mlp is for models that are trained from scratch": _from(start, "wide-mlp:hidden=48"),
        "cola is for models that are trained from scratch": _from(start, "cola"),
        "sequence_length 16 exceeds the 8 positions": _from(short),
    }
    for words, recipe in refused.items():
        with pytest.raises(UserError, match=words):
            run_training(recipe, tmp_path / "out", prepared=TEXT, quiet=True)
    few = FakeText()
    object.__setattr__(few, "vocab_size", 1000)
    with pytest.raises(UserError, match=r"the text has 1000 tokens and .* has 48; give the model's own"):
        run_training(_from(start), tmp_path / "out", prepared=few, quiet=True)
    few = FakeText()
    few.tokenizer.add_tokens(["another"])
    with pytest.raises(UserError, match="the text's tokenizer is not that of"):
        run_training(_from(start), tmp_path / "out", prepared=few, quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_has_its_own_optimizers_state(first, tmp_path):
    recipe = _from(first[0] / "checkpoints" / "step-000012", init_optimizer=True, keep_checkpoints=9)
    whole = run_training(recipe, tmp_path / "whole", prepared=TEXT, quiet=True)
    out = cut_back(tmp_path / "whole", tmp_path / "out", 4)
    assert run_training(recipe, out, resume=True, prepared=TEXT, quiet=True).curve == whole.curve
