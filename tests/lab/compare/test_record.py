"""Records of finished runs, reports and pictures of them: cautions beside claims, training losses, diverged runs."""

import math
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from compare_helpers import ACCURACY, a_record, a_run, an_arm, curved_run
from nlr_lab.compare import report
from nlr_lab.compare.record import TIMING, Folder
from nlr_lab.compare.report import draw_models, findings, mean_curve, render_report, training_rows
from nlr_lab.compare.statistics import curve_cautions, holm, late_change, paired_mean
from nlr_lab.compare.trial import Choice, best_run, next_choices
from nlr_lab.runtime.environment import machine
from nlr_lab.tasks.task import LOSS, Measure
from refusals import assert_refused
from seeds import rng

SEEDS = (1, 2, 3)
GAIN = 0.2


def falling(step, steps):
    """Still falls by 0.4 over the last fifth of the steps."""
    return 5 - 2 * step / steps


def flattened(step, steps):
    return 3 + 2 * math.exp(-20 * step / steps)


def compared(shape, every, measure=LOSS, **options):
    gains = {"baseline": 0.0, "noble": GAIN}
    runs = {
        name: [curved_run(shape, seed, gain, every, measure=measure, **options) for seed in SEEDS]
        for name, gain in gains.items()
    }
    return a_record([an_arm(name, *own) for name, own in runs.items()], SEEDS, measure=measure)


def verdict(results):
    (line,) = (line for line in findings(results) if line.startswith("`noble`"))
    assert "**lower**" in line or "**higher**" in line
    assert line in render_report(results)
    return line


def at_first(step, steps):
    return 3.0 + 1e-3 * (step < steps)


@pytest.mark.parametrize(
    ("shape", "options", "cautions"),
    [
        (falling, {"every": 5}, ["(over the last 20 % of the steps `baseline` by 0.4 and `noble` by 0.4"]),
        (falling, {"every": 1, "steps": 3}, ["(over the last 33 % of the steps", "read off 3 evaluations, fewer than"]),
        (falling, {"every": 100}, ["the runs are evaluated too seldom to tell whether their curves have flattened."]),
        (falling, {"every": 20, "measure": ACCURACY}, ["the curves have not flattened"]),
        (flattened, {"every": 5}, []),
        (flattened, {"every": 20}, ["the speed is read off 5 evaluations, fewer than 10"]),
        (flattened, {"every": 20, "measure": ACCURACY}, []),
        (at_first, {"every": 5}, ["in 3 of 3 seeds the crossing lies at the first evaluation"]),
    ],
)
def test_cautions_a_claim_that_its_curves_do_not_bear(shape, options, cautions):
    results = compared(shape, **options)
    line = verdict(results)
    assert (". **Caution**: " in line) == bool(cautions)
    assert "; ".join(results["against"]["baseline"]["noble"]["cautions"].values()) in line
    for words in cautions:
        assert words in line
    fewer = options in ({"every": 5}, {"every": 1, "steps": 3}) and shape is not at_first
    assert ("in fewer steps" in line) == fewer
    assert "**faster**" not in line, "no hours were measured"
    assert "measure" not in options or "read off" not in line
    for name in ("delta", "step_speedup", "wall_clock_speedup"):
        results["against"]["baseline"]["noble"][name]["shown"] = False
    assert "Caution" not in " ".join(findings(results)), "nothing is claimed"


@pytest.mark.parametrize("measure", [LOSS, ACCURACY])
@pytest.mark.parametrize(("ahead", "cautioned"), [(1, False), (-1, True)])
def test_cautions_a_claim_that_the_tuning_seed_contradicts(ahead, cautioned, measure):
    """At each arm's best learning rate there, of which the other one says nothing."""
    sign = 1 if measure.is_loss else -1

    def runs(value, seeds, **more):
        score = {} if measure.is_loss else {"score": value}
        return [a_run(seed, value + 0.01 * seed, **score, **more) for seed in seeds]

    tried = {"baseline": 3.0, "noble": 3.0 - sign * ahead * 0.2}
    final = {"baseline": 3.0, "noble": 3.0 - sign * 0.5}
    arms = [
        an_arm(name, *runs(final[name], SEEDS), tuning=[*runs(best, [0]), *runs(best + sign, [0], lr=2e-3)])
        for name, best in tried.items()
    ]
    pair = a_record(arms, SEEDS, measure=measure)["against"]["baseline"]["noble"]
    assert ("tuning" in pair["cautions"]) == cautioned
    if cautioned:
        assert f"tuned on ({0.2 * sign:+.3g})" in pair["cautions"]["tuning"]


def test_late_change_needs_an_evaluation_in_the_first_four_fifths():
    assert late_change([(50, 4.0), (80, 3.5), (90, 2.0), (100, 3.0)]) == pytest.approx((-0.5, 0.2))
    assert late_change([(81, 4.0), (100, 3.0)]) is None
    assert late_change([]) is None
    assert curve_cautions(0.4, {"a": [[(80, 3.5), (100, 3.0)], [(80, 3.5), (100, 3.4)]]}) == {}


def test_a_curve_that_rose_again_is_said():
    flat, risen = [[(50, 3.0), (80, 3.0), (100, 3.0)]], [[(50, 2.5), (80, 3.2), (100, 3.4)]]
    (said,) = curve_cautions(0.4, {"a": flat, "b": risen}).items()
    assert said == ("rose", "`b` by 0.9 ended above the best of its curve, by more than the difference")
    assert curve_cautions(1.0, {"a": flat, "b": risen}) == {}
    assert curve_cautions(0.4, {"b": risen}, higher_is_better=True) == {}, "a score's best is its noise's"


LOST = {"train": None, "plain": None, "loss": None}


def augmented(seed, train, plain, loss=2.0):
    return a_run(seed, loss, train_loss=train, plain_loss=plain)


def rows(*arms):
    results = a_record(arms)
    assert "## Training loss" in render_report(results)
    return {name: cells for name, *cells in training_rows(results)}


def test_pairs_both_training_losses_by_seed_and_keeps_the_rows_of_arms_that_diverged():
    baseline = an_arm("baseline", *(augmented(seed, 1.5 + 0.01 * seed, 1.4 + 0.02 * seed) for seed in SEEDS))
    noble = an_arm("noble", *(augmented(seed, 1.4 + 0.012 * seed, 1.5 - 0.01 * seed**2) for seed in SEEDS))
    found = rows(baseline, noble)
    assert found["baseline"] == ["1.5200", "reference", "-", "1.4400", "reference", "-"]
    for at, differences in (
        (1, [-0.1 + 0.002 * seed for seed in SEEDS]),
        (4, [0.1 - 0.01 * seed**2 - 0.02 * seed for seed in SEEDS]),
    ):
        delta = paired_mean(differences)
        assert found["noble"][at] == f"{delta.value:+.4f} [{delta.low:+.4f}, {delta.high:+.4f}]"

    def lost_at(name, lost):
        return an_arm(name, *(augmented(s, **LOST) if s == lost else augmented(s, 1.4, 1.3) for s in SEEDS))

    lost = "diverged in 1 of 3 seeds"
    assert rows(baseline, lost_at("noble", 2))["noble"] == [lost, "it diverged", "-"] * 2
    never = rows(baseline, an_arm("noble", choice=None))["noble"]
    assert never == ["diverged at every choice", "it diverged", "-"] * 2
    found = rows(lost_at("baseline", 2), lost_at("noble", 0))
    assert found["baseline"][0] == lost
    assert found["noble"] == ["1.4000", "the reference diverged", "-", "1.3000", "the reference diverged", "-"]
    for missing in (None, math.nan):
        runs = (augmented(seed, missing if seed == 2 else 1.4 + 0.01 * seed**2, 1.3) for seed in SEEDS)
        assert rows(baseline, an_arm("noble", *runs))["noble"][1] == "it diverged"


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


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({("a", 1e-3): 3.0, ("a", 2e-3): 2.0, ("b", 1e-3): 2.5, ("b", 2e-3): 2.4}, [("a", 4e-3)]),
        ({("a", 1e-3): 2.0, ("a", 2e-3): 3.0, ("b", 1e-3): 2.5, ("b", 2e-3): 2.4}, [("a", 5e-4)]),
        ({("a", 1e-3): 3.0, ("a", 2e-3): 2.0, ("a", 4e-3): None, ("b", 4e-3): 2.5}, []),
        ({("a", 1e-3): None, ("a", 2e-3): None, ("b", 1e-3): None, ("b", 2e-3): None}, [("a", 5e-4), ("b", 5e-4)]),
        ({("a", 1e-3): 2.0}, []),
    ],
    ids=["up", "down", "inside", "diverged", "no-grid"],
)
def test_grid_grows_where_the_best_init_is_at_its_edge(losses, expected):
    tried = [a_run(0, loss, lr=rate, init=init) for (init, rate), loss in losses.items()]
    assert [(choice.init, choice.lr) for choice in next_choices(tried)] == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({(1e-3, 1e-3): 3.0, (2e-3, 1e-3): 2.0, (1e-3, 1e-2): 2.5, (2e-3, 1e-2): 1.0}, [(4e-3, 1e-2), (2e-3, 1e-1)]),
        ({(1e-3, 1e-3): 3.0, (2e-3, 1e-3): 1.0, (4e-3, 1e-3): 2.0, (2e-3, 1e-2): 2.0}, [(2e-3, 1e-4)]),
        ({(1e-3, 1e-3): None, (2e-3, 1e-3): None, (2e-3, 1e-2): None}, [(5e-4, 1e-3), (5e-4, 1e-2)]),
        ({(1e-3, 1e-2): 3.0, (2e-3, 1e-2): 2.0, (4e-3, 1e-2): 3.0}, []),
    ],
    ids=["both", "head", "diverged", "no-grid-of-heads"],
)
def test_grid_grows_at_each_edge_that_the_best_rates_are_at(losses, expected):
    tried = [a_run(0, loss, lr=rate, head_lr=head) for (rate, head), loss in losses.items()]
    assert [(choice.lr, choice.head_lr) for choice in next_choices(tried)] == expected


@pytest.fixture
def drawn(monkeypatch):
    kept = {}
    save = report.save
    monkeypatch.setattr(
        report, "save", lambda figure, path: (kept.update({path.name: figure.axes[0]}), save(figure, path))
    )
    return kept


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_curves_are_truncated_dashed_and_averaged(tmp_path, drawn):
    generator = rng()
    curves = {
        name: [tuple((s, 3 - speed * s / 100 + generator.normal(0, 0.01)) for s in range(0, 101, 10)) for _ in SEEDS]
        for name, speed in (("baseline", 1.0), ("noble", 1.3))
    }
    arms = [
        an_arm(name, *(a_run(seed, curve[-1][1], 100, curve=curve) for seed, curve in zip(SEEDS, own, strict=True)))
        for name, own in curves.items()
    ]
    results = a_record(arms)
    draw_models(tmp_path, results)
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0.01, "an empty picture"
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    axes = drawn["curves.png"]
    baseline, noble = lines(axes)["baseline"], lines(axes)["noble"]
    assert (baseline.is_dashed(), noble.is_dashed()) == (True, False)
    assert min(noble.get_xdata()) == 20, "the first fifth of the steps is left out"
    expected = np.mean([[loss for step, loss in curve if step >= 20] for curve in curves["noble"]], axis=0)
    np.testing.assert_allclose(noble.get_ydata(), expected)
    target = results["arms"][0]["final_loss"]["mean"]
    assert any(np.allclose(line.get_ydata(), target) for line in axes.lines), "the reference's final loss"
    assert len(axes.collections) == 2, "one band for each arm"


def test_training_losses_are_drawn_where_they_are_known(tmp_path, drawn):
    own = {"baseline": [[(5, 5.0), (10, 4.0)], [(5, 5.4), (10, 4.2)]], "noble": [[(5, 3.0), (10, 2.0)]] * 2}
    arms = [
        an_arm(name, *(a_run(seed, train_curve=curve) for seed, curve in enumerate(curves, 1)))
        for name, curves in own.items()
    ]
    results = a_record(arms, (1, 2))
    draw_models(tmp_path, results)
    axes = drawn["training.png"]
    assert (axes.get_ylabel(), len(axes.lines)) == ("training loss", 2)
    np.testing.assert_allclose(lines(axes)["baseline"].get_xydata(), [(5, 5.2), (10, 4.1)])
    assert "![training loss](training.png)" in render_report(results)
    assert "training.png" not in render_report(a_record([an_arm(name, a_run(1)) for name in own], (1,)))


def test_mean_curve_is_of_the_steps_that_every_seed_has():
    steps, mean, low, high = mean_curve([[(0, 4.0), (10, 2.0)], [(0, 2.0), (5, 2.0), (20, 2.0)]])
    np.testing.assert_array_equal(steps, [0, 5, 10])
    np.testing.assert_allclose(mean, [3.0, 2.5, 2.0])
    np.testing.assert_allclose(low, [2.0, 2.0, 2.0])
    np.testing.assert_allclose(high, [4.0, 3.0, 2.0])
    steps, *_ = mean_curve([[(0, 4.0), (10, None), (20, 3.0)]])
    np.testing.assert_array_equal(steps, [0])


def test_diverged_and_missing_curves_are_not_drawn(tmp_path, drawn):
    draw_models(tmp_path, a_record([an_arm("baseline", *(a_run(seed, None) for seed in SEEDS)), an_arm("noble")]))
    assert not drawn["curves.png"].lines
    assert (tmp_path / "curves.png").exists()


def test_rate_sweep_marks_choice_and_divergence(tmp_path, drawn):
    def tuned(name, rates, chosen):
        tuning = [a_run(0, loss, lr=rate) for rate, loss in rates]
        return an_arm(name, *(a_run(seed) for seed in SEEDS), tuning=tuning, choice=Choice(lr=chosen))

    sweeps = [(2e-3, 2.0), (1e-3, 2.1), (4e-3, None)], [(1e-3, 1.9), (2e-3, 1.95)]
    draw_models(tmp_path, a_record([tuned("baseline", sweeps[0], 2e-3), tuned("noble", sweeps[1], 1e-3)]))
    axes = drawn["rates.png"]
    np.testing.assert_allclose(lines(axes)["baseline"].get_xdata(), [1e-3, 2e-3])
    assert axes.get_xscale() == "log"
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[4e-3]]
    rings = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert sorted(line.get_xdata()[0] for line in rings) == [1e-3, 2e-3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.002", "0.004"]


def test_curves_are_drawn_against_tokens_flops_and_hours_where_these_are_known(tmp_path, drawn):
    arms = [
        an_arm(name, a_run(1, 3.0, 100, curve=[(50, 4.0), (100, 3.0)]), flops=flops)
        for name, flops in (("baseline", 10.0), ("noble", 12.0))
    ]
    results = a_record(arms, (1,), times={"baseline": [36.0] * 3, "noble": [72.0] * 3})
    results["recipe"]["settings"] |= {"task.text.sequence_length": 8, "train.batch_size": 4}
    draw_models(tmp_path, results)
    panels = [axes for axes in drawn["curves.png"].figure.axes if axes.lines]
    assert [axes.get_xlabel() for axes in panels] == ["step", "training FLOPs", "hours of training"]
    reached = {axes.get_xlabel(): lines(axes)["noble"].get_xdata()[-1] for axes in panels}
    assert reached == pytest.approx({"step": 100, "training FLOPs": 3 * 100 * 32 * 12.0, "hours of training": 2.0})
    assert lines(panels[2])["baseline"].get_xdata()[-1] == pytest.approx(1.0)
    (above,) = drawn["curves.png"].child_axes
    assert above.get_xlabel() == "tokens"


def test_damaged_step_times_cost_no_runs(tmp_path):
    folder = Folder(tmp_path, {}, {"a": {}}, ())
    folder.save_times({"a": [1.0, 2.0]}, {})
    assert folder.load_times(2, {}) == {"a": [1.0, 2.0]}
    (tmp_path / TIMING).write_text((tmp_path / TIMING).read_text()[:20])
    assert_refused(f"{TIMING} is damaged, .*; delete it: it is measured again$", folder.load_times, 2, {})


def test_a_familys_p_values_are_holms():
    gains = {"baseline": 0.0, "noble": 0.2, "cola": 0.1, "wide": 0.01}
    arms = [
        an_arm(name, *(a_run(s, 3.0 - gain * (1 + 0.1 * s) + 0.02 * math.sin(7 * s + place)) for s in SEEDS))
        for place, (name, gain) in enumerate(gains.items())
    ]
    family = a_record(arms)["against"]["baseline"].values()
    plain = [each["delta"]["p_value"] for each in family]
    assert [each["p_holm"] for each in family] == pytest.approx(holm(plain))
    assert max(each["p_holm"] / p for each, p in zip(family, plain, strict=True)) > 1.5


def test_what_holms_correction_does_not_bear_is_called_a_hint():
    delta = {"value": -0.1, "low": -0.15, "high": -0.05, "p_value": 0.03, "n": 3, "shown": True, "note": ""}
    metric = {"name": "loss", "unit": "nats", "higher_is_better": False}
    said = [
        report.delta_sentence("noble", "baseline", {"delta": delta, "n": 3, "p_holm": p}, metric) for p in (0.03, 0.09)
    ]
    assert ["a hint, not a finding" in each for each in said] == [False, True]
    assert said[1].endswith("p = 0.09: a hint, not a finding.")


def test_the_strongest_control_of_a_score_is_the_highest():
    scores = {"baseline": 0.5, "weak": 0.4, "strong": 0.6, "noble": 0.8}
    arms = [
        an_arm(name, *(a_run(s, 1.0, score=score + 0.001 * s * (1 + place)) for s in SEEDS), control=name != "noble")
        for place, (name, score) in enumerate(scores.items())
    ]
    families = [[("baseline", name) for name in scores if name != "baseline"]]
    families += [[(control, "noble")] for control in ("weak", "strong")]
    lines = findings(a_record(arms, pairs=families, measure=ACCURACY))
    (line,) = (line for line in lines if line.startswith("Against the strongest control"))
    assert "`strong`" in line


@pytest.mark.parametrize(
    ("value", "shown", "said"), [(0.8, True, "slower"), (0.8, False, "no difference"), (1.2, True, "not shown")]
)
def test_hours_are_called_by_their_side(value, shown, said):
    assert said in report._hours_verdict({"value": value, "shown": shown}, ["seeds"])


def test_step_times_are_kept_for_as_many_threads(tmp_path):
    folder = Folder(tmp_path, {}, {"a": {}}, ())
    folder.save_times({"a": [1.0, 2.0]}, machine(1))
    assert folder.load_times(2, machine(1)) == {"a": [1.0, 2.0]}
    assert folder.load_times(2, machine(2)) is None


def test_the_lower_of_two_equal_rates_is_chosen():
    assert best_run([a_run(0, 2.0, lr=3e-3), a_run(0, 2.0, lr=1e-3)]).lr == 1e-3
