"""The heart of the tool: train a baseline and other arms on the same batches and say what the difference is.

Order of work: prepare the text once; build every arm (a bad arm fails here, before anything is written);
time interleaved steps, and shorten all runs where the time limit asks for it; tune each arm's learning rate on a
seed of its own; then train seed by seed, every arm within a seed, so that stopping after any seed leaves all arms
with the same n. After each seed the
record, the pictures and the report are written anew.

    out/compare.json     the settings that every run in this folder shares
    out/timing.json      seconds of the interleaved steps
    out/runs/<arm>/lr-<rate>/seed-<k>/      one training run each, with its result.json
    out/results.json     the record      out/report.md, out/curves.png, out/rates.png   made from it
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.cores import FreeThreads
from nlr_lab.runtime.environment import cpu_threads
from nlr_lab.runtime.time_limit import (
    PACE_ROUNDS,
    TIMING_SHARE,
    Forecast,
    Lengths,
    OutOfTimeError,
    TimeLimit,
    evaluation_seconds,
    median_steps,
    seconds_around,
    shortened,
)
from nlr_lab.tasks.task import measure_of, plain_split, scored_split
from nlr_lab.training.checkpoints import on_first_process
from nlr_lab.training.recipe import Arm, Recipe, TrainConfig
from nlr_lab.training.run import join_processes, run_training

from .folder import (
    MARKER,
    Plan,
    arm_settings,
    check_folder,
    check_text,
    copy_report,
    lengths,
    load_timing,
    open_folder,
    save_timing,
    shared_settings,
    version_notes,
    write_text,
)
from .kept_runs import KeptRuns
from .measure import Measurement, measure_arms
from .plots import ArmCurves, plot_curves, plot_rate_sweep
from .record import ArmRecord, Run, build_results, command_line
from .report import chosen_by, findings, render_report, render_tables
from .runs import Runner, Runs, chosen_rate, tune
from .workers import Workers, check_workers, open_workers

Measurer = Callable[..., Measurement]

_START = 2.0  # seconds of a run beside its steps, at the least


@dataclass(frozen=True)
class Comparison:
    """What `compare` hands back: the record, and the folder that it is written in."""

    out: Path
    results: dict[str, Any] = field(repr=False)

    def copy_to(self, folder: Path | str, name: str) -> None:
        """Copies what a reader needs, without the runs: `name`.md, .json, -curves.png, -rates.png.

        Args:
            folder: an existing folder, of a study for example. Files of these names in it are replaced.
            name: how the files' names begin.
        """
        copy_report(self.out, ("curves.png", "rates.png"), Path(folder), name)

    def __rich__(self) -> Any:
        return render_tables(self.results)

    def __str__(self) -> str:
        """The tables, what was found, and where the files are."""
        console = Console(file=io.StringIO(), width=max(100, shutil.get_terminal_size((130, 40)).columns))
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        lines = [f"- {line}".replace("**", "") for line in findings(self.results)]
        return "\n".join([console.file.getvalue(), *lines, f"\nIn {self.out}: report.md, curves.png, results.json"])


def compare(
    recipe: Recipe,
    out: Path | str,
    *,
    arms: Sequence[Arm] | None = None,
    seeds: int | None = None,
    tune_lr: Sequence[float] | None = None,
    reference: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    max_seconds: float | None = None,
    max_extensions: int = 4,
    timing_rounds: int = 30,
    workers: int | None = None,
    keep_checkpoints: bool = False,
    kept_runs: Path | None = None,
    quiet: bool = False,
    command: str | None = None,
    run: Runner = run_training,
    measure: Measurer = measure_arms,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Trains every arm over the same seeds and compares them with the reference and with each control.

    Args:
        recipe: task and training settings, shared by all arms; its `arms`, `seeds` and `tune_lr` are the
            defaults of the arguments of those names.
        out: folder for the runs and the report; new or empty, unless `resume` or `overwrite`.
        arms: at least two, with names of their own. Arms whose method is "baseline" are controls.
        seeds: number of paired seeds. Tuning uses `recipe.train.seed`, the comparison the seeds that follow
            it: a rate chosen for its luck on a seed gains nothing from that luck here.
        tune_lr: rates to try for every arm that names none itself; empty means the recipe's rate. While an
            arm's best is at the edge, its grid is extended by the grid's own ratio.
        reference: name of the arm that the main tables compare with; the first arm by default.
        resume: continue in `out`: finished runs are used as they are, a half-done run goes on from its
            checkpoint, missing ones are run. Arms and seeds may be added.
        overwrite: delete what a former comparison wrote to `out`; other files there are left alone.
        max_seconds: it ends within this time. No new seed and no new rate of the tuning is begun that would not, by
            the slowest run of each arm so far. Where timed steps say that not even the first rate and the first seed
            would, all runs are shortened, schedule and all, as much as it takes; the report says so, and such runs
            have folders of their own (`runs/<arm>/steps-<n>/`). A run that is over time all the same stops.
        max_extensions: how often an arm's grid may grow; after that the report says "still at the edge".
        timing_rounds: interleaved steps of each arm; 0 leaves step times out.
        workers: so many runs side by side, on this machine's GPUs or cores, or on the Ray cluster that RAY_ADDRESS
            names and whose machines all see `out`; None: one after another, in this process. With `max_seconds` the
            seeds follow each other still.
        keep_checkpoints: keep the checkpoints of finished runs too (their models are kept in any case).
        kept_runs: a file that keeps the finished runs, a line each, outside `out`: what it has and `out` lacks is used
            as it is, and it is written anew after each run. With it a folder is gone on with, as with `resume`.
        quiet: print nothing.
        command: how to repeat this, for the report; by default this process' own command line.
        run: trains one arm; has `run_training`'s signature.
        measure: builds and times the arms; has `measure_arms`' signature.
        clock: seconds, for `max_seconds`.

    Raises:
        UserError: arms, rates or seeds that make no comparison; a folder that is not empty, or that holds a
            comparison with other settings (the message names the field); an arm that cannot be matched; a time limit
            that does not hold even ten steps of every arm. Nothing has been written then.
    """
    limit, threads = TimeLimit(max_seconds, clock), FreeThreads(recipe.train.threads)
    out = Path(out)
    check_workers(workers)
    plan = Plan.make(recipe, arms, seeds, tune_lr, reference, max_extensions)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join_processes(recipe, out)
    main = int(os.environ.get("RANK", "0")) == 0
    kept = None if kept_runs is None else KeptRuns(kept_runs, out, MARKER)
    if kept is not None:
        resume = True
        on_first_process(lambda: kept.check(plan.settings, arm_settings(plan.arms), plan.defaults))
    on_first_process(lambda: check_folder(out, plan, resume=resume, overwrite=overwrite))
    console = Console(quiet=quiet or not main, highlight=False)
    on_first_process(lambda: recipe.task.prepare(progress=not quiet) and None)  # fills the cache
    prepared = recipe.task.prepare(progress=False)
    if resume:
        on_first_process(lambda: check_text(out, prepared.fingerprint))

    def measured_now() -> tuple[Measurement, Forecast | None]:
        """With the forecast of runs by the times of steps as they are now."""
        with threads.chosen():
            former = load_timing(out, plan, timing_rounds) if resume else None
            rounds, limited = 0 if former is not None else timing_rounds, {}
            if max_seconds is not None:
                rounds, limited = max(rounds, PACE_ROUNDS), {"max_seconds": TIMING_SHARE * limit.left}
            if rounds:
                console.print(f"timing steps of {len(plan.arms)} arms")
            begun = limit.passed
            found = measure(recipe, plan.arms, prepared, rounds=rounds, **limited)
            forecast = None
            if found.times:
                start = seconds_around(limit.passed - begun, found.times, _START)
                forecast = _forecast(recipe, prepared, found.times, start, workers)
            return replace(found, times=former or (found.times if timing_rounds else None)), forecast

    measured, forecast = on_first_process(measured_now)
    if kept is not None:
        on_first_process(lambda: kept.restore(prepared.fingerprint))

    def open_runs(steps: int | None, helpers: Workers | None = None) -> Runs:
        own = recipe if steps is None else replace(recipe, train=shortened(_in_steps(recipe, prepared), steps))
        plain = (own, out, prepared, run, keep_checkpoints, quiet, console, helpers, kept)
        return Runs(*plain, limit=limit, forecast=forecast, threads=threads, steps=steps)

    def missing(steps: int | None, anew: bool) -> list[str]:
        return [arm.name for arm in open_runs(steps).missing(plan, plan.seeds[:1], 1, anew=anew)]

    full = _in_steps(recipe, prepared).steps if forecast is not None else 0
    may_shorten = forecast if max_seconds is not None else None
    plans = Lengths(full, may_shorten, limit, lambda: lengths(out), missing)
    steps = plans.choose(anew=overwrite)
    lock = open_folder(out, plan, prepared.fingerprint, overwrite=overwrite) if main else None
    with contextlib.ExitStack() as stack:
        if lock is not None:
            stack.callback(lock.release)
        if main and measured.times is not None:
            with cpu_threads(threads.now):
                save_timing(out, plan, measured.times)
        always = [match.describe(_counts(measured, match.by)) for match in plan.matches]
        always += [*measured.notes, *(on_first_process(lambda: version_notes(out / MARKER)) if resume else [])]
        if timing_rounds and measured.times and (rounds := len(measured.times[plan.reference])) < timing_rounds:
            always.append(f"Step times are of {rounds} rounds, not of {timing_rounds}, to keep within the time limit.")
        helpers = stack.enter_context(open_workers(workers, recipe.train.threads, run, console))
        if kept is not None:
            on_first_process(kept.collect)  # what the folder had alone

        def session(steps: int | None) -> Comparison:
            """Raises TooLongError where not even the first seed ends in time, and a shorter one would."""
            runs = open_runs(steps, helpers)
            notes = list(always)
            if steps is not None:
                notes.insert(0, plans.note(steps))
                console.print(notes[0], soft_wrap=True)

            def time_for(arms: Sequence[Arm]) -> bool:
                # Clocks differ between processes, and a split decision would hang them.
                return on_first_process(lambda: runs.expected_seconds(arms) < limit.left)

            def to_go() -> list[Arm]:
                return runs.missing(plan, plan.seeds)

            tuned: dict[str, list[Run]] = {}
            seeds = plan.seeds
            try:
                tuned = tune(plan, runs, time_for, notes, at_once=max_seconds is None, to_go=to_go)
            except OutOfTimeError as error:
                plans.shorten(steps, error)
                notes.append(f"Stopped for time before the first seed: {error}.")
                seeds = ()
            if not runs.measure.is_loss and scored_split(prepared) is None:
                notes.append("Learning rates and best steps were chosen on the scored examples themselves.")
            rates = {arm.name: chosen_rate(plan, arm, tuned.get(arm.name), runs.measure) for arm in plan.arms}
            running = [(arm, rate) for arm in plan.arms if (rate := rates[arm.name][0]) is not None]

            def publish() -> Comparison:
                results = build_results(
                    name=recipe.name,
                    summary=_summary(runs.recipe),
                    settings=plan.settings | plan.choices | ({} if steps is None else shared_settings(runs.recipe)),
                    data=prepared.describe(),
                    arms=[_record(arm, *rates[arm.name], plan, runs, measured, tuned) for arm in plan.arms],
                    reference=plan.reference,
                    seeds=plan.seeds,
                    tuning_seed=plan.tuning_seed,
                    times=measured.times,
                    notes=notes + threads.notes,
                    command=command or command_line(),
                    seconds=limit.passed,
                    threads=plan.threads,
                    measure=runs.measure,
                )
                if main:
                    _write(out, results)
                return Comparison(out, results)

            if max_seconds is None:
                runs.train_ahead([(arm, rate, seed) for seed in seeds for arm, rate in running])
            for index, seed in enumerate(seeds):
                missing = [(arm, rate) for arm, rate in running if runs.find(arm, rate, seed) is None]
                if index > 0 and missing and not time_for([arm for arm, _ in missing]):
                    notes.append(f"Stopped for time before seed {seed}; {len(plan.seeds)} seeds were asked for.")
                    break
                try:
                    runs.train_ahead([(arm, rate, seed) for arm, rate in missing])
                    for place, (arm, rate) in enumerate(missing, 1):
                        where = f"seed {index + 1} of {len(plan.seeds)}"
                        after = [later for later, _ in missing[place:]]
                        runs.get(arm, rate, seed, where, after=after, needed=index == 0, to_go=to_go)
                except OutOfTimeError as error:
                    if index == 0:
                        plans.shorten(steps, error)
                    notes.append(f"Stopped for time in seed {seed}: {error}.")
                    break
                if missing and index + 1 < len(plan.seeds):
                    publish()
            return publish()

        return plans.run(session, steps)


def _in_steps(recipe: Recipe, prepared: Any) -> TrainConfig:
    """The recipe's training with its length in steps."""
    return recipe.train if recipe.train.steps else recipe.train.resolved(len(prepared.train))


def _forecast(
    recipe: Recipe, prepared: Any, times: Mapping[str, Sequence[float]], start: float, workers: int | None
) -> Forecast:
    train, step = _in_steps(recipe, prepared), median_steps(times)
    splits = (prepared.valid, scored_split(prepared), plain_split(prepared))
    examples = sum(len(split) for split in splits if split is not None)
    return Forecast(
        step=step,
        evaluation={name: evaluation_seconds(each, examples, train.batch_size) for name, each in step.items()},
        evaluations=math.ceil(train.steps / train.eval_every),
        start=start,
        at_once=workers or 1,
    )


def _counts(measured: Measurement, by: str) -> Mapping[str, float | None]:
    """What was counted of every arm, in the built models."""
    return dict(measured.parameters) if by == "parameters" else measured.flops


def _record(
    arm: Arm,
    rate: float | None,
    source: str,
    plan: Plan,
    runs: Runs,
    measured: Measurement,
    tuned: Mapping[str, Sequence[Run]],
) -> ArmRecord:
    found = {} if rate is None else {seed: runs.find(arm, rate, seed) for seed in plan.seeds}
    return ArmRecord(
        name=arm.name,
        description=arm_settings([arm])[arm.name],
        control=arm.control,
        lr=rate,
        lr_source=source,
        parameters=measured.parameters[arm.name],
        trainable=measured.trainable.get(arm.name),
        flops=measured.flops[arm.name],
        runs={seed: run for seed, run in found.items() if run is not None},
        tuning=tuned.get(arm.name, ()),
    )


def _summary(recipe: Recipe) -> str:
    train = recipe.train
    sequences = f"{train.length} in steps of {train.batch_size} examples"
    if measure_of(recipe.task).is_loss and train.steps:
        sequences = f"{train.steps} steps of {train.batch_size} sequences"
    return f"{recipe.description.rstrip('.')}. Each run takes {sequences}."


# --- what is left behind -------------------------------------------------------------------------------------


def _write(out: Path, results: dict[str, Any]) -> None:
    """Record, pictures and report; each file whole or not at all."""
    # A curve is a list of pairs: one pair a line, not four lines.
    text = re.sub(r"\[\s+([^\s\[\]]+),\s+([^\s\[\]]+)\s+\]", r"[\1, \2]", json.dumps(results, indent=1))
    write_text(out / "results.json", text + "\n")
    draw(out, results)
    write_text(out / "report.md", render_report(results))


def draw(out: Path, results: Mapping[str, Any]) -> None:
    """The pictures of a record: `curves.png`, and `rates.png` where rates were tuned."""
    whole = set(results["seeds"])
    metric = results["metric"]
    by_loss = metric["name"] == "loss"
    unit = f"evaluation loss ({results['loss_unit']})" if by_loss else f"{metric['name']} on held-out examples"
    name = "curve" if by_loss else "metric_curve"
    curves = []
    for arm in results["arms"]:
        runs = [run for run in arm["runs"] if run["seed"] in whole]
        series = tuple(
            tuple((step, float("nan") if value is None else value) for step, value in run[name]) for run in runs
        )
        curves.append(ArmCurves(name=arm["name"], dashed=arm["control"], curves=series))
    base = next(arm for arm in results["arms"] if arm["name"] == results["reference"])
    title = f"{results['recipe']['name']}, n = {results['n']}"
    # Curves of a few evaluations are shown whole, and a score apart is no point of theirs.
    few = max((len(curve) for arm in curves for curve in arm.curves), default=0) < 10
    target = base["final_loss"]["mean"] if by_loss else None
    plot_curves(out / "curves.png", curves, target=target, skip=0 if few else 0.2, title=title, y_label=unit)
    sweeps = {
        arm["name"]: [(run["lr"], chosen_by(run)) for run in arm["tuning"]] for arm in results["arms"] if arm["tuning"]
    }
    if sweeps:
        chosen = {arm["name"]: arm["lr"] for arm in results["arms"] if arm["lr"] is not None}
        dashed = [arm["name"] for arm in results["arms"] if arm["control"]]
        plot_rate_sweep(out / "rates.png", sweeps, chosen=chosen, dashed=dashed, y_label=unit)
