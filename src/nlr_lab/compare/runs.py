"""The runs of a comparison: found when they are finished, trained when they are not; and each arm's rate."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nlr_lab.runtime.cores import FreeThreads
from nlr_lab.runtime.time_limit import Forecast, OutOfTimeError, Pace, TimeLimit
from nlr_lab.tasks.task import LOSS, Measure, measure_of
from nlr_lab.training.checkpoints import DivergedError, on_first_process
from nlr_lab.training.recipe import Arm, Recipe
from nlr_lab.training.result import stability

from .folder import SHORTENED, Plan, begun
from .kept_runs import KeptRuns
from .rates import rate_beyond, tidy
from .record import Run
from .workers import Workers

Runner = Callable[..., Any]

_RESULT = "result.json"


class Runs:
    """The runs of one folder: found when they are finished, trained when they are not.

    Args:
        recipe: of all runs, but for arm, rate and seed.
        out: the comparison's folder.
        prepared: the task's data.
        run: trains one arm.
        keep_checkpoints: of finished runs.
        quiet: passed on to `run`.
        console: for a line a run.
        workers: train runs side by side.
        kept: keeps finished runs outside `out`.
        limit: of the comparison.
        forecast: of the runs' time, if steps were timed.
        threads: of runs in this process.
        steps: to which the recipe was shortened; None: it was not. Such runs have folders of their own.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        prepared: Any,
        run: Runner,
        keep_checkpoints: bool,
        quiet: bool,
        console: Console,
        workers: Workers | None = None,
        kept: KeptRuns | None = None,
        *,
        limit: TimeLimit,
        forecast: Forecast | None = None,
        threads: FreeThreads,
        steps: int | None = None,
    ) -> None:
        self.workers, self.kept = workers, kept
        self.limit, self.forecast, self.threads, self.steps = limit, forecast, threads, steps
        self.recipe, self.out, self.prepared, self.run = recipe, out, prepared, run
        self.keep_checkpoints, self.quiet, self.console = keep_checkpoints, quiet, console
        self._slowest: dict[str, float] = {}
        self.measure = measure_of(recipe.task)

    def folder(self, arm: Arm, rate: float, seed: int) -> Path:
        return self._of_arm(arm) / f"lr-{rate:.6g}" / f"seed-{seed}"

    def _of_arm(self, arm: Arm) -> Path:
        folder = self.out / "runs" / arm.name
        return folder if self.steps is None else folder / f"{SHORTENED}{self.steps}"

    def find(self, arm: Arm, rate: float, seed: int) -> Run | None:
        """The finished run, or None. A torn result counts as unfinished."""
        path = self.folder(arm, rate, seed) / _RESULT

        def read() -> Run | None:
            try:
                return _as_run(json.loads(path.read_text(encoding="utf-8")), seed, rate)
            except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
                return None

        found = on_first_process(read)
        if found is not None:
            self._slowest[arm.name] = max(found.seconds, self._slowest.get(arm.name, 0.0))
        return found

    def expected_seconds(self, arms: Iterable[Arm]) -> float:
        """How long one more run of each arm will take: as long as its slowest so far, and a tenth for the rest.

        Before there is any, by the forecast.
        """

        def expected(arm: Arm) -> float:
            if arm.name in self._slowest or self.forecast is None:
                return 1.1 * self._slowest.get(arm.name, 0.0)
            return self.forecast.seconds(arm.name, self._length)

        return sum(expected(arm) for arm in arms)

    @property
    def _length(self) -> int:
        return self.recipe.train.steps or self.recipe.train.resolved(len(self.prepared.train)).steps

    def missing(self, plan: Plan, seeds: Sequence[int], rates: int | None = None, *, anew: bool = False) -> list[Arm]:
        """The arms of runs that are not finished, as often as they have any: at these seeds, and of the tuning.

        As this process sees the folder.

        Args:
            plan: of the comparison.
            seeds: at each of which an arm has a run at its rate, whichever that is.
            rates: so many of the first rates of each grid; None: all.
            anew: as if none were finished.
        """

        def done(arm: Arm, rate: str, seed: int) -> bool:
            return not anew and any(self._of_arm(arm).glob(f"lr-{rate}/seed-{seed}/{_RESULT}"))

        found = []
        for arm in plan.arms:
            grid = plan.grid_of(arm)[:rates]
            found += [arm for rate in grid if not done(arm, f"{rate:.6g}", plan.tuning_seed)]
            found += [arm for seed in seeds if not done(arm, "*", seed)]
        return found

    def get(
        self,
        arm: Arm,
        rate: float,
        seed: int,
        place: str,
        *,
        after: Sequence[Arm] = (),
        needed: bool = False,
        to_go: Callable[[], Sequence[Arm]] = tuple,
    ) -> Run:
        """The finished run, trained or resumed first if need be. A run that diverges is a result too.

        Args:
            arm: what is trained.
            rate: its learning rate.
            seed: its seed.
            place: of it in the comparison, for the screen.
            after: arms of runs that the comparison cannot do without and that come later: time is kept for them.
            needed: whether this is such a run: then it stops as soon as its pace says that it will not end in time.
            to_go: the arms of all runs that are still to be done, for the screen.

        Raises:
            OutOfTimeError: it would not end in time.
        """
        found = self.find(arm, rate, seed)
        if found is not None:
            return found
        folder = self.folder(arm, rate, seed)
        resumed = on_first_process(lambda: begun(folder))
        left = 0.0 if self.console.quiet else self.expected_seconds(to_go())
        words = f"; {self.limit.words(left)}" if left else ""
        self.console.print(f"[bold]{arm.name}[/] rate {rate:g}, {place}{', resumed' if resumed else ''}{words}")
        own = self._recipe(arm, rate, seed)
        started = self.limit.passed
        stop = Pace(
            self.limit,
            self.threads,
            self.forecast,
            arm=arm.name,
            steps=0 if self.forecast is None else self._length,
            reserve=self.expected_seconds(after),
            looks_ahead=needed,
        )
        # A run that diverges has written its result before it raises; any other error is the user's to see.
        with contextlib.suppress(DivergedError), self.threads.chosen():
            self.run(
                own,
                folder,
                resume=resumed,
                overwrite=False,
                prepared=self.prepared,
                quiet=self.quiet,
                report=False,
                stop=stop,
            )
        found = self.find(arm, rate, seed)
        assert found is not None, f"{folder} has no result.json after training"
        if not resumed and found.final_loss is not None:
            seconds = self.limit.passed - started
            self._slowest[arm.name] = max(seconds, self._slowest[arm.name])
            if self.forecast is not None:
                self.forecast.observe(arm.name, self._length, seconds)
        name = self.measure.name
        loss = f"diverged at step {found.steps}" if found.judged is None else f"{name} {found.judged:.4f}"
        self.console.print(f"    {loss} ({found.seconds:.0f} s)")
        self._sweep(found, folder)
        self._keep()
        return found

    def train_ahead(self, wanted: Sequence[tuple[Arm, float, int]]) -> None:
        """Trains those (arm, rate, seed) that are missing side by side, where there are workers; `get` finds them."""
        if self.workers is None:
            return
        missing = [each for each in dict.fromkeys(wanted) if self.find(*each) is None]
        self.workers.train([(self._recipe(*each), self.folder(*each)) for each in missing], self.limit)
        for each in missing:
            found = self.find(*each)
            assert found is not None, f"{self.folder(*each)} has no result.json after training"
            self._sweep(found, self.folder(*each))
        self._keep()

    def _recipe(self, arm: Arm, rate: float, seed: int) -> Recipe:
        return replace(
            self.recipe, arm=replace(arm, lr=rate, grid=()), train=replace(self.recipe.train, lr=rate, seed=seed)
        )

    def _sweep(self, found: Run, folder: Path) -> None:
        if found.final_loss is not None and not self.keep_checkpoints:
            on_first_process(lambda: shutil.rmtree(folder / "checkpoints", ignore_errors=True))

    def _keep(self) -> None:
        if self.kept is not None:
            on_first_process(self.kept.collect)


def _as_run(record: Mapping[str, Any], seed: int, rate: float) -> Run:
    diverged = record["status"] != "done"
    final = None if diverged else record["final_loss"]
    if not diverged and not isinstance(final, float | int):
        raise ValueError("a finished run without a loss")

    def points(name: str) -> tuple[tuple[int, float], ...]:
        # A loss that JSON could not hold is null: not a number, as it was.
        return tuple((int(s), float("nan") if loss is None else float(loss)) for s, loss in record.get(name, ()))

    def number(name: str) -> float | None:
        value = record.get(name)
        return None if value is None else float(value)

    return Run(
        seed=seed,
        lr=rate,
        final_loss=None if final is None else float(final),
        steps=int(record["steps"]),
        seconds=float(record["seconds"]),
        tokens_per_step=int(record["tokens_per_step"]),
        fingerprint=str(record["fingerprint"]),
        curve=points("curve"),
        score=number("score"),
        selection=number("selection"),
        best_score=number("best_score"),
        metric_curve=points("metric_curve"),
        train_loss=None if diverged else _last_tenth(points("train_curve"), int(record["steps"])),
        plain_loss=None if diverged else next((loss for _, loss in reversed(points("plain_curve"))), None),
        # By the same rule for runs from before there was one.
        **({"diverged_at": int(record["steps"])} if diverged else stability(points("train_curve"), record["steps"])),
    )


def _last_tenth(curve: Sequence[tuple[int, float]], steps: int) -> float | None:
    """Mean of a training curve, whose entries stand for the steps since the one before, over the last steps."""
    weights = [(step - before, loss) for (step, loss), before in zip(curve, (0, *(s for s, _ in curve)), strict=False)]
    late = [each for each, (step, _) in zip(weights, curve, strict=True) if step > 0.9 * steps]
    total = sum(weight for weight, _ in late)
    return sum(weight * loss for weight, loss in late) / total if total else None


def tune(
    plan: Plan,
    runs: Runs,
    time_for: Callable[[Sequence[Arm]], bool],
    notes: list[str],
    *,
    at_once: bool = False,
    to_go: Callable[[], Sequence[Arm]] = tuple,
) -> dict[str, list[Run]]:
    """Runs each arm's grid on the tuning seed, and extends it where its best is at the edge.

    Rate by rate, so that all arms have as many when time is up; where it is no matter, workers may begin all `at_once`.
    Time is kept for the first seed of every arm (`to_go` is for the screen).

    Raises:
        OutOfTimeError: not even the first rate of every arm ends in time.
    """
    grids = {arm.name: plan.grid_of(arm) for arm in plan.arms}
    arms = [arm for arm in plan.arms if grids[arm.name]]
    longest = max(map(len, grids.values()))
    tried: dict[str, list[Run]] = {arm.name: [] for arm in arms}

    seed = on_first_process(lambda: runs.missing(plan, plan.seeds[:1], 0))

    def attempt(arm: Arm, rate: float, place: str, after: Sequence[Arm] = (), needed: bool = False) -> None:
        kept = [*after, *seed]
        run = runs.get(arm, rate, plan.tuning_seed, place, after=kept, needed=needed, to_go=to_go)
        tried[arm.name].append(run)

    if at_once:
        runs.train_ahead([(arm, rate, plan.tuning_seed) for arm in arms for rate in grids[arm.name]])
    for index in range(longest):
        now = [(arm, grids[arm.name][index]) for arm in arms if index < len(grids[arm.name])]
        missing = [arm for arm, rate in now if runs.find(arm, rate, plan.tuning_seed) is None]
        stopped = f"Tuning stopped for time after {index} of {longest} rates of the grid."
        if index > 0 and missing and not time_for([*missing, *seed]):
            notes.append(stopped)
            return tried
        try:
            runs.train_ahead([(arm, rate, plan.tuning_seed) for arm, rate in now])
            for place, (arm, rate) in enumerate(now, 1):
                after = [later for later, _ in now[place:] if later in missing]
                attempt(arm, rate, f"tuning {index + 1} of {len(grids[arm.name])}", after, index == 0)
        except OutOfTimeError:
            if index == 0:
                raise
            notes.append(stopped)
            return {name: found[:index] for name, found in tried.items()}
    growing = list(arms)
    for extension in range(plan.max_extensions + 1):
        beyond = {arm.name: next_rate(tried[arm.name], runs.measure) for arm in growing}
        growing = [arm for arm in growing if beyond[arm.name] is not None]
        wider = [(arm, found, plan.tuning_seed) for arm in growing if (found := beyond[arm.name]) is not None]
        if extension < plan.max_extensions and (runs.workers is None or time_for([*growing, *seed])):
            with contextlib.suppress(OutOfTimeError):
                runs.train_ahead(wider)
        for arm, rate, _ in wider:
            known = runs.find(arm, rate, plan.tuning_seed) is not None
            fits = extension < plan.max_extensions and (known or time_for([arm, *seed]))
            try:
                if fits:
                    attempt(arm, rate, f"tuning, grid extended to {rate:g}")
            except OutOfTimeError:
                fits = False
            if not fits:
                notes.append(_edge_note(arm.name, tried[arm.name], extension, runs.measure))
                growing.remove(arm)
    return tried


def next_rate(tried: Sequence[Run], measure: Measure = LOSS) -> float | None:
    """The rate by which an arm's grid grows, or None where its best is at no edge (`rate_beyond`)."""
    best = _best(tried, measure)
    return rate_beyond([run.lr for run in tried], None if best is None else best.lr)


def _best(tried: Iterable[Run], measure: Measure) -> Run | None:
    """The run with the best selection; of equals the one with the lower loss, then the smaller rate.

    Correlations of a classifier that knows the commonest class alone are all 0, and the loss still tells them apart.
    """
    sign = -1 if measure.higher_is_better else 1
    finite = [(sign * run.chosen_by, run.final_loss, run.lr, run) for run in tried if run.chosen_by is not None]
    return min(finite, key=lambda each: each[:3], default=(0, 0, 0, None))[3]


def _edge_note(name: str, tried: Sequence[Run], extensions: int, measure: Measure) -> str:
    best = _best(tried, measure)
    if best is None:
        return f"`{name}` diverged at every rate tried, and was left out of the comparison."
    return (
        f"`{name}`: the best rate {best.lr:g} is still at the edge of its grid after {extensions} extensions, "
        "so it may do better than shown."
    )


def chosen_rate(plan: Plan, arm: Arm, tried: Sequence[Run] | None, measure: Measure = LOSS) -> tuple[float | None, str]:
    """The arm's rate (None: it diverged at all of them) and where it comes from."""
    if tried:
        best = _best(tried, measure)
        return (None, "none trains") if best is None else (best.lr, "tuned")
    if arm.lr is not None:
        return tidy(arm.lr), "set by the arm"
    return tidy(plan.default_rate), "the recipe's"
