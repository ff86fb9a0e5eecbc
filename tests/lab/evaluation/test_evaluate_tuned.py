"""`nlr evaluate RUN` of `nlr finetune`: the run's own numbers again, another split, another base, and wrong input."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import finetune_helpers as kit
from cli_helpers import refused, run, succeed
from nlr_lab.evaluation import losses
from nlr_lab.training import run_training

TASKS = {"cola": kit.glue_task, "instructions": kit.instruction_task, "images": kit.image_task}
ARMS = ("full", "lora:r=2", "sine-dora:r=2,omega=30", "nora++:r=2,groups=4,lora_r=2", "noble-adapter:r=2", "head")
TUNED = {"cola": ARMS, "instructions": ARMS[:2], "images": ARMS[2:]}


def tuned(task, out, arm="sine-lora:r=2,omega=30"):
    return run_training(kit.recipe(task, arm, steps=3, eval_every=3, save_every=3), out, quiet=True)


def evaluated(capsys, folder, *options):
    out = succeed(capsys, "evaluate", folder, "--out", folder / "scores.json", *options)
    written = json.loads((folder / "scores.json").read_text())["held_out"]
    assert ("squared error" if "pearson" in written else "nats") in out
    for name, value in written.items():
        assert f"{name} {value:.4f}" in out
    return written


@pytest.mark.parametrize(("kind", "arm"), [(kind, arm) for kind, arms in TUNED.items() for arm in arms])
def test_evaluate_gives_the_runs_own_numbers(root, tmp_path, capsys, kind, arm):
    result = tuned(TASKS[kind](root), tmp_path / "out", arm)
    expected = result.scores or {"loss": result.final_loss}
    assert evaluated(capsys, tmp_path / "out") == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("pooling", ["own", "mean"])
def test_evaluate_scores_another_split(root, tmp_path, capsys, pooling):
    # Trained alike, and scored on the one and on the other.
    tasks = {split: kit.glue_task(root, "stsb", pooling, scored=split) for split in ("dev", "test")}
    scores = {split: tuned(task, tmp_path / split).scores for split, task in tasks.items()}
    assert scores["dev"] != scores["test"]
    assert evaluated(capsys, tmp_path / "dev") == pytest.approx(scores["dev"], rel=1e-4, abs=1e-6)
    for split, other in (("dev", "test"), ("test", "dev")):
        found = evaluated(capsys, tmp_path / split, "--split", other)
        assert found == pytest.approx(scores[other], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", TASKS)
def test_a_batch_that_does_not_fit_memory_is_refused(root, tmp_path, capsys, monkeypatch, kind):
    tuned(TASKS[kind](root), tmp_path)
    assert run(capsys, "evaluate", tmp_path, "--batch-size", 999_999)[0] == 0
    monkeypatch.setattr(losses, "free_memory", lambda: losses.RESERVE + 5_000)
    code, out, err = run(capsys, "evaluate", tmp_path, "--batch-size", 999_999)
    assert code == 2, out
    fits = re.search(r"lower the batch size \(--batch-size\) to at most (\d+)$", err.strip())[1]
    assert run(capsys, "evaluate", tmp_path, "--batch-size", fits)[0] == 0


def test_a_base_that_has_moved_is_named(root, tmp_path, capsys):
    shutil.copytree(root, tmp_path / "here")
    result = tuned(kit.glue_task(tmp_path / "here"), tmp_path / "out")
    shutil.move(tmp_path / "here" / "bert", tmp_path / "there")
    assert "here/bert" in refused(capsys, "evaluate", tmp_path / "out")
    found = evaluated(capsys, tmp_path / "out", "--base", tmp_path / "there")
    assert found == pytest.approx(result.scores, rel=1e-4, abs=1e-6)


def test_wrong_input_is_refused(root, tmp_path, capsys):
    glue, images, full = (tmp_path / name for name in ("glue", "images", "full"))
    tuned(kit.glue_task(root), glue)
    tuned(kit.image_task(root), images)
    tuned(kit.glue_task(root), full, "full")
    assert "only a task of GLUE" in refused(capsys, "evaluate", images, "--split", "test")
    assert "--split is for" in refused(capsys, "evaluate", root / "llama", "--split", "test")
    assert "invalid choice" in refused(capsys, "evaluate", glue, "--split", "train")
    assert "not for a causal language model" in refused(capsys, "evaluate", glue, "--source", root / "alpaca.json")
    assert "--base is for adapters" in refused(capsys, "evaluate", full, "--base", root / "bert")
    shutil.copytree(root / "bert", tmp_path / "wide")
    wide = json.loads((tmp_path / "wide" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(wide | {"hidden_size": 32}))
    err = refused(capsys, "evaluate", glue, "--base", tmp_path / "wide")
    assert str(tmp_path / "wide") in err
    weights = glue / "model" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: each for name, each in tensors.items() if "classifier" not in name}, weights)
    (glue / "model" / "manifest.json").unlink()
    assert "does not fit" in refused(capsys, "evaluate", glue)
    save_file({name: torch.full_like(each, torch.nan) for name, each in tensors.items()}, weights)
    assert "the model is broken" in refused(capsys, "evaluate", glue)
    weights.unlink()
    assert re.search(r"no adapter_model\.safetensors", refused(capsys, "evaluate", glue))
    shutil.rmtree(root / "glue")
    assert "glue" in refused(capsys, "evaluate", full)
    kit.glue_folder(root / "glue", seed=1)
    assert "the data are no longer those" in refused(capsys, "evaluate", full)
    kit.glue_folder(root / "glue")
