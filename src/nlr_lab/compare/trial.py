"""A trial as the pipeline sees it: one run of an arm, at one choice of its tuned settings, with one seed.

A kind of trial (training a model, fitting a field) is a subclass of `Trials`. A comparison with a time limit needs one
run of every arm at the least (and one more of each that is tuned). Their time is forecast from timed steps before
anything is trained, and follows what runs really take.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from nlr_lab.runtime.storage import flatten
from nlr_lab.tasks.task import LOSS, Measure
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

Curve = tuple[tuple[int, float], ...]
Stop = Callable[[int], bool]
"""Asked after each step with its number: whether the run must stop for time."""

PACE_ROUNDS = 3
"""Rounds of steps that are timed for a limit alone."""
_TIMING_SHARE = 0.1  # of a limit, that timing steps may take
_REPORT_SHARE, _REPORT_SECONDS = 0.05, 30.0  # of a limit, kept for the pictures and the report


def tidy(rate: float) -> float:
    """Round a learning rate to six digits, so that it and its folder's name are one to one."""
    return float(f"{rate:.6g}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Values of all that is tuned for an arm, rates `tidy`.

    That is its learning rate, the init of a neural field's linears, and a new head's learning rate.
    """

    lr: float
    init: str = ""
    head_lr: float | None = None

    @property
    def folder(self) -> str:
        """Its path under the arm's."""
        head = "" if self.head_lr is None else f"head-{self.head_lr:.6g}"
        return "/".join(part for part in (self.init, head, f"lr-{self.lr:.6g}") if part)

    def __str__(self) -> str:
        head = "" if self.head_lr is None else f"lr of the head {self.head_lr:g}"
        return ", ".join(part for part in (self.init, f"lr {self.lr:g}", head) if part)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run as the comparison needs it; one that is judged by its loss may omit the scores."""

    seed: int
    lr: float
    init: str = ""
    head_lr: float | None = None
    final_loss: float | None
    """None: it diverged."""
    steps: int
    seconds: float
    curve: Curve
    score: float | None = None
    selection: float | None = None
    """The score on the examples for choices."""
    best_score: float | None = None
    """The score where the selection was best."""
    metric_curve: Curve = ()
    """The selection."""
    score_curve: Curve = ()
    """The score, where it is not of the examples that choices are made on."""
    train_curve: Curve = ()
    """Training loss: the mean over each fiftieth of the steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All numbers after the last step, where there are more than the score."""
    train_loss: float | None = None
    """Loss on the training examples as they were augmented, averaged over the last tenth of the steps."""
    plain_loss: float | None = None
    """Loss on training examples without their augmentation, after the last step."""
    diverged_at: int | None = None
    """The step from which the training loss rose and did not recover, or was not finite."""
    spikes: int = 0
    """Number of times that it spiked and recovered."""

    @property
    def judged(self) -> float | None:
        """The number that the run is compared by."""
        return self.final_loss if self.score is None or self.final_loss is None else self.score

    @property
    def chosen_by(self) -> float | None:
        """The number that a choice is made by."""
        return self.judged if self.selection is None or self.final_loss is None else self.selection

    @property
    def losses(self) -> Curve:
        """The curve; the final loss closes it where no evaluation lies at the end."""
        if self.final_loss is None or (self.curve and self.curve[-1][0] >= self.steps):
            return self.curve
        return (*self.curve, (self.steps, self.final_loss))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"status": "diverged" if self.final_loss is None else "done"}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Costs of the arms before they are trained, by arm name."""

    parameters: dict[str, int]
    trainable: dict[str, int] = field(default_factory=dict)
    """Parameters that are trained."""
    active: dict[str, int | None] = field(default_factory=dict)
    """Parameters that one token meets: with experts not all."""
    flops: dict[str, float | None] = field(default_factory=dict)
    """FLOPs of matrix products, forward, per token; None where they could not be counted."""
    times: dict[str, list[float]] | None = None
    """Seconds of single training steps, all arms in turn; None when not measured."""
    start: float = 0.0
    """Seconds until an arm has taken its first step, its model built and compiled."""
    paces: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Paces for the forecast under a time limit."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the report."""


class TimeLimit:
    """Seconds from now that a comparison may take, its report included; None: no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float]) -> None:
        self.seconds, self._clock, self._started = seconds, clock, clock()
        self.kept = 0.0 if seconds is None else min(_REPORT_SHARE * seconds, _REPORT_SECONDS)
        """Seconds for the report and its pictures."""

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def left(self) -> float:
        """Seconds left to runs; infinite without a limit."""
        return math.inf if self.seconds is None else self.seconds - self.kept - self.passed

    @property
    def timing(self) -> float | None:
        """Seconds that timing steps may take; None: as many as they need."""
        return None if self.seconds is None else _TIMING_SHARE * self.left

    @staticmethod
    def holding(seconds: float) -> float:
        """Return the limit that leaves so many seconds to runs."""
        return seconds + max(_REPORT_SECONDS, seconds * _REPORT_SHARE / (1 - _REPORT_SHARE))


class Forecast:
    """Seconds that a run takes, by arm: as its slowest so far and a tenth; before there is one, by timed steps.

    Args:
        paces: seconds of a step and of all else in a run, of each arm whose steps were timed for it.
        at_once: runs side by side.
    """

    def __init__(self, paces: Mapping[str, tuple[float, float]], at_once: int) -> None:
        self.paces, self.at_once = paces, at_once
        self._slower = 1.0
        self._taken: dict[tuple[str, int], float] = {}

    def seconds(self, arm: str, steps: int) -> float:
        """Return the seconds of a run of so many steps; 0 where nothing is known yet."""
        if (arm, steps) in self._taken:
            return 1.1 * self._taken[arm, steps]
        if arm in self.paces:
            return self._by_pace(arm, steps)
        return 1.1 * max(self._taken.values(), default=0.0)

    def _by_pace(self, arm: str, steps: int) -> float:
        step, beside = self.paces[arm]
        return self._slower * (steps * step + beside)

    def total(self, arms: Iterable[str], steps: int) -> float:
        """Return the seconds of one run of each arm, as often as it is named."""
        return self._side_by_side([self.seconds(arm, steps) for arm in arms])

    def steps_within(self, arms: Sequence[str], seconds: float) -> int:
        """Return the most steps at which one run of each arm, as often as it is named, fits; below 1: none."""
        each, beside = (self._side_by_side([self.paces[arm][part] for arm in arms]) for part in (0, 1))
        steps = math.floor((seconds / self._slower - beside) / each)
        return steps - steps % 10 if steps > 20 else steps

    def _side_by_side(self, seconds: Sequence[float]) -> float:
        return max(sum(seconds) / self.at_once, max(seconds, default=0.0))

    def observe(self, arm: str, steps: int, seconds: float, *, whole: bool = True) -> None:
        """Record the time of a run of so many steps, or of an unfinished one as its pace predicts."""
        if arm in self.paces:
            self._slower *= max(1.0, seconds / self._by_pace(arm, steps))
        if whole:
            self._taken[arm, steps] = max(seconds, self._taken.get((arm, steps), 0.0))


def measure_paces(
    times: Mapping[str, Sequence[float]],
    start: float,
    evaluations: int,
    evaluation: Callable[[float], float],
) -> dict[str, tuple[float, float]]:
    """Return what a forecast needs of each arm, from `times` of its steps: seconds of a step, and of all else in a run.

    A run takes `start` seconds to begin; its number of evaluations does not depend on its steps, and `evaluation`
    gives their seconds by those of a step.
    """
    steps = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}
    return {name: (step, evaluations * evaluation(step) + start) for name, step in steps.items()}


def shortened(config: Any, steps: int) -> Any:
    """Return the same training (of steps, not epochs) in fewer: the whole schedule, with as many evaluations."""
    share = steps / config.steps
    names = {each.name for each in fields(config)} & {"eval_every", "save_every", "log_every"}
    spacing = {name: max(1, round(share * value)) for name in names if (value := getattr(config, name))}
    return replace(config, steps=steps, warmup_steps=min(steps, round(share * config.warmup_steps)), **spacing)


class Trials(ABC):
    """The trials of one recipe, which has name, description, train, arms, seeds and tune_lr."""

    arm: ClassVar[Any]
    """An arm; it has `parse`."""
    example: ClassVar[str]
    """Two arms, for a message."""
    pictures: ClassVar[tuple[str, ...]]
    """Files that `draw` writes."""
    report: ModuleType
    """Has `render_report` of a record, its `tables` and the sentences `findings`."""
    timing_rounds: ClassVar[int]
    """Interleaved steps of each arm by default."""
    parts: ClassVar[tuple[str, ...]]
    """Fields of the recipe that have its settings."""
    free: ClassVar[frozenset[str]]
    """Settings that may differ between the runs of one folder: learning rate and seed are in each run's path, the
    others change no number, or only by rounding."""
    measure: Measure
    fingerprint: str

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe

    def shortened(self, steps: int | None) -> Self:
        """Return the same trials in fewer steps; None: in as many."""
        if steps is None:
            return self
        other = object.__new__(type(self))
        other.__dict__ |= vars(self)
        other.recipe = replace(self.recipe, train=shortened(self.in_steps(), steps))
        return other

    def in_steps(self) -> Any:
        """Return the recipe's training, its length in steps; known once data are prepared."""
        return self.recipe.train

    def settings(self) -> dict[str, Any]:
        """Return the settings that all runs share, flat."""
        found = flatten({part: getattr(self.recipe, part) for part in self.parts})
        return {name: value for name, value in found.items() if name not in self.free}

    def resolve(self, arms: Sequence[Any]) -> list[Any]:
        """Return the arms, with references to other arms resolved; raise UserError where that is impossible."""
        return list(arms)

    def join(self, out: Path) -> None:  # noqa: B027  # most kinds run in one process
        """Join the other processes of a distributed run, if there are any."""

    def has_weights(self, folder: Path) -> bool:
        """Return whether a finished run has what the pictures need of it."""
        return True

    def control(self, arm: Any) -> bool:
        """Return whether the arm is a baseline that others are compared with besides the reference."""
        return False

    def pairs(self, reference: str, arms: Sequence[Any]) -> Sequence[Sequence[tuple[str, str]]]:
        """Return (reference, arm) by name, in families within which p-values are adjusted."""
        references = [reference] + [arm.name for arm in arms if self.control(arm) and arm.name != reference]
        return [[(other, arm.name) for arm in arms if arm.name != other] for other in references]

    def add_to(self, results: dict[str, Any]) -> dict[str, Any]:
        """Return the record with what this kind of trial adds to it."""
        return results

    def default_reference(self, arms: Sequence[Any]) -> str:
        """Return the name of the arm that the others are compared with."""
        return arms[0].name

    @abstractmethod
    def arm_settings(self, arm: Any) -> dict[str, Any]:
        """Return what an arm is, without what is in each run's path."""

    @abstractmethod
    def choices(self, arm: Any, grid: Sequence[float]) -> list[Choice]:
        """Return what an arm is tuned over, first come first; one choice: it is not tuned."""

    @abstractmethod
    def prepare(self, *, quiet: bool) -> None:
        """Read the data and set their `fingerprint`."""

    @abstractmethod
    def count_and_time(self, arms: Sequence[Any], rounds: int, limit: TimeLimit) -> Measurement:
        """Build every arm (UserError where one cannot be), count it, time interleaved steps.

        Rounds of 0 leave times out. Where there is a limit, the arms' `paces` are measured too.
        """

    @abstractmethod
    def run(self, arm: Any, choice: Choice, seed: int, folder: Path, *, resume: bool, stop: Stop | None) -> None:
        """Run one trial into its folder; the last file is result.json, also of a run that diverged.

        Raises:
            OutOfTimeError: `stop` said so; it resumes from its last checkpoint.
        """

    @abstractmethod
    def read(self, record: Mapping[str, Any], choice: Choice, seed: int) -> Run:
        """Read a run's result.json; raise ValueError, KeyError or TypeError where it is torn."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return the record's "recipe" (except its settings) and "data"."""

    @abstractmethod
    def draw(self, out: Path, results: Mapping[str, Any], run_folders: Mapping[str, Path]) -> None:
        """Write the pictures of a record; `run_folders`: each arm's run with the first seed, where it has a choice."""


# --- the plan and the choices -----------------------------------------------------------------------------------------


class Plan:
    """The checked arguments of `compare`; raise UserError for arms, seeds or learning rates that make no comparison."""

    def __init__(
        self,
        trials: Trials,
        arms: Sequence[Any] | None,
        seeds: int | None,
        tune_lr: Sequence[float] | None,
        reference: str | None,
        max_extensions: int,
    ) -> None:
        recipe = trials.recipe
        given = recipe.arms if arms is None else arms
        count = recipe.seeds if seeds is None else seeds
        chosen = [trials.arm.parse(arm) if isinstance(arm, str) else arm for arm in given]
        names = [arm.name for arm in chosen]
        grid = tuple(sorted(map(tidy, recipe.tune_lr if tune_lr is None else tune_lr)))
        if len(names) < 2:
            raise UserError(f"a comparison needs at least two arms, such as: {trials.example}")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two arms are called {name!r}; rename one with ,name=...")
        check_integer("seeds", count, minimum=1)
        check_integer("max_extensions", max_extensions, minimum=0)
        if len(grid) == 1 or len(set(grid)) < len(grid) or any(not 0 < rate < math.inf for rate in grid):
            raise UserError("tune_lr needs at least two different learning rates above 0; to set one, set lr instead")
        if reference is not None and reference not in names:
            raise UserError(f"there is no arm {reference!r} to be the reference; choose from {', '.join(names)}")
        self.arms = trials.resolve(chosen)
        self.reference = reference or trials.default_reference(self.arms)
        self.tuning_seed = recipe.train.seed
        self.seeds = range(self.tuning_seed + 1, self.tuning_seed + 1 + count)
        self.grid, self.max_extensions = grid, max_extensions
        self.choices = {arm.name: trials.choices(arm, grid) for arm in self.arms}
        """Choices that each arm is tuned over; one choice: it is not tuned."""

    def tuned(self, arm: Any) -> list[Choice]:
        """Return what an arm is tuned over, the middle rate first: time may end it; empty where it is not tuned."""
        choices = self.choices[arm.name]
        rates = sorted({choice.lr for choice in choices})
        middle = (len(rates) - 1) / 2
        return sorted(choices, key=lambda choice: abs(rates.index(choice.lr) - middle)) if len(choices) > 1 else []


def best_run(tried: Sequence[Run], measure: Measure = LOSS) -> Run | None:
    """Return the run with the best selection, of equals the one with the lower loss, then the smaller learning rate.

    Correlations of a classifier that knows the commonest class alone are all 0, and the loss still tells them apart.
    """
    sign = -1 if measure.higher_is_better else 1
    finite = [(sign * run.chosen_by, run.final_loss, run.lr, run) for run in tried if run.chosen_by is not None]
    return min(finite, key=lambda each: each[:3], default=(0, 0, 0, None))[3]


def next_choices(tried: Sequence[Run], measure: Measure = LOSS) -> list[Choice]:
    """Return what an arm tries next: its best choice, with each rate that is at an edge taken beyond that edge.

    Where every choice diverged: every init and rate of the head, at the next lower learning rate.
    """
    best = best_run(tried, measure)
    kept = dict.fromkeys((run.init, run.head_lr) for run in tried if best in (None, run))
    found = []
    for init, head in kept:
        near = [run for run in tried if run.init == init]
        rates, heads = {run.lr for run in near}, {run.head_lr for run in near if run.head_lr is not None}
        found += [Choice(lr=rate, init=init, head_lr=head) for rate in _beyond(rates, best.lr if best else None)]
        if best is not None:
            found += [Choice(lr=best.lr, init=init, head_lr=rate) for rate in _beyond(heads, head)]
    return found


def _beyond(rates: set[float], best: float | None) -> list[float]:
    """The rate beyond the edge of a grid that the best is at, by the grid's own ratio; None: the next lower one."""
    grid = sorted(rates)
    if len(grid) > 1 and best in (None, grid[0]):
        return [tidy(grid[0] * grid[0] / grid[1])]
    return [tidy(grid[-1] * grid[-1] / grid[-2])] if len(grid) > 1 and best == grid[-1] else []
