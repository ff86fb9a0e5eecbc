"""The fits of a comparison of fields: found when they are finished, fitted when they are not; each arm's choice."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from nlr_lab.fields.fit import FitResult, build, fit, load_weights
from nlr_lab.fields.folder import SETTINGS, read_result
from nlr_lab.fields.problem import Init, Problem
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.runtime.cores import FreeThreads
from nlr_lab.runtime.storage import read_json, read_manifest, write_json
from nlr_lab.runtime.time_limit import Forecast, OutOfTimeError, Pace, TimeLimit
from nonlinear_lowrank.errors import DivergedError, UserError

from .field_plan import FieldArm, FieldPlan
from .field_record import FieldRun
from .folder import SHORTENED
from .kept_runs import KeptRuns
from .rates import rate_beyond

_DIVERGED = "diverged.json"


class FieldRuns:
    """The fits of one folder: found when they are finished, fitted when they are not.

    Args:
        problem: what is fitted.
        recipe: of all fits, but for arm, init, rate and seed.
        out: the comparison's folder.
        console: for a line a fit.
        kept: keeps finished fits outside `out`.
        limit: of the comparison.
        forecast: of the fits' time, if steps were timed for it.
        threads: of the fits.
        steps: to which the recipe was shortened; None: it was not. Such fits have folders of their own.
    """

    def __init__(
        self,
        problem: Problem,
        recipe: FieldRecipe,
        out: Path,
        console: Console,
        kept: KeptRuns | None,
        *,
        limit: TimeLimit,
        forecast: Forecast | None,
        threads: FreeThreads,
        steps: int | None,
    ) -> None:
        self.problem, self.recipe, self.out, self.console, self.kept = problem, recipe, out, console, kept
        self.limit, self.forecast, self.threads, self.steps = limit, forecast, threads, steps
        self._slowest: dict[str, float] = {}

    def folder(self, arm: FieldArm, init: Init, rate: float, seed: int) -> Path:
        return self._of_arm(arm) / init / f"lr-{rate:.6g}" / f"seed-{seed}"

    def _of_arm(self, arm: FieldArm) -> Path:
        folder = self.out / "runs" / arm.name
        return folder if self.steps is None else folder / f"{SHORTENED}{self.steps}"

    def expected(self, arms: Sequence[FieldArm]) -> float:
        """Seconds of one fit of each, by the slowest so far; before there is any, by the forecast."""
        slowest = max(self._slowest.values(), default=0.0)

        def seconds(arm: FieldArm) -> float:
            if arm.name in self._slowest or self.forecast is None:
                return 1.1 * self._slowest.get(arm.name, slowest)
            return self.forecast.seconds(arm.name, self.recipe.train.steps)

        return sum(seconds(arm) for arm in arms)

    def missing(
        self, plan: FieldPlan, seeds: Sequence[int], choices: int | None = None, *, anew: bool = False
    ) -> list[FieldArm]:
        """The arms of fits that are not finished, as often as they have any: at these seeds, and of the tuning.

        Args:
            plan: of the comparison.
            seeds: at each of which an arm has a fit at its init and rate, whichever they are.
            choices: so many of the first choices of init and rate of each arm that is tuned; None: all.
            anew: as if none were finished.
        """

        def done(arm: FieldArm, init: str, rate: str, seed: int) -> bool:
            found = self._of_arm(arm).glob(f"{init}/lr-{rate}/seed-{seed}/*.json")
            return not anew and any(path.name in ("result.json", _DIVERGED) for path in found)

        found = []
        for arm in plan.arms:
            tuned = plan.choices(arm, self.recipe.train.lr)
            first = tuned[:choices] if len(tuned) > 1 else []
            found += [arm for init, rate in first if not done(arm, init, f"{rate:.6g}", plan.tuning_seed)]
            found += [arm for seed in seeds if not done(arm, "*", "*", seed)]
        return found

    def find(self, arm: FieldArm, init: Init, rate: float, seed: int) -> FieldRun | None:
        folder = self.folder(arm, init, rate, seed)
        if (folder / _DIVERGED).is_file():
            return FieldRun(init=init, lr=rate, seed=seed, diverged=read_json(folder / _DIVERGED, step=int)["step"])
        found = _result(folder)
        if found is None:
            return None
        self._slowest[arm.name] = max(self._slowest.get(arm.name, 0.0), found["seconds"])
        return FieldRun(
            init=init,
            lr=rate,
            seed=seed,
            score=found["score"],
            metrics=found["metrics"],
            curve=found["curve"],
            seconds=found["seconds"],
        )

    def get(self, arm: FieldArm, init: Init, rate: float, seed: int, place: str, **planned: Any) -> FieldRun:
        """The finished fit; `planned` as for `fit`."""
        return self.find(arm, init, rate, seed) or self.fit(arm, init, rate, seed, place, **planned)

    def is_whole(self, arm: FieldArm, init: Init, rate: float, seed: int) -> bool:
        """Whether a fit is finished and has its weights; a kept run has not. One that diverged has none to have."""
        folder = self.folder(arm, init, rate, seed)
        if (folder / _DIVERGED).is_file():
            return True
        try:
            read_manifest(folder / "model")
        except UserError:
            return False
        return _result(folder) is not None

    def fit(
        self,
        arm: FieldArm,
        init: Init,
        rate: float,
        seed: int,
        place: str,
        *,
        after: Sequence[FieldArm] = (),
        needed: bool = False,
        to_go: Callable[[], Sequence[FieldArm]] = tuple,
    ) -> FieldRun:
        """Fits, or goes on with a fit. One that diverges is a result too.

        Args:
            arm: what is fitted.
            init: its init.
            rate: its learning rate.
            seed: its seed.
            place: of it in the comparison, for the screen.
            after: arms of fits that the comparison cannot do without and that come later: time is kept for them.
            needed: whether this is such a fit: then it stops as soon as its pace says that it will not end in time.
            to_go: the arms of all fits that are still to be done, for the screen.

        Raises:
            OutOfTimeError: it would not end in time.
        """
        folder = self.folder(arm, init, rate, seed)
        if not self.is_whole(arm, init, rate, seed):
            (folder / "result.json").unlink(missing_ok=True)
        title = f"{arm.name}, {init}, rate {rate:g}, {place}"
        damaged = _is_damaged(folder)
        resumed, started = folder.exists() and not damaged, self.limit.passed
        stop = Pace(
            self.limit,
            self.threads,
            self.forecast,
            arm=arm.name,
            steps=self.recipe.train.steps,
            reserve=self.expected(after),
            looks_ahead=needed,
        )
        try:
            with self.threads.chosen():
                result: FitResult | None = fit(
                    self.problem,
                    replace(arm.method, init=init),
                    replace(self.recipe.train, lr=rate, seed=seed),
                    folder,
                    resume=resumed,
                    overwrite=damaged,
                    quiet=True,
                    pictures=False,
                    about=asdict(self.recipe.problem),
                    stop=stop,
                )
        except DivergedError as error:
            result = None
            write_json(folder / _DIVERGED, {"step": error.step})
        line = "diverged" if result is None else f"{result.score} {result.value:.4g}, {result.seconds:.1f} s"
        if self.kept is not None:
            self.kept.collect()
        run = self.find(arm, init, rate, seed)
        assert run is not None
        if result is not None and not resumed:
            seconds = self.limit.passed - started
            self._slowest[arm.name] = max(seconds, self._slowest[arm.name])
            if self.forecast is not None:
                self.forecast.observe(arm.name, result.steps, seconds)
        left = 0.0 if self.console.quiet else self.expected(to_go())
        words = f"; {self.limit.words(left)}" if left else ""
        self.console.print(f"{title}: {line}{words}", soft_wrap=True, markup=False)
        return run

    def model(self, arm: FieldArm, run: FieldRun) -> nn.Module:
        """A finished fit's network."""
        model = build(self.problem, replace(arm.method, init=run.init), run.seed)
        load_weights(model, self.folder(arm, run.init, run.lr, run.seed))
        return model.eval()


def _is_damaged(folder: Path) -> bool:
    """Whether what a fit was begun with can no longer be read, so that it begins anew."""
    if not (folder / SETTINGS).is_file():
        return False
    try:
        read_json(folder / SETTINGS, settings=dict)
    except UserError:
        return True
    return False


def _result(folder: Path) -> dict[str, Any] | None:
    """What a finished fit wrote of itself; None where it is not finished, or damaged: it is fitted again then."""
    try:
        return read_result(folder) if (folder / "result.json").is_file() else None
    except UserError:
        return None


def tune_fields(
    plan: FieldPlan,
    default_rate: float,
    runs: FieldRuns,
    time_for: Callable[[Sequence[FieldArm]], bool],
    notes: list[str],
    to_go: Callable[[], Sequence[FieldArm]] = tuple,
) -> dict[str, list[FieldRun]]:
    """Every choice of every arm on the tuning seed, choice by choice; an arm with one choice has no tuning.

    Where an arm's best rate is at the edge, the grid of its best init grows. Time is kept for the first seed of every
    arm (`to_go` is for the screen).

    Raises:
        OutOfTimeError: not even the first choice of every arm ends in time.
    """
    seed = runs.missing(plan, plan.seeds[:1], 0)
    choices = {arm.name: plan.choices(arm, default_rate) for arm in plan.arms}
    tried: dict[str, list[FieldRun]] = {arm.name: [] for arm in plan.arms}
    for arm in plan.arms:
        if len(choices[arm.name]) == 1:
            init, rate = choices[arm.name][0]
            tried[arm.name].append(FieldRun(init=init, lr=rate, seed=plan.tuning_seed))
    for index in range(max(map(len, choices.values()))):
        now = [(arm, choices[arm.name][index]) for arm in plan.arms if index < len(choices[arm.name]) > 1]
        missing = [arm for arm, choice in now if runs.find(arm, *choice, plan.tuning_seed) is None]
        stopped = f"Tuning stopped for time after {index} choices of init and rate of every arm."
        if index > 0 and missing and not time_for([*missing, *seed]):
            notes.append(stopped)
            return tried
        try:
            for place, (arm, choice) in enumerate(now, 1):
                after = [*(later for later, _ in now[place:] if later in missing), *seed]
                where = f"tuning {index + 1} of {len(choices[arm.name])}"
                planned: dict[str, Any] = {"after": after, "needed": index == 0, "to_go": to_go}
                tried[arm.name].append(runs.get(arm, *choice, plan.tuning_seed, where, **planned))
        except OutOfTimeError:
            if index == 0:
                raise
            notes.append(stopped)
            return {name: found[: max(1, index)] for name, found in tried.items()}
    growing = list(plan.arms)
    for _ in range(plan.max_extensions):
        beyond = {arm.name: _next_choices(tried[arm.name]) for arm in growing}
        growing = [arm for arm in growing if beyond[arm.name]]
        for arm in list(growing):
            begun = [runs.find(arm, *each, plan.tuning_seed) for each in beyond[arm.name]]
            if None in begun and not time_for([*[arm] * begun.count(None), *seed]):
                growing.remove(arm)
                continue
            try:
                for init, rate in beyond[arm.name]:
                    where = f"grid extended to {rate:g}"
                    run = runs.get(arm, init, rate, plan.tuning_seed, where, after=seed, to_go=to_go)
                    tried[arm.name].append(run)
            except OutOfTimeError:
                growing.remove(arm)
    return tried


def _next_choices(tried: Sequence[FieldRun]) -> list[tuple[Init, float]]:
    """What an arm tries next: its best init at the rate beyond the edge that its best is at.

    Where every choice diverged: every init, at the next lower rate.
    """
    best = _best(tried)
    found = []
    for init in dict.fromkeys(run.init for run in tried) if best is None else (best.init,):
        rates = [run.lr for run in tried if run.init == init]
        rate = rate_beyond(rates, None if best is None else best.lr) if len(rates) > 1 else None
        if rate is not None:
            found.append((init, rate))
    return found


def _best(tried: Sequence[FieldRun]) -> FieldRun | None:
    """The fit with the best score, of equals that with the lower loss, then the smaller rate; None where all diverged.

    Shapes of which nothing is inside score 0 alike, and the loss still tells them apart.
    """
    whole = [(run.value, -run.curve[-1]["loss"], -run.lr, run) for run in tried if run.value is not None]
    return max(whole, key=lambda each: each[:3], default=(0, 0, 0, None))[3]


def chosen(arm: FieldArm, tried: Sequence[FieldRun], notes: list[str]) -> tuple[Init, float] | None:
    """The arm's best init and rate, or None where every choice diverged."""
    if len(tried) == 1 and tried[0].score is None and tried[0].diverged is None:
        return tried[0].init, tried[0].lr  # the only choice
    best = _best(tried)
    if best is None:
        notes.append(f"`{arm.name}` diverged at every choice, and was left out of the comparison.")
        return None
    if _next_choices(tried):
        notes.append(
            f"`{arm.name}`: its best rate {best.lr:g} is at the edge of those tried with its init; it may do better."
        )
    return best.init, best.lr
