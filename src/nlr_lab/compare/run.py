"""The heart of the tool: run a baseline and other arms on the same batches and say what the difference is.

Order of work: prepare the data once; build every arm (a bad arm fails here, before anything is written);
time interleaved steps, and shorten all runs where the time limit asks for it; tune each arm on a
seed of its own; then run seed by seed, every arm within a seed, so that stopping after any seed leaves all arms
with the same n. After each seed the record, the pictures and the report are written anew.
"""

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.cores import FreeThreads
from nlr_lab.runtime.environment import cpu_threads
from nlr_lab.runtime.processes import on_rank_0, rank
from nlr_lab.runtime.storage import write_text
from nlr_lab.runtime.time_limit import Lengths, OutOfTimeError, TimeLimit
from nonlinear_lowrank.validation import check_integer

from .folder import REPORT, RESULTS, Folder, record_text
from .plan import Plan
from .record import ArmRecord, build_results, command_line
from .runs import Runs
from .trial import Choice, Measurement, Run, Trials
from .tuning import Tried, choose, tune
from .workers import check_workers, open_workers


@dataclass(frozen=True)
class Comparison:
    """The record of a comparison, and the folder that it is written in."""

    out: Path
    results: dict[str, Any] = field(repr=False)
    trials: Trials = field(repr=False)

    def copy_to(self, folder: Path | str, name: str) -> None:
        """Copy what a reader needs, without the runs: `name`.md, .json and -picture.png.

        Args:
            folder: an existing folder, of a study for example. Files of these names in it are replaced or go.
            name: how the files' names begin.
        """
        folder = Path(folder)
        text = (self.out / REPORT).read_text(encoding="utf-8")
        for picture in self.trials.pictures:
            text = text.replace(f"({picture})", f"({name}-{picture})")
            (folder / f"{name}-{picture}").unlink(missing_ok=True)
            if (self.out / picture).exists():
                shutil.copyfile(self.out / picture, folder / f"{name}-{picture}")
        shutil.copyfile(self.out / RESULTS, folder / f"{name}.json")
        write_text(folder / f"{name}.md", text)

    def __rich__(self) -> Any:
        return self.trials.report.render_tables(self.results)

    def __str__(self) -> str:
        """The tables, what was found, and where the files are."""
        console = Console(file=io.StringIO(), width=max(110, shutil.get_terminal_size((130, 40)).columns))
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        lines = [f"- {line}".replace("**", "") for line in self.trials.report.findings(self.results)]
        files = [name for name in (REPORT, *self.trials.pictures, RESULTS) if (self.out / name).exists()]
        return "\n".join([console.file.getvalue(), *lines, f"\nIn {self.out}: {', '.join(files)}"])


def compare(
    recipe: Any,
    out: Path | str,
    *,
    arms: Sequence[Any] | None = None,
    seeds: int | None = None,
    tune_lr: Sequence[float] | None = None,
    reference: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    max_seconds: float | None = None,
    max_extensions: int = 4,
    timing_rounds: int | None = None,
    workers: int | None = None,
    keep_checkpoints: bool = False,
    kept_runs: Path | None = None,
    quiet: bool = False,
    command: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    trials: Trials | None = None,
) -> Comparison:
    """Run every arm over the same seeds and compare them with the reference and with each control.

    Args:
        recipe: task or problem and training settings, shared by all arms; its `arms`, `seeds` and `tune_lr` are the
            defaults of the arguments of those names.
        out: folder for the runs and the report; new or empty, unless `resume` or `overwrite`.
        arms: at least two, with names of their own: `Arm`, of a neural field `FieldArm`, or their short forms.
        seeds: number of paired seeds. Tuning uses `recipe.train.seed`, the comparison the seeds that follow
            it: a choice made for its luck on a seed gains nothing from that luck here.
        tune_lr: learning rates to try for every arm that names none itself; empty means the recipe's. While an
            arm's best is at the edge, its grid is extended by the grid's own ratio.
        reference: name of the arm that the main tables compare with; by default the first arm, of neural fields the
            dense one if there is one.
        resume: continue in `out`: finished runs are used as they are, a half-done run goes on from its
            checkpoint, missing ones are run. Arms and seeds may be added.
        overwrite: delete what a former comparison wrote to `out`; other files there stay.
        max_seconds: it ends within this time. No new seed and no new choice of the tuning is begun that would not, by
            the slowest run of each arm so far. Where timed steps say that not even the first choice and the first seed
            would, all runs are shortened, schedule and all, as much as it takes; the report says so, and such runs
            have folders of their own (`runs/<arm>/steps-<n>/`). A run that is over time all the same stops.
        max_extensions: how often an arm's grid may grow; after that the report says "still at the edge".
        timing_rounds: interleaved steps of each arm; 0 leaves step times out. None: 30, of neural fields 20.
        workers: so many runs side by side, on this machine's GPUs or cores, or on the Ray cluster that RAY_ADDRESS
            names and whose machines all see `out`; None: one after another, in this process. With `max_seconds` the
            seeds follow each other still.
        keep_checkpoints: keep the checkpoints of finished runs too (their models are kept in any case).
        kept_runs: a file that keeps the finished runs, a line each, outside `out`: what it has and `out` lacks is used
            as it is, and it is written anew after each run. With it a folder is resumed, as with `resume`. The first
            seed's fits of a neural field, which its strip of pictures shows, are run again where `out` lacks weights.
        quiet: print nothing.
        command: how to repeat this, for the report; by default this process' own command line.
        clock: seconds, for `max_seconds`.
        trials: what is run, where that does not follow from the recipe.

    Raises:
        UserError: arms, learning rates or seeds that make no comparison; a folder that is not empty, or that holds a
            comparison with other settings (the message names the field); an arm that cannot be matched; a time limit
            that does not hold even ten steps of every arm. Nothing has been written then.
    """
    limit, threads = TimeLimit(max_seconds, clock), FreeThreads(recipe.train.threads)
    trials = trials or _trials_of(recipe)
    rounds = trials.timing_rounds if timing_rounds is None else timing_rounds
    check_integer("timing_rounds", rounds, minimum=0)
    check_workers(workers)
    plan = Plan.make(trials, arms, seeds, tune_lr, reference, max_extensions)
    folder = Folder(Path(out), plan, trials.pictures, kept_runs)
    resume = resume or kept_runs is not None
    trials.join(folder.path)
    on_rank_0(lambda: folder.check(resume=resume, overwrite=overwrite))
    trials.prepare(quiet=quiet)
    if resume:
        on_rank_0(lambda: folder.check_data(trials.fingerprint))
    is_rank_0 = rank() == 0
    console = Console(stderr=True, quiet=quiet or not is_rank_0, highlight=False, soft_wrap=True)

    def measure() -> Any:
        with threads.chosen():
            former = folder.load_times(rounds, recipe.train.threads) if resume else None
            return trials.count_and_time(plan.arms, rounds, former, limit)

    measured, forecast = on_rank_0(measure)
    if forecast is not None and workers:
        forecast.at_once = workers
    known: dict[str, Any] = {"limit": limit, "forecast": forecast, "threads": threads, "console": console}

    def missing(steps: int | None, anew: bool) -> list[str]:
        runs = Runs(trials, plan, folder, steps=steps, **known)
        return [arm.name for arm in runs.missing(plan.seeds[:1], 1, anew=anew)]

    on_rank_0(folder.restore_runs)
    may_shorten = forecast if max_seconds is not None else None
    lengths = Lengths(trials.steps if may_shorten else 0, may_shorten, limit, folder.lengths, missing)
    steps = lengths.choose(anew=overwrite)
    with contextlib.ExitStack() as stack:
        if is_rank_0:
            stack.enter_context(folder.opened(trials.fingerprint, overwrite=overwrite))
            if measured.times is not None:
                with cpu_threads(threads.now):
                    folder.save_times(measured.times, recipe.train.threads)
        notes = trials.notes(measured)
        if resume:
            notes += on_rank_0(folder.version_notes)
        if measured.times and (taken := len(measured.times[plan.reference])) < rounds:
            notes.append(f"Step times are of {taken} rounds, not of {rounds}, to keep within the time limit.")
        helpers = stack.enter_context(open_workers(workers, recipe.train.threads, console))
        on_rank_0(folder.keep_runs)  # what the folder had alone
        known |= {"workers": helpers, "keep_checkpoints": keep_checkpoints}

        def session(steps: int | None) -> Comparison:
            runs = Runs(trials, plan, folder, steps=steps, **known)
            return _Session(runs, measured, lengths, list(notes), command or command_line(), is_rank_0).run()

        return lengths.run(session, steps)


def _trials_of(recipe: Any) -> Trials:
    """Return the recipe's kind of trials; what another kind needs is not imported."""
    from nlr_lab.training.recipe import Recipe

    if isinstance(recipe, Recipe):
        from .models.trial import ModelTrials

        return ModelTrials(recipe)
    from .fields.trial import FieldTrials

    return FieldTrials(recipe)


class _Session:
    """All runs of one length: tuning, then seed by seed, with a report after each."""

    def __init__(
        self,
        runs: Runs,
        measured: Measurement,
        lengths: Lengths,
        notes: list[str],
        command: str,
        writes: bool,
    ) -> None:
        self.runs, self.plan, self.trials, self.limit = runs, runs.plan, runs.trials, runs.limit
        self.measured, self.lengths, self.notes, self.command, self.writes = measured, lengths, notes, command, writes
        self.tried: Tried = {}
        self.chosen: dict[str, tuple[Choice | None, str]] = {}

    def run(self) -> Comparison:
        """Run all that ends in time and report it.

        Raises:
            TooLongError: not even the first seed ends in time, and a shorter one would.
        """
        if self.runs.steps is not None:
            self.notes.insert(0, self.lengths.note(self.runs.steps))
            self.runs.console.print(self.notes[0])
        free = self.limit.seconds is None
        seeds: Sequence[int] = self.plan.seeds
        try:
            self.tried = tune(self.runs, self.notes, all_at_once=free)
        except OutOfTimeError as error:
            self._stop(f"before the first seed: {error}.", needed=error)
            seeds = ()
        for arm in self.plan.arms:
            self.chosen[arm.name] = choose(self.runs, arm, self.tried.get(arm.name, ()), self.notes)
        going = self._going()
        if free:
            self.runs.run_ahead([(arm, choice, seed) for seed in seeds for arm, choice in going])
        for index, seed in enumerate(seeds):
            first = index == 0
            missing = [each for each in going if not self.runs.is_done(*each, seed, with_weights=first)]
            if not first and missing and not self.runs.have_time_for([arm for arm, _ in missing]):
                self._stop(f"before seed {seed}; {len(self.plan.seeds)} seeds were asked for.")
                break
            try:
                self._run_seed(seed, missing, f"seed {index + 1} of {len(self.plan.seeds)}", first)
            except OutOfTimeError as error:
                self._stop(f"in seed {seed}: {error}.", needed=error if first else None)
                break
            if missing and index + 1 < len(self.plan.seeds):
                self.report()
        return self.report()

    def _run_seed(self, seed: int, missing: Sequence[tuple[Any, Choice]], place: str, first: bool) -> None:
        self.runs.run_ahead([(arm, choice, seed) for arm, choice in missing])
        for number, (arm, choice) in enumerate(missing, 1):
            after = [later for later, _ in missing[number:]]
            self.runs.get(arm, choice, seed, place, after=after, needed=first, with_weights=first)

    def _stop(self, where: str, needed: OutOfTimeError | None = None) -> None:
        """Note that time is up; `needed`: for a run that the comparison cannot do without, so fewer steps are tried."""
        if needed is not None:
            self.lengths.shorten(self.runs.steps, needed)
        self.notes.append(f"Stopped for time {where}")

    def report(self) -> Comparison:
        """Write record, pictures and report; each file whole or not at all."""
        plan, trials, path = self.plan, self.trials, self.runs.folder.path
        arms = [self._record(arm) for arm in plan.arms]
        about = trials.about()
        own = {"train.lr": trials.recipe.train.lr, "train.seed": plan.tuning_seed, "tune_lr": list(plan.grid)}
        own |= {
            f"grid of {arm.name}": rates
            for arm in plan.arms
            if (rates := sorted({choice.lr for choice in plan.tuned(arm)})) and rates != list(plan.grid)
        }
        settings = trials.shared_settings() | own | {"seeds": len(plan.seeds)}
        results = build_results(
            about=about | {"recipe": about["recipe"] | {"settings": settings}},
            arms=arms,
            pairs=trials.pairs(plan.reference, plan.arms),
            reference=plan.reference,
            seeds=plan.seeds,
            tuning_seed=plan.tuning_seed,
            measure=trials.measure,
            times=self.measured.times,
            notes=self.notes + self.runs.threads.notes,
            command=self.command,
            seconds=self.limit.passed,
            threads=trials.recipe.train.threads,
        )
        results = trials.add_to(results, plan.arms)
        if self.writes:
            write_text(path / RESULTS, record_text(results))
            first = plan.seeds[0]
            folders = {arm.name: self.runs.path(arm, choice, first) for arm, choice in self._going()}
            trials.draw(path, results, folders)
            write_text(path / REPORT, trials.report.render_report(results))
        return Comparison(path, results, trials)

    def _going(self) -> list[tuple[Any, Choice]]:
        return [(arm, choice) for arm in self.plan.arms if (choice := self.chosen[arm.name][0]) is not None]

    def _record(self, arm: Any) -> ArmRecord:
        choice, source = self.chosen[arm.name]
        found: dict[int, Run | None] = {}
        if choice is not None:
            found = {seed: self.runs.find(arm, choice, seed) for seed in self.plan.seeds}
        return ArmRecord(
            name=arm.name,
            settings=self.plan.arm_settings[arm.name],
            control=self.trials.control(arm),
            choice=choice,
            source=source,
            parameters=self.measured.parameters[arm.name],
            trainable=self.measured.trainable.get(arm.name),
            flops=self.measured.flops.get(arm.name),
            runs={seed: run for seed, run in found.items() if run is not None},
            tuning=self.tried.get(arm.name, ()),
        )
