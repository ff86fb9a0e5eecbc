"""Fields side by side: every arm at its best init and rate, over seeds, with rate-distortion curves and pictures.

Order of work: read the data; build every arm (a bad one fails before anything is written); time interleaved steps;
tune each arm's init and rate on a seed of its own; then seed by seed, every arm within a seed, so that stopping after
any seed leaves all arms with the same n. After each seed the record, the curves and the report are written anew; the
strip shows the first seed's fits, and is drawn again only when those have changed.

    out/fields.json    the settings that every run in this folder shares
    out/runs/<arm>/<init>/lr-<rate>/seed-<k>/    one fit each (`fields.fit`)
    out/results.json   the record      out/report.md, out/rate.png, out/strip.png    made from it
    out/omega.png      score against omega, where a rank has three sines or more
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from nlr_lab.bench.timing import Clock, interleaved_step_times
from nlr_lab.fields.fit import build
from nlr_lab.fields.problem import FieldMethod, Init, Problem
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.fields.step import Stepper
from nlr_lab.runtime.cores import FreeThreads
from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nlr_lab.runtime.resources import choose_device, told_of_memory
from nlr_lab.runtime.storage import write_json
from nlr_lab.runtime.time_limit import (
    PACE_ROUNDS,
    TIMING_SHARE,
    Forecast,
    Lengths,
    OutOfTimeError,
    TimeLimit,
    median_steps,
    seconds_around,
    shortened,
)
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear
from nonlinear_lowrank.validation import check_integer

from .field_pictures import plot_omegas, plot_rates, plot_strip
from .field_plan import (
    MARKER,
    PICTURES,
    FieldArm,
    FieldPlan,
    arm_settings,
    check_folder,
    open_folder,
    shared_settings,
)
from .field_record import FieldArmRecord, FieldRun, build_record
from .field_report import render_report, render_table
from .field_runs import FieldRuns, chosen, tune_fields
from .folder import copy_report, lengths, version_notes, write_text
from .kept_runs import KeptRuns
from .record import command_line

_START = 0.2  # seconds of a fit beside its steps, at the least


@dataclass(frozen=True)
class FieldComparison:
    """What `compare_fields` hands back: the record, and the folder that it is written in."""

    out: Path
    results: dict[str, Any] = field(repr=False)

    def copy_to(self, folder: Path | str, name: str) -> None:
        """Copies what a reader needs, without the runs: `name`.md, .json, -rate.png, -strip.png, -omega.png if there.

        Args:
            folder: an existing folder, of a study for example. Files of these names in it are replaced.
            name: how the files' names begin.
        """
        copy_report(self.out, PICTURES, Path(folder), name)

    def __str__(self) -> str:
        pictures = ", ".join(name for name in PICTURES if (self.out / name).exists())
        return f"{render_table(self.results)}\nIn {self.out}: report.md, {pictures}, results.json"


def compare_fields(
    recipe: FieldRecipe,
    out: Path | str,
    *,
    arms: Sequence[FieldArm] | None = None,
    seeds: int | None = None,
    tune_lr: Sequence[float] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    max_seconds: float | None = None,
    timing_rounds: int = 20,
    max_extensions: int = 4,
    kept_runs: Path | None = None,
    quiet: bool = False,
    command: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FieldComparison:
    """Fits every arm over the same seeds, each at its best init and rate, and compares sine with plain low rank.

    Args:
        recipe: problem and optimization, shared by all arms; its `arms`, `seeds` and `tune_lr` are the defaults of the
            arguments of those names.
        out: folder for the runs and the report; new or empty, unless `resume` or `overwrite`.
        arms: at least two, with names of their own.
        seeds: number of paired seeds. Tuning uses `recipe.train.seed`, the comparison the seeds that follow it.
        tune_lr: rates to try for every arm that names none; empty means the recipe's. An arm with one choice of init
            and rate is not tuned.
        resume: go on in `out`: finished fits are used as they are, a half-done one goes on from its checkpoint. Arms
            and seeds may be added.
        overwrite: delete what a former comparison wrote to `out`.
        max_seconds: it ends within this time. No new seed and no new tuning fit is begun that would not, by the slowest
            fit so far. Where timed steps say that not even the first choice of every arm and the first seed would, all
            fits are shortened, schedule and all, as much as it takes; the report says so, and such fits have folders of
            their own (`runs/<arm>/steps-<n>/`). A fit that is over time all the same stops.
        timing_rounds: interleaved steps of each arm; 0 leaves step times out.
        max_extensions: how often an arm's grid of rates may grow, at its best init, while its best rate is at the edge;
            after that the report says so.
        kept_runs: a file that keeps the finished fits, a line each, outside `out`: what it has and `out` lacks is used
            as it is, and it is written anew after each fit. With it a folder is gone on with, as with `resume`. The
            first seed's fits, which the strip of pictures shows, are fitted again where `out` lacks their weights.
        quiet: print nothing.
        command: how to repeat this, for the report; by default this process' own command line.
        clock: seconds, for `max_seconds`.

    Raises:
        UserError: arms, rates, seeds or rounds that make no comparison, data that are not what they should be, a
            device or a folder that may not be used, a time limit that does not hold even ten steps of every arm.
            Nothing has been written then.
    """
    limit, threads, out = TimeLimit(max_seconds, clock), FreeThreads(recipe.train.threads), Path(out)
    check_integer("timing_rounds", timing_rounds, minimum=0)
    device = choose_device(recipe.train.device, dtype=torch.float64)
    plan = FieldPlan.make(recipe, arms, seeds, tune_lr, max_extensions)
    kept = None if kept_runs is None else KeptRuns(kept_runs, out, MARKER)
    if kept is not None:
        resume = True
        kept.check(plan.settings, arm_settings(plan.arms))
    problem = recipe.problem.prepare()
    check_folder(out, plan, problem.fingerprint, resume=resume, overwrite=overwrite)
    built = {arm.name: _size_and_omega(build(problem, arm.method, plan.tuning_seed)) for arm in plan.arms}
    dense, _ = _size_and_omega(build(problem, FieldMethod(), plan.tuning_seed))
    console = Console(stderr=True, quiet=quiet, highlight=False)
    if kept is not None:
        kept.restore(problem.fingerprint)
    times = forecast = None
    with threads.chosen():
        if timing_rounds:
            times = _step_times(problem, plan, recipe, device, timing_rounds, limit=limit)
        if max_seconds is not None:
            forecast = _forecast(problem, plan, recipe, device, limit)

    def open_runs(steps: int | None) -> FieldRuns:
        own = recipe if steps is None else replace(recipe, train=shortened(recipe.train, steps))
        plain = (problem, own, out, console, kept)
        return FieldRuns(*plain, limit=limit, forecast=forecast, threads=threads, steps=steps)

    def missing(steps: int | None, anew: bool) -> list[str]:
        return [arm.name for arm in open_runs(steps).missing(plan, plan.seeds[:1], 1, anew=anew)]

    plans = Lengths(recipe.train.steps, forecast, limit, lambda: lengths(out), missing)
    steps = plans.choose(anew=overwrite)
    lock = open_folder(out, plan, problem.fingerprint, overwrite=overwrite)
    try:
        if kept is not None:
            kept.collect()  # what the folder had alone
        always = version_notes(out / MARKER)
        if times and (rounds := len(times[plan.arms[0].name])) < timing_rounds:
            always.append(f"Step times are of {rounds} rounds, not of {timing_rounds}, to keep within the time limit.")

        def session(steps: int | None) -> FieldComparison:
            """Raises TooLongError where not even the first seed ends in time, and a shorter one would."""
            runs = open_runs(steps)
            strip = _Strip(out / "strip.png", problem, runs, plan)
            notes = list(always)
            if steps is not None:
                notes.insert(0, plans.note(steps))
                console.print(notes[0], soft_wrap=True)

            def time_for(arms: Sequence[FieldArm]) -> bool:
                return runs.expected(arms) < limit.left

            def to_go() -> list[FieldArm]:
                return runs.missing(plan, plan.seeds)

            tuned: dict[str, list[FieldRun]] = {arm.name: [] for arm in plan.arms}
            best: dict[str, tuple[Init, float] | None] = dict.fromkeys(tuned)
            try:
                tuned = tune_fields(plan, recipe.train.lr, runs, time_for, notes, to_go)
                best = {arm.name: chosen(arm, tuned[arm.name], notes) for arm in plan.arms}
            except OutOfTimeError as error:
                plans.shorten(steps, error)
                notes.append(f"Stopped for time before the first seed: {error}.")

            def publish() -> FieldComparison:
                records = []
                for arm in plan.arms:
                    choice = best[arm.name]
                    found = [] if choice is None else [runs.find(arm, *choice, seed) for seed in plan.seeds]
                    records.append(
                        FieldArmRecord(
                            name=arm.name,
                            method=arm.method,
                            choice=choice,
                            parameters=built[arm.name][0],
                            omega=built[arm.name][1],
                            runs=tuple(run for run in found if run is not None),
                            tuning=tuple(tuned[arm.name]),
                        )
                    )
                results = build_record(
                    name=recipe.name,
                    problem=problem.name,
                    settings={**shared_settings(runs.recipe), "tune_lr": list(plan.grid), "train.lr": recipe.train.lr},
                    fingerprint=problem.fingerprint,
                    arms=records,
                    dense=dense,
                    seeds=plan.seeds,
                    tuning_seed=plan.tuning_seed,
                    times=times,
                    notes=notes + threads.notes,
                    command=command or command_line(),
                    seconds=limit.passed,
                )
                _write(out, results, strip)
                return FieldComparison(out, results)

            going = [(arm, choice) for arm in plan.arms if (choice := best[arm.name]) is not None]
            for index, seed in enumerate(plan.seeds):
                missing = [
                    (arm, choice)
                    for arm, choice in going
                    if runs.find(arm, *choice, seed) is None or (index == 0 and not runs.is_whole(arm, *choice, seed))
                ]
                if index > 0 and missing and not time_for([arm for arm, _ in missing]):
                    notes.append(f"Stopped for time before seed {seed}; {len(plan.seeds)} seeds were asked for.")
                    break
                try:
                    for place, (arm, choice) in enumerate(missing, 1):
                        after = [later for later, _ in missing[place:]]
                        where = f"seed {index + 1} of {len(plan.seeds)}"
                        runs.fit(arm, *choice, seed, where, after=after, needed=index == 0, to_go=to_go)
                except OutOfTimeError as error:
                    if index == 0:
                        plans.shorten(steps, error)
                    notes.append(f"Stopped for time in seed {seed}: {error}.")
                    break
                if missing and index + 1 < len(plan.seeds):
                    publish()
            return publish()

        return plans.run(session, steps)
    finally:
        lock.release()


def _step_times(
    problem: Problem,
    plan: FieldPlan,
    recipe: FieldRecipe,
    device: torch.device,
    rounds: int,
    *,
    limit: TimeLimit,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds of interleaved training steps of every arm."""

    def steps(arm: FieldArm) -> Callable[[], object]:
        stepper = Stepper(problem, build(problem, arm.method, plan.tuning_seed).to(device), recipe.train)
        return lambda: stepper.take(0)

    if clock is None:
        clock = "process" if device.type == "cpu" else "wall"  # a GPU takes none of the process' time
    train = recipe.train
    most = None if limit.seconds is None else TIMING_SHARE * limit.left
    with cpu_threads(train.threads), many_compiled(train.compile), told_of_memory("the timing of steps"):
        steppers = {arm.name: steps(arm) for arm in plan.arms}
        return interleaved_step_times(steppers, rounds, clock=clock, max_seconds=most)


@torch.no_grad()
def _forecast(
    problem: Problem, plan: FieldPlan, recipe: FieldRecipe, device: torch.device, limit: TimeLimit
) -> Forecast:
    """Forecast the fits' time by some steps, an evaluation and a picture; keep time for the pictures."""
    begun = limit.passed
    with torch.enable_grad():
        times = _step_times(problem, plan, recipe, device, PACE_ROUNDS, limit=limit, clock="wall")
    start = seconds_around(limit.passed - begun, times, _START)
    train = recipe.train
    with cpu_threads(train.threads), told_of_memory("an evaluation"):
        model = build(problem, plan.arms[0].method, plan.tuning_seed).to(device).eval()
        evaluating = time.monotonic()
        problem.evaluate(model)
        drawing = time.monotonic()
        problem.picture(model)
        limit.keep((len(plan.arms) + 1) * (time.monotonic() - drawing))
    return Forecast(
        step=median_steps(times),
        evaluation=dict.fromkeys(times, drawing - evaluating),
        evaluations=sum(train.evaluates(step) for step in range(1, train.steps + 1)),
        start=start,
    )


def _size_and_omega(model: nn.Module) -> tuple[int, float | None]:
    """Parameters, and the frequency of the sines, which is the same in all."""
    sines = (each for each in model.modules() if isinstance(each, SineLowRankLinear))
    omega = next((each.sine_config.omega for each in sines if each.sine_config.activation == "sine"), None)
    assert not isinstance(omega, str)
    return sum(each.numel() for each in model.parameters()), omega


class _Strip:
    """The pictures of the first seed's fits beside the truth, drawn when they are others than those drawn last.

    A picture can take longer than a fit (a shape is a mesh, a scene its rays), and further seeds change none.
    """

    def __init__(self, path: Path, problem: Problem, runs: FieldRuns, plan: FieldPlan) -> None:
        self.path, self.problem, self.runs, self.plan = path, problem, runs, plan
        self._drawn: object = None  # nothing yet in this session, whatever an earlier one left

    def draw(self, results: dict[str, Any]) -> None:
        seed = self.plan.seeds[0]
        shown = []
        for arm, record in zip(self.plan.arms, results["arms"], strict=True):
            run = None if record["lr"] is None else self.runs.find(arm, record["init"], record["lr"], seed)
            if run is not None and run.value is not None:
                shown.append((arm, record, run.value, run))
        now = [(arm, record["percent"], run) for arm, record, _, run in shown]
        if now == self._drawn:
            return
        pictures = [
            (record, value, self.problem.picture(self.runs.model(arm, run))) for arm, record, value, run in shown
        ]
        plot_strip(self.path, results, self.problem.picture(None), pictures)
        self._drawn = now


def _write(out: Path, results: dict[str, Any], strip: _Strip) -> None:
    """Record, pictures and report; each file whole or not at all."""
    write_json(out / "results.json", results)
    plot_rates(out / "rate.png", results)
    plot_omegas(out / "omega.png", results)
    strip.draw(results)
    write_text(out / "report.md", render_report(results))
