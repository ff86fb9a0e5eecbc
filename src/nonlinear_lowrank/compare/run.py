"""The heart of the tool: train a baseline and other arms on the same batches and say what the difference is.

Order of work: prepare the text once; build every arm (a bad arm fails here, before anything is written);
time interleaved steps; tune each arm's learning rate on a seed of its own; then train seed by seed, every
arm within a seed, so that stopping after any seed leaves all arms with the same n. After each seed the
record, the pictures and the report are written anew.

    out/compare.json     the settings that every run in this folder shares
    out/timing.json      seconds of the interleaved steps
    out/runs/<arm>/lr-<rate>/seed-<k>/      one training run each, with its result.json
    out/results.json     the record      out/report.md, out/curves.png, out/rates.png   made from it
"""

import contextlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..tasks.task import measure_of, scored_split
from ..training.checkpoints import on_first_process
from ..training.recipe import Arm, Recipe
from ..training.run import join_processes, run_training
from .folder import (
    MARKER,
    Plan,
    arm_settings,
    check_folder,
    check_text,
    copy_report,
    load_timing,
    open_folder,
    save_timing,
    version_notes,
    write_text,
)
from .kept_runs import KeptRuns
from .measure import Measurement, measure_arms
from .plots import ArmCurves, plot_curves, plot_rate_sweep
from .record import ArmRecord, Run, build_results, command_line
from .report import chosen_by, findings, render_report, render_tables
from .runs import Runner, Runs, chosen_rate, tune
from .workers import check_workers, open_workers

Measurer = Callable[..., Measurement]


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
        max_seconds: no new seed and no new rate of the tuning is begun that would not end within this time,
            by the slowest run of each arm so far. The first rate and the first seed always run, for without
            them there is nothing to report.
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
            comparison with other settings (the message names the field); an arm that cannot be matched. Nothing has
            been written then.
    """
    started = clock()
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

    def measured_now() -> Measurement:
        former = load_timing(out, plan, timing_rounds) if resume else None
        found = measure(recipe, plan.arms, prepared, rounds=0 if former is not None else timing_rounds)
        return found if former is None else replace(found, times=former)

    measured = on_first_process(measured_now)
    if kept is not None:
        on_first_process(lambda: kept.restore(prepared.fingerprint))
    lock = open_folder(out, plan, prepared.fingerprint, overwrite=overwrite) if main else None
    with contextlib.ExitStack() as stack:
        if lock is not None:
            stack.callback(lock.release)
        if main and measured.times is not None:
            save_timing(out, plan, measured.times)
        notes = [match.describe(_counts(measured, match.by)) for match in plan.matches]
        notes += [*measured.notes, *(on_first_process(lambda: version_notes(out / MARKER)) if resume else [])]
        helpers = stack.enter_context(open_workers(workers, recipe.train.threads, run, console))
        if kept is not None:
            on_first_process(kept.collect)  # what the folder had alone
        runs = Runs(recipe, out, prepared, run, keep_checkpoints, quiet, console, helpers, kept)

        def time_for(arms: Sequence[Arm]) -> bool:
            def fits() -> bool:
                return max_seconds is None or clock() - started + runs.expected_seconds(arms) < max_seconds

            # Clocks differ between processes, and a split decision would hang them.
            return on_first_process(fits)

        tuned = tune(plan, runs, time_for, notes, at_once=max_seconds is None)
        if not runs.measure.is_loss and scored_split(prepared) is None:
            notes.append("Learning rates and best steps were chosen on the scored examples themselves.")
        rates = {arm.name: chosen_rate(plan, arm, tuned.get(arm.name), runs.measure) for arm in plan.arms}
        running = [(arm, rate) for arm in plan.arms if (rate := rates[arm.name][0]) is not None]

        def publish() -> Comparison:
            results = build_results(
                name=recipe.name,
                summary=_summary(recipe),
                settings=plan.settings | plan.choices,
                data=prepared.describe(),
                arms=[_record(arm, *rates[arm.name], plan, runs, measured, tuned) for arm in plan.arms],
                reference=plan.reference,
                seeds=plan.seeds,
                tuning_seed=plan.tuning_seed,
                times=measured.times,
                notes=notes,
                command=command or command_line(),
                seconds=clock() - started,
                threads=plan.threads,
                measure=runs.measure,
            )
            if main:
                _write(out, results)
            return Comparison(out, results)

        if max_seconds is None:
            runs.train_ahead([(arm, rate, seed) for seed in plan.seeds for arm, rate in running])
        for index, seed in enumerate(plan.seeds):
            missing = [(arm, rate) for arm, rate in running if runs.find(arm, rate, seed) is None]
            if index > 0 and missing and not time_for([arm for arm, _ in missing]):
                notes.append(f"Stopped for time before seed {seed}; {len(plan.seeds)} seeds were asked for.")
                break
            runs.train_ahead([(arm, rate, seed) for arm, rate in missing])
            for arm, rate in missing:
                runs.get(arm, rate, seed, f"seed {index + 1} of {len(plan.seeds)}")
            if missing and index + 1 < len(plan.seeds):
                publish()
        return publish()


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
