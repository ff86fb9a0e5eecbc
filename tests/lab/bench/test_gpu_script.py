"""benchmarks/gpu.py, rehearsed on the CPU: its first use is on a machine that is lent by the minute."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def rehearse(output: Path, *options: str) -> dict:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--output", str(output), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    data = json.loads(output.read_text())
    assert json.loads(done.stdout) == data
    assert data["failed"] == data["wrong"] == data["out_of_time"] == {}
    return data


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script as a module, and a function that runs it here with options and returns its status and its file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*options):
        output = tmp_path / "gpu.json"
        command = ["gpu.py", "--device", "cpu", "--tiny", "--rounds", "2", "--output", str(output), *options]
        monkeypatch.setattr(sys, "argv", command)
        status = module.main()
        return status, json.loads(output.read_text())

    yield module, run
    torch.set_float32_matmul_precision("highest")


@pytest.mark.slow
def test_runs_on_the_cpu(tmp_path):
    data = rehearse(tmp_path / "gpu.json", "--rounds", "2", "--steps", "40")
    ranks = data["sizes"]["step"]["ranks"]
    all_arms = [f"{name} r={rank}" for name in ("noble", "noble-official") for rank in ranks]
    fewer = dict.fromkeys(("step-compiled", "step-graphs"), all_arms[:: len(ranks)])
    assert data["skipped"] == []
    for part, arms in {"step-eager": all_arms, **fewer}.items():
        assert [row["arm"] for row in data[part]["rows"]] == arms
        assert 0 < data[part]["baseline_utilization"] < 1.5
        assert all(row["figures"]["launches"] > 0 for row in data[part]["rows"])
    for arm, losses in data["losses"].items():
        assert len(losses) == 40, arm
        assert losses[-1] < losses[0] - 0.3, arm
    assert len(set(map(tuple, data["losses"].values()))) == 1 + len(ranks)
    for part in ("adapters", "adapters-compiled"):
        assert {row["arm"] for row in data[part]["rows"]} == {"sine-lora r=8", "sine-dora r=8", "dora r=8"}
    ratios = {row["arm"]: row["figures"].get("saved_ratio") for row in data["peak"]["rows"]}
    assert ratios["sine-lora r=8"] <= 1.01
    assert ratios["sine-dora r=8"] <= 1.01 < ratios["dora r=8"]
    panels = {row["panel"].split(",")[0] for part in ("op", "op-sine") for row in data[part]["rows"]}
    assert panels == {"rational", "gated", "sine"}
    assert all(data[part]["rows"] for part in ("decode", "decode-graphs", "memory"))
    (forms,) = data["forms"].values()
    assert set(forms) == {
        f"{name}={value}" for name in ("JOIN_UP", "JOIN_DOWN", "FUSE_DOWN") for value in (False, True)
    }


def test_every_kernel_is_compared(tmp_path):
    data = rehearse(tmp_path / "gpu.json", "--only", "kernels")
    kinds = {name.split()[0] for name in data["kernels"]}
    assert kinds == {"noble", "rational", "rational_gated", "rational_anchored", "sine", "sine-dora"}
    assert sum(name.endswith("bfloat16") for name in data["kernels"]) * 2 == len(data["kernels"])


def test_nothing_is_measured_after_a_wrong_kernel(script, monkeypatch, capsys):
    module, run = script
    right = module.ops.sine_layer
    monkeypatch.setattr(module.ops, "sine_layer", lambda *inputs, **how: right(*inputs, **how) * 1.01)
    status, data = run("--only", "kernels", "step-eager")
    assert status == 2
    assert set(data["wrong"]) == {name for name in data["kernels"] if name.startswith("sine")}
    assert "number 0" in next(iter(data["wrong"].values()))
    assert data["skipped"] == ["step-eager"]
    out, err = capsys.readouterr()
    assert "sine r=16 bfloat16: number 0" in err
    assert json.loads(out) == data


def test_a_part_that_fails_or_takes_too_long_stops_itself_alone(script, monkeypatch):
    module, run = script

    def slow(sizes, options, found):
        found["finished"] = 2
        time.sleep(60)

    parts = {
        "decode": (0.2, slow),
        "op": (9, lambda *_: 1 / 0),
        "memory": (9, lambda sizes, options, found: found.update(a=1)),
    }
    monkeypatch.setattr(module, "PARTS", parts)
    status, data = run("--only", *parts)
    assert status == 1
    assert data["out_of_time"]["decode"] < 10
    assert data["decode"] == {"finished": 2}
    assert data["failed"] == {"op": "ZeroDivisionError: division by zero"}
    assert data["memory"] == {"a": 1}
    assert run("--only", "memory", "--minutes", "0")[1]["skipped"] == ["memory"]
    monkeypatch.setattr(module, "PARTS", {"kernels": parts["decode"]})
    assert run()[0] == 2  # not shown to be right


def test_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "device cuda cannot be used here" in done.stderr
