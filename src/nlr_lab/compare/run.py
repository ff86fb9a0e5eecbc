"""The heart of the tool: run a baseline and other arms on the same batches and say what the difference is.

Order of work: prepare the data once; build every arm (a bad arm fails here, before anything is written);
time interleaved steps, and shorten all runs where the time limit asks for it; tune each arm on a
seed of its own; then run seed by seed, every arm within a seed, so that stopping after any seed leaves all arms
with the same n. After each seed, and at Ctrl-C in one, the record, the pictures and the report are rewritten.
"""

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from nlr_lab.runtime.environment import OutOfTimeError, cpu_threads, machine
from nlr_lab.runtime.log import append_entry
from nlr_lab.runtime.processes import FreeThreads, on_rank_0, rank
from nlr_lab.runtime.signals import StoppedBySignal
from nlr_lab.runtime.storage import disk_errors, read_json, write_text
from nlr_lab.runtime.tables import duration
from nlr_lab.training.result import DivergedError
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .record import (
    REPORT,
    RESULT,
    RESULTS,
    SHORTENED,
    ArmRecord,
    Folder,
    begun,
    build_results,
    command_line,
    record_text,
)
from .trial import Choice, Forecast, Measurement, Plan, Run, Stop, TimeLimit, Trials, best_run, next_choices

_LEAST_STEPS = 10  # below this a run would be over before its evaluations say anything
_MARGIN = 1.3  # of the forecast that a length is chosen by: to begin once more costs more than to take fewer steps
_SURE = 0.1  # of a run's steps, after which its own pace says when it ends
Wanted = tuple[Any, Choice]
"""An arm at one choice."""


@dataclass(frozen=True)
class Comparison:
    """The record of a comparison, and the folder that it is written in."""

    out: Path
    results: dict[str, Any] = field(repr=False)
    trials: Trials = field(repr=False)

    def __str__(self) -> str:
        """The tables, what was found, and where the files are."""
        text, tables = io.StringIO(), Markdown("\n\n".join(self.trials.report.tables(self.results)))
        Console(file=text, width=max(110, shutil.get_terminal_size((130, 40)).columns)).print(tables)
        lines = [f"- {line}".replace("**", "") for line in self.trials.report.findings(self.results)]
        files = [name for name in (REPORT, *self.trials.pictures, RESULTS) if (self.out / name).exists()]
        return "\n".join([text.getvalue(), *lines, f"\nIn {self.out}: {', '.join(files)}"])


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
        seeds: number of paired seeds, those that follow `recipe.train.seed`, which is the tuning's alone.
        tune_lr: learning rates to try for every arm that names none itself. While an arm's best is at the edge, its
            grid is extended by the grid's own ratio.
        reference: name of the arm that the main tables compare with; by default the first, of neural fields the dense.
        resume: finished runs are used as they are, a half-done run resumes from its checkpoint, missing ones are run.
            Arms and seeds may be added. For a finished run its result.json is enough; a neural field's fit of the first
            seed, whose picture is shown, is run again where its weights are missing.
        overwrite: delete what a former comparison wrote to `out`; other files there stay.
        max_seconds: it ends within this time: no seed and no tuning choice is begun that would exceed it. Where the
            first would, all runs are shortened, schedule and all, in folders of their own.
        max_extensions: how often an arm's grid may grow.
        timing_rounds: interleaved steps of each arm; 0 leaves step times out. None: 30, of neural fields 20.
        workers: runs side by side, on this machine's GPUs or cores, or on the Ray cluster that RAY_ADDRESS
            names and whose machines all see `out`; None: one after another, in this process.
        quiet: print nothing.
        command: how to repeat this, for the report; by default this process' own command line.
        clock: seconds, for `max_seconds`.
        trials: the kind of run, where the recipe does not imply it.

    Raises:
        UserError: arms, learning rates or seeds that make no comparison; a folder that cannot be used, or holds a
            comparison with other settings; an arm that cannot be built or matched; a time limit that does not hold even
            ten steps of every arm. Nothing has been written then.
    """
    limit, threads, own_threads = TimeLimit(max_seconds, clock), FreeThreads(recipe.train.threads), recipe.train.threads
    trials = trials or _trials_of(recipe)
    rounds = trials.timing_rounds if timing_rounds is None else timing_rounds
    check_integer("timing_rounds", rounds, minimum=0)
    if workers is not None:
        from .workers import check_workers, open_workers

        check_workers(workers)
    plan = Plan(trials, arms, seeds, tune_lr, reference, max_extensions)
    arm_settings = {arm.name: trials.arm_settings(arm) for arm in plan.arms}
    folder = Folder(Path(out), trials.settings(), arm_settings, trials.pictures)
    trials.join(folder.path)
    on_rank_0(lambda: folder.check(resume=resume, overwrite=overwrite))
    trials.prepare(quiet=quiet)
    if resume:
        on_rank_0(lambda: folder.check_data(trials.fingerprint))

    def timed_on() -> dict[str, Any]:  # its number of threads is the one in use
        parts = getattr(recipe.train, "gradient_accumulation", 1)
        return machine(own_threads) | ({"gradient_accumulation": parts} if parts > 1 else {})

    def measure() -> Measurement:
        with threads.chosen():
            former = folder.load_times(rounds, timed_on()) if resume else None
            found = trials.count_and_time(plan.arms, 0 if former else rounds, limit)
            return replace(found, times=former) if former else found

    measured = on_rank_0(measure)
    session = _Session(
        *(trials, plan, folder, limit, threads, measured, Forecast(measured.paces, workers or 1), workers),
        console=Console(stderr=True, quiet=quiet or rank() > 0, highlight=False, soft_wrap=True),
        command=command or command_line(),
    )
    steps = session.choose_length(anew=overwrite)
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            stack.enter_context(folder.opened(trials.fingerprint, overwrite=overwrite))
            if measured.times is not None:
                with cpu_threads(threads.now):
                    folder.save_times(measured.times, timed_on())
        session.known_notes += measured.notes
        if resume:
            left_out = on_rank_0(lambda: folder.left_out_notes((plan.tuning_seed, *plan.seeds)))
            for note in left_out:
                session.console.print(note)
            session.known_notes += on_rank_0(folder.version_notes) + left_out
        if measured.times and (taken := len(measured.times[plan.reference])) < rounds:
            note = f"Step times are of {taken} rounds, not of {rounds}, to keep within the time limit."
            session.known_notes.append(note)
        if workers is not None:
            stack.enter_context(open_workers(workers, own_threads))
        return session.run(steps)


def _trials_of(recipe: Any) -> Trials:
    """Return the recipe's kind of trials; what another kind needs is not imported."""
    from nlr_lab.training.recipe import Recipe

    if isinstance(recipe, Recipe):
        from .model_trials import ModelTrials

        return ModelTrials(recipe)
    from .field_trials import FieldTrials

    return FieldTrials(recipe)


@dataclass
class _Session:
    """The runs of a comparison, all of one length at a time: tuning, then seed by seed, with a report after each."""

    full: Trials
    plan: Plan
    folder: Folder
    limit: TimeLimit
    threads: FreeThreads
    measured: Measurement
    forecast: Forecast
    workers: int | None
    console: Console
    command: str
    known_notes: list[str] = field(default_factory=list)

    def run(self, steps: int | None) -> Comparison:
        """Run all that ends in time, in so many steps (None: those that were asked for), and report it."""
        self.trials, self.steps, self.notes = self.full.shortened(steps), steps, list(self.known_notes)
        self.tried: dict[str, list[Run]] = {}
        if steps is not None:
            asked = self.full.in_steps().steps
            note = (
                f"Every run was shortened from {asked} to {steps} steps, its whole schedule with it, so that one seed "
                f"of every arm ends within {duration(self.limit.seconds or 0.0)}: this compares arms at {steps} steps, "
                f"and says nothing of {asked}. --resume with more time, or on a free machine, runs those."
            )
            self.notes.insert(0, note)
            self.console.print(note)
        seeds: Sequence[int] = self.plan.seeds
        try:
            self._tune()
        except OutOfTimeError as error:
            if (fewer := self._fewer_steps()) is not None:
                return self.run(fewer)
            self.notes.append(f"Stopped for time before the first seed: {error}.")
            seeds = ()
        self.chosen = {arm.name: self._choose(arm) for arm in self.plan.arms}
        going = self._going()
        if self.limit.seconds is None:
            self._run_ahead([(arm, choice, seed) for seed in seeds for arm, choice in going])
        for index, seed in enumerate(seeds):
            try:
                place = f"seed {index + 1} of {len(self.plan.seeds)}"
                _, missing = self._run_round(seed, going, place, (), needed=index == 0)
            except OutOfTimeError as error:
                if index == 0 and (fewer := self._fewer_steps()) is not None:
                    return self.run(fewer)
                self.notes.append(f"Stopped for time in seed {seed}: {error}.")
                break
            except StoppedBySignal as error:
                self.notes.append(f"Seed {seed}: {error}; continue with --resume.")
                self._report()
                raise
            if missing and index + 1 < len(self.plan.seeds):
                self._report()
        return self._report()

    def _going(self) -> list[tuple[Any, Choice]]:
        return [(arm, choice) for arm in self.plan.arms if (choice := self.chosen[arm.name][0]) is not None]

    # --- within the time limit -------------------------------------------------------------------------------

    def choose_length(self, most: int | None = None, *, anew: bool = False) -> int | None:
        """Return the most steps up to `most` at which the runs that are needed end in time; None: as many as asked for.

        Lengths to which runs were shortened earlier are continued if they fit; `anew`: there are none.

        Raises:
            UserError: not even `_LEAST_STEPS` fit; the message names the limit that would do.
        """
        limit, forecast = self.limit, self.forecast
        if limit.seconds is None or not forecast.paces:
            return None
        full = self.full.in_steps().steps
        most = full if most is None else most
        every = [arm.name for arm in self.plan.arms for _ in range(1 + bool(self.plan.tuned(arm)))]

        def choose() -> int | None:
            for steps in (most, *(each for each in self.folder.lengths() if each < most and not anew)):
                length = None if steps == full else steps
                needed = every if anew else [arm.name for arm in self._missing(length, self.plan.seeds[:1], 1)]
                if not needed or _MARGIN * forecast.total(needed, steps) <= limit.left:
                    return length
            steps, least = min(most, forecast.steps_within(every, limit.left / _MARGIN)), min(full, _LEAST_STEPS)
            if steps < least:
                runs = limit.passed + _MARGIN * forecast.total(every, least)
                given, wanted = duration(limit.seconds or 0.0), duration(TimeLimit.holding(runs), up=True)
                raise UserError(
                    f"the time limit of {given} does not hold {least} steps of every arm; give it at least {wanted} "
                    "(--max-minutes), or compare fewer arms or smaller models"
                )
            return steps

        return on_rank_0(choose)

    def _fewer_steps(self) -> int | None:
        """Return fewer steps that would have ended in time; None: none would."""
        with contextlib.suppress(UserError):
            return self.choose_length((self.steps or self.full.in_steps().steps) - 1)
        return None

    def _missing(self, steps: int | None, seeds: Sequence[int], choices: int | None = None) -> list[Any]:
        """Return the arms of unfinished runs of a length, one entry per run.

        A run is due at the first `choices` choices of each tuned arm, and at each seed, at any choice, unless all that
        was tuned diverged.
        """
        tuning_seed = self.plan.tuning_seed

        def done(arm: Any, choice: str, seed: int) -> bool:
            return any(self._of_arm(arm, steps).glob(f"{choice}/seed-{seed}/{RESULT}"))

        def diverged(run: Path) -> bool:
            found = self._read(run, self.plan.choices[arm.name][0], tuning_seed)  # any choice: its loss alone is read
            return found is not None and found.final_loss is None

        found = []
        for arm in self.plan.arms:
            tuned = self.plan.tuned(arm)
            found += [arm for choice in tuned[:choices] if not done(arm, choice.folder, tuning_seed)]
            any_choice = "*/" * self.plan.choices[arm.name][0].folder.count("/") + "lr-*"
            tried = [file.parent for file in self._of_arm(arm, steps).glob(f"{any_choice}/seed-{tuning_seed}/{RESULT}")]
            if not tuned or len(tried) < len(tuned) or not all(map(diverged, tried)):
                found += [arm for seed in seeds if not done(arm, any_choice, seed)]
        return found

    def _expected_seconds(self, arms: Sequence[Any]) -> float:
        """Return how long one more run of each arm takes."""
        return self.forecast.total([arm.name for arm in arms], self.trials.in_steps().steps)

    def _stop_rule(self, arm: Any, steps: int, after: Sequence[Any], *, needed: bool) -> Stop:
        """Return a function that says at each step whether a run must stop; its threads give way to others meanwhile.

        The forecast learns the pace of a stopped run.
        """
        limit, reserve = self.limit, self._expected_seconds(after)
        begun: list[tuple[int, float]] = []

        def stop(step: int) -> bool:
            self.threads.give_way()
            if limit.seconds is None:
                return False
            now, left = limit.passed, limit.left - reserve
            if not begun:
                begun.append((step, now))
            done, seconds = step - begun[0][0], now - begun[0][1]
            over = left < 0
            if not done:
                return over
            pace = seconds / done
            if needed and done >= max(2, _SURE * steps):
                over = over or pace * (steps - step) > left
            if over:
                self.forecast.observe(arm.name, steps, pace * steps, whole=False)
            return over

        return stop

    # --- single runs -----------------------------------------------------------------------------------------

    def _of_arm(self, arm: Any, steps: int | None) -> Path:
        folder = self.folder.path / "runs" / arm.name
        return folder if steps is None else folder / f"{SHORTENED}{steps}"

    def _path(self, arm: Any, choice: Choice, seed: int) -> Path:
        return self._of_arm(arm, self.steps) / choice.folder / f"seed-{seed}"

    def _read(self, path: Path, choice: Choice, seed: int) -> Run | None:
        with contextlib.suppress(UserError, ValueError, LookupError, TypeError, FileNotFoundError):
            return self.full.read(read_json(path / RESULT), choice, seed)
        return None

    def _find(self, arm: Any, choice: Choice, seed: int, *, with_weights: bool = False) -> Run | None:
        """Return the finished run, or None: also where its result is torn, or weights that it must have are gone."""
        path = self._path(arm, choice, seed)

        def read() -> tuple[Run | None, bool]:
            if (found := self._read(path, choice, seed)) is None:
                return None, False
            return found, not with_weights or found.final_loss is None or self.trials.has_weights(path)

        found, whole = on_rank_0(read)
        if found is not None:
            self.forecast.observe(arm.name, self.trials.in_steps().steps, found.seconds)
        return found if whole else None

    def _run_round(
        self, seed: int, now: Sequence[Wanted], place: str, reserved: Sequence[Any], *, needed: bool
    ) -> tuple[list[Run], list[Wanted]]:
        """Return one run of each of `now`, and which were missing and were run or resumed.

        `place` is for the screen; time is kept for runs of the `reserved` arms.

        Raises:
            OutOfTimeError: a run would not end in time; one that is `needed` says so as soon as its pace does.
        """
        missing = [each for each in now if self._find(*each, seed, with_weights=seed == self.plan.seeds[0]) is None]
        if missing and not needed:
            seconds = self._expected_seconds([*(arm for arm, _ in missing), *reserved])
            if on_rank_0(lambda: seconds > self.limit.left):  # clocks differ: one process decides for all
                raise OutOfTimeError("no time for another run of every arm")
        self._run_ahead([(arm, choice, seed) for arm, choice in missing])
        runs = []
        for number, (arm, choice) in enumerate(now, 1):
            after = [*(each[0] for each in now[number:] if each in missing), *reserved]
            runs.append(self._get(arm, choice, seed, place, after, needed=needed))
        return runs, missing

    def _get(self, arm: Any, choice: Choice, seed: int, place: str, after: Sequence[Any], *, needed: bool) -> Run:
        """Return the finished run, run or resumed first if need be. A run that diverges is a result too."""
        found = self._find(arm, choice, seed, with_weights=seed == self.plan.seeds[0])
        if found is not None:
            return found
        path = self._path(arm, choice, seed)
        resume = on_rank_0(lambda: begun(path))
        left = self._log()
        words = f"; {'about' if left <= self.limit.left else 'at most'} " if left else ""
        words += f"{duration(max(0.0, min(left, self.limit.left)))} left" if left else ""
        self.console.print(f"[bold]{arm.name}[/] {choice}, {place}{', resumed' if resume else ''}{words}")
        started, steps = self.limit.passed, self.trials.in_steps().steps
        stop = self._stop_rule(arm, steps, after, needed=needed)
        # A run that diverges has written its result before it raises; any other error is the user's to see.
        with contextlib.suppress(DivergedError), self.threads.chosen():
            self.trials.run(arm, choice, seed, path, resume=resume, stop=stop)
        found = self._ended(arm, choice, seed)
        if not resume and found.final_loss is not None:
            self.forecast.observe(arm.name, steps, self.limit.passed - started)
        score = "diverged" if found.judged is None else f"{self.trials.measure.name} {found.judged:.4f}"
        self.console.print(f"    {score} after {found.steps} steps ({found.seconds:.0f} s)")
        return found

    def _log(self) -> float:
        """Return how long all runs that are missing take, 0 where nothing is known yet; write it to the log."""
        missing = on_rank_0(lambda: self._missing(self.steps, self.plan.seeds))
        seconds = self._expected_seconds(missing)
        if rank() == 0:
            to_go = max(0.0, min(seconds, self.limit.left))
            tuning_seed = self.plan.tuning_seed
            append_entry(self.folder.path, left=len(missing), to_go=round(to_go, 1), tuning_seed=tuning_seed)
        return seconds

    def _run_ahead(self, wanted: Sequence[tuple[Any, Choice, int]]) -> None:
        """Run (arm, choice, seed) that are missing side by side, where there are workers; `_get` finds them."""
        if self.workers is None:
            return
        from .workers import run_side_by_side

        missing = [each for each in dict.fromkeys(wanted) if self._find(*each) is None]
        runs = [(*each, self._path(*each)) for each in missing]
        self._log()
        for each in run_side_by_side(self.trials, runs, self.workers, self.limit, self.console):
            self._ended(*each)
            self._log()

    def _ended(self, arm: Any, choice: Choice, seed: int) -> Run:
        found, path = self._find(arm, choice, seed), self._path(arm, choice, seed)
        assert found is not None, f"{path} has no {RESULT}"
        if found.final_loss is not None:
            on_rank_0(lambda: shutil.rmtree(path / "checkpoints", ignore_errors=True))
        return found

    # --- each arm's choice -----------------------------------------------------------------------------------

    def _tune(self) -> None:
        """Run every choice of each arm on the tuning seed, and go beyond its grid where the best is at the edge.

        Choice by choice, so that all arms have as many when time is up, and time is left for the first seed of every
        arm. Raise OutOfTimeError where not even the first choice of every arm ends in time.
        """
        plan, seed = self.plan, self.plan.tuning_seed
        first_seed = on_rank_0(lambda: self._missing(self.steps, plan.seeds[:1], 0))
        arms = [arm for arm in plan.arms if plan.tuned(arm)]
        self.tried = {arm.name: [] for arm in arms}
        if self.limit.seconds is None:
            self._run_ahead([(arm, choice, seed) for arm in arms for choice in plan.tuned(arm)])
        longest = max((len(plan.tuned(arm)) for arm in arms), default=0)
        for index in range(longest + plan.max_extensions):
            place = f"tuning {index + 1} of {longest}" if index < longest else "tuning, grid extended"
            if index < longest:
                now = [(arm, plan.tuned(arm)[index]) for arm in arms if index < len(plan.tuned(arm))]
            else:
                now = [(arm, each) for arm in arms for each in next_choices(self.tried[arm.name], self.trials.measure)]
            try:
                runs, _ = self._run_round(seed, now, place, first_seed, needed=index == 0)
            except OutOfTimeError:
                if index == 0:
                    raise
                if index < longest:
                    self.notes.append(f"Tuning stopped for time after {index} of {longest} choices of every arm.")
                return
            for (arm, _), found in zip(now, runs, strict=True):
                self.tried[arm.name].append(found)

    def _choose(self, arm: Any) -> tuple[Choice | None, str]:
        """Return the arm's choice (None: it diverged at all of them) and where it comes from; note caveats."""
        choices, tried = self.plan.choices[arm.name], self.tried.get(arm.name, ())
        if not tried:
            return choices[0], "the recipe's" if arm.lr is None else "set by the arm"
        best = best_run(tried, self.trials.measure)
        if best is None:
            self.notes.append(f"`{arm.name}` diverged at every choice tried, and was left out of the comparison.")
            return None, "none trains"
        if next_choices(tried, self.trials.measure):
            head = "" if best.head_lr is None else f", or its head's, {best.head_lr:g},"
            self.notes.append(
                f"`{arm.name}`: the best learning rate {best.lr:g}{head} is still at the edge of its grid, so it "
                "may do better than shown."
            )
        return Choice(lr=best.lr, init=best.init, head_lr=best.head_lr), "tuned"

    # --- the record ------------------------------------------------------------------------------------------

    def _unused(self) -> list[str]:
        """Return a sentence for each arm that has finished runs in the folder which this report does not use."""
        notes = []
        for arm in self.plan.arms:
            place, choice = self._of_arm(arm, self.steps), self.chosen[arm.name][0]
            tried = [Choice(lr=run.lr, init=run.init, head_lr=run.head_lr) for run in self.tried.get(arm.name, ())]
            used = {each.folder for each in (*tried, choice) if each is not None}
            found = {str(file.parent.parent.relative_to(place)) for file in place.glob(f"**/seed-*/{RESULT}")}
            if left := sorted(each for each in found - used if not each.startswith(SHORTENED)):
                why = "are in the folder and not in this report, which was called with another --lr or --tune-lr"
                notes.append(f"Runs of `{arm.name}` at {', '.join(left)} {why}.")
        return notes

    def _report(self) -> Comparison:
        """Write record, pictures and report; each file whole or not at all."""
        plan, trials, path = self.plan, self.trials, self.folder.path
        about = trials.about() | {"command": self.command, "seconds": round(self.limit.passed, 1)}
        own = {"train.lr": trials.recipe.train.lr, "train.seed": plan.tuning_seed, "tune_lr": list(plan.grid)}
        for arm in plan.arms:
            rates = sorted({choice.lr for choice in plan.tuned(arm)})
            own |= {f"grid of {arm.name}": rates} if rates and rates != list(plan.grid) else {}
        settings = trials.settings() | own | {"seeds": len(plan.seeds)}
        results = build_results(
            about | {"recipe": about["recipe"] | {"settings": settings}, "tuning_seed": plan.tuning_seed},
            [self._record(arm) for arm in plan.arms],
            pairs=trials.pairs(plan.reference, plan.arms),
            reference=plan.reference,
            seeds=plan.seeds,
            measure=trials.measure,
            times=self.measured.times,
            notes=self.notes + on_rank_0(self._unused) + self.threads.notes,
            threads=trials.recipe.train.threads,
        )
        results = trials.add_to(results)
        self._log()
        if rank() == 0:
            folders = {arm.name: self._path(arm, choice, plan.seeds[0]) for arm, choice in self._going()}
            with disk_errors(f"the report to {path}"):
                write_text(path / RESULTS, record_text(results))
                trials.draw(path, results, folders)
                write_text(path / REPORT, trials.report.render_report(results))
        return Comparison(path, results, trials)

    def _record(self, arm: Any) -> ArmRecord:
        choice, source = self.chosen[arm.name]
        seeds = () if choice is None else self.plan.seeds
        found = {seed: run for seed in seeds if (run := self._find(arm, choice, seed)) is not None}  # type: ignore[arg-type]
        return ArmRecord(
            name=arm.name,
            settings=self.trials.arm_settings(arm),
            control=self.trials.control(arm),
            choice=choice,
            source=source,
            parameters=self.measured.parameters[arm.name],
            trainable=self.measured.trainable.get(arm.name),
            active=self.measured.active.get(arm.name),
            flops=self.measured.flops.get(arm.name),
            runs=found,
            tuning=self.tried.get(arm.name, ()),
        )
