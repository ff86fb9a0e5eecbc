"""DeepSpeed: what is refused, exact resume, and the losses of one process."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nlr_lab.training.deepspeed as engine
from nlr_lab.training import TrainResult, run_training
from nonlinear_lowrank.hub.storage import staged_folder
from processes_helpers import run_processes
from refusals import assert_refused
from training_helpers import FakeText, make_recipe

SETTINGS = {"steps": 8, "save_every": 2, "eval_every": 2, "keep_checkpoints": 9, "dropout": 0.0, "max_grad_norm": 0.3}

SCRIPT = """
import os, sys
import torch
torch.set_num_threads(1)
import deepspeed.ops
deepspeed.ops.__compatible_ops__.clear()  # it would compile an operator for minutes
import test_deepspeed as here, training_helpers
from pathlib import Path
root = Path(sys.argv[1])
for name in sys.argv[2:]:
    if name == "again":
        if os.environ["RANK"] == "0":
            training_helpers.cut_back(root / "whole", root / "again", 4)
        torch.distributed.barrier()
    here.train(root / name)
"""


def train(out, arm="noble:rank=4", allowed=True):
    recipe, resume = make_recipe(arm, **SETTINGS, bf16=out.name == "bf16"), (out / "checkpoints").exists()
    run_training(recipe, out, prepared=FakeText(), quiet=True, resume=resume, allow_torch_checkpoints=allowed)


def losses(out):
    result = TrainResult.from_json((out / "result.json").read_text())
    return [loss for _, loss in (*result.curve, *result.train_curve)]


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint that looks as if two DeepSpeed processes had written it."""
    place = tmp_path / "checkpoints" / "step-000004"
    place.parent.mkdir()
    with staged_folder(place, {"processes": 2}) as folder:
        (folder / "latest").write_text("global_step4")
        (folder / "state.pt").write_bytes(b"a pickle")
    return place


@pytest.mark.parametrize(
    ("options", "spoil", "message"),
    [
        ({"deepspeed": False}, None, "was written by DeepSpeed; resume with the engine"),
        ({"processes": 3}, None, "written by 2 DeepSpeed processes and there are 3"),
        ({}, lambda folder: (folder / "latest").unlink(), "was written without DeepSpeed; resume with the engine"),
        ({"checkpoints": Path("elsewhere")}, None, "not in the run's own folder"),
        ({}, lambda folder: (folder / "state.pt").write_bytes(b"a Pickle"), "is damaged"),
        ({}, lambda folder: (folder / "link").symlink_to(folder / "state.pt"), "has links; pickles are read from"),
    ],
)
def test_checkpoint_of_another_run_engine_or_hand_is_refused(checkpoint, options, spoil, message):
    here = {"checkpoints": checkpoint.parent, "deepspeed": True, "processes": 2}
    engine.check_readable(checkpoint, **here)
    if spoil is not None:
        spoil(checkpoint)
    assert_refused(message, engine.check_readable, checkpoint, **here | options)


@pytest.mark.parametrize(
    ("arm", "allowed", "configuration", "words"),
    [
        ("noble:rank=4", False, {}, "DeepSpeed's checkpoints are pickled; give --allow"),
        ("noble:rank=4,optimizer=muon", True, {}, "Muon needs whole matrices"),
        ("noble:rank=4", True, {"bf16": {"enabled": True}}, "DeepSpeed's bf16 casts all weights.*give --train.bf16"),
    ],
)
def test_arms_that_deepspeed_would_spoil_write_nothing(arm, allowed, configuration, words, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    file = tmp_path / "deepspeed.json"
    settings = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, **configuration}
    file.write_text(json.dumps(settings))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    assert_refused(words, train, tmp_path / "out", arm, allowed)
    assert not (tmp_path / "out").exists()


def test_missing_deepspeed_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert_refused(r"pip install '.*\[deepspeed\]'", train, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_as_one_process_and_resumes(stage, tmp_path, monkeypatch):
    """float32: DeepSpeed keeps its state in it."""
    deepspeed = pytest.importorskip("deepspeed")
    train(tmp_path / "alone")
    for name, value in {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": str(stage)}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    site = Path(deepspeed.__file__).parents[1]
    script = f"import sys; sys.path.append({str(site)!r})\n{SCRIPT}"
    run_processes(script, tmp_path, "whole", "bf16", "again")
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    weights = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name, value in load_file(tmp_path / "alone" / "model" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)
    half = load_file(tmp_path / "bf16" / "model" / "model.safetensors")
    assert {each.dtype for each in half.values()} == {torch.float32}
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "alone"), rel=2e-2)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "whole")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    for name, value in load_file(tmp_path / "again" / "model" / "model.safetensors").items():
        assert torch.equal(value, weights[name]), name
