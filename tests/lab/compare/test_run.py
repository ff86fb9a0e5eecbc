"""The bookkeeping of a comparison, with a stand-in for training."""

import errno
import json
import math
import platform
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compare_helpers import (
    BASE,
    CONTROL,
    NOBLE,
    STEPS,
    FakeTraining,
    StubTask,
    bowl,
    compare_stub,
    fake_measure,
    gain,
)
from nlr_lab.compare.record import clean
from nlr_lab.compare.report import findings, render_report
from nlr_lab.runtime.signals import StoppedBySignal
from nlr_lab.training import Recipe, TrainConfig
from refusals import assert_refused, refuse_to_open
from studies.study import copy


@pytest.fixture
def recipe():
    train = TrainConfig(steps=STEPS, batch_size=8, lr=1e-3, tracker="none")
    return Recipe(name="stub", description="A stub", task=StubTask(), train=train, arms=("baseline",), seeds=3)


@pytest.fixture
def go(recipe, tmp_path):
    def run(loss=gain, *, training=None, recipe=recipe, out=tmp_path / "out", arms=(BASE, CONTROL, NOBLE), **options):
        return compare_stub(recipe, out, train=training or FakeTraining(loss), arms=arms, **options)

    return run


def test_finds_a_gain_with_its_interval_and_both_speedups(go, tmp_path):
    comparison = go(seeds=4)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results == json.loads(json.dumps(comparison.results))
    assert not list((tmp_path / "out").rglob("checkpoints"))
    assert (results["n"], results["seeds"]) == (4, [1, 2, 3, 4])
    pair = results["against"]["baseline"]["noble-r4"]
    noble, base = ([gain(name, 1e-3, seed) for seed in (1, 2, 3, 4)] for name in ("noble-r4", "baseline"))
    assert pair["delta"]["value"] == pytest.approx(np.mean(np.subtract(noble, base)))
    assert pair["delta"]["shown"]
    assert pair["p_holm"] >= pair["delta"]["p_value"]
    # A straight line from 5 to L crosses L0 after (5 - L0) / (5 - L) of its steps.
    speed = np.subtract(5, noble) / np.subtract(5, base)
    assert pair["step_speedup"]["value"] == pytest.approx(math.exp(np.mean(np.log(speed))))
    arm = next(arm for arm in results["arms"] if arm["name"] == "noble-r4")
    ratio = arm["step_time_ratio"]["median"]
    assert ratio == pytest.approx(1.1, abs=0.02)
    assert pair["wall_clock_speedup"]["value"] == pytest.approx(pair["step_speedup"]["value"] / ratio)
    assert arm["parameters_percent"] == pytest.approx(10)
    assert arm["flops_percent"] == pytest.approx(10)
    assert set(results["against"]) == {"baseline", "baseline-init-noble"}
    text = " ".join(findings(results))
    assert "**lower** than `baseline`" in text
    assert "Against the strongest control" in text
    assert "`baseline-init-noble`" in text
    assert "No control has as many parameters as noble-r4 (wide-mlp:match=noble-r4)" in text


def test_omits_speed_in_steps_without_curves(go):
    found = go(training=FakeTraining(gain, every=0), seeds=4).results
    report = render_report(found)
    assert "**lower** than `baseline`" in report
    assert "step time" in report
    assert not re.search("speedup|crossing|1.000x|as fast", report)


def test_names_untuned_rates_a_missing_control_and_a_single_seed(go, tmp_path):
    plain = " ".join(findings(go(arms=(BASE, NOBLE)).results))
    assert "Learning rates were not tuned" in plain
    assert "No control has NOBLE's dense init" in plain
    (pair,) = go(arms=(BASE, NOBLE), seeds=1, resume=True).results["against"]["baseline"].values()
    assert (pair["delta"]["low"], pair["delta"]["p_value"]) == (None, None)
    alone = " ".join(findings(go(seeds=1, resume=True).results))
    assert "n = 1" in alone
    assert "**" not in alone, "nothing may be claimed from one seed"
    full = " ".join(findings(go(tune_lr=(1e-3, 2e-3), out=tmp_path / "full").results))
    assert "not tuned" not in full
    assert "No control has NOBLE's dense init" not in full
    assert "No control has as many parameters as noble-r4" in full


def test_prints_a_slower_arm_as_plainly(go, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")  # cells in one line each
    comparison = go(lambda arm, rate, seed: gain(arm, rate, seed) + (0.5 if arm == "noble-r4" else 0.0))
    assert comparison.results["against"]["baseline"]["noble-r4"]["matched_speedup"]["shown"]
    text, shown = " ".join(findings(comparison.results)), str(comparison)
    assert "**higher** than `baseline`" in text
    assert "0 of 3 seeds: no step speedup" in text
    assert "not reached (by 0 of 3" in re.sub(r"[\s\u2502|]+", " ", shown)
    assert "At the lowest loss that both reach" in shown


def test_tunes_each_arm_and_extends_its_grid_until_the_best_is_inside(go, tmp_path):
    training = FakeTraining(bowl({"baseline": 2e-3, "noble-r4": 16e-3, "baseline-init-noble": 0.5e-3}))
    comparison = go(training=training, tune_lr=(1e-3, 2e-3, 4e-3))
    rates = {arm["name"]: arm["lr"] for arm in comparison.results["arms"]}
    assert rates == {"baseline": 2e-3, "noble-r4": 16e-3, "baseline-init-noble": 0.5e-3}
    tried = {arm["name"]: [run["lr"] for run in arm["tuning"]] for arm in comparison.results["arms"]}
    assert tried["noble-r4"] == [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
    assert tried["baseline-init-noble"] == [0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3]
    assert {call[2] for call in training.calls if call[1] == 32e-3} == {0}, "tuning has a seed of its own"
    assert {call[2] for call in training.calls} == {0, 1, 2, 3}
    assert not any("edge" in note for note in comparison.results["notes"])
    loss = bowl({"baseline": 2e-3, "noble-r4": 16e-3})
    fewer = go(loss, arms=(BASE, NOBLE), tune_lr=(1e-3, 2e-3, 4e-3), max_extensions=1, out=tmp_path / "fewer").results
    (note,) = fewer["notes"]
    assert "`noble-r4`: the best learning rate 0.008 is still at the edge of its grid, so it may do better" in note
    fixed = go(arms=(BASE, replace(NOBLE, lr=5e-3)), tune_lr=(1e-3, 2e-3), out=tmp_path / "fixed").results["arms"][1]
    assert (fixed["lr"], fixed["lr_source"], fixed["tuning"]) == (5e-3, "set by the arm", [])


def test_leaves_out_an_arm_that_diverges_at_every_rate(go):
    def loss(arm, rate, seed):
        if arm == "noble-r4" or rate > 2e-3:
            return math.nan
        return gain(arm, rate, seed) - 10 * rate

    comparison = go(loss, tune_lr=(1e-3, 2e-3, 4e-3), max_extensions=1)
    arms = {arm["name"]: arm for arm in comparison.results["arms"]}
    assert arms["baseline"]["lr"] == 2e-3, "the next rate diverges, so 2e-3 is inside the grid"
    assert arms["noble-r4"]["lr"] is None
    assert [run["lr"] for run in arms["noble-r4"]["tuning"]] == [0.5e-3, 1e-3, 2e-3, 4e-3], "grows downwards"
    assert comparison.results["n"] == 3, "the other arms go on"
    assert any("`noble-r4` diverged at every choice" in line for line in findings(comparison.results))


def test_copies_what_a_reader_needs_under_another_name(go, tmp_path):
    study, out = tmp_path / "study", tmp_path / "out"
    study.mkdir()
    (study / "table.json").write_text("an older one")
    loss = bowl({"baseline": 2e-3, "noble-r4": 2e-3})
    comparison = go(loss, draw=True, arms=(BASE, NOBLE), tune_lr=(1e-3, 2e-3, 4e-3))
    copy(comparison, study, "table")
    names = {"table.md", "table.json", "table-curves.png", "table-rates.png"}
    assert {path.name for path in study.iterdir()} == names
    for name in ("curves", "rates"):
        assert (study / f"table-{name}.png").read_bytes() == (out / f"{name}.png").read_bytes()
    assert json.loads((study / "table.json").read_text()) == comparison.results
    text = (study / "table.md").read_text()
    assert sorted(re.findall(r"\]\(([^)]+)\)", text)) == ["table-curves.png", "table-rates.png"]
    assert text.replace("table-", "") == (out / "report.md").read_text() == render_report(comparison.results)
    for heading in ("What was found", "Loss", "Speed", "Learning rates", "Settings", "How to repeat", "limits"):
        assert heading in text
    assert text.isascii()


def test_records_a_diverged_run_and_continues(go):
    training = FakeTraining(
        lambda arm, rate, seed: math.nan if (arm, seed) == ("noble-r4", 2) else gain(arm, rate, seed)
    )
    comparison = go(training=training)
    assert len(training.calls) == 9
    pair = comparison.results["against"]["baseline"]["noble-r4"]
    assert pair["delta"]["value"] is None
    assert "diverged in 1 of 3 seeds" in " ".join(findings(comparison.results))
    assert comparison.results["against"]["baseline"]["baseline-init-noble"]["delta"]["n"] == 3
    again = FakeTraining(gain)
    go(training=again, resume=True)
    assert again.calls == [], "a diverged run is a result; it is not tried again"


def test_tells_a_finite_divergence_from_a_spike(go):
    def rises(arm, seed):
        return range(60, 101) if (arm, seed) == ("noble-r4", 2) else range(30, 33) if arm == "noble-r4" else ()

    class Training(FakeTraining):
        def __call__(self, recipe, out, **options):
            super().__call__(recipe, out, **options)
            result = json.loads((out / "result.json").read_text())
            high = rises(recipe.arm.name, recipe.train.seed)
            curve = [[step, 8.0 if step in high else 5 - 0.02 * step + 0.001 * (step % 3)] for step in range(1, 101)]
            (out / "result.json").write_text(json.dumps(result | {"train_curve": curve}))

    results = go(training=Training(gain), arms=(BASE, NOBLE)).results
    runs = {run["seed"]: run for run in results["arms"][1]["runs"]}
    assert [runs[seed]["diverged_at"] for seed in (1, 2, 3)] == [None, 60, None]
    assert [runs[seed]["spikes"] for seed in (1, 2, 3)] == [1, 0, 1]
    assert {run["diverged_at"] for run in results["arms"][0]["runs"]} == {None}
    assert len(runs[3]["train_curve"]) == 50, "the means of two steps each"
    assert runs[3]["train_curve"][:2] == [[2, pytest.approx(4.9715)], [4, pytest.approx(4.9305)]]
    report = render_report(results)
    assert "`noble-r4` diverged at step 60 on seed 2: its loss rose and did not recover." in report
    assert "`noble-r4` spiked and recovered: 1 on seed 1, 1 on seed 3." in report
    assert "diverged in 1 of 3 seeds" in report
    assert re.search(r"\| noble-r4 \| [\d.]+ \| diverged at step 60 \|", report)
    assert results["against"]["baseline"]["noble-r4"]["delta"]["value"] is None
    assert (runs[2]["status"], runs[2]["final_loss"], runs[2]["train_curve"][-1][0]) == ("diverged", None, 58)


@pytest.mark.parametrize(("stop", "left"), [(0, 12), (4, 8), (12, 1)])
def test_resumes_after_an_interrupt_with_the_same_results(go, tmp_path, stop, left):
    rates = {"tune_lr": (1e-3, 2e-3, 4e-3), "arms": (BASE, NOBLE)}
    loss = bowl({"baseline": 2e-3, "noble-r4": 4e-3})
    whole = FakeTraining(loss)
    expected = go(training=whole, out=tmp_path / "whole", **rates).results
    first = FakeTraining(loss)
    first.stop_after = stop
    with pytest.raises(KeyboardInterrupt):
        go(training=first, **rates)
    entry = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])
    assert entry["left"] == left, "the run that was cut is one of them, and an extension only once it is due"
    second = FakeTraining(loss)
    results = go(training=second, resume=True, **rates).results
    assert sorted(first.calls + second.calls) == sorted(whole.calls), "every run exactly once"
    assert second.resumed == second.calls[:1], "the run that was cut resumes, the others start afresh"
    for record in (expected, results):
        record.pop("seconds")
    assert results == expected
    assert json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])["left"] == 0


def test_reuses_runs_where_arms_and_seeds_are_added(go):
    go(arms=(BASE, NOBLE), seeds=2)
    more = FakeTraining(gain)
    comparison = go(training=more, arms=(BASE, CONTROL, NOBLE), seeds=3, resume=True)
    assert {call[0] for call in more.calls if call[2] < 3} == {"baseline-init-noble"}
    assert len(more.calls) == 5
    assert comparison.results["n"] == 3
    none = FakeTraining(gain)
    other = go(training=none, resume=True, reference="baseline-init-noble")
    assert none.calls == []
    assert other.results["reference"] == "baseline-init-noble"
    assert "Reference: `baseline-init-noble`" in render_report(other.results)


def test_a_tie_has_no_side(go):
    report = render_report(go(lambda *run: 3.0).results)
    assert "- `noble-r4`: the same loss as `baseline` (n = 3), so no difference is shown." in report


def test_arms_and_seeds_of_former_calls_that_are_left_out_are_named(go, capsys):
    go(seeds=3, tune_lr=(1e-3, 2e-3))
    fewer = {"arms": (BASE, NOBLE), "seeds": 2, "tune_lr": (1e-3, 2e-3), "resume": True}
    for _ in range(2):  # the record no longer has them
        results = go(training=(none := FakeTraining(gain)), quiet=False, **fewer).results
        assert none.calls == []
        note = (
            "Not named in this call, and left out though the folder has their runs: arm `baseline-init-noble`, seed 3. "
            "p (Holm) does not count them."
        )
        assert note in results["notes"]
        assert note in capsys.readouterr().err
    assert not any("left out" in note for note in go(tune_lr=(1e-3, 2e-3), resume=True).results["notes"])


def test_runs_at_rates_of_former_calls_are_named(go):
    go(tune_lr=(1e-3, 2e-3), seeds=2)
    notes = go(resume=True, seeds=2).results["notes"]
    left = [note for note in notes if "another --lr or --tune-lr" in note]
    assert len(left) == 3
    assert left[1].startswith("Runs of `baseline-init-noble` at lr-0.00")
    again = go(tune_lr=(1e-3, 2e-3), resume=True, seeds=2).results["notes"]
    assert not any("at lr-0.001" in note for note in again if "`noble-r4`" in note)


def test_step_times_of_another_accumulation_are_measured_anew(go, recipe):
    asked = []

    def measure(recipe, arms, prepared, *, rounds, **options):
        asked.append(rounds)
        return fake_measure(recipe, arms, prepared, rounds=rounds, **options)

    halved = replace(recipe, train=replace(recipe.train, gradient_accumulation=2))
    for each, resume in ((recipe, False), (recipe, True), (halved, True), (halved, True)):
        go(recipe=each, resume=resume, measure_with=measure)
    assert asked == [30, 0, 30, 0]


def test_reports_the_seeds_that_every_arm_finished(go, tmp_path):
    training = FakeTraining(gain)
    training.stop_after = 8
    with pytest.raises(KeyboardInterrupt):
        go(training=training)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["n"] == 2, "published before the last"
    found = go(resume=True, max_seconds=1e-9).results
    assert (found["seeds"], found["incomplete_seeds"]) == ([1, 2], [3])
    assert any("Left out" in note and "3" in note for note in found["notes"])
    assert any("Stopped for time" in note for note in found["notes"])


def test_reports_the_runs_that_are_done_where_a_signal_stops_a_seed(go, tmp_path):
    trained = FakeTraining(gain)

    def training(recipe, out, **given):
        if len(trained.calls) == 2:
            raise StoppedBySignal(signal.SIGINT, " at step 3 of 60")
        trained(recipe, out, **given)

    with pytest.raises(StoppedBySignal):
        go(training=training)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "- No seed was finished by all arms: there is nothing to compare yet." in report
    assert "- Seed 1: stopped by SIGINT at step 3 of 60; continue with --resume." in report
    assert re.search(r"\| baseline \| [\d.]+ \|", report), "its run is whole"
    assert "| noble-r4 | not run |" in report


@pytest.mark.parametrize(("limit", "n"), [(5.2, 2), (5.3, 5)])
def test_begins_no_seed_that_would_not_end_in_time(go, limit, n):
    # Three arms of 1.5 s each and a tenth: 4.95 s, by a clock that stands still; a twentieth is kept for the report.
    go(seeds=2)
    comparison = go(seeds=5, max_seconds=limit, resume=True, clock=lambda: 0.0)
    assert comparison.results["n"] == n


@pytest.mark.parametrize("name", ["timing.json", "results.json", "report.md"])
def test_full_disk_is_named_with_the_file_and_costs_no_run(go, tmp_path, monkeypatch, name):
    with monkeypatch.context() as patch:
        refuse_to_open(patch, errno.ENOSPC, tmp_path / "out" / f".tmp-{name}")
        assert_refused(r"cannot write .*/out.*: no space left on the disk; make room and .*--resume", go)
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert bool(runs) == (name != "timing.json")
    go(resume=True)
    assert (tmp_path / "out" / name).is_file()
    assert runs.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}.items()


def test_trains_again_where_a_result_is_torn(go, tmp_path):
    go(arms=(BASE, NOBLE))
    torn = tmp_path / "out/runs/noble-r4/lr-0.001/seed-2/result.json"
    torn.write_text(torn.read_text()[:40])
    training = FakeTraining(gain)
    go(training=training, arms=(BASE, NOBLE), resume=True)
    assert training.resumed == [("noble-r4", 1e-3, 2)]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "words"), [({}, "not empty"), ({"resume": True}, "no comparison"), ({"overwrite": True}, "holds no")]
)
def test_refuses_a_used_folder_untouched(go, tmp_path, options, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    assert_refused(words, go, **options)
    assert files(tmp_path / "out") == {Path("diary.txt"): b"mine"}


def test_overwrites_a_comparisons_own_files_alone(go, tmp_path):
    go(arms=(BASE, NOBLE), seeds=1)
    (tmp_path / "out" / "diary.txt").write_text("mine")
    training = FakeTraining(gain)
    go(training=training, arms=(BASE, NOBLE), seeds=1, overwrite=True)
    assert len(training.calls) == 2, "nothing of the former comparison is reused"
    assert (tmp_path / "out" / "diary.txt").read_text() == "mine"


def test_refuses_changed_settings_by_name(go, recipe, tmp_path):
    go(arms=(BASE, NOBLE), seeds=1)
    before = files(tmp_path / "out")
    betas = replace(recipe, train=replace(recipe.train, betas=(0.9, 0.99)))
    longer = replace(recipe, task=StubTask(sequence_length=9))
    for changed, field in ((betas, "train.betas"), (longer, "task.sequence_length")):
        assert_refused(field, go, recipe=changed, arms=(BASE, NOBLE), seeds=1, resume=True)
    assert files(tmp_path / "out") == before
    wider = replace(NOBLE, settings={"rank": 8})
    assert_refused("settings of arm 'noble-r4'", go, arms=(BASE, wider), seeds=1, resume=True)
    go(recipe=longer, arms=(BASE, NOBLE), seeds=1, overwrite=True)


def test_setting_newer_than_the_runs_is_no_difference_while_it_is_off(go, recipe, tmp_path):
    go(arms=(BASE, NOBLE), seeds=1)
    marker = tmp_path / "out" / "compare.json"
    record = json.loads(marker.read_text())
    assert record["settings"].pop("train.label_smoothing") == 0
    marker.write_text(json.dumps(record))
    smooth = replace(recipe, train=replace(recipe.train, label_smoothing=0.1))
    refused = r"train.label_smoothing was '\(absent\)' in .* and is 0.1 now"
    assert_refused(refused, go, recipe=smooth, arms=(BASE, NOBLE), seeds=1, resume=True)
    go(arms=(BASE, NOBLE), seeds=1, resume=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"settings": 3}'])
def test_refuses_a_broken_marker(go, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.json").write_text(text)
    assert_refused(r"compare\.json", go, resume=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arms": (BASE,)}, "at least two"),
        ({"arms": (BASE, BASE)}, "two arms"),
        ({"seeds": 0}, "seeds"),
        ({"max_extensions": -1}, "max_extensions must be an integer of at least 0"),
        ({"tune_lr": (1e-3,)}, "two different learning rates"),
        ({"tune_lr": (0.0, 1e-3)}, "above 0"),
        ({"reference": "nobody"}, "nobody"),
        ({"resume": True, "overwrite": True}, "choose one"),
    ],
)
def test_refuses_bad_arguments_before_anything_is_written(go, tmp_path, options, words):
    assert_refused(words, go, **options)
    assert not (tmp_path / "out").exists()


def test_record_holds_settings_and_versions_and_no_path_or_host(go, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/somewhere/bin/nlr", "compare", "stub", "--out", str(tmp_path / "deep/er")])
    results = go(command=None).results
    text = json.dumps(results) + render_report(results)
    assert results["command"] == "nlr compare stub --out .../er"
    assert str(tmp_path) not in text
    assert platform.node() not in text or len(platform.node()) < 4
    assert "np." not in text
    assert results["recipe"]["settings"]["train.weight_decay"] == 0.01
    assert results["recipe"]["settings"]["task.sequence_length"] == 8
    assert {"python", "torch", "transformers", "nonlinear-lowrank"} <= set(results["versions"])
    assert min(results["machine"]["cpu_count"], results["machine"]["threads"]) >= 1
    value = {"a": (1, math.nan, Path("/x/y")), "b": "/x/y z", "c": "--out=/x/y", "d": "a/b", 3: {1.5}}
    value["e"] = "/x/a.bin:0.7,b/c.bin:3e-1"
    cleaned = clean(value)
    assert json.loads(json.dumps(cleaned, allow_nan=False)) == cleaned
    mixed = {"e": ".../a.bin:0.7,b/c.bin:3e-1"}
    assert cleaned == {"a": [1, None, ".../y"], "b": ".../y z", "c": "--out=.../y", "d": "a/b", "3": "{1.5}"} | mixed
