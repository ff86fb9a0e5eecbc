"""A comparison's time limit, with trainings and machines that are slow on purpose; and the threads that it takes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from compare_helpers import BASE, CONTROL, NOBLE, StubTask, compare_stub, field_recipe, tiny_recipe
from nlr_lab.bench.timing import interleaved_step_times
from nlr_lab.compare import compare
from nlr_lab.compare.trial import Measurement, shortened
from nlr_lab.fields.fit import Stepper
from nlr_lab.fields.settings import FitConfig
from nlr_lab.runtime.environment import OutOfTimeError
from nlr_lab.runtime.log import LOG, read_entries
from nlr_lab.runtime.tables import duration
from nlr_lab.training import Arm, DivergedError, Recipe, TrainConfig, run_training
from refusals import assert_refused

STEPS = 200


class Machine:
    """A clock, and a training whose steps take the seconds that the test says: of the step's number among all."""

    def __init__(self, seconds=lambda step: 1.0):
        self.now, self.taken, self.seconds, self.threads, self.runs, self.rates = 0.0, 0, seconds, [], [], []

    def clock(self):
        return self.now

    def measure(self, recipe, arms, prepared, *, rounds, max_seconds=None, quiet=True):
        step = self.seconds(0)
        rounds = rounds if max_seconds is None else max(1, min(rounds, int(max_seconds / step / len(arms))))
        self.now += rounds * len(arms) * step
        names = [arm.name for arm in arms]
        times = {name: [step] * rounds for name in names} if rounds else None
        return Measurement(parameters=dict.fromkeys(names, 10), flops=dict.fromkeys(names, 1.0), times=times)

    def run(self, recipe, out, *, resume, prepared, stop=None, **_):
        self.threads.append(torch.get_num_threads())
        self.rates.append(recipe.train.lr)
        self.runs.append((recipe.arm.name, recipe.train.seed, recipe.train.steps))
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.json").write_text("{}")
        started, steps = self.now, recipe.train.steps
        for step in range(1, steps + 1):
            self.taken += 1
            self.now += self.seconds(self.taken)
            if stop is not None and step < steps and stop(step):
                raise OutOfTimeError(f"stopped for time at step {step} of {steps}")
        gain = 0.2 * (recipe.arm.name != "baseline") + 0.01 * recipe.train.seed**2
        curve = [[step, 5 - step / steps - gain] for step in range(0, steps + 1, recipe.train.eval_every)]
        result = {"status": "done", "final_loss": 4 - gain, "steps": steps, "seconds": self.now - started}
        (out / "result.json").write_text(json.dumps(result | {"curve": curve}))


@pytest.fixture
def go(tmp_path):
    train = TrainConfig(steps=STEPS, warmup_steps=20, batch_size=8, lr=1e-3, eval_every=20, tracker="none", threads=1)
    recipe = Recipe(name="stub", task=StubTask(), train=train)

    def run(machine, *, recipe=recipe, out=tmp_path / "out", arms=(BASE, NOBLE), seeds=2, **options):
        replaced = {"train": machine.run, "measure_with": machine.measure, "clock": machine.clock}
        options = {"timing_rounds": 3, "draw": True} | options
        return compare_stub(recipe, out, arms=arms, seeds=seeds, **replaced, **options)

    return run


def test_limit_that_is_not_met_changes_nothing(go, tmp_path):
    limited = go(Machine(), max_seconds=1200, out=tmp_path / "limited").results
    free = go(Machine(), out=tmp_path / "free").results
    assert limited | {"seconds": 0} == free | {"seconds": 0}
    assert limited["n"] == 2


def test_runs_are_shortened_where_not_even_one_seed_would_end(go, tmp_path):
    machine = Machine()
    found = go(machine, max_seconds=200).results
    assert machine.now <= 200
    (steps,) = {steps for *_, steps in machine.runs}
    assert 60 <= steps <= 90, "most of the time is used"
    assert found["n"] == 1
    assert found["recipe"]["settings"]["train.steps"] == steps
    assert found["recipe"]["settings"]["train.warmup_steps"] == round(steps / 10)
    said = f"Every run was shortened from 200 to {steps} steps, its whole schedule with it"
    assert found["notes"][0].startswith(said)
    assert found["notes"][0] in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "curves.png").exists()
    # With the same limit it goes on at the same length, and with time the whole runs have folders of their own.
    again = Machine()
    assert go(again, max_seconds=200, resume=True).results["recipe"]["settings"]["train.steps"] == steps
    assert again.runs[:1] in ([], [("baseline", 2, steps)])
    whole = Machine()
    found = go(whole, resume=True).results
    assert {run[2] for run in whole.runs} == {STEPS}
    assert found["n"] == 2
    assert not any("shortened" in note for note in found["notes"])


def test_tuned_arms_are_shortened_for_their_first_rate_too(go):
    machine = Machine()
    found = go(machine, tune_lr=(1e-3, 2e-3, 4e-3), max_seconds=300).results
    assert machine.now <= 300
    assert found["n"] == 1
    tried = {len(arm["tuning"]) for arm in found["arms"]}
    assert tried < {1, 2}
    assert f"Tuning stopped for time after {tried.pop()} of 3 choices of every arm." in found["notes"]
    assert machine.rates[:2] == [2e-3, 2e-3], "the middle of the grid first"


@pytest.mark.parametrize("kind", ["with a rate of the head", "diverged while tuned"])
def test_limit_leaves_what_has_finished_as_it_is(go, tmp_path, kind):
    class Diverging(Machine):
        def run(self, recipe, out, **options):
            super().run(recipe, out, **options)
            if recipe.arm.name == "noble-r4":
                (out / "result.json").write_text(
                    json.dumps({"status": "diverged", "steps": 7, "seconds": 1.0, "curve": []})
                )
                raise DivergedError("it diverged", 7)

    if kind == "diverged while tuned":
        machine, options = Diverging, {"arms": (BASE, CONTROL, NOBLE), "tune_lr": (1e-3, 2e-3), "max_extensions": 1}
    else:
        arms = tuple(Arm.parse(f"lora:r={rank},lr=1e-3,head_lr=1e-2") for rank in (1, 2))
        machine, options = Machine, {"arms": arms}
    whole = go(machine(), **options).results
    assert read_entries(tmp_path / "out" / LOG)[-1]["left"] == 0
    again = machine()
    limited = go(again, resume=True, max_seconds=100, **options).results
    assert again.runs == []
    assert limited["n"] == whole["n"] == 2


def test_machine_that_slows_down_shortens_once_more(go):
    machine = Machine(lambda step: 1.0 if step < 30 else 4.0)
    found = go(machine, max_seconds=640).results
    assert machine.now <= 640
    assert found["n"] == 1
    assert machine.runs[0] == ("baseline", 1, STEPS), "at first the whole runs fit"
    assert found["recipe"]["settings"]["train.steps"] < STEPS / 3


def test_stops_a_seed_in_time_and_reports(go, tmp_path):
    machine = Machine(lambda step: 1.0 if step <= 2 * STEPS else 10.0)
    found = go(machine, max_seconds=1000).results
    assert machine.now <= 1000
    assert found["n"] == 1
    assert machine.runs[2] == ("baseline", 2, STEPS)
    assert any("Stopped for time in seed 2" in note for note in found["notes"])
    machine = Machine(lambda step: 1.0 if step < 30 else 150.0)  # comes to a stand
    found = go(machine, max_seconds=640, out=tmp_path / "still").results
    assert machine.now <= 640 + 150, "a step is not interrupted"
    assert found["n"] == 0
    assert any("Stopped for time in seed 1: stopped for time at step" in note for note in found["notes"])
    assert "there is nothing to compare yet" in (tmp_path / "still" / "report.md").read_text()


def test_limit_that_holds_nothing_is_refused_before_anything_is_written(go, tmp_path):
    assert_refused("limit of 5 s does not hold 10 steps of every arm; give it at least", go, Machine(), max_seconds=5)
    assert not (tmp_path / "out").exists()
    go(Machine(), seeds=1)
    assert go(Machine(), seeds=2, resume=True, max_seconds=5).results["n"] == 1, "what there is can be reported"


def test_schedule_shrinks_as_a_whole():
    assert [duration(each) for each in (40.4, 170, 9000)] == ["40 s", "3 min", "2.5 h"]
    config = TrainConfig(steps=300, warmup_steps=30, batch_size=8, lr=1e-3, eval_every=20, save_every=150, log_every=10)
    short = shortened(config, 90)
    assert short == replace(config, steps=90, warmup_steps=9, eval_every=6, save_every=45, log_every=3)
    field = FitConfig(steps=100, warmup_steps=10, save_every=0)
    short = shortened(field, 50)
    assert short == replace(field, steps=50, warmup_steps=5)
    assert [short.rate(step) for step in (5, 49)] == pytest.approx([field.rate(step) for step in (10, 99)])


def test_timing_ends_after_its_seconds(monkeypatch):
    now = iter(range(10_000))
    monkeypatch.setattr("nlr_lab.bench.timing.time.monotonic", lambda: next(now))
    calls = []
    times = interleaved_step_times({"a": lambda: calls.append(1)}, 50, 3, "wall", max_seconds=10)
    assert 5 < len(times["a"]) < 12
    assert len(calls) == len(times["a"]) + 3


def test_stopped_run_goes_on_bit_by_bit(tmp_path):
    recipe = tiny_recipe(tmp_path, eval_every=3, save_every=2)
    whole = run_training(recipe, tmp_path / "whole", quiet=True)
    asked = []
    with pytest.raises(OutOfTimeError, match="stopped for time at step 5 of 8; continue with --resume"):
        run_training(recipe, tmp_path / "cut", quiet=True, stop=lambda step: asked.append(step) or step >= 5)
    assert asked == [1, 2, 3, 4, 5]
    assert not (tmp_path / "cut" / "result.json").exists()
    gone_on = run_training(recipe, tmp_path / "cut", quiet=True, resume=True, stop=lambda step: step >= 8)
    assert replace(gone_on, seconds=0) == replace(whole, seconds=0)


def test_slow_fields_end_within_their_limit(tmp_path, monkeypatch):
    take, clock = Stepper.take, SimpleNamespace(now=0.0)

    def slow(stepper, step):
        clock.now += 1.0
        return take(stepper, step)

    monkeypatch.setattr(Stepper, "take", slow)
    monkeypatch.setattr("nlr_lab.bench.timing.time.perf_counter", lambda: clock.now)
    arms = [f"{kind}:rank=1,init=kaiming_zero" for kind in ("low-rank", "sine")]
    recipe = field_recipe(tmp_path, arms=arms, steps=300, eval_every=0, save_every=500)
    options = {"timing_rounds": 0, "quiet": True, "clock": lambda: clock.now}
    comparison = compare(recipe, tmp_path / "out", max_seconds=200, **options)
    found = comparison.results
    assert clock.now <= 200
    assert found["n"] == 1
    steps = found["recipe"]["settings"]["train.steps"]
    assert 50 <= steps < 100
    assert found["arms"][0]["runs"][0]["steps"] == steps
    assert f"shortened from 300 to {steps} steps" in str(comparison)
    assert (tmp_path / "out" / "rate.png").exists()
    assert_refused("does not hold 10 steps of every arm", compare, recipe, tmp_path / "none", max_seconds=10, **options)
    assert not (tmp_path / "none").exists()
