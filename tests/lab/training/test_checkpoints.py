"""Killed runs resume bit-exactly; damaged checkpoints are skipped; a full disk costs only what follows."""

import errno
import json
import math
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from nlr_lab.runtime.signals import StoppedBySignal
from nlr_lab.runtime.storage import newest_valid, read_manifest, step_folders
from nlr_lab.training import DivergedError, checkpoints, run_training, trainer
from nlr_lab.training.checkpoints import tensor_names
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.hub.storage import MANIFEST
from training_helpers import FakeText, TrainingServer, cut_back, make_recipe

TEXT = FakeText()


@pytest.fixture(scope="module")
def server():
    return TrainingServer()


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def assert_same(out: Path, whole: Path) -> None:
    assert weights(out) == weights(whole)
    results = [json.loads((folder / "result.json").read_text()) | {"seconds": 0} for folder in (out, whole)]
    assert results[0] == results[1]
    assert not list(out.rglob(".tmp-*"))


def test_killed_run_has_the_same_bits(server, tmp_path):
    """Kills at all moments: half-written checkpoints, right after one, and anywhere (more in studies/faults)."""
    kills, settings = 3, {"steps": 12, "save_every": 1, "gradient_accumulation": 2, "eval_every": 5}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert server.run(whole, **settings) == {"exit": 0, "error": ""}
    folder, done = killed / "checkpoints", 0
    for attempt in range(kills):
        reached = max(step_folders(folder), default=0)
        server.start(killed, **settings)
        if attempt % 3 == 0:  # while a checkpoint is written
            moment, delay = (lambda: any(folder.glob(".tmp-step-*/optimizer"))), random.choice([0.0, 0.01])
        elif attempt % 3 == 1:  # after a step or two
            moment = lambda goal=reached + 2: max(step_folders(folder), default=0) >= goal  # noqa: E731
            delay = random.uniform(0, 0.02)
        else:  # whenever
            moment, delay = (lambda: True), random.uniform(0.05, 1.5)
        done += server.kill_when(moment, delay)
    assert done >= 2, "the run was over before it could be killed"
    assert server.run(killed, **settings) == {"exit": 0, "error": ""}
    assert_same(killed, whole)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_stops_after_a_checkpoint_and_the_bits_stay_the_same(name, tmp_path, monkeypatch, capfd):
    """Between two entries of the training curve too, of whose mean loss the checkpoint then has a part."""
    number, batches = getattr(signal, name), random.randint(1, 4)
    arm = f"training_helpers:signalled,at={batches},number={int(number)}"
    recipe = make_recipe(arm, gradient_accumulation=2, save_every=12, eval_every=6, log_every=5)
    run_training(recipe, tmp_path / "whole", prepared=TEXT, quiet=True)
    out, step = tmp_path / "out", 0
    inherited = signal.signal(number, signal.SIG_DFL)
    monkeypatch.setenv("NLR_TEST_FAULT", "1")
    for _ in range(3):
        step += math.ceil(batches / 2)
        with pytest.raises(StoppedBySignal, match=f"stopped by {name} at step {step} of 12") as stopped:
            run_training(recipe, out, resume=out.exists(), prepared=TEXT, quiet=True)
        assert stopped.value.exit_code == 128 + number
        assert max(step_folders(out / "checkpoints")) == step
        assert f"{name}: stopping after a checkpoint of this step" in capfd.readouterr().err
    monkeypatch.delenv("NLR_TEST_FAULT")
    run_training(recipe, out, resume=True, prepared=TEXT, quiet=True)
    assert_same(out, tmp_path / "whole")
    assert signal.signal(number, inherited) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so(tmp_path, monkeypatch):
    inherited = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    monkeypatch.setenv("NLR_TEST_FAULT", "1")
    recipe = make_recipe(f"training_helpers:signalled,at=3,number={int(signal.SIGUSR1)}")
    try:
        assert run_training(recipe, tmp_path / "out", prepared=TEXT, quiet=True).steps == 12
    finally:
        signal.signal(signal.SIGUSR1, inherited)


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_TEST_FAULT", "1")
    arm = "training_helpers:signalled,at=0"  # before each batch
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM again, at once"):
        run_training(make_recipe(arm, gradient_accumulation=2), tmp_path / "out", prepared=TEXT, quiet=True)
    assert not step_folders(tmp_path / "out" / "checkpoints")


def test_a_signal_in_the_last_step_leaves_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_TEST_FAULT", "1")
    recipe = make_recipe("training_helpers:signalled,at=12")
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM when the run was done"):
        run_training(recipe, tmp_path / "out", prepared=TEXT, quiet=True)
    assert run_training(recipe, tmp_path / "out", resume=True, prepared=TEXT, quiet=True).steps == 12


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
        pytest.param({"arm": "nonlinear-query+noble:rank=4,optimizer=muon"}, id="muon"),
        pytest.param({"arm": "nonlinear-query+noble:budget=30%,qk_norm=true"}, id="three-methods"),
        pytest.param({"arm": "noble:rank=4,split_fused=true"}, id="split"),
        pytest.param({"arm": "noble:rank=4+rational:groups=4+wide-mlp:ratio=3"}, id="activations-wide"),
        pytest.param({"arm": "baseline", "schedule": "cosine", "gradient_accumulation": 4}, id="accumulated"),
        pytest.param({"arm": "training_helpers:plain_module"}, id="not-a-transformers-model"),
        pytest.param({"bf16": True, "max_grad_norm": 0.0}, id="bf16-unclipped"),
        pytest.param({"embedding_noise": 5.0, "label_smoothing": 0.1}, id="noise-smoothing"),
    ],
)
def test_resuming_anywhere_gives_the_same_bits(finished, tmp_path, settings):
    done = finished(**settings)
    for step in (random.choice([2, 4, 6, 8, 10]), 12):
        out = cut_back(done, tmp_path / f"from-{step}", step)
        torch.manual_seed(random.randrange(2**31))  # the resumed process has another past
        result = run_training(make_recipe(keep_checkpoints=9, **settings), out, resume=True, prepared=TEXT, quiet=True)
        assert [step for step, _ in result.curve] == [5, 10, 12], "the evaluation curve is whole"
        assert_same(out, done)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"schedule": "constant"}, id="constant"),
        pytest.param({"schedule": "wsd", "decay_share": 0.25}, id="wsd"),  # its decay begins at step 9
        pytest.param({"warmup_steps": 4, "eval_every": 2}, id="linear"),
    ],
)
def test_a_longer_run_has_the_bits_of_one_that_was_never_shorter(tmp_path, capfd, settings):
    settings["keep_checkpoints"] = 9
    long, out = make_recipe(steps=24, **settings), tmp_path / "out"
    run_training(long, tmp_path / "whole", prepared=TEXT, quiet=True)
    run_training(make_recipe(**settings), out, prepared=TEXT, quiet=True)
    result = run_training(long, out, resume=True, prepared=TEXT, quiet=True)
    gone = re.findall(r"deleting \S*step-0000(\d\d)", capfd.readouterr().err)
    shared = {"constant": 12, "wsd": 9}.get(settings.get("schedule"), 4)
    assert gone == [f"{step:02}" for step in range(2, 14, 2) if step > shared]
    assert weights(out) == weights(tmp_path / "whole")
    assert result.steps == json.loads((out / "recipe.json").read_text())["recipe"]["train"]["steps"] == 24
    assert run_training(long, out, resume=True, prepared=TEXT, quiet=True).to_dict() == result.to_dict()


@pytest.mark.parametrize(
    ("settings", "steps", "words"),
    [
        ({}, 24, "is at step 12 of a linear schedule over 12 steps, which differs from one over 24 from step 2 on"),
        ({"schedule": "constant", "warmup_steps": 0, "warmup_share": 0.25}, 24, "over 24 from step 0 on"),
        ({"schedule": "wsd", "decay_share": 0.25}, 24, "from step 9 on, and no checkpoint is older"),
        ({}, 6, "train.steps was 12 when"),
    ],
)
def test_a_schedule_that_came_down_is_not_stretched(tmp_path, settings, steps, words):
    run_training(make_recipe(**settings), tmp_path, prepared=TEXT, quiet=True)
    with pytest.raises(UserError, match=words):
        run_training(make_recipe(**{**settings, "steps": steps}), tmp_path, resume=True, prepared=TEXT, quiet=True)
    assert (tmp_path / "result.json").is_file()
    assert max(step_folders(tmp_path / "checkpoints")) == 12


def test_checkpoint_is_complete_and_has_no_pickle(finished):
    folder = finished() / "checkpoints" / "step-000006"
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["processes"]) == (6, 1)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*manifest["files"], MANIFEST}
    assert {Path(name).suffix for name in files} == {".json", ".py", ".safetensors"}
    named = {name for group in json.loads((folder / "state.json").read_text())["groups"] for name in group["params"]}
    # The optimizer has the names in memory.
    assert {name.replace(".dense.", ".") for name in named} == set(load_file(folder / "model.safetensors"))
    assert {f"exp_avg/{name}" for name in named} <= tensor_names(folder / "optimizer")
    model, final = (load_model(path).eval() for path in (folder.parent / "step-000012", finished() / "model"))
    assert torch.equal(model(input_ids=TEXT.valid.tokens).logits, final(input_ids=TEXT.valid.tokens).logits)
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
    out = cut_back(finished(), tmp_path / "out", 4)
    for folder in step_folders(out / "checkpoints").values():
        (folder / "state.json").write_text("{}")
    run_training(make_recipe(keep_checkpoints=9), out, resume=True, prepared=TEXT)
    assert "starting at step 0" in capsys.readouterr().out
    assert weights(out) == weights(finished())


def test_checkpoint_of_another_model_is_refused(finished, tmp_path):
    """Only a changed user function can get there: the recipe's own fields are compared."""
    out = cut_back(finished(), tmp_path / "out", 6)
    recipe = json.loads((out / "recipe.json").read_text())
    other = make_recipe(arm="baseline", keep_checkpoints=9)
    recipe["recipe"]["arm"] = other.to_dict()["arm"]
    (out / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=r"does not fit the model: unexpected tensor .*noble"):
        run_training(other, out, resume=True, prepared=TEXT, quiet=True)


def test_failed_write_keeps_the_last_good_checkpoint(server, finished, tmp_path):
    out = cut_back(finished(), tmp_path / "out", 6)
    before = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    answer = server.run(out, keep_checkpoints=9, limit=20_000)
    assert answer["exit"] == 2
    assert all(words in answer["error"] for words in ("step 8", "no space left", "step-000006"))
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()} == before
    assert not list(out.rglob(".tmp-*"))
    assert server.run(out, keep_checkpoints=9)["exit"] == 0, "with room again it goes on"
    assert weights(out) == weights(finished())


def writing():
    return any(thread.name == "checkpoint" for thread in threading.enumerate())


def test_steps_go_on_while_a_checkpoint_is_written(finished, tmp_path, monkeypatch):
    """It holds the weights of its own step all the same."""
    write, steps, ahead = checkpoints.write_weights, [0], {}

    def slow(folder, share):
        step, deadline = int(folder.name[-6:]), time.monotonic() + 60
        while steps[-1] <= step < 11 and time.monotonic() < deadline:
            time.sleep(0.001)
        ahead[step] = steps[-1] > step
        write(folder, share)

    monkeypatch.setattr(checkpoints, "write_weights", slow)
    recipe, out = make_recipe(keep_checkpoints=9), tmp_path / "out"
    run_training(recipe, out, prepared=TEXT, quiet=True, stop=lambda step: steps.append(step))
    assert ahead == {2: True, 4: True, 6: True, 8: True, 10: True, 12: False}
    assert not writing()
    for folder in step_folders(out / "checkpoints").values():
        files = sorted(each.relative_to(folder) for each in folder.rglob("*.safetensors"))
        assert len(files) == 2
        for file in files:
            tensors, want = load_file(folder / file), load_file(finished() / "checkpoints" / folder.name / file)
            assert all(torch.equal(tensors[name], value) for name, value in want.items())
    assert_same(out, finished())


def test_failed_write_stops_the_run_at_the_next_step(tmp_path, monkeypatch):
    write, steps = checkpoints.write_weights, []

    def fails(folder, share):
        write(folder, share)
        if folder.name.endswith("8"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stop(step):
        steps.append(step)
        while step == 9 and writing():
            time.sleep(0.001)

    monkeypatch.setattr(checkpoints, "write_weights", fails)
    refused = pytest.raises(UserError, match=r"checkpoint of step 8 .*no space left.*last good .*step-000004.*--resume")
    with refused:
        run_training(make_recipe(save_every=4), tmp_path / "out", prepared=TEXT, quiet=True, stop=stop)
    assert steps[-1] in (8, 9), "it may fail before the next step already"
    assert list(step_folders(tmp_path / "out" / "checkpoints")) == [4]
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "no space left on the disk; make room"), (errno.EACCES, "Permission denied; fix that")],
)
def test_failing_disk_at_the_final_model_costs_no_checkpoint(tmp_path, number, words):
    text, full = FakeText(), OSError(number, os.strerror(number))
    refused = pytest.raises(UserError, match=f"cannot write the model to .*: {words} and continue with --resume")
    with mock.patch.object(text.tokenizer, "save_pretrained", side_effect=full), refused:
        run_training(make_recipe(steps=4), tmp_path / "out", prepared=text, quiet=True)
    assert not (tmp_path / "out" / "model").exists()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert run_training(make_recipe(steps=4), tmp_path / "out", prepared=text, resume=True, quiet=True).steps == 4


def test_dead_data_reader_is_named_and_the_run_resumes(server, tmp_path):
    """In processes of their own: torch tells of it by an exception out of a signal's handler, wherever that may be."""
    settings = {"arm": "training_helpers:lose_reader,at=7", "dataloader_workers": 1, "steps": 12, "save_every": 2}
    out, whole = tmp_path / "out", tmp_path / "whole"
    answer = server.run(out, fault=True, **settings)
    assert answer["exit"] == 2
    assert re.search(r"data-loading process died at step \d+ .*last good checkpoint is .*--resume", answer["error"])
    newest, damaged = newest_valid(out / "checkpoints")
    assert newest.name in ("step-000004", "step-000006", "step-000008")
    assert not damaged
    assert server.run(out, **settings) == server.run(whole, **settings) == {"exit": 0, "error": ""}
    assert weights(out) == weights(whole)


@pytest.mark.parametrize(
    ("arm", "settings", "step", "saved"),
    [
        ("poison,at=7", {}, 7, [4, 6]),
        ("poison,at=10", {"gradient_accumulation": 2}, 5, [2, 4]),
        ("poison_gradient,at=4", {"eval_every": 12}, 4, [2]),
        ("poison,at=0", {}, 5, [2, 4]),
        ("poison,at=7", {"log_every": 12, "save_every": 10, "eval_every": 12}, 7, []),
        ("poison,at=1", {}, 1, []),
    ],
)
def test_run_that_is_no_longer_finite_stops_and_names_the_step(tmp_path, monkeypatch, arm, settings, step, saved):
    original = trainer.RunTrainer.training_step

    def training_step(trainer, *args, **kwargs):  # as on a GPU, where looking at every loss would wait for it
        with mock.patch.object(trainer, "check_finite"):
            return original(trainer, *args, **kwargs)

    if not saved:
        monkeypatch.setattr(trainer.RunTrainer, "training_step", training_step)
    out, recipe = tmp_path / "out", make_recipe(f"training_helpers:{arm}", **settings)
    last = f"the last good checkpoint is .*step-{saved[-1]:06d}" if saved else "there is no checkpoint"
    with pytest.raises(DivergedError, match=f"at step {step}; {last}") as caught:
        run_training(recipe, out, prepared=TEXT, quiet=True)
    assert caught.value.step == step
    assert ("nlr verify checks" if step == 1 else "lower the learning rate") in str(caught.value)
    assert list(step_folders(out / "checkpoints")) == saved
    result = json.loads((out / "result.json").read_text())
    assert (result["status"], result["final_loss"], result["steps"]) == ("diverged", None, step)
    with pytest.raises(DivergedError, match=f"step {step}"):
        run_training(recipe, out, resume=True, prepared=TEXT, quiet=True)


def test_random_states_come_back():
    """Also those that only a user's arm or data draw from."""

    def draws():
        return random.random(), np.random.random(), np.random.standard_normal(), torch.rand(()).item()  # noqa: NPY002

    np.random.standard_normal()  # noqa: NPY002 - of two that are drawn, one is kept
    state = json.loads(json.dumps(checkpoints.random_state(torch.device("cpu"))))
    before = draws()
    checkpoints.set_random_state(state, torch.device("cpu"))
    assert draws() == before


def test_seconds_before_a_resume_count(finished, tmp_path):
    out = cut_back(finished(), tmp_path / "out", 10)
    manifest = out / "checkpoints" / "step-000010" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"seconds": 1e6}))
    result = run_training(make_recipe(keep_checkpoints=9), out, resume=True, prepared=TEXT, quiet=True)
    assert 1e6 < result.seconds < 1.1e6


@pytest.mark.filterwarnings("ignore:.*in a single process")
def test_running_means_beside_an_adapter_are_kept(tmp_path):
    def model():
        return get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), LoraConfig(target_modules=["0"]))

    trained, resumed = model(), model()
    trained(torch.randn(8, 4))
    checkpoints.write_trained(tmp_path, trained, trained.state_dict())
    checkpoints.read_weights(tmp_path, resumed)
    assert resumed.base_model.model[1].running_mean.equal(trained.base_model.model[1].running_mean)


@pytest.mark.parametrize("pieces", [1, 4])
def test_first_loss_is_of_the_whole_batch(tmp_path, pieces):
    recipe = make_recipe(steps=1, warmup_steps=0, log_every=1, gradient_accumulation=pieces)
    run_training(recipe, tmp_path, prepared=TEXT, quiet=True)
    state = json.loads((tmp_path / "checkpoints" / "step-000001" / "trainer_state.json").read_text())
    found = {name: value for entry in state["log_history"] for name, value in entry.items()}
    assert found["untrained_loss"] == pytest.approx(found["loss"], rel=1e-4)
