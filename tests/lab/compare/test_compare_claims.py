"""Claims of a comparison whose curves have not flattened, or are evaluated too seldom, carry a caution beside them."""

import math

import pytest

from compare_helpers import a_record, a_run, an_arm
from nlr_lab.compare.fields.record import field_sections
from nlr_lab.compare.fields.report import findings as field_findings
from nlr_lab.compare.models.report import findings, render_report
from nlr_lab.compare.statistics import curve_cautions, late_change
from nlr_lab.tasks.task import LOSS, Measure

SEEDS = (1, 2, 3)
GAIN = 0.2


def falling(step, steps):
    """Still falls by 0.4 over the last fifth of the steps."""
    return 5 - 2 * step / steps


def flattened(step, steps):
    return 3 + 2 * math.exp(-20 * step / steps)


def compared(shape, every, steps=100, measure=LOSS):
    """A baseline and an arm that ends GAIN lower (a score: higher), its curve evaluated every so many steps."""

    def a_run_of(seed, gain):
        def value(step):
            return shape(step, steps) + 0.1 * seed - gain + 0.001 * seed**2 * (gain > 0)

        points = tuple((step, value(step)) for step in range(every, steps + 1, every))
        score = {} if measure.is_loss else {"score": -points[-1][1], "metric_curve": tuple((s, -v) for s, v in points)}
        return a_run(seed, value(steps), steps, curve=points, **score)

    arms = [
        an_arm(name, *(a_run_of(seed, gain) for seed in SEEDS)) for name, gain in (("baseline", 0.0), ("noble", GAIN))
    ]
    return a_record(arms, SEEDS, measure=measure)


def verdict(results):
    """The line that claims."""
    (line,) = (line for line in findings(results) if line.startswith("`noble`"))
    assert "**lower**" in line or "**higher**" in line
    assert line in render_report(results)
    return line


def test_claim_on_curves_that_still_fall_says_so():
    results = compared(falling, every=5)
    line = verdict(results)
    assert "**faster**" in line
    assert ". **Caution**: the curves have not flattened (over the last 20 % of the steps " in line
    assert "`baseline` by 0.4 and `noble` by 0.4 still improved, more than the difference)" in line
    assert results["against"]["baseline"]["noble"]["cautions"] == [line.partition("**Caution**: ")[2].rstrip(".")]


def test_claim_on_flat_curves_evaluated_often_stands_alone():
    results = compared(flattened, every=5)
    assert "**faster**" in verdict(results)
    assert "Caution" not in verdict(results)
    assert results["against"]["baseline"]["noble"]["cautions"] == []


def test_speed_read_off_few_evaluations_says_so():
    assert "the speed is read off 5 evaluations, fewer than 10" in verdict(compared(flattened, every=20))


def test_three_steps_are_no_evidence():
    line = verdict(compared(falling, every=1, steps=3))
    assert "**faster**" in line
    assert ". **Caution**: the curves have not flattened (over the last 33 % of the steps" in line
    assert "the speed is read off 3 evaluations, fewer than 10" in line


def test_crossing_at_the_first_evaluation_is_no_interpolation():
    results = compared(lambda step, steps: 3.0 + 1e-3 * (step < steps), every=5)
    assert "in 3 of 3 seeds the crossing lies at the first evaluation" in verdict(results)


def test_runs_evaluated_at_their_end_alone_cannot_tell():
    line = verdict(compared(falling, every=100))
    assert "**Caution**: the runs are evaluated too seldom to tell whether their curves have flattened." in line


def test_scores_that_still_rise_are_cautioned_without_speed():
    accuracy = Measure(name="accuracy", higher_is_better=True, unit="")
    line = verdict(compared(falling, every=20, measure=accuracy))
    assert "the curves have not flattened" in line
    assert "read off" not in line
    assert "Caution" not in verdict(compared(flattened, every=20, measure=accuracy))


def test_difference_that_is_not_claimed_needs_no_caution():
    results = compared(falling, every=5)
    pair = results["against"]["baseline"]["noble"]
    for name in ("delta", "step_speedup", "wall_clock_speedup"):
        pair[name]["shown"] = False
    assert "Caution" not in " ".join(findings(results))


def field_arm(kind, scores, late):
    """Ends at `scores`, of which the last half of the steps brought `late`."""
    runs = [
        a_run(seed, 1.0, 20, score=score, metric_curve=((10, score - late), (20, score)), metrics={"psnr": score})
        for seed, score in enumerate(scores)
    ]
    return an_arm(kind, *runs, settings={"kind": kind, "rank": 1})


@pytest.mark.parametrize(("late", "cautioned"), [(3.0, True), (0.5, False)])
def test_fields_claim_by_the_same_rule(late, cautioned):
    arms = (field_arm("low-rank", (20.0, 21.0, 22.0), late), field_arm("sine", (21.0, 22.1, 23.2), 0.1))
    psnr = Measure(name="psnr", higher_is_better=True, unit="dB")
    results = field_sections(a_record(arms, (0, 1, 2), measure=psnr), 1000, {"low-rank": None, "sine": 7.0})
    line = field_findings(results)[0]
    assert "above by 1.1 dB" in line
    assert ("Caution" in line) == cautioned == bool(results["against"]["low-rank"]["sine"]["cautions"])
    assert not cautioned or "over the last 50 % of the steps `low-rank` by 3 still improved" in line


def test_late_change_needs_an_evaluation_in_the_first_four_fifths():
    assert late_change([(50, 4.0), (80, 3.5), (90, 2.0), (100, 3.0)]) == pytest.approx((-0.5, 0.2))
    assert late_change([(81, 4.0), (100, 3.0)]) is None
    assert late_change([]) is None
    assert curve_cautions(0.4, {"a": [[(80, 3.5), (100, 3.0)], [(80, 3.5), (100, 3.4)]]}) == ()
