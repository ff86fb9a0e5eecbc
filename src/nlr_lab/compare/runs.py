"""The runs of a comparison: found when they are finished, run when they are not."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.cores import FreeThreads
from nlr_lab.runtime.processes import on_rank_0
from nlr_lab.runtime.storage import read_json
from nlr_lab.runtime.time_limit import Forecast, Pace, TimeLimit
from nonlinear_lowrank.errors import DivergedError, UserError

from .folder import SHORTENED, Folder
from .plan import Plan
from .trial import Choice, Run, Trials
from .workers import Workers

Wanted = tuple[Any, Choice, int]
"""Arm, choice, seed."""

_RESULT = "result.json"


class Runs:
    """The runs of one folder, all of one length.

    Args:
        trials: what is run.
        plan: of the comparison.
        folder: of the comparison.
        limit: of the comparison.
        forecast: of the runs' time, if steps were timed.
        threads: of runs in this process.
        console: for a line a run.
        steps: to which the recipe was shortened; None: it was not. Such runs have folders of their own.
        workers: run side by side.
        keep_checkpoints: of finished runs.
    """

    def __init__(
        self,
        trials: Trials,
        plan: Plan,
        folder: Folder,
        *,
        limit: TimeLimit,
        forecast: Forecast | None,
        threads: FreeThreads,
        console: Console,
        steps: int | None,
        workers: Workers | None = None,
        keep_checkpoints: bool = False,
    ) -> None:
        self.trials = trials if steps is None else trials.shortened(steps)
        self.plan, self.folder, self.limit, self.forecast, self.threads = plan, folder, limit, forecast, threads
        self.console, self.steps, self.workers, self.keep_checkpoints = console, steps, workers, keep_checkpoints
        self._slowest: dict[str, float] = {}

    def path(self, arm: Any, choice: Choice, seed: int) -> Path:
        """Return the run's folder."""
        return self._of_arm(arm) / choice.folder / f"seed-{seed}"

    def _of_arm(self, arm: Any) -> Path:
        folder = self.folder.path / "runs" / arm.name
        return folder if self.steps is None else folder / f"{SHORTENED}{self.steps}"

    def find(self, arm: Any, choice: Choice, seed: int) -> Run | None:
        """Return the finished run, or None. A torn result counts as unfinished."""
        path = self.path(arm, choice, seed) / _RESULT

        def read() -> Run | None:
            try:
                return self.trials.read(read_json(path), choice, seed) if path.is_file() else None
            except (UserError, ValueError, LookupError, TypeError):
                return None

        found = on_rank_0(read)
        if found is not None:
            self._slowest[arm.name] = max(found.seconds, self._slowest.get(arm.name, 0.0))
        return found

    def is_done(self, arm: Any, choice: Choice, seed: int, *, with_weights: bool = False) -> bool:
        """Return whether a run is finished, and has what pictures need of it."""
        found = self.find(arm, choice, seed)
        if found is None or not with_weights or found.final_loss is None:
            return found is not None
        return on_rank_0(lambda: self.trials.has_weights(self.path(arm, choice, seed)))

    def expected_seconds(self, arms: Sequence[Any]) -> float:
        """Return how long one more run of each arm takes: as its slowest so far and a tenth, else by the forecast."""
        slowest = max(self._slowest.values(), default=0.0)

        def expected(arm: Any) -> float:
            if arm.name in self._slowest or self.forecast is None:
                return 1.1 * self._slowest.get(arm.name, slowest)
            return self.forecast.seconds(arm.name, self.trials.steps)

        return sum(expected(arm) for arm in arms)

    def have_time_for(self, arms: Sequence[Any]) -> bool:
        """Return whether one more run of each arm ends in time; clocks differ, so rank 0 decides for all processes."""
        return on_rank_0(lambda: self.expected_seconds(arms) < self.limit.left)

    def missing(self, seeds: Sequence[int], choices: int | None = None, *, anew: bool = False) -> list[Any]:
        """Return the arms of runs that are not finished, as often as they have any, as this process sees the folder.

        Args:
            seeds: at each of which an arm has a run at its choice, whichever that is.
            choices: so many of the first choices of each arm that is tuned; None: all.
            anew: as if none were finished.
        """

        def done(arm: Any, choice: str, seed: int) -> bool:
            return not anew and any(self._of_arm(arm).glob(f"{choice}/seed-{seed}/{_RESULT}"))

        found = []
        for arm in self.plan.arms:
            tuned = self.plan.tuned(arm)[:choices]
            found += [arm for choice in tuned if not done(arm, choice.folder, self.plan.tuning_seed)]
            any_choice = "*/lr-*" if self.plan.choices[arm.name][0].init else "lr-*"
            found += [arm for seed in seeds if not done(arm, any_choice, seed)]
        return found

    def get(
        self,
        arm: Any,
        choice: Choice,
        seed: int,
        place: str,
        *,
        after: Sequence[Any] = (),
        needed: bool = False,
        with_weights: bool = False,
    ) -> Run:
        """Return the finished run, run or resumed first if need be. A run that diverges is a result too.

        Args:
            arm: what is run.
            choice: of what is tuned of it.
            seed: its seed.
            place: of it in the comparison, for the screen.
            after: arms of runs that the comparison cannot do without and that come later: time is kept for them.
            needed: whether this is such a run: then it stops as soon as its pace says that it will not end in time.
            with_weights: whether pictures need it.

        Raises:
            OutOfTimeError: it would not end in time.
        """
        if self.is_done(arm, choice, seed, with_weights=with_weights):
            found = self.find(arm, choice, seed)
            assert found is not None
            return found
        path = self.path(arm, choice, seed)
        resume = on_rank_0(lambda: begun(path))
        left = 0.0 if self.console.quiet else self.expected_seconds(self.missing(self.plan.seeds))
        words = f"; {self.limit.words(left)}" if left else ""
        self.console.print(f"[bold]{arm.name}[/] {choice}, {place}{', resumed' if resume else ''}{words}")
        started, steps = self.limit.passed, self.trials.steps
        stop = Pace(
            self.limit,
            self.threads,
            self.forecast,
            arm=arm.name,
            steps=steps,
            reserve=self.expected_seconds(after),
            looks_ahead=needed,
        )
        # A run that diverges has written its result before it raises; any other error is the user's to see.
        with contextlib.suppress(DivergedError), self.threads.chosen():
            self.trials.run(arm, choice, seed, path, resume=resume, stop=stop)
        found = self._ended(arm, choice, seed)
        if not resume and found.final_loss is not None:
            seconds = self.limit.passed - started
            self._slowest[arm.name] = max(seconds, self._slowest[arm.name])
            if self.forecast is not None:
                self.forecast.observe(arm.name, steps, seconds)
        score = "diverged" if found.judged is None else f"{self.trials.measure.name} {found.judged:.4f}"
        self.console.print(f"    {score} after {found.steps} steps ({found.seconds:.0f} s)")
        self._keep()
        return found

    def run_ahead(self, wanted: Sequence[Wanted]) -> None:
        """Run those that are missing side by side, where there are workers; `get` finds them."""
        if self.workers is None:
            return
        missing = [each for each in dict.fromkeys(wanted) if self.find(*each) is None]
        self.workers.train(self.trials, [(*each, self.path(*each)) for each in missing], self.limit)
        for each in missing:
            self._ended(*each)
        self._keep()

    def _ended(self, arm: Any, choice: Choice, seed: int) -> Run:
        found, path = self.find(arm, choice, seed), self.path(arm, choice, seed)
        assert found is not None, f"{path} has no {_RESULT}"
        if found.final_loss is not None and not self.keep_checkpoints:
            on_rank_0(lambda: shutil.rmtree(path / "checkpoints", ignore_errors=True))
        return found

    def _keep(self) -> None:
        on_rank_0(self.folder.keep_runs)


def begun(folder: Path) -> bool:
    """Return whether there is something to resume; a torn result is removed, so that the run can write it anew."""
    (folder / _RESULT).unlink(missing_ok=True)
    return folder.exists() and any(folder.iterdir())
