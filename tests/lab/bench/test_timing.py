"""Interleaving, pairing and clocks of timed steps."""

import gc
import math
import platform
import time

import numpy as np
import pytest

from cli_helpers import python_prints
from nlr_lab.bench.timing import interleaved_step_times, paired_ratio
from refusals import assert_refused
from seeds import rng


def test_arms_take_turns_in_rotating_order():
    calls = []
    arms = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = interleaved_step_times(arms, 4, 2, "wall")
    turns = ["".join(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(turns) == 6
    assert turns[2:] == ["abc", "bca", "cab", "abc"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4, "c": 4}


PAGE_FAULTS = """
import resource
import torch
from nlr_lab.bench.timing import keep_freed_memory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        for mebibytes in (8, 24, 64):
            torch.ones(mebibytes << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults(4)
print(faults(10))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_freed_memory_is_kept():
    """In a process of its own: what a worker of these tests did before decides where its memory comes from."""
    assert int(python_prints(PAGE_FAULTS)) < 1000  # else 2,048 and more in each of the 30


def _spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_process_clock_counts_work_alone():
    arms = {"work": lambda: _spin(0.02), "wait": lambda: time.sleep(0.02)}
    by_cpu = interleaved_step_times(arms, 3, 0, "process")
    by_wall = interleaved_step_times(arms, 3, 0, "wall")
    assert min(by_cpu["work"]) >= 0.02
    assert max(by_cpu["wait"]) < 0.01
    assert min(by_wall["wait"]) >= 0.02


def test_drift_cancels_in_ratios():
    """Drift that both arms see cancels: the second half of the rounds is three times as slow."""
    done = {"slow": 0, "fast": 0}

    def arm(name: str, seconds: float):
        def step() -> None:
            done[name] += 1
            _spin(seconds * (1 if done[name] <= 6 else 3))

        return step

    times = interleaved_step_times({"slow": arm("slow", 0.006), "fast": arm("fast", 0.003)}, 11, 1)
    assert paired_ratio(times["slow"], times["fast"]).median == pytest.approx(2, rel=0.1)
    assert max(times["fast"]) > 2.5 * min(times["fast"])


def test_garbage_is_collected_between_rounds():
    states = []
    interleaved_step_times({"arm": lambda: states.append(gc.isenabled())}, 2, 1)
    assert states == [False] * 3
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleaved_step_times({"arm": lambda: 1 / 0}, 2)
    assert gc.isenabled()


def test_ratio_equals_numpys_and_its_interval_covers():
    generator = rng()
    covered = 0
    for _ in range(100):
        base = generator.uniform(1, 2, 31)
        times = base * 1.2 * generator.lognormal(0, 0.05, 31)
        ratio = paired_ratio(list(times), list(base), resamples=400)
        quartiles = tuple(np.quantile(times / base, [0.25, 0.5, 0.75]))
        assert (ratio.lower_quartile, ratio.median, ratio.upper_quartile) == pytest.approx(quartiles)
        assert ratio.low <= ratio.median <= ratio.high
        assert ratio.n == 31
        covered += ratio.low <= 1.2 <= ratio.high
    assert covered >= 85  # 95 in truth; below 85 with a chance of less than 1e-4
    assert str(paired_ratio([2.0], [1.0])) == "2.000 (n = 1)", "few rounds bear no interval of 95 %"
    assert_refused("no measurable time", paired_ratio, [1.0], [0.0])


def test_interval_is_as_wide_as_the_medians_of_normal_logs():
    found = [paired_ratio(np.exp(row), np.ones(401), resamples=1000) for row in rng().normal(0, 0.1, (30, 401))]
    widths = [math.log(each.high / each.low) for each in found]
    doubled = [paired_ratio(2 * np.exp(row), np.ones(401), resamples=1000) for row in rng().normal(0, 0.1, (30, 401))]
    assert 2 * 1.96 * np.mean([each.log_standard_error for each in doubled]) == pytest.approx(np.mean(widths), rel=0.1)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * math.sqrt(math.pi / 2) * 0.1 / math.sqrt(401), rel=0.1)


def test_one_warm_up_and_one_round_are_taken_however_late():
    done = []
    times = interleaved_step_times({"arm": lambda: done.append(1)}, rounds=5, warmup=3, max_seconds=-1.0)
    assert (len(done), len(times["arm"])) == (2, 1)
