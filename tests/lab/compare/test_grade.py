"""Grades of claims: each condition counts, and "faster" needs all but a downstream score."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from compare_helpers import ACCURACY, a_record, an_arm, curved_run
from nlr_lab.compare.grade import CONDITIONS, FASTER, conditions_met
from nlr_lab.compare.report import findings
from nlr_lab.tasks.task import LOSS

PSNR = replace(ACCURACY, name="psnr")
SEEDS = (1, 2, 3)
STUDIES = Path(__file__).parents[3] / "studies"
GAIN = {"baseline": 0.0, "noble": 0.2, "wide": 0.05}


def a_claim(
    *, seeds=SEEDS, rates=(1e-4, 1e-3, 1e-2), every=5, falls=0.05, flops=1.0, wide=None, seconds=1.0, measure=LOSS,
    rises=0.0, more=(),
):  # fmt: skip
    """A record in which noble ends 0.2 lower than the baseline: every condition but a downstream score is met."""

    def shape(step, steps):
        return 3 + 2 * max(0.0, 0.5 - step / steps) + falls * (steps - step) / steps

    def overfitted(step, steps):
        return shape(step, steps) + rises * (step > 0.75 * steps)

    def the_run(name, seed, **more):
        own = overfitted if name == "noble" else shape
        return curved_run(own, seed, GAIN.get(name, 0.0), every, measure=measure, **more)

    counts = {"baseline": 1.0, "noble": flops} | ({} if wide is None else {"wide": wide}) | dict.fromkeys(more, 1.0)
    arms = [
        an_arm(
            name,
            *(the_run(name, seed) for seed in seeds),
            flops=count,
            control=name != "noble",
            tuning=[the_run(name, 0, lr=rate) for rate in rates],
        )
        for name, count in counts.items()
    ]
    pairs = [[("baseline", name) for name in counts if name != "baseline"], [("wide", "noble")] * ("wide" in counts)]
    times = {name: [seconds if name == "noble" else 1.0] * 20 for name in counts}
    times["baseline"] = [1.0 + 1e-3 * (i % 3) for i in range(20)]
    return a_record(arms, seeds, pairs=pairs, measure=measure, times=times)


def test_says_faster_where_all_but_a_downstream_score_is_met():
    results = a_claim()
    assert results["against"]["baseline"]["noble"]["grade"] == list(FASTER)
    line = next(line for line in findings(results) if line.startswith("`noble`"))
    assert "**faster**" in line
    assert line.endswith("Grade 6 of 7; not shown: downstream.")


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"seeds": (1, 2)}, {"seeds"}),
        ({"rises": 0.3}, {"flattened", "equal hours"}),
        ({"falls": 0.0}, {"equal hours"}),  # the baseline's curve was flat
        ({"rates": ()}, {"tuned"}),
        ({"rates": (1e-3, 1e-2)}, {"tuned"}),
        ({"falls": 3.0}, {"flattened"}),
        ({"every": 20}, {"evaluations"}),
        ({"every": 100}, {"flattened", "evaluations", "equal hours"}),
        ({"flops": 1.2}, {"equal FLOPs"}),
        ({"flops": 1.2, "wide": 1.1}, {"equal FLOPs"}),
        ({"seconds": 4.0}, {"equal hours"}),
    ],
)
def test_each_condition_is_missed_on_its_own(change, missing):
    results = a_claim(**change)
    assert set(CONDITIONS) - {*results["against"]["baseline"]["noble"]["grade"]} == {*missing, "downstream"}
    line = next(line for line in findings(results) if line.startswith("`noble`"))
    assert "**faster**" not in line


def test_arms_that_ended_worse_are_judged_by_the_other_ones_flops():
    for flops, met in ((0.5, False), (1.0, True), (2.0, True)):
        results = a_claim(flops=1.0, wide=flops)
        results["against"]["noble"] = {"wide": results["against"]["wide"]["noble"]}
        worse = results["against"]["noble"]["wide"]
        worse["delta"] = worse["delta"] | {"value": -worse["delta"]["value"]}
        assert ("equal FLOPs" in conditions_met(results, "wide", "noble")) == met


def test_hours_are_corrected_for_the_number_of_arms():
    results = a_claim(more=("a", "b", "c"))
    pairs = results["against"]["baseline"]
    for p, met in ((0.012, True), (0.013, False)):
        pairs["noble"]["wall_clock_speedup"]["p_value"] = p
        for other in ("a", "b", "c"):
            pairs[other]["wall_clock_speedup"]["p_value"] = 0.5
        assert ("equal hours" in conditions_met(results, "noble", "baseline")) == met


def test_a_control_of_equal_flops_stands_for_equal_flops():
    assert "equal FLOPs" in conditions_met(a_claim(flops=1.2, wide=1.2), "noble", "baseline")


@pytest.mark.parametrize(("measure", "met"), [(ACCURACY, True), (PSNR, False)], ids=["accuracy", "psnr"])
def test_a_score_on_a_task_is_downstream(measure, met):
    assert ("downstream" in conditions_met(a_claim(measure=measure), "noble", "baseline")) == met


def test_a_record_that_is_silent_on_a_condition_does_not_meet_it():
    results = a_claim()
    pair = results["against"]["baseline"]["noble"]
    del results["metric"], pair["cautions"], pair["p_holm"]
    for arm in results["arms"]:
        del arm["flops_per_token"], arm["head_lr"]
    assert conditions_met(results, "noble", "baseline") == ("tuned", "equal hours")


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*/results.json")), ids=lambda file: file.parent.name)
def test_every_kept_pair_has_the_grade_that_its_record_gives(file):
    parts = json.loads(file.read_text(encoding="utf-8"))
    for part in filter(lambda each: isinstance(each, dict), parts.values()):
        for other, pairs in part.get("against", {}).items():
            for name, pair in pairs.items():
                # Whether curves had flattened is told by their cautions; the first records have only the grade.
                of_curves = set() if "cautions" in pair else {"flattened", "evaluations"}
                assert {*pair["grade"]} - of_curves == {*conditions_met(part, name, other)}, (name, other)
        for pair in part.get("pairs", ()):
            assert {*pair["grade"]} <= {*CONDITIONS}
