"""The statistics against brute force, closed forms and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

import nlr_lab.compare.statistics as pairs
from compare_helpers import a_run
from nlr_lab.bench.timing import paired_ratio


def summarise(ratios, **options):
    return paired_ratio(ratios, [1.0] * len(ratios), **options)


def make_run(loss, total=1000, every=10, start=0):
    curve = tuple((step, float(loss(step))) for step in range(start, total + 1, every))
    return a_run(1, curve[-1][1], total, curve=curve)


def test_crossing_matches_dense_search_on_noisy_curves(rng):
    for _ in range(50):
        steps = np.cumsum(rng.integers(1, 5, 30))
        losses = 4.0 / np.sqrt(steps) + rng.normal(0, 0.15, 30)
        target = rng.uniform(losses.min(), losses.max())
        dense = np.union1d(np.linspace(steps[0], steps[-1], 20001), steps)  # a dip may be narrower than the spacing
        brute = dense[np.argmax(np.interp(dense, steps, losses) <= target)]
        found = pairs.first_crossing(np.stack([steps, losses], 1), target)
        assert found == pytest.approx(brute, abs=2 * (steps[-1] - steps[0]) / 20000)


def test_crossing_edges():
    assert pairs.first_crossing([(0, 3.0), (10, 2.0), (20, 1.0)], 0.5) is None
    assert pairs.first_crossing([(0, 3.0), (10, 2.0), (20, 1.0)], 1.0) == 20
    assert pairs.first_crossing([(5, 1.0), (10, 0.5)], 2.0) == 5
    assert pairs.first_crossing([(0, 3.0), (10, 1.0), (20, 3.0), (30, 0.0)], 2.0) == 5, "the first of several crossings"
    assert pairs.first_crossing([(0, 3.0), (10, math.nan), (20, 1.0)], 2.0) == 20
    with pytest.raises(AssertionError, match="increase"):
        pairs.first_crossing([(0, 1.0), (0, 1.0)], 1.0)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_interval_is_students_and_the_same_decision_as_the_test(rng, n):
    for row in rng.normal(0.0, 0.01, (100, n)):
        found, half = pairs.paired_mean(row), stats.t.ppf(0.975, n - 1) * row.std(ddof=1) / math.sqrt(n)
        assert (found.low, found.high) == (pytest.approx(row.mean() - half), pytest.approx(row.mean() + half))
        assert found.shown == (found.p_value < 0.05)


@pytest.mark.parametrize(
    ("estimate", "word"),
    [
        (pairs.paired_mean([0.1]), "one seed"),
        (pairs.paired_mean([]), "no seed"),
        (pairs.paired_mean([0.1, 0.1, 0.1]), "no spread"),
        (pairs.paired_mean([0.0, 0.0]), "no spread"),
        (pairs.geometric_mean([1.2]), "one seed"),
    ],
)
def test_gives_no_interval_without_seeds_or_spread(estimate, word):
    assert estimate.low is estimate.high is estimate.p_value is None
    assert word in estimate.note
    assert not estimate.shown


def test_holm_is_the_closed_bonferroni_procedure(rng):
    """Brute force: the adjusted p of a hypothesis is the largest Bonferroni p of any set that holds it."""
    for _ in range(40):
        p = list(rng.uniform(0, 1, rng.integers(1, 7)) ** 3)
        sets = [s for size in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), size)]
        brute = [max(min(1.0, len(s) * min(p[i] for i in s)) for s in sets if index in s) for index in range(len(p))]
        assert pairs.holm([*p[:1], None, *p[1:]]) == pytest.approx([*brute[:1], None, *brute[1:]])
    assert pairs.holm([]) == []


@pytest.mark.parametrize("k", [0.3, 0.95, 1.0, 1.05, 3.0])
def test_speedup_of_a_curve_that_runs_k_times_as_fast(k):
    reference = make_run(lambda s: 5.0 - s / 500)
    speed = pairs.seed_speed(reference, make_run(lambda s: 5.0 - k * s / 500))
    assert (speed.reached, speed.bound) == (k >= 1, False)
    assert speed.step_speedup == (pytest.approx(k) if k >= 1 else None)
    assert speed.matched_speedup == pytest.approx(k)


def test_speeds_that_are_no_numbers():
    falling = make_run(lambda s: 5.0 - s / 500)
    useless = make_run(lambda s: 6.0 + s / 500)
    speed = pairs.seed_speed(falling, useless)
    assert (speed.reached, speed.step_speedup, speed.matched_speedup) == (False, None, None)
    assert "untrained" in speed.note
    speed = pairs.seed_speed(useless, falling)
    assert speed.reached
    assert speed.step_speedup is None
    assert "before training" in speed.note
    late = make_run(lambda s: 2.0, start=100)
    assert pairs.seed_speed(falling, late).bound


@pytest.mark.parametrize(("seeds", "jitter"), [(2, 0.1), (4, 0.1), (4, 0.5)])
def test_wall_clock_is_the_quotient_and_its_interval_covers(rng, seeds, jitter):
    true_speed, true_ratio, trials, covered = 1.3, 1.1, 500, 0
    for _ in range(trials):
        speed = pairs.geometric_mean(rng.lognormal(math.log(true_speed), 0.04, seeds))
        timing = summarise(rng.lognormal(math.log(true_ratio), jitter, 31), resamples=200)
        wall = pairs.wall_clock_speedup(speed, timing)
        assert wall.value == pytest.approx(speed.value / timing.median)
        assert math.log(wall.high / wall.low) >= math.log(speed.high / speed.low), "never narrower than the steps"
        assert wall.shown == (wall.p_value < 0.05), "interval and p-value are the same decision"
        covered += wall.low <= true_speed / true_ratio <= wall.high
    # The combination errs on the wide side; what must not happen is a lack of coverage.
    assert covered / trials > 0.95 - 5 * math.sqrt(0.95 * 0.05 / trials)


def test_wall_clock_without_its_parts():
    one = pairs.geometric_mean([1.2])
    timing = summarise([1.1, 1.2, 1.3])
    assert pairs.wall_clock_speedup(one, timing).value == pytest.approx(1.0)
    assert pairs.wall_clock_speedup(one, timing).low is None
    assert pairs.wall_clock_speedup(one, None).value is None
    missing = pairs.Estimate(value=None, n=3, null=1.0, note="not reached (by 1 of 3 seeds)")
    assert pairs.wall_clock_speedup(missing, timing).note == missing.note


def test_bootstrap_error_of_the_median_matches_simulation(rng):
    spread = np.median(rng.normal(0, 0.1, (4000, 41)), axis=1).std()
    found = [summarise(np.exp(rng.normal(0, 0.1, 41)), resamples=500).log_standard_error for _ in range(200)]
    assert np.mean(found) == pytest.approx(spread, rel=0.15)
    summary = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (summary.lower_quartile, summary.median, summary.upper_quartile) == (2.0, 3.0, 4.0)


def test_pair_uses_common_seeds_and_cancels_what_they_share(rng):
    shift = {seed: rng.normal(0, 1.0) for seed in range(1, 6)}
    reference = {s: make_run(lambda x, s=s: 5 + shift[s] - x / 500) for s in shift}
    arm = {s: make_run(lambda x, s=s: 5 + shift[s] - (1.2 + 0.001 * s) * x / 500) for s in (1, 2, 3, 4)}
    pair = pairs.compare_pair(reference, arm)
    assert (pair["n"], sorted(pair["seeds"]), pair["reached"]) == (4, [1, 2, 3, 4], 4)
    assert pair["delta"]["value"] == pytest.approx(-0.4 - 0.002 * 2.5)
    assert pair["delta"]["shown"], "the shared seed effect of sd 1 must cancel"
    assert pair["step_speedup"]["value"] == pytest.approx(1.2025, abs=1e-4)
    assert pair["wall_clock_speedup"]["note"] == "step time not measured"


def test_pair_partly_reached_gives_no_step_speedup_but_a_matched_one():
    reference = {s: make_run(lambda x: 5 - x / 500) for s in (1, 2)}
    arm = {1: make_run(lambda x: 5 - 1.25 * x / 500), 2: make_run(lambda x: 5 - 0.8 * x / 500)}
    pair = pairs.compare_pair(reference, arm, summarise([1.1, 1.1]))
    assert pair["reached"] == 1
    assert pair["step_speedup"]["value"] is pair["wall_clock_speedup"]["value"] is None
    assert "1 of 2" in pair["step_speedup"]["note"]
    assert pair["matched_speedup"]["value"] == pytest.approx(1.0)
    assert pair["matched_wall_clock_speedup"]["value"] == pytest.approx(1 / 1.1)


def test_pair_with_a_diverged_seed_gives_no_aggregate():
    good = make_run(lambda x: 5 - x / 500)
    bad = a_run(2, None, curve=((0, 5.0), (10, math.nan)))
    pair = pairs.compare_pair({1: good, 2: good}, {1: good, 2: bad})
    assert (pair["diverged"], list(pair["seeds"])) == (1, [1])
    for name in ("delta", "step_speedup", "matched_speedup", "wall_clock_speedup"):
        assert pair[name]["value"] is None
        assert "diverged in 1 of 2" in pair[name]["note"]
    note = pairs.compare_pair({1: good, 2: bad}, {1: good, 2: good})["delta"]["note"]
    assert note == "the reference diverged in 1 of 2 seeds"
    note = pairs.compare_pair({1: good, 2: bad}, {1: bad, 2: bad})["delta"]["note"]
    assert note == "diverged in 2 of 2 seeds, and the reference in 1"


def test_pair_notices_a_reference_whose_curve_rose_again():
    over = make_run(lambda x: 3 + abs(x - 500) / 500)
    assert pairs.compare_pair({1: over}, {1: make_run(lambda x: 5 - x / 400)})["early"] == 1
    empty = pairs.compare_pair({}, {})
    assert (empty["n"], empty["delta"]["value"], empty["step_speedup"]["value"]) == (0, None, None)


def test_wall_clock_interval_is_movers():
    speed, timing = pairs.geometric_mean([1.2, 1.3, 1.45]), summarise([1.1, 1.2, 1.3, 1.15])
    errors = ((speed.dof, speed.standard_error), (timing.n - 1, timing.log_standard_error))
    half = math.hypot(*(stats.t.ppf(0.975, dof) * error for dof, error in errors))
    wall = pairs.wall_clock_speedup(speed, timing)
    assert math.log(wall.high / wall.value) == pytest.approx(half)
    assert math.log(wall.value / wall.low) == pytest.approx(half)


def test_edges_of_the_cautions():
    def evaluated(count):
        return {"arm": [[(step, 1.0) for step in range(count)]]}

    assert pairs.speed_cautions(evaluated(10), 0) == {}
    assert "read off 9 evaluations" in pairs.speed_cautions(evaluated(9), 0)["evaluations"]
    at_the_end = make_run(lambda step: 5 - step / 500 if step <= 990 else 3.03)
    assert pairs.compare_pair({1: at_the_end}, {1: make_run(lambda step: 5 - step / 400)})["early"] == 0
    late, useless = make_run(lambda step: 2.0 - step / 1e4, start=100), make_run(lambda step: 5.0)
    assert pairs.seed_speed(late, useless).bound, "a matched speed, read off the reference's first evaluation"
