"""A trial as the pipeline knows it, one run of an arm at one choice of what is tuned of it with one seed; the plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from nlr_lab.tasks.task import Measure
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .time_limit import Forecast, TimeLimit, shortened

Curve = tuple[tuple[int, float], ...]
Stop = Callable[[int], bool]
"""Asked after each step with its number: whether the run must stop for time."""


def tidy(rate: float) -> float:
    """Round a learning rate to six digits, so that it and its folder's name are one to one."""
    return float(f"{rate:.6g}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A value of all that is tuned of an arm: its learning rate, `tidy`, and the init of a neural field's linears."""

    lr: float
    init: str = ""

    @property
    def folder(self) -> str:
        """Its path under the arm's."""
        return f"{self.init}/lr-{self.lr:.6g}" if self.init else f"lr-{self.lr:.6g}"

    def __str__(self) -> str:
        return f"{self.init}, lr {self.lr:g}" if self.init else f"lr {self.lr:g}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run as the comparison needs it. `final_loss` is None where the run diverged.

    A run that is judged by its loss may omit the rest: `score` (what it is judged by), `selection` (the
    same on what choices are made on), `best_score` (the score where the selection was best).
    """

    seed: int
    lr: float
    init: str = ""
    final_loss: float | None
    steps: int
    seconds: float
    curve: Curve
    score: float | None = None
    selection: float | None = None
    best_score: float | None = None
    metric_curve: Curve = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All numbers after the last step, where there are more than the score."""
    train_loss: float | None = None
    """Loss on the training examples as they were augmented, averaged over the last tenth of the steps."""
    plain_loss: float | None = None
    """Loss on training examples without their augmentation, after the last step."""
    diverged_at: int | None = None
    """The step from which the training loss spiked and did not recover, or was no number."""
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
    flops: dict[str, float | None] = field(default_factory=dict)
    """FLOPs of matrix products, forward, per token; None where they could not be counted."""
    times: dict[str, list[float]] | None = None
    """Seconds of single training steps, all arms in turn; None when not measured."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the report."""


class Trials(ABC):
    """The trials of one recipe: a kind of trial (training a model, fitting a field) is a subclass.

    Args:
        recipe: with name, description, train, arms, seeds and tune_lr.
    """

    example: ClassVar[str]
    """Two arms, for a message."""
    pictures: ClassVar[tuple[str, ...]]
    """Files that `draw` writes."""
    report: ModuleType
    """Has `render_report` and `render_tables` of a record, and the sentences `findings`."""
    timing_rounds: ClassVar[int]
    """Interleaved steps of each arm by default."""
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

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that all runs share, flat."""
        return {name: value for name, value in self.settings().items() if name not in self.free}

    def resolve(self, arms: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arms with what one leaves to another filled in; raise UserError where that cannot be."""
        return tuple(arms)

    def join(self, out: Path) -> None:  # noqa: B027  # most kinds run in one process
        """Join the other processes of a distributed run, if there are any."""

    def has_weights(self, folder: Path) -> bool:
        """Return whether a finished run has what the pictures need of it."""
        return True

    def notes(self, measured: Measurement) -> list[str]:
        """Return sentences for the report."""
        return measured.notes

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
    def parse_arm(self, text: str) -> Any:
        """Read an arm's short form."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return all settings, flat."""

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
    def count_and_time(
        self, arms: Sequence[Any], rounds: int, former: dict[str, list[float]] | None, limit: TimeLimit
    ) -> tuple[Measurement, Forecast | None]:
        """Build every arm (UserError where one cannot be), count it, time interleaved steps, forecast the runs' time.

        Rounds of 0 leave times out; `former` are those of an earlier session, which need not be taken again. A forecast
        is needed where there is a limit.
        """

    @abstractmethod
    def run(self, arm: Any, choice: Choice, seed: int, folder: Path, *, resume: bool, stop: Stop | None) -> None:
        """Run one trial into its folder; the last file is result.json, also of a run that diverged.

        Raises:
            OutOfTimeError: `stop` said so; it goes on from its last checkpoint when it is resumed.
        """

    @abstractmethod
    def read(self, record: Mapping[str, Any], choice: Choice, seed: int) -> Run:
        """Read a run's result.json; raise ValueError, KeyError or TypeError where it is torn."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return the record's "recipe" (but for its settings) and "data"."""

    @abstractmethod
    def draw(self, out: Path, results: Mapping[str, Any], run_folders: Mapping[str, Path]) -> None:
        """Write the pictures of a record; `run_folders`: each arm's run with the first seed, where it has a choice."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checked arguments of `compare`: arms, seeds and learning rates."""

    arms: tuple[Any, ...]
    seeds: tuple[int, ...]
    tuning_seed: int
    grid: tuple[float, ...]
    choices: dict[str, list[Choice]]
    """Choices that each arm is tuned over, by name; one choice: it is not tuned."""
    reference: str
    max_extensions: int

    @classmethod
    def make(
        cls,
        trials: Trials,
        arms: Sequence[Any] | None,
        seeds: int | None,
        tune_lr: Sequence[float] | None,
        reference: str | None,
        max_extensions: int,
    ) -> "Plan":
        """Raise UserError for arms, seeds or learning rates that make no comparison."""
        recipe = trials.recipe
        given = recipe.arms if arms is None else arms
        chosen = tuple(trials.parse_arm(arm) if isinstance(arm, str) else arm for arm in given)
        count = recipe.seeds if seeds is None else seeds
        grid = tuple(sorted(map(tidy, recipe.tune_lr if tune_lr is None else tune_lr)))
        names = [arm.name for arm in chosen]
        if len(names) < 2:
            raise UserError(f"a comparison needs at least two arms, such as: {trials.example}")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two arms are called {name!r}; give one of them another with ,name=...")
        check_integer("seeds", count, minimum=1)
        check_integer("max_extensions", max_extensions, minimum=0)
        if any(not 0 < rate < float("inf") for rate in grid):
            raise UserError("every learning rate of tune_lr must be a finite number above 0")
        if len(grid) == 1 or len(set(grid)) < len(grid):
            raise UserError("tune_lr needs at least two different learning rates; to set one, set lr instead")
        if reference is not None and reference not in names:
            raise UserError(f"there is no arm {reference!r} to be the reference; there are {', '.join(names)}")
        chosen = trials.resolve(chosen)
        first = recipe.train.seed + 1
        return cls(
            arms=chosen,
            seeds=tuple(range(first, first + count)),
            tuning_seed=recipe.train.seed,
            grid=grid,
            choices={arm.name: trials.choices(arm, grid) for arm in chosen},
            reference=reference or trials.default_reference(chosen),
            max_extensions=max_extensions,
        )

    def tuned(self, arm: Any) -> list[Choice]:
        """Return what an arm is tuned over; empty where it is not tuned."""
        return self.choices[arm.name] if len(self.choices[arm.name]) > 1 else []
