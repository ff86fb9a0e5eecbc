"""Killed runs resume bit-exactly; damaged checkpoints are skipped; a full disk costs only what follows."""

import errno
import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nlr_lab.runtime.storage import newest_valid, read_manifest, step_folders
from nlr_lab.training import DivergedError, checkpoints, run_training
from nlr_lab.training.checkpoints import tensor_names
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.hub.storage import MANIFEST
from training_helpers import FakeText, TrainingServer, cut_back, make_recipe

TEXT = FakeText()


@pytest.fixture(scope="module")
def server():
    server = TrainingServer()
    yield server
    server.close()


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def numbers(out: Path) -> dict:
    """The result without the clock."""
    return {key: value for key, value in json.loads((out / "result.json").read_text()).items() if key != "seconds"}


def temporaries(out: Path) -> list[Path]:
    return list(out.rglob(".tmp-*"))


KILLED = {"steps": 12, "save_every": 1, "gradient_accumulation": 2, "eval_every": 5}


def assert_survives(server: TrainingServer, tmp_path: Path, kills: int, **settings) -> None:
    """Kills at moments of every kind: half-written checkpoints, right after one, and anywhere."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert server.run(whole, **settings) == {"exit": 0, "error": ""}
    folder = killed / "checkpoints"
    done = 0
    for attempt in range(kills):
        reached = max(step_folders(folder), default=0)
        pid = server.start(killed, **settings)
        if attempt % 3 == 0:  # while a checkpoint is written
            moment = lambda: any(folder.glob(".tmp-step-*/optimizer"))  # noqa: E731
            delay = random.choice([0.0, random.uniform(0, 0.01)])
        elif attempt % 3 == 1:  # after a step or two
            moment = lambda goal=reached + 2: max(step_folders(folder), default=0) >= goal  # noqa: E731
            delay = random.uniform(0, 0.02)
        else:  # whenever
            moment, delay = (lambda: True), random.uniform(0.05, 1.5)
        done += server.kill_when(pid, moment, delay)
    assert done >= min(kills, 2), "the run was over before it could be killed"
    assert server.run(killed, **settings) == {"exit": 0, "error": ""}
    assert weights(killed) == weights(whole)
    assert numbers(killed) == numbers(whole)
    assert not temporaries(killed)


def test_run_killed_three_times_has_the_same_bits(server, tmp_path):
    assert_survives(server, tmp_path, kills=3, **KILLED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"arm": "noble:rank=4"}, id="adamw"),
        pytest.param({"arm": "noble:rank=4,depth=1,activation=gelu", "optimizer": "muon"}, id="muon"),
        pytest.param({"arm": "baseline", "bf16": True, "dataloader_workers": 1}, id="bf16-workers"),
    ],
)
def test_run_killed_eighteen_times_has_the_same_bits(server, tmp_path, settings):
    assert_survives(server, tmp_path, kills=18, **{**KILLED, "steps": 40, **settings})


def test_run_killed_between_its_last_step_and_its_result_is_finished(server, tmp_path):
    settings = {"steps": 4, "save_every": 4}
    out, whole = tmp_path / "killed", tmp_path / "whole"
    pid = server.start(out, **settings)
    assert server.kill_when(pid, lambda: any((out / "checkpoints").glob("step-*")))
    assert not (out / "result.json").exists()
    assert server.run(out, **settings)["exit"] == 0
    assert server.run(whole, **settings)["exit"] == 0
    assert weights(out) == weights(whole)
    assert numbers(out) == numbers(whole)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 12 steps with all its checkpoints; called with settings, it is made once for each."""
    made: dict[str, Path] = {}

    def make(**settings) -> Path:
        key = json.dumps(settings, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("finished") / "out"
            run_training(make_recipe(keep_checkpoints=9, **settings), made[key], prepared=TEXT, quiet=True)
        return made[key]

    return make


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"optimizer": "muon"}, id="muon"),
        pytest.param({"arm": "baseline", "schedule": "cosine", "gradient_accumulation": 4}, id="accumulated"),
        pytest.param({"arm": "training_helpers:plain_module"}, id="not-a-transformers-model"),
        pytest.param({"bf16": True, "max_grad_norm": 0.0}, id="bf16-unclipped"),
    ],
)
def test_resuming_anywhere_gives_the_same_bits(finished, tmp_path, settings):
    done = finished(**settings)
    for step in random.sample([2, 4, 6, 8, 10, 12], 2):
        out = cut_back(done, tmp_path / f"from-{step}", step)
        torch.manual_seed(random.randrange(2**31))  # the resumed process has another past
        result = run_training(make_recipe(keep_checkpoints=9, **settings), out, resume=True, prepared=TEXT, quiet=True)
        assert weights(out) == weights(done), f"from step {step}"
        assert numbers(out) == numbers(done)
        assert [step for step, _ in result.curve] == [5, 10, 12], "the evaluation curve is whole"


def test_checkpoint_is_complete_and_has_no_pickle(finished):
    folder = finished() / "checkpoints" / "step-000006"
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["processes"]) == (6, 1)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*manifest["files"], MANIFEST}
    assert {Path(name).suffix for name in files} == {".json", ".safetensors"}
    named = {name for group in json.loads((folder / "state.json").read_text())["groups"] for name in group["params"]}
    # The optimizer has the names in memory.
    assert {name.replace(".dense.", ".") for name in named} == set(load_file(folder / "model.safetensors"))
    assert {f"exp_avg/{name}" for name in named} <= tensor_names(folder / "optimizer")


def test_checkpoint_loads_as_a_model(finished):
    model = load_model(finished() / "checkpoints" / "step-000012").eval()
    final = load_model(finished() / "model").eval()
    tokens = TEXT.valid.tokens
    assert torch.equal(model(input_ids=tokens).logits, final(input_ids=tokens).logits)
    assert model.config.use_cache


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", "truncate"),
        ("optimizer/shard-00001-model-00001-of-00001.safetensors", "flip"),
        ("state.json", "remove"),
        (MANIFEST, "truncate"),
        (MANIFEST, "remove"),
    ],
)
def test_damaged_checkpoint_is_passed_over(finished, tmp_path, capsys, name, harm):
    done = finished()
    out = cut_back(done, tmp_path / "out", 10)
    path = out / "checkpoints" / "step-000010" / name
    content = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    else:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content[: len(content) // 2] if harm == "truncate" else content)
    run_training(make_recipe(keep_checkpoints=9), out, resume=True, prepared=TEXT)
    printed = capsys.readouterr().out.splitlines()
    about = [line for line in printed if "damaged checkpoint" in line]
    assert len(about) == 1
    assert name in about[0]
    assert "step-000010" in about[0]
    assert f"resuming from {out / 'checkpoints' / 'step-000008'}" in printed
    assert weights(out) == weights(done)
    assert read_manifest(out / "checkpoints" / "step-000010"), "it was written anew"


def test_run_starts_anew_where_all_checkpoints_are_damaged(finished, tmp_path, capsys):
    done = finished()
    out = cut_back(done, tmp_path / "out", 4)
    for folder in step_folders(out / "checkpoints").values():
        (folder / "state.json").write_text("{}")
    run_training(make_recipe(keep_checkpoints=9), out, resume=True, prepared=TEXT)
    assert "starting at step 0" in capsys.readouterr().out
    assert weights(out) == weights(done)


def test_checkpoint_of_another_model_is_refused(finished, tmp_path):
    """Only a changed user function can get there: the recipe's own fields are compared."""
    out = cut_back(finished(), tmp_path / "out", 6)
    recipe = json.loads((out / "recipe.json").read_text())
    other = make_recipe(arm="baseline", keep_checkpoints=9)
    recipe["recipe"]["arm"] = other.to_dict()["arm"]
    (out / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=r"does not fit the model: unexpected tensor .*noble"):
        run_training(other, out, resume=True, prepared=TEXT, quiet=True)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run_training(make_recipe(steps=7, save_every=2, keep_checkpoints=2), tmp_path / "a", prepared=TEXT, quiet=True)
    assert list(step_folders(tmp_path / "a" / "checkpoints")) == [6, 7]


def test_failed_write_keeps_the_last_good_checkpoint(server, finished, tmp_path):
    """A real failed write, in the middle of a file."""
    out = cut_back(finished(), tmp_path / "out", 6)
    before = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    answer = server.run(out, keep_checkpoints=9, limit=20_000)
    assert answer["exit"] == 2
    assert "step 8" in answer["error"]
    assert "no space left" in answer["error"]
    assert "step-000006" in answer["error"]
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()} == before
    assert not temporaries(out)
    assert server.run(out, keep_checkpoints=9)["exit"] == 0, "with room again it goes on"
    assert weights(out) == weights(finished())


@pytest.mark.parametrize("victim", ["_write_optimizer", "save_pretrained", "fsync"])
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, victim):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def break_at_step_4(trainer, *args):
        if trainer.state.global_step == 4:
            if victim == "save_pretrained":
                monkeypatch.setattr(trainer.model, "save_pretrained", full)
            elif victim == "fsync":
                monkeypatch.setattr(os, "fsync", full)
            else:
                monkeypatch.setattr(checkpoints, victim, full)
        return original(trainer, *args)

    original = checkpoints.CheckpointedTrainer._save_checkpoint
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.CheckpointedTrainer, "_save_checkpoint", break_at_step_4)
        with pytest.raises(UserError, match=r"step 4.*no space left.*last good checkpoint is .*step-000002"):
            run_training(make_recipe(), tmp_path / "out", prepared=TEXT, quiet=True)
    newest, damaged = newest_valid(tmp_path / "out" / "checkpoints")
    assert newest.name == "step-000002"
    assert not damaged
    assert not temporaries(tmp_path)
    assert not (tmp_path / "out" / "result.json").exists()


def test_full_disk_at_the_final_model_costs_no_checkpoint(tmp_path, monkeypatch):
    text = FakeText()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(text.tokenizer, "save_pretrained", full)
        with pytest.raises(UserError, match=r"cannot write the model to .*no space left.*--resume"):
            run_training(make_recipe(steps=4), tmp_path / "out", prepared=text, quiet=True)
    assert not (tmp_path / "out" / "model").exists()
    assert not temporaries(tmp_path)
    assert run_training(make_recipe(steps=4), tmp_path / "out", prepared=text, resume=True, quiet=True).steps == 4


def test_dead_data_reader_is_named_and_the_run_resumes(server, tmp_path):
    """In processes of their own: torch tells of it by an exception out of a signal's handler, wherever that may be."""
    settings = {"arm": "training_helpers:lose_reader,at=7", "dataloader_workers": 1, "steps": 12, "save_every": 2}
    out, whole = tmp_path / "out", tmp_path / "whole"
    answer = server.run(out, fault=True, **settings)
    assert answer["exit"] == 2
    assert re.search(r"reads data died at step \d+ .*last good checkpoint is .*--resume", answer["error"])
    newest, damaged = newest_valid(out / "checkpoints")
    assert newest.name in ("step-000004", "step-000006", "step-000008")
    assert not damaged
    assert server.run(out, **settings) == server.run(whole, **settings) == {"exit": 0, "error": ""}
    assert weights(out) == weights(whole)


@pytest.mark.parametrize(("accumulation", "batch", "step"), [(1, 7, 7), (2, 10, 5)])
def test_nan_loss_stops_the_run_and_names_the_step(tmp_path, accumulation, batch, step):
    out = tmp_path / "out"
    recipe = make_recipe(f"training_helpers:poison,at={batch}", gradient_accumulation=accumulation)
    with pytest.raises(DivergedError, match=f"at step {step};.*step-00000{(step - 1) // 2 * 2}") as caught:
        run_training(recipe, out, prepared=TEXT, quiet=True)
    assert caught.value.step == step
    newest, damaged = newest_valid(out / "checkpoints")
    assert newest.name == f"step-00000{(step - 1) // 2 * 2}"
    assert not damaged
    result = json.loads((out / "result.json").read_text())
    assert (result["status"], result["final_loss"], result["steps"]) == ("diverged", None, step)
    with pytest.raises(DivergedError, match=f"step {step}"):
        run_training(recipe, out, resume=True, prepared=TEXT, quiet=True)


def test_step_of_a_nan_loss_is_exact_where_it_is_looked_for_at_logs_only(tmp_path, monkeypatch):
    """As on a GPU, where looking at every loss would wait for it."""

    original = checkpoints.CheckpointedTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(trainer, "check_finite", lambda: None)
            return original(trainer, *args, **kwargs)

    monkeypatch.setattr(checkpoints.CheckpointedTrainer, "training_step", training_step)
    recipe = make_recipe("training_helpers:poison,at=7", log_every=12, save_every=10, eval_every=12)
    with pytest.raises(DivergedError, match="at step 7; there is no checkpoint"):
        run_training(recipe, tmp_path / "out", prepared=TEXT, quiet=True)
    assert not step_folders(tmp_path / "out" / "checkpoints")


def test_nan_weights_are_not_saved(tmp_path):
    recipe = make_recipe("training_helpers:poison_gradient,at=4", save_every=2, eval_every=12)
    with pytest.raises(DivergedError, match=r"at step 4; the last good checkpoint is .*step-000002"):
        run_training(recipe, tmp_path / "out", prepared=TEXT, quiet=True)
    assert list(step_folders(tmp_path / "out" / "checkpoints")) == [2]


def test_infinite_evaluation_stops_the_run(tmp_path):
    with pytest.raises(DivergedError, match=r"at step 5; the last good checkpoint is .*step-000004"):
        run_training(make_recipe("training_helpers:poison_evaluation"), tmp_path / "out", prepared=TEXT, quiet=True)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["curve"] == []
