"""Checkpoints that each process writes its part of: exact resume, other numbers of processes, and what is refused."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nlr_lab.training.shards as shards
from nlr_lab.training import TrainResult, run_training
from nonlinear_lowrank import UserError
from nonlinear_lowrank.hub.verify import verify
from processes_helpers import fsdp_environment, run_processes
from training_helpers import FakeText, make_recipe

SETTINGS = {"steps": 8, "save_every": 2, "eval_every": 2, "keep_checkpoints": 9, "dropout": 0.0, "max_grad_norm": 0.3}

SCRIPT = """
import os, sys
import torch
torch.set_num_threads(1)
if os.environ.get("ACCELERATE_USE_FSDP"):
    torch.set_default_dtype(torch.float64)
    import processes_helpers
    processes_helpers.shard_on_cpus()
if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__.clear()  # it would compile an operator for minutes
import test_shards as here
from pathlib import Path
root = Path(sys.argv[1])
for name in sys.argv[2:]:
    if name == "again":
        if os.environ["RANK"] == "0":
            here.cut_back(root / "whole", root / "again", 4)
        torch.distributed.barrier()
    here.train(root / name)
"""


def recipe(arm="noble:rank=4", **settings):
    return make_recipe(arm, **{**SETTINGS, **settings})


def train(out, **options):
    resume = (out / "checkpoints").exists()
    settings = {"bf16": True} if "bf16" in out.name else {}
    run_training(
        recipe(**settings),
        out,
        prepared=FakeText(),
        quiet=True,
        resume=resume,
        **{"allow_torch_checkpoints": True, **options},
    )


def losses(out):
    result = TrainResult.from_json((out / "result.json").read_text())
    return [loss for _, loss in (*result.curve, *result.train_curve)]


def cut_back(whole, out, step):
    """A copy of a run as if it had been stopped after this step."""
    shutil.copytree(whole, out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "model")
    for checkpoint in (out / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`whole`: FSDP2 on two processes, each writing its part; then `again`, which goes on after step 4."""
    root = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fsdp_environment("GlmDecoderLayer").items():
            patch.setenv(name, value)
        run_processes(SCRIPT, root, "whole", "again")
    return root


def test_resume_is_exact(root):
    steps = sorted(each.name for each in (root / "whole" / "checkpoints").iterdir())
    assert steps == [f"step-{step:06d}" for step in (2, 4, 6, 8)]
    assert losses(root / "again") == losses(root / "whole")
    for name, value in load_file(root / "whole" / "model" / "model.safetensors").items():
        assert torch.equal(value, load_file(root / "again" / "model" / "model.safetensors")[name]), name


def test_one_process_goes_on_from_two(root):
    torch.set_default_dtype(torch.float64)
    try:
        cut_back(root / "whole", root / "alone", 4)
        train(root / "alone")
    finally:
        torch.set_default_dtype(torch.float32)
    assert losses(root / "alone") == pytest.approx(losses(root / "whole"), rel=1e-6)


def test_its_parts_are_listed_and_checked(root, tmp_path):
    checkpoint = root / "whole" / "checkpoints" / "step-000004"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    parts = [name for name in files if name.endswith(".distcp")]
    assert len(parts) == 2
    assert "shards/.metadata" in files
    assert not list(checkpoint.rglob("*.safetensors"))
    found = verify(checkpoint)
    assert found.faults == []
    assert any("--allow-torch-checkpoints" in note for note in found.notes)
    copy = shutil.copytree(root / "whole", tmp_path / "copy")
    part = copy / "checkpoints" / "step-000008" / parts[0]
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert f"{part} is damaged" in "\n".join(verify(copy).faults)


def stopped(root, tmp_path):
    cut_back(root / "whole", tmp_path / "run", 4)
    return tmp_path / "run"


def test_pickles_are_read_on_demand_only(root, tmp_path):
    out = stopped(root, tmp_path)
    before = sorted(out.rglob("*"))
    with pytest.raises(UserError, match=r"step-000004 is pickled; to go on from it give --allow-torch-checkpoints"):
        train(out, allow_torch_checkpoints=False)
    assert sorted(out.rglob("*")) == before


def test_nothing_is_read_through_a_link(root, tmp_path):
    out = stopped(root, tmp_path)
    part = next(out.rglob("step-000004/shards/*.distcp"))
    shutil.move(part, tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="has links; pickles are read from nowhere else"):
        train(out)


def test_another_engine_is_refused(root, tmp_path):
    out = stopped(root, tmp_path)
    folder = out / "checkpoints" / "step-000004"
    options = {"deepspeed": True, "allowed": True, "processes": 2}
    with pytest.raises(UserError, match="was not written by DeepSpeed; go on with the engine"):
        shards.check_readable(folder, folder.parent, **options)
    (folder / "latest").write_text("global_step4")
    with pytest.raises(UserError, match="was written by DeepSpeed; go on with the engine"):
        shards.check_readable(folder, folder.parent, **{**options, "deepspeed": False})
    with pytest.raises(UserError, match="written by 2 DeepSpeed processes and there are 3; start as many"):
        shards.check_readable(folder, folder.parent, **{**options, "processes": 3})
    with pytest.raises(UserError, match="not in the run's own folder"):
        shards.check_readable(folder, tmp_path, **options)


def test_a_model_too_large_for_one_process_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "GATHERED_BYTES", 100_000)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"would be gathered on the first process.*--allow-torch-checkpoints"):
        train(tmp_path / "out", allow_torch_checkpoints=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arm", "options", "configuration", "words"),
    [
        ("noble:rank=4", {"allow_torch_checkpoints": False}, {}, "DeepSpeed's checkpoints are pickled; give --allow"),
        ("noble:rank=4,optimizer=muon", {}, {}, "Muon needs whole matrices"),
        ("noble:rank=4", {}, {"bf16": {"enabled": True}}, "DeepSpeed's bf16 casts all weights.*give --train.bf16"),
    ],
)
def test_what_deepspeed_would_spoil_is_refused_before_anything_is_written(
    arm, options, configuration, words, tmp_path, monkeypatch
):
    pytest.importorskip("deepspeed")
    file = tmp_path / "deepspeed.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, **configuration})
    )
    for name, value in {"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": str(file)}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(UserError, match=words):
        run_training(
            recipe(arm),
            tmp_path / "out",
            prepared=FakeText(),
            quiet=True,
            **{"allow_torch_checkpoints": True, **options},
        )
    assert not (tmp_path / "out").exists()


def test_without_deepspeed_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"pip install 'nonlinear-lowrank\[deepspeed\]'"):
        train(tmp_path / "out")
    with pytest.raises(UserError, match="DeepSpeed's checkpoints are pickled; give --allow-torch-checkpoints"):
        train(tmp_path / "out", allow_torch_checkpoints=False)
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


def test_what_is_damaged_is_not_unpickled(root, tmp_path):
    """Also where the newest one was not looked for, but named."""
    out = stopped(root, tmp_path)
    folder = out / "checkpoints" / "step-000004"
    part = next(folder.glob("shards/*.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    options = {"deepspeed": False, "allowed": True, "processes": 1}
    with pytest.raises(UserError, match="is damaged"):
        shards.check_readable(folder, folder.parent, **options)
