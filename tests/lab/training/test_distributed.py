"""Training on two processes is training on one: DDP and FSDP2, branches and adapters, in float64; and on with another
number of processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import finetune_helpers
from nlr_lab.runtime.processes import warn_of_restarts
from nlr_lab.training import CheckpointedTrainer, TrainResult, run_training
from processes_helpers import fsdp_environment, run_processes
from training_helpers import FakeText, make_recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

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
    """{name: (recipe, prepared data or None)}."""
    found = {"noble": (make_recipe("noble:rank=4", dropout=0.0, steps=6, eval_every=2), FakeText())}
    task = finetune_helpers.instruction_task(root)
    for arm in ARMS:
        found[arm.partition(":")[0]] = (finetune_helpers.recipe(task, arm, steps=6, eval_every=2), None)
    return found


def train_all(root, mode, names):
    """Runs into root/mode; each notes what its optimizer and its parameters were."""
    for name in names:
        recipe, prepared = recipes(root)[name] if name != "chain" else (make_recipe(**CHAIN), FakeText())
        folder, seen = root / mode / name, {}
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "GlmDecoderLayer" if prepared else "LlamaDecoderLayer"
        save = CheckpointedTrainer._save_checkpoint

        def spied(self, *args, save=save, seen=seen):
            groups = self.optimizer.param_groups
            seen["groups"] = [[g["initial_lr"], g["weight_decay"], sum(p.numel() for p in g["params"])] for g in groups]
            seen["kinds"] = sorted({type(p).__name__ for p in self.model.parameters()})
            save(self, *args)

        CheckpointedTrainer._save_checkpoint = spied
        try:
            resume = (folder / "checkpoints").exists()
            run_training(recipe, folder, prepared=prepared, quiet=True, resume=resume)
        finally:
            CheckpointedTrainer._save_checkpoint = save
        (root / mode / f"{name}.json").write_text(json.dumps(seen))


def cut_back(folder: Path, step: int) -> None:
    """As if the run had been stopped after this step."""
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "model")
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def result(root, mode, name):
    return TrainResult.from_json((root / mode / name / "result.json").read_text())


def assert_same(found, want):
    """Losses by step, to 1e-6."""
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
    run_processes(SCRIPT, root, "alone", "noble", "sine-lora", "nora", "chain", count=1)
    return root


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_processes_are_one(root, mode, monkeypatch):
    names = ["noble", "sine-lora", "nora"]
    if mode == "ddp":  # one more: a run of one process goes on with two
        shutil.copytree(root / "alone" / "chain", root / "ddp" / "chain")
        cut_back(root / "ddp" / "chain", 4)
        names.append("chain")
    for name, value in (fsdp_environment("") if mode == "fsdp2" else {}).items():
        monkeypatch.setenv(name, value)
    run_processes(SCRIPT, root, mode, *names)
    for name in ("noble", "sine-lora", "nora"):
        want, found = result(root, "alone", name), result(root, mode, name)
        assert_same(found.curve, want.curve)
        assert_same(found.train_curve, want.train_curve)
        ours, theirs = (json.loads((root / each / f"{name}.json").read_text()) for each in ("alone", mode))
        assert theirs["groups"] == ours["groups"]
        assert len({rate for rate, *_ in ours["groups"]}) > 1 or name != "noble"
        assert ("DTensor" in theirs["kinds"]) == (mode == "fsdp2")
    if mode == "ddp":
        check_chain(root)


def check_chain(root):
    """1 -> 2 -> 1 processes is the same curve as 1 all along."""
    want = result(root, "alone", "chain")
    assert_same(result(root, "ddp", "chain").curve, want.curve)
    shutil.copytree(root / "ddp" / "chain", root / "again")
    cut_back(root / "again", 8)
    torch.set_default_dtype(torch.float64)
    try:
        back = run_training(make_recipe(**CHAIN), root / "again", prepared=FakeText(), quiet=True, resume=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(back.curve, want.curve)


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
def test_a_killed_process_is_started_again_and_nothing_is_lost(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({"RESTARTS": "1", "STORE": "True", "RANK": "0"}, True),
        ({"RESTARTS": "1", "STORE": "True", "RANK": "1"}, False),
        ({"RESTARTS": "1", "STORE": "False", "RANK": "0"}, False),
        ({"RESTARTS": "0", "STORE": "True", "RANK": "0"}, False),
        ({}, False),
    ],
)
def test_restarts_that_can_hang_are_warned_of(variables, warned, monkeypatch, capsys):
    names = {"RESTARTS": "TORCHELASTIC_MAX_RESTARTS", "STORE": "TORCHELASTIC_USE_AGENT_STORE", "RANK": "RANK"}
    for short, name in names.items():
        monkeypatch.delenv(name, raising=False)
        if short in variables:
            monkeypatch.setenv(name, variables[short])
    warn_of_restarts.cache_clear()
    for _ in range(2):
        warn_of_restarts()
    assert (capsys.readouterr().err.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 1) == warned
