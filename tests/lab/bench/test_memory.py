"""`nlr bench memory` and peak memory at toy sizes, against what can be counted by hand."""

import json
from dataclasses import replace

import pytest
import torch

from nlr_lab.bench.result import draw
from nlr_lab.bench.training import TrainBenchConfig, bench_memory, peak_bytes

TINY = TrainBenchConfig(
    width=64,
    layers=2,
    heads=2,
    hidden=96,
    vocab_size=67,
    sequence_length=32,
    batch_size=4,
    methods=("noble", "sine-lora", "sine-dora", "dora", "nora"),
    ranks=(4,),
    modes=("eager",),
)


def test_peak_agrees_with_counts_by_hand():
    x = torch.randn(1 << 16, requires_grad=True)
    assert x.nbytes <= peak_bytes(lambda: x.detach() + 1, "cpu") <= x.nbytes + 1024
    # sin(x) and cos(x) are kept, their product is the third; of the backward pass one at a time on top
    peak = peak_bytes(lambda: (torch.sin(x) * torch.cos(x)).sum().backward(), "cpu")
    assert 3 * x.nbytes <= peak <= 6 * x.nbytes
    assert peak_bytes(lambda: None, "cpu") == 0


# torch hides it where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_report_agrees_with_counts_by_hand(mode, tmp_path):
    lines = []
    result = bench_memory(replace(TINY, modes=(mode,)), progress=lines.append)
    rows = {row.arm: row.figures for row in result.rows}
    assert list(rows) == [
        "baseline",
        *(f"{name} r=4" for name in ("lora", "noble", "sine-lora", "sine-dora", "dora", "nora")),
    ]
    # NOBLE keeps h alone: r numbers a token for each of the six linears of a block
    h = 2 * 6 * 4 * 32 * 4 * 4
    extra = rows["noble r=4"]["saved_bytes"] - rows["baseline"]["saved_bytes"]
    assert h <= extra <= 1.05 * h
    assert rows["noble r=4"]["saved_ratio"] == rows["noble r=4"]["saved_bytes"] / rows["baseline"]["saved_bytes"]
    # sine keeps what LoRA keeps, or less; nothing as large as a weight
    for name in ("sine-lora r=4", "sine-dora r=4"):
        assert rows[name]["saved_bytes"] <= 1.01 * rows["lora r=4"]["saved_bytes"]
    assert rows["nora r=4"]["trained"] < rows["lora r=4"]["trained"]
    for row in result.rows:
        over = {"baseline": None, "noble r=4": "baseline", "lora r=4": "baseline"}
        assert row.over == over.get(row.arm, "lora r=4")
        assert row.figures["peak_bytes"] > row.figures["saved_bytes"] * 0.9
        assert row.arm in str(result)
    weights = 4 * rows["baseline"]["trained"]
    assert weights <= rows["baseline"]["weights_bytes"] <= weights + 1024  # buffers
    assert json.loads(result.to_json())["rows"][0]["arm"] == "baseline"
    assert len(lines) == len(rows)
    draw(result, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_branches_of_a_base_model_save_three_percent_more():
    base = {"width": 1024, "layers": 12, "heads": 16, "hidden": 2752, "ranks": (64,), "bf16": True}
    config = TrainBenchConfig(**base, sequence_length=64, batch_size=1, modes=("eager",))
    baseline, noble = bench_memory(config, progress=lambda line: None).rows
    assert 1 < noble.figures["saved_bytes"] / baseline.figures["saved_bytes"] <= 1.03
