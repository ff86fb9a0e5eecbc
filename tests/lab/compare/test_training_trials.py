"""compare with the real training and the real costs, on tiny models."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from compare_helpers import BASE, CONTROL, NOBLE, tiny_recipe
from nlr_lab.compare import compare, model_trials
from nlr_lab.compare.model_trials import measure_arms, training_step
from nlr_lab.compare.trial import Choice
from nlr_lab.training import Arm
from refusals import assert_refused


@pytest.fixture
def tiny(tmp_path):
    recipe = tiny_recipe(tmp_path, gradient_accumulation=2)
    return recipe, recipe.task.prepare(progress=False)


def test_measured_costs_are_the_formulas(tiny):
    recipe, prepared = tiny
    measured = measure_arms(recipe, (BASE, CONTROL, NOBLE), prepared, rounds=2)
    d, hidden, vocabulary, layers, length, r = 16, 32, prepared.vocab_size, 1, 16, 4
    linears = [(d, d)] * 4 + [(d, 2 * hidden), (hidden, d)]
    norms = layers * 2 * d + d
    parameters = layers * sum(a * b for a, b in linears) + 2 * vocabulary * d + norms
    flops = 2 * layers * sum(a * b for a, b in linears) + 2 * vocabulary * d + layers * 2 * 2 * length * d
    branch = layers * sum(r * (a + b) + r * r for a, b in linears)
    waves = layers * len(linears) * 4 * r
    assert measured.parameters["baseline"] == measured.parameters["baseline-init-noble"] == parameters
    assert measured.flops["baseline"] == flops
    assert measured.parameters["noble-r4"] == parameters + branch + waves
    assert measured.flops["noble-r4"] == flops + 2 * branch
    assert measured.notes == []
    assert {name: len(times) for name, times in measured.times.items()} == dict.fromkeys(measured.parameters, 2)
    assert min(min(times) for times in measured.times.values()) > 0
    assert measured.start > 0


def test_what_a_process_pays_once_is_no_part_of_a_runs_start(tiny, monkeypatch):
    recipe, prepared = tiny
    paid = []

    def slow_at_first(*given):
        if not paid:
            paid.append(time.sleep(1.0))
        return training_step(*given)

    monkeypatch.setattr(model_trials, "training_step", slow_at_first)
    assert measure_arms(recipe, (BASE, NOBLE), prepared, rounds=1).start < 0.9


def test_timed_step_is_a_training_step(tiny):
    recipe, prepared = tiny
    step = training_step(recipe, NOBLE, prepared)
    cells = dict(zip(step.__code__.co_freevars, [cell.cell_contents for cell in step.__closure__], strict=True))
    before = [parameter.clone() for parameter in cells["trained"]]
    step()
    moved = [not torch.equal(old, new) for old, new in zip(before, cells["trained"], strict=True)]
    assert sum(moved) >= len(moved) - 1, "every parameter with a gradient is stepped"
    assert cells["batch"]["input_ids"].shape == (2, 16), "a micro-batch is the batch over the accumulation"


def test_steps_are_timed_as_runs_take_them(tiny, monkeypatch):
    recipe, prepared = tiny
    seen = []
    monkeypatch.setattr(model_trials, "to_float8", lambda model: seen.append("float8"))
    monkeypatch.setattr(
        model_trials,
        "interleaved_step_times",
        lambda *_, **__: seen.append(torch.are_deterministic_algorithms_enabled()),
    )
    exact = replace(recipe, train=replace(recipe.train, deterministic=True, bf16=True, fp8=True))
    measure_arms(exact, (BASE,), prepared, rounds=1)
    assert seen == ["float8", True]


def test_a_match_is_of_the_datas_vocabulary(tiny, tmp_path):
    recipe, prepared = tiny
    prepared.tokenizer.save_pretrained(tmp_path / "own")
    named = replace(recipe.task.text, tokenizer=str(tmp_path / "own"), vocab_size=4000)
    recipe = replace(recipe, task=replace(recipe.task, text=named))
    texts = "noble:budget=10%,name=noble", "wide-mlp:match=noble,name=wide"
    arms = model_trials.resolve_matches(recipe, [Arm.parse(text) for text in texts])
    counts = measure_arms(recipe, arms, recipe.task.prepare(progress=False), rounds=0).parameters
    assert counts["noble"] <= counts["wide"] < counts["noble"] + 2 * 3 * 16


def test_seeds_of_two_versions_of_a_users_change_are_not_mixed(tmp_path, monkeypatch):
    recipe, change = tiny_recipe(tmp_path), tmp_path / "own_change.py"
    change.write_text("def change(model):\n    return model")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"arms": (BASE, Arm.parse("own_change:change")), "seeds": 1, "timing_rounds": 0, "quiet": True}
    compare(recipe, tmp_path / "out", **options)
    change.write_text("def change(model):\n    return model  # another")
    assert_refused("code of arm .own_change.change. was", compare, recipe, tmp_path / "out", resume=True, **options)


def test_end_to_end_through_the_real_training(tmp_path):
    recipe = tiny_recipe(tmp_path, eval_every=2, save_every=4)
    out = tmp_path / "out"
    options = {"seeds": 2, "tune_lr": (), "timing_rounds": 3, "quiet": True}
    first = compare(recipe, out, arms=(BASE, NOBLE), **options).results
    for arm in first["arms"]:
        assert [run["status"] for run in arm["runs"]] == ["done"] * 2
        for run in arm["runs"]:
            assert run["curve"][-1] == [8, run["final_loss"]]
            assert 1.0 < run["final_loss"] < math.log(270) + 2
            folder = out / "runs" / arm["name"] / f"lr-{arm['lr']:.6g}" / f"seed-{run['seed']}"
            result = json.loads((folder / "result.json").read_text())
            assert result["final_loss"] == run["final_loss"]
            assert (result["lr"], result["seed"]) == (arm["lr"], run["seed"])
            assert result["parameters"] == arm["parameters"], "what was measured is what was trained"
            assert (folder / "model").is_dir()
            assert not (folder / "checkpoints").exists()
    delta = first["against"]["baseline"]["noble-r4"]["delta"]
    losses = [[run["final_loss"] for run in arm["runs"]] for arm in first["arms"]]
    assert delta["value"] == pytest.approx(np.mean(np.subtract(losses[1], losses[0])))
    assert first["arms"][1]["step_time_ratio"]["n"] == 3
    for name in ("results.json", "report.md", "curves.png", "timing.json", "compare.json"):
        assert (out / name).stat().st_size > 0
    assert str(tmp_path) not in (out / "results.json").read_text() + (out / "report.md").read_text()

    before = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    twin_arm, poisoned = (Arm(name=name, method=f"{__name__}:{name}") for name in ("twin", "poison"))
    second = compare(recipe, out, arms=(BASE, NOBLE, twin_arm, poisoned), resume=True, **options).results
    assert {path: path.stat().st_mtime_ns for path in before} == before, "finished runs are used as they are"
    assert second["arms"][0]["runs"] == first["arms"][0]["runs"]
    assert second["against"]["baseline"]["poison"]["delta"]["note"] == "diverged in 2 of 2 seeds"
    same = second["against"]["baseline"]["twin"]
    assert same["delta"]["value"] == 0.0, "the same model on the same batches is the same run"
    assert same["step_speedup"]["value"] == pytest.approx(1.0)
    assert "no spread" in same["delta"]["note"]


def test_steps_in_place_of_a_recipes_epochs_are_evaluated_once_an_epoch(tmp_path):
    recipe = tiny_recipe(tmp_path, epochs=1.0, steps=2, eval_every=0, save_every=0)
    options = {"seeds": 1, "tune_lr": (), "timing_rounds": 1, "quiet": True}
    found = compare(recipe, tmp_path / "out", arms=(BASE, NOBLE), **options).results
    assert [arm["runs"][0]["steps"] for arm in found["arms"]] == [2, 2]


def twin(model):
    return model


def poison(model):
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] = math.nan
    return model


def test_training_loss_is_the_mean_over_the_steps_of_the_last_tenth(tmp_path):
    curve = [[2, 5.0], [4, 4.0], [100, 3.0], [180, 2.0], [195, 1.5], [200, 1.0]]  # each over the steps since the last
    record = {"status": "done", "steps": 200, "seconds": 1.0, "final_loss": 1.0, "curve": [[200, 1.0]]}
    trials = model_trials.ModelTrials(tiny_recipe(tmp_path))
    run = trials.read(record | {"train_curve": curve}, Choice(lr=1e-3), 1)
    assert run.train_loss == pytest.approx((15 * 1.5 + 5 * 1.0) / 20)
