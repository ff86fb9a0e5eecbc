"""Training on two processes is training on one: DDP and FSDP2, branches and adapters, in float64; and a run resumes
bit-exactly, or with another number of processes on the same curve."""

import json
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import finetune_helpers
from nlr_lab.runtime.processes import warn_of_restarts
from nlr_lab.runtime.signals import StoppedBySignal
from nlr_lab.training import DivergedError, TrainResult, checkpoints, run_training
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from processes_helpers import fsdp_environment, run_processes
from training_helpers import FakeText, cut_back, make_recipe

ARMS = ("sine-lora:r=2,omega=200", "nora:r=2,groups=4")
CHAIN = {"steps": 12, "save_every": 4, "keep_checkpoints": 9, "dropout": 0.0}

SCRIPT = """
import os, sys
import torch
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
import processes_helpers
if os.environ.get("ACCELERATE_USE_FSDP"):
    processes_helpers.shard_on_cpus()
import test_distributed as here
from pathlib import Path
here.train_all(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
"""


def recipes(root):
    signalled = make_recipe("training_helpers:signalled,at=7", **CHAIN)
    chain, task = (make_recipe(**CHAIN), FakeText()), finetune_helpers.instruction_task(root)
    tuned = {arm.partition(":")[0]: finetune_helpers.recipe(task, arm, steps=6, eval_every=2) for arm in ARMS}
    return {
        "noble": (make_recipe("noble:rank=4", dropout=0.0, steps=6, eval_every=2), FakeText()),
        "chain": chain,
        "again": chain,
        "full": chain,
        "stopped": (signalled, FakeText()),
        "continued": (signalled, FakeText()),
        "poisoned": (make_recipe("training_helpers:poison,at=7", gradient_accumulation=2), FakeText()),
        "uneven": (make_recipe(batch_size=6, gradient_accumulation=2), FakeText()),
        **{name: (recipe, None) for name, recipe in tuned.items()},
    }


def train_all(root, mode, names):
    rank, all_recipes = os.environ["RANK"], recipes(root)
    for name in names:
        recipe, prepared = all_recipes[name]
        folder, stopped = root / mode / ("stopped" if name == "continued" else name), {}
        if name == "again":  # the chain as if its last third had not been
            if rank == "0":
                cut_back(root / mode / "chain", folder, 8)
            torch.distributed.barrier()
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "GlmDecoderLayer" if prepared else "LlamaDecoderLayer"
        if name == "stopped" and rank == "1":
            os.environ["NLR_TEST_FAULT"] = "1"
        write = mock.patch.object(checkpoints, "write_weights", wraps=checkpoints.write_weights)
        if name == "full" and rank == "1":
            write = mock.patch.object(checkpoints, "write_weights", side_effect=OSError(28, "full"))
        try:
            resume = (folder / "checkpoints").exists()
            with write:
                run_training(recipe, folder, prepared=prepared, quiet=True, resume=resume)
        except DivergedError as error:
            stopped = {"diverged": error.step}
        except StoppedBySignal as error:
            stopped = {"exit": error.exit_code, "why": str(error)}
        except UserError as error:
            stopped = {"refused": str(error)}
        os.environ.pop("NLR_TEST_FAULT", None)
        (root / mode / f"{name}-{rank}.json").write_text(json.dumps(stopped))


def noted(root, mode, name, rank):
    return json.loads((root / mode / f"{name}-{rank}.json").read_text())


def result(root, mode, name):
    return TrainResult.from_json((root / mode / name / "result.json").read_text())


def groups(root, mode, name):
    state = json.loads((root / mode / name / "checkpoints" / "step-000006" / "state.json").read_text())
    return [(each["initial_lr"], each["weight_decay"], sorted(each["params"])) for each in state["groups"]]


def assert_same(found, want):
    assert [step for step, _ in found] == [step for step, _ in want]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in want], rel=1e-6)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    finetune_helpers.instruction_task(root)
    model = AutoModelForCausalLM.from_pretrained(root / "llama")
    model.double().save_pretrained(root / "llama")
    for mode in ("alone", "ddp", "fsdp2"):
        (root / mode).mkdir()
    run_processes(SCRIPT, root, "alone", "noble", "sine-lora", "nora", "chain", "stopped", count=1)
    return root


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_and_resume(root, mode, monkeypatch):
    cut_back(root / "alone" / "chain", root / mode / "chain", 4)  # a run of one process goes on with two
    for name, value in (fsdp_environment("") if mode == "fsdp2" else {}).items():
        monkeypatch.setenv(name, value)
    names = ("noble", "sine-lora", "nora", "chain", "again", "full", "stopped", "continued", "poisoned", "uneven")
    run_processes(SCRIPT, root, mode, *names)
    for name in ("noble", "sine-lora", "nora"):
        want, found = result(root, "alone", name), result(root, mode, name)
        assert_same(found.curve, want.curve)
        assert_same(found.train_curve, want.train_curve)
        assert found.parameters == want.parameters
        assert groups(root, mode, name) == groups(root, "alone", name)
        assert len({rate for rate, *_ in groups(root, mode, name)}) > 1 or name != "noble"
    for rank in (0, 1):
        assert "no space left" in noted(root, mode, "full", rank)["refused"], "the thread's failure reaches all"
        assert noted(root, mode, "poisoned", rank) == {"diverged": 4}, "two micro-batches a step"
        assert "does not split over 2 processes" in noted(root, mode, "uneven", rank)["refused"]
        why = "stopped by SIGTERM at step 7 of 12"
        assert noted(root, mode, "stopped", rank) == {"exit": 143, "why": why}, (
            "also where the other one has the signal"
        )
    assert not (root / mode / "uneven").exists()
    assert not list((root / mode / "full" / "checkpoints").iterdir())
    assert_same(result(root, mode, "stopped").curve, result(root, "alone", "stopped").curve)

    assert_same(result(root, mode, "chain").curve, result(root, "alone", "chain").curve)
    weights = load_file(root / mode / "chain" / "model" / "model.safetensors")
    for name, value in load_file(root / mode / "again" / "model" / "model.safetensors").items():
        assert torch.equal(value, weights[name]), name
    checkpoint = root / mode / "chain" / "checkpoints" / "step-000008"
    assert len(list(checkpoint.glob("optimizer/*.safetensors"))) == 2, "each process writes its part"
    shards = [load_file(each) for each in sorted(checkpoint.glob("model*.safetensors"))]
    assert len(shards) == (2 if mode == "fsdp2" else 1), "sharded weights are gathered in no process"
    assert all(shards)
    saved = {name: value for each in shards for name, value in each.items()}
    assert saved.keys() == weights.keys()
    assert load_model(checkpoint) is not None
    last = [load_file(each) for each in sorted((checkpoint.parent / "step-000012").glob("model*.safetensors"))]
    assert all(torch.equal(value, weights[name]) for each in last for name, value in each.items())
    monkeypatch.undo()
    cut_back(root / mode / "chain", root / mode / "back", 8)  # and of two with one
    torch.set_default_dtype(torch.float64)
    try:
        back = run_training(make_recipe(**CHAIN), root / mode / "back", prepared=FakeText(), quiet=True, resume=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(back.curve, result(root, "alone", "chain").curve)


ELASTIC = """
import os, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from nlr_lab.training import run_training
from training_helpers import FakeText, make_recipe

out = Path(sys.argv[1])
recipe = make_recipe("training_helpers:die,at=7", save_every=3, keep_checkpoints=9)
run_training(recipe, out, prepared=FakeText(), quiet=True, resume=True)
if os.environ["RANK"] == "0":
    (out / "restarts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@pytest.mark.slow
def test_killed_process_is_started_again_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see docs/distributed.md
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    for name in ("die", "live"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(script), str(tmp_path / name)]
        monkeypatch.setenv("NLR_TEST_DIES", "1" if name == "die" else "")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / name / "restarts").read_text() for name in ("die", "live")] == ["1", "0"]
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("die", "live"))
    assert one == other


STOPPED = """
import sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from nlr_lab.training import run_training
from training_helpers import FakeText, before_training, make_recipe

def begun(model):
    return before_training(model, 3, lambda _: Path(sys.argv[1], "begun").touch())

once = dict.fromkeys(("steps", "log_every", "eval_every", "save_every"), 100_000)
if __name__ == "__main__":
    run_training(make_recipe("script:begun", **once), Path(sys.argv[1]), prepared=FakeText(), quiet=True)
"""


@pytest.mark.slow
def test_torchrun_that_is_terminated_leaves_a_checkpoint_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (tmp_path / "script.py").write_text(STOPPED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*command, str(tmp_path / "script.py"), str(tmp_path / "out")]) as running:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "out" / "begun").exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            running.terminate()
            running.wait(timeout=29)  # at 30 s torchrun kills
        finally:
            running.kill()
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert 0 < int(checkpoint.name.removeprefix("step-")) < 100_000
    assert load_model(checkpoint) is not None


@pytest.mark.parametrize("odd", ["", "RANK", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"])
def test_restarts_that_can_hang_are_warned_of(odd, monkeypatch, capsys):
    names = {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"}
    for name, value in names.items():
        monkeypatch.setenv(name, {"1": "0", "True": "False", "0": "1"}[value] if name == odd else value)
    warn_of_restarts.cache_clear()
    for _ in range(2):
        warn_of_restarts()
    assert capsys.readouterr().err.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == (not odd)
