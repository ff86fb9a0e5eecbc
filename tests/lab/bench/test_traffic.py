"""The byte and FLOP model of a branch on a GPU against counts by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nlr_lab.bench.settings import TrafficBenchConfig, TrainBenchConfig
from nlr_lab.bench.traffic import STRUCTURES, Shape, bench_traffic, branch_kernels, optimizer_bytes
from nlr_lab.bench.training import Stepper, bench_arms
from nlr_lab.plan.presets import HARDWARE

TINY = Shape(T=2, I=3, O=5, r=1)
SMALL = TrafficBenchConfig(
    width=32, hidden=48, layers=1, vocab_size=67, sequence_length=8, batch_size=2, ranks=(4, 8), hardware="h100"
)


def numbers(structure, shape=TINY):
    return [each.nbytes // 2 for each in branch_kernels(structure, shape) if each.name != "cosnet backward"]


def test_products_apart_by_hand():
    # x (2, 3), y (2, 5), h (2, 1), D (1, 3), U (5, 1)
    assert numbers("products apart") == [6 + 3 + 2, 4, 20 + 2 + 5, 10 + 5 + 2, 12 + 2 + 3, 10 + 2 + 5, 6 + 2 + 3]
    (backward,) = (each for each in branch_kernels("products apart", TINY) if each.name == "cosnet backward")
    # h, du, u, dh2; h, dh2, c1, dh; c1, dh2; four float32 sums of the one tile, written and read
    assert backward.nbytes == 2 * 10 * 2 + 2 * 4 * 4
    assert [each.flops for each in branch_kernels("products apart", TINY)] == [12, 4, 20, 20, 12, 12, 20, 12]


def test_ways_to_join_by_hand():
    def difference(structure, shape=TINY):
        return sum(numbers(structure, shape)) - sum(numbers("products apart", shape))

    assert difference("up as a second range*") == -2 * 10 - 2  # y twice, and h once by the kernel that takes D
    assert difference("up and dX as ranges*") == -2 * 10 - 2 - 2 * 6
    assert difference("all but h, du inside*") == -2 * 10 - 2 - 2 * 6 - 10 - 6
    assert difference("limit: all inside*") == -2 * 10 - 2 * 6 - 10 - 6 - 6 - 10
    # x read and written beside u, W and U read and written; T O is above (I + r) (T + O) for long, wide matrices alone
    wide = Shape(T=50, I=3, O=50, r=1)
    assert difference("today", wide) == 2 * (50 + 50) * 4 - 2 * 50 * 50 - 50
    assert difference("today") == -2
    narrow = Shape(T=50, I=50, O=3, r=1)  # dy beside dh; x is read once for both weights' gradients, D's is copied out
    assert difference("today", narrow) == 2 * (50 + 50) * 4 - 3 * 50 * 50 + 2 * 50 - 50
    assert difference("dx and du one product") == -2 + 2 * 5 * 4 + 2 * 2 - 10
    assert difference("W and Wdown one product") == 2 * 6 * 3 + 2 * 2 - 6


def test_every_structure_has_the_same_flops():
    for shape in (TINY, Shape(64, 48, 96, 16), Shape(512, 512, 1024, 256)):
        flops = {name: sum(each.flops for each in branch_kernels(name, shape)) for name in STRUCTURES}
        assert len(set(flops.values())) == 1
    assert optimizer_bytes(TINY) == 40 * (3 + 5 + 1)


def test_flops_are_those_of_a_counted_step():
    result = bench_traffic(SMALL)
    config = TrainBenchConfig(
        width=32, heads=2, hidden=48, layers=1, vocab_size=67, sequence_length=8, batch_size=2, ranks=(4, 8)
    )
    plain, *branches = (Stepper(config, "eager", arm).flops() for arm in bench_arms(("noble",), (4, 8)))
    scores = 4 * 8 * 32 * 16
    assert result.baseline_flops == plain - 0.5 * scores  # counted steps form the scores again
    found = {row["rank"]: round(1e12 * row["teraflops"]) for row in result.rows if row["structure"] == "today"}
    assert list(found.values()) == [each - plain for each in branches]


def test_times_follow_from_bytes_and_flops():
    result = bench_traffic(SMALL)
    h100 = HARDWARE["h100"]
    assert result.baseline_seconds == pytest.approx(result.baseline_flops / (0.45 * h100.bf16))
    slow = bench_traffic(replace(SMALL, bandwidth_share=1e-9))
    for row in slow.rows:  # nothing but bytes counts
        assert row["milliseconds"] == pytest.approx(1e12 * row["gigabytes"] / (1e-9 * h100.bandwidth))
        assert (row["slack"] is None) != row["structure"].endswith("*")
    fast = bench_traffic(replace(SMALL, product_share=1e-9))
    for row in fast.rows:
        assert row["milliseconds"] >= 1e15 * row["teraflops"] / (1e-9 * h100.bf16) * (1 - 1e-9)
    assert json.loads(result.to_json())["rows"] == result.rows
    assert all(name in str(result) for name in STRUCTURES)


def test_committed_figures_are_those_of_the_model():
    file = Path(__file__).parents[3] / "benchmarks" / "results" / "traffic.json"
    committed, found = (json.loads(text) for text in (file.read_text(), bench_traffic(TrafficBenchConfig()).to_json()))
    assert committed["config"] == found["config"]
    for one, other in zip(committed["rows"], found["rows"], strict=True):
        assert one == pytest.approx(other), "nlr bench traffic --out benchmarks/results/traffic.json"
