"""`nlr bench step` and the GPU script, at toy sizes: what they report, not how fast this machine is."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nonlinear_lowrank as nlr
from nonlinear_lowrank.analysis.bench_step import StepBenchConfig, bench_step, make_stepper
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.analysis.timing import paired_ratio
from nonlinear_lowrank.errors import UserError

TINY = StepBenchConfig(
    width=32,
    layers=1,
    heads=2,
    hidden=48,
    vocab_size=67,
    sequence_length=8,
    batch_size=2,
    ranks=(4, 8),
    modes=("eager",),
    rounds=3,
    warmup=1,
    clock="wall",  # steps of this size can be shorter than the process clock's tick
)
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_step.py"


def test_report():
    lines = []
    result = bench_step(TINY, progress=lines.append)
    assert [(row.mode, row.rank) for row in result.rows] == [("eager", 4), ("eager", 8)]
    data = json.loads(result.to_json())
    for row in result.rows:
        times = data["times"]["eager"]
        assert len(times["baseline"]) == len(times[f"r={row.rank}"]) == 3
        assert row.step == paired_ratio(times[f"r={row.rank}"], times["baseline"])
        assert row.step_over_flops == row.step.median / row.flop_ratio
        # r (d_in + d_out) + r^2 multiply-adds for each of 6 linears, over linears, attention and head
        branch = sum(row.rank * (d_in + d_out) + row.rank**2 for d_in, d_out in [(32, 32)] * 4 + [(32, 96), (48, 32)])
        plain = 4 * 32 * 32 + 32 * 96 + 48 * 32 + 2 * 8 * 32 + 67 * 32
        assert row.flop_ratio == pytest.approx(1 + branch / plain)
        assert f"{row.flop_ratio:.4f}" in str(result)
    assert data["config"]["ranks"] == [4, 8]
    assert data["machine"]["threads"] == 1
    assert lines


def test_arms_differ_by_the_branch_alone_and_learn():
    plain, noble = (make_stepper(TINY, "eager", rank, lr=1e-2) for rank in (None, 4))
    assert plain.cost.branch_flops == 0
    assert plain.cost.flops == noble.cost.flops - noble.cost.branch_flops
    assert noble.cost.to_dict() == model_cost(noble.model, 8).to_dict()
    for stepper in (plain, noble):
        before = {name: p.detach().clone() for name, p in stepper.model.named_parameters()}
        losses = [stepper.step().item() for _ in range(30)]
        assert losses[-1] < losses[0] - 0.5
        assert all(not torch.equal(p, before[name]) for name, p in stepper.model.named_parameters())
        assert all(p.grad is None for p in stepper.model.parameters())


def test_steps_take_the_batches_they_are_given():
    torch.manual_seed(0)
    batches = iter([torch.randint(0, 67, (2, 8)) for _ in range(2)])
    stepper = make_stepper(TINY, "eager", 4, batch=lambda: next(batches))
    losses = {stepper.step().item() for _ in range(2)}
    assert len(losses) == 2
    with pytest.raises(StopIteration):
        stepper.step()


def test_threads_are_put_back():
    torch.set_num_threads(2)
    try:
        result = bench_step(replace(TINY, rounds=1, ranks=(4,)))
        assert torch.get_num_threads() == 2
        assert result.machine["threads"] == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": ()}, "ranks must be different"),
        ({"ranks": (4, 4)}, "ranks must be different"),
        ({"ranks": (0,)}, "rank must be a whole number"),
        ({"ranks": (32,)}, "rank 32 is not low"),
        ({"width": 30, "heads": 4}, "must be a multiple of 2 x heads"),
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"modes": ("fast",)}, "unknown modes 'fast'"),
        ({"clock": "sun"}, "unknown clock 'sun'"),
        ({"activation": "step"}, "unknown activation"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_bad_input_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **change)


def test_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="use --device cpu"):
        replace(TINY, device="cuda")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        bench_step(replace(TINY, clock="cuda"))


def _run_script(output: Path, *options: str) -> dict:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--output", str(output), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    data = json.loads(output.read_text())
    assert json.loads(done.stdout) == data
    assert data["failed"] == {}
    return data


def test_the_gpu_script_runs_on_the_cpu(tmp_path):
    """Its first use is on a machine that is lent by the minute."""
    data = _run_script(tmp_path / "gpu.json", "--only", "operator", "step", "losses", "--steps", "40")
    assert [row["rank"] for row in data["step"]["rows"]] == data["ranks"]
    for arm, losses in data["losses"].items():
        assert len(losses) == 40, arm
        assert losses[-1] < losses[0] - 0.3, arm
    assert len(set(map(tuple, data["losses"].values()))) == 1 + len(data["ranks"])
    for kinds in data["operator"].values():
        for name, error in kinds["noble_linear"].items():
            assert error <= 2 * kinds["plain formula"][name] + 1e-6, name
    assert nlr.__name__ in data["versions"]


@pytest.mark.slow
def test_whole_models_keep_h_alone_eager_and_compiled(tmp_path):
    data = _run_script(tmp_path / "gpu.json", "--only", "kept_bytes")
    kept = data["kept_bytes"]
    for rank in data["ranks"]:
        for mode in ("eager", "compiled"):
            branches = kept[f"r={rank}"][mode] - kept["baseline"][mode]
            h = data["linears"] * data["tokens"] * rank * data["element_size"]
            assert h <= branches <= 1.05 * h, (rank, mode)


def test_the_gpu_script_without_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "use --device cpu" in done.stderr
