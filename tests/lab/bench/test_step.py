"""`nlr bench step` and the GPU script, at toy sizes: what they report, not how fast this machine is."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nonlinear_lowrank as nlr
from nlr_lab.bench.arms import METHODS, BenchArm, bench_arms
from nlr_lab.bench.timing import paired_ratio
from nlr_lab.bench.training import TrainBenchConfig, bench_step, make_stepper
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import all_methods

TINY = TrainBenchConfig(
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
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
NOBLE = BenchArm(method="noble", rank=4)


def test_report_counts_flops_by_hand():
    lines = []
    result = bench_step(TINY, progress=lines.append)
    assert [(row.panel, row.arm, row.over) for row in result.rows] == [
        ("eager", "noble r=4", "baseline"),
        ("eager", "noble r=8", "baseline"),
    ]
    data = json.loads(result.to_json())
    for row in result.rows:
        times = data["times"]["eager"]
        assert len(times["baseline"]) == len(times[row.arm]) == 3
        assert row.step == paired_ratio(times[row.arm], times["baseline"])
        assert row.figures["step_over_flops"] == row.step.median / row.figures["flop_ratio"]
        # r (d_in + d_out) + r^2 multiply-adds a token for each of 6 linears, forward and twice as much backward, where
        # the bottleneck is computed again
        sides = sum(d_in + d_out for d_in, d_out in [(32, 32)] * 4 + [(32, 96), (48, 32)])
        rank = int(row.arm.removeprefix("noble r="))
        branch = 2 * 16 * (3 * rank * sides + 6 * 4 * rank**2)
        assert result.flops[row.arm] - result.flops["baseline"] == branch
        assert row.figures["flop_ratio"] == result.flops[row.arm] / result.flops["baseline"]
        assert f"{row.figures['flop_ratio']:.4f}" in str(result)
    linears = 4 * 32 * 32 + 32 * 96 + 48 * 32 + 67 * 32
    attention = 4 * 8 * 32 * 16  # scores and values, forward; backward forms the scores again
    assert result.flops["baseline"] == 6 * 16 * linears + 3.5 * attention
    assert data["config"]["ranks"] == [4, 8]
    assert data["machine"]["threads"] == 1
    assert data["machine"]["copy_bytes_per_second"] > 1e6
    assert lines


@pytest.mark.parametrize("family", ["glm", "llama"])
def test_every_method_is_over_its_arm(family):
    config = replace(TINY, methods=tuple(METHODS), ranks=(4,), rounds=1, family=family)
    result = bench_step(config)
    rows = {row.arm: row for row in result.rows}
    assert set(rows) == {arm.name for arm in bench_arms(config.methods, config.ranks)} - {"baseline"}
    for row in rows.values():
        assert row.over == ("baseline" if row.arm.split()[0] in (*all_methods(), "lora") else "lora r=4")
    # sine-LoRA has LoRA's factors and forms its weight of them; DoRA and sine-DoRA add one number an output
    trained = {arm: row.figures["trained_ratio"] for arm, row in rows.items()}
    assert trained["sine-lora r=4"] == 1 < rows["sine-lora r=4"].figures["flop_ratio"]
    assert trained["sine-dora r=4"] == trained["dora r=4"] > 1
    assert trained["lora r=4"] < 0.3 < 0.9 < trained["nonlinear-query"] < 1.1
    assert trained["noble-adapter r=4"] > 1


def test_adapters_alone_omit_the_plain_model():
    names = [arm.name for arm in bench_arms(("sine-lora",), (2, 4))]
    assert names == ["lora r=2", "lora r=4", "sine-lora r=2", "sine-lora r=4"]


def test_frozen_weights_have_their_type():
    config = replace(TINY, methods=("sine-lora",), bf16=True, frozen_dtype="bfloat16")
    arm = BenchArm(method="sine-lora", rank=4)
    stepper = make_stepper(config, "eager", arm, lr=1e-2)
    kinds = {(each.requires_grad, each.dtype) for each in stepper.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    losses = [stepper.step().item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_arms_differ_by_the_branch_and_learn():
    plain, noble = (make_stepper(TINY, "eager", arm, lr=1e-2) for arm in (BenchArm(), NOBLE))
    assert plain.flops() < noble.flops()
    assert noble.trained - plain.trained == sum(
        each.numel() for name, each in noble.model.named_parameters() if "noble_" in name
    )
    for stepper in (plain, noble):
        before = {name: p.detach().clone() for name, p in stepper.model.named_parameters()}
        losses = [stepper.step().item() for _ in range(30)]
        assert losses[-1] < losses[0] - 0.5
        assert all(not torch.equal(p, before[name]) for name, p in stepper.model.named_parameters())
        assert all(p.grad is None for p in stepper.model.parameters())


def test_steps_take_the_given_batches():
    torch.manual_seed(0)
    batches = iter([torch.randint(0, 67, (2, 8)) for _ in range(2)])
    stepper = make_stepper(TINY, "eager", NOBLE, batch=lambda: next(batches))
    losses = {stepper.step().item() for _ in range(2)}
    assert len(losses) == 2
    with pytest.raises(StopIteration):
        stepper.step()


def test_threads_are_restored():
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
        ({"ranks": (0,)}, "ranks must be a positive integer"),
        ({"ranks": (32,)}, "rank 32 is not low"),
        ({"width": 30, "heads": 4}, "must be a multiple of 2 x heads"),
        ({"rounds": 0}, "rounds must be a positive integer"),
        ({"modes": ("fast",)}, "unknown modes 'fast'"),
        ({"clock": "sun"}, "unknown clock 'sun'"),
        ({"activation": "step"}, "unknown activation"),
        ({"threads": 0}, "threads must be a positive integer"),
        ({"methods": ("magic",)}, "unknown method 'magic'"),
        ({"methods": ()}, "methods must be different"),
        ({"methods": ("noble", "noble")}, "methods must be different"),
        ({"family": "gpt"}, "unknown family 'gpt'"),
        ({"kv_heads": 3}, "kv_heads must divide"),
        ({"frozen_dtype": "int8"}, "unknown frozen_dtype 'int8'"),
    ],
)
def test_bad_settings_raise(change, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **change)


def test_missing_gpu_raises(monkeypatch):
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


@pytest.mark.slow
def test_gpu_script_runs_on_the_cpu(tmp_path):
    """Its first use is on a machine that is lent by the minute."""
    data = _run_script(tmp_path / "gpu.json", "--rounds", "2", "--steps", "40")
    assert [row["arm"] for row in data["step"]["rows"]] == [
        f"noble r={rank}" for rank in data["sizes"]["step"]["ranks"]
    ]
    assert data["skipped"] == []
    for arm, losses in data["losses"].items():
        assert len(losses) == 40, arm
        assert losses[-1] < losses[0] - 0.3, arm
    assert len(set(map(tuple, data["losses"].values()))) == 1 + len(data["sizes"]["step"]["ranks"])
    for kinds in data["operator"].values():
        for name, error in kinds["noble_linear"].items():
            assert error <= 2 * kinds["plain formula"][name] + 1e-6, name
    assert data["fused"]["config"]["fuse_shared_inputs"]
    assert len(data["fused"]["rows"]) == len(data["step"]["rows"])
    assert {row["arm"] for row in data["adapters"]["rows"]} == {"sine-lora r=8", "sine-dora r=8", "dora r=8"}
    ratios = {row["arm"]: row["figures"].get("saved_ratio") for row in data["peak"]["rows"]}
    assert ratios["sine-lora r=8"] <= 1.01
    assert ratios["sine-dora r=8"] <= 1.01 < ratios["dora r=8"]
    assert {row["panel"].split(",")[0] for row in data["op"]["rows"]} == {"noble", "sine", "rational", "gated"}
    assert data["decode"]["rows"]
    assert data["memory"]["rows"]
    assert nlr.__name__ in data["versions"]


def test_gpu_script_ends_in_time(tmp_path):
    data = _run_script(tmp_path / "gpu.json", "--minutes", "0", "--only", "operator", "losses")
    assert data["skipped"] == ["operator", "losses"]


def test_gpu_script_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "use --device cpu" in done.stderr
