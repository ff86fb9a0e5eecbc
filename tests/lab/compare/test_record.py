"""Records of finished runs: cautions beside claims, training losses of image models, what a diverged run leaves."""

import math
from dataclasses import replace

import pytest

from compare_helpers import a_record, a_run, an_arm
from nlr_lab.compare.field_report import field_sections
from nlr_lab.compare.field_report import findings as field_findings
from nlr_lab.compare.report import findings, render_report, training_rows
from nlr_lab.compare.run import next_choices
from nlr_lab.compare.statistics import curve_cautions, late_change, paired_mean
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


def test_cautions_a_claim_on_curves_that_still_fall():
    results = compared(falling, every=5)
    line = verdict(results)
    assert "**faster**" in line
    assert ". **Caution**: the curves have not flattened (over the last 20 % of the steps " in line
    assert "`baseline` by 0.4 and `noble` by 0.4 still improved, more than the difference)" in line
    assert results["against"]["baseline"]["noble"]["cautions"] == [line.partition("**Caution**: ")[2].rstrip(".")]


def test_lets_a_claim_on_flat_curves_stand_alone():
    results = compared(flattened, every=5)
    assert "**faster**" in verdict(results)
    assert "Caution" not in verdict(results)
    assert results["against"]["baseline"]["noble"]["cautions"] == []


def test_cautions_a_speed_read_off_few_evaluations():
    assert "the speed is read off 5 evaluations, fewer than 10" in verdict(compared(flattened, every=20))


def test_three_steps_are_no_evidence():
    line = verdict(compared(falling, every=1, steps=3))
    assert "**faster**" in line
    assert ". **Caution**: the curves have not flattened (over the last 33 % of the steps" in line
    assert "the speed is read off 3 evaluations, fewer than 10" in line


def test_cautions_a_crossing_at_the_first_evaluation():
    results = compared(lambda step, steps: 3.0 + 1e-3 * (step < steps), every=5)
    assert "in 3 of 3 seeds the crossing lies at the first evaluation" in verdict(results)


def test_cautions_runs_evaluated_at_their_end_alone():
    line = verdict(compared(falling, every=100))
    assert "**Caution**: the runs are evaluated too seldom to tell whether their curves have flattened." in line


def test_cautions_scores_that_still_rise_without_speed():
    accuracy = Measure(name="accuracy", higher_is_better=True, unit="")
    line = verdict(compared(falling, every=20, measure=accuracy))
    assert "the curves have not flattened" in line
    assert "read off" not in line
    assert "Caution" not in verdict(compared(flattened, every=20, measure=accuracy))


def test_omits_cautions_where_nothing_is_claimed():
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


# --- training losses of image models --------------------------------------------------------------------------

LOST = {"train": None, "plain": None, "loss": None}


def augmented(seed, train, plain, loss=2.0):
    return a_run(seed, loss, train_loss=train, plain_loss=plain)


def rows(*arms):
    results = a_record(arms)
    assert "## Training loss" in render_report(results)
    return {name: cells for name, *cells in training_rows(results)}


def baseline():
    return an_arm("baseline", *(augmented(seed, 1.5 + 0.01 * seed, 1.4 + 0.02 * seed) for seed in SEEDS))


def test_pairs_both_training_losses_by_seed():
    noble = an_arm("noble", *(augmented(seed, 1.4 + 0.012 * seed, 1.5 - 0.01 * seed**2) for seed in SEEDS))
    found = rows(baseline(), noble)
    assert found["baseline"] == ["1.5200", "reference", "-", "1.4400", "reference", "-"]
    for at, differences in (
        (1, [-0.1 + 0.002 * seed for seed in SEEDS]),
        (4, [0.1 - 0.01 * seed**2 - 0.02 * seed for seed in SEEDS]),
    ):
        delta = paired_mean(differences)
        assert found["noble"][at] == f"{delta.value:+.4f} [{delta.low:+.4f}, {delta.high:+.4f}]"


def test_keeps_the_row_of_an_arm_that_diverged():
    noble = an_arm("noble", augmented(1, 1.4, 1.3), augmented(2, **LOST), augmented(3, 1.4, 1.3))
    lost = "diverged in 1 of 3 seeds"
    assert rows(baseline(), noble)["noble"] == [lost, "it diverged", "-", lost, "it diverged", "-"]
    assert (
        rows(baseline(), an_arm("noble", choice=None))["noble"] == ["diverged at every choice", "it diverged", "-"] * 2
    )


def test_names_a_reference_that_diverged():
    reference = an_arm("baseline", augmented(1, 1.4, 1.3), augmented(2, **LOST), augmented(3, 1.4, 1.3))
    found = rows(reference, an_arm("noble", *(augmented(seed, 1.4, 1.3) for seed in SEEDS)))
    assert found["baseline"][0] == "diverged in 1 of 3 seeds"
    assert found["noble"] == ["1.4000", "the reference diverged", "-", "1.3000", "the reference diverged", "-"]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_names_a_loss_that_is_no_number(missing):
    noble = an_arm("noble", *(augmented(seed, missing if seed == 2 else 1.4 + 0.01 * seed**2, 1.3) for seed in SEEDS))
    assert rows(baseline(), noble)["noble"][1] == "it diverged"


# --- the choice of a learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize(("losses", "expected"), [((0.63, 0.62), 9e-3), ((0.62, 0.63), 1e-3 / 3)])
def test_loss_chooses_where_the_metric_says_nothing(losses, expected):
    """Matthews correlation is 0 of every classifier that knows the commonest class alone."""
    tried = [a_run(0, loss, lr=lr, score=0.1, selection=0.0) for lr, loss in zip((1e-3, 3e-3), losses, strict=True)]
    measure = Measure(name="matthews", higher_is_better=True, unit="")
    (choice,) = next_choices(tried, measure)
    assert choice.lr == pytest.approx(expected, rel=1e-5)
    better = replace(tried[0], selection=0.1, final_loss=9.0)
    (choice,) = next_choices([better, *tried[1:]], measure)
    assert choice.lr == pytest.approx(1e-3 / 3, rel=1e-5), "only where it says nothing"
