"""A trial as the pipeline knows it: settings -> run -> scores over steps. A kind of trial is a subclass of `Trials`.

A trial is one run of an arm, at one choice of what is tuned of it, with one seed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from nlr_lab.runtime.time_limit import Forecast, TimeLimit, shortened
from nlr_lab.tasks.task import Measure

from .pairs import RunCurve

Curve = tuple[tuple[int, float], ...]
Stop = Callable[[int], bool]
"""Asked after each step with its number: whether the run must stop for time."""


def tidy(rate: float) -> float:
    """Round a learning rate to six digits, so that it and its folder's name are one to one."""
    return float(f"{rate:.6g}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A value of all that is tuned of an arm."""

    lr: float
    """Learning rate, `tidy`."""
    init: str = ""
    """Init of a neural field's linears."""

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
    def choice(self) -> Choice:
        return Choice(lr=self.lr, init=self.init)

    @property
    def judged(self) -> float | None:
        """The number that the run is compared by."""
        return self.final_loss if self.score is None or self.final_loss is None else self.score

    @property
    def chosen_by(self) -> float | None:
        """The number that a choice is made by."""
        return self.judged if self.selection is None or self.final_loss is None else self.selection

    def as_curve(self) -> RunCurve:
        """Return the curve for the statistics; the final loss closes it where no evaluation lies at the end."""
        points = list(self.curve)
        if self.final_loss is not None and (not points or points[-1][0] < self.steps):
            points.append((self.steps, self.final_loss))
        return RunCurve(
            steps=tuple(float(step) for step, _ in points),
            losses=tuple(loss for _, loss in points),
            total_steps=self.steps,
            final_loss=self.final_loss,
            score=self.judged,
        )

    def score_curve(self, measure: Measure) -> list[tuple[float, float]]:
        """The number that the run is compared by, over its steps."""
        if measure.is_loss:
            curve = self.as_curve()
            return list(zip(curve.steps, curve.losses, strict=True))
        return [(float(step), value) for step, value in self.metric_curve]

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
    """The trials of one recipe.

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

    def shortened(self, steps: int) -> Self:
        """Return the same trials in fewer steps."""
        other = object.__new__(type(self))
        other.__dict__ |= vars(self)
        other.recipe = replace(self.recipe, train=shortened(self.in_steps(), steps))
        return other

    def in_steps(self) -> Any:
        """Return the recipe's training, its length in steps; known once data are prepared."""
        return self.recipe.train

    @property
    def steps(self) -> int:
        return self.in_steps().steps

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

    def add_to(self, results: dict[str, Any], arms: Sequence[Any]) -> dict[str, Any]:
        """Return the record with what this kind of trial adds to it."""
        return results

    @abstractmethod
    def parse_arm(self, text: str) -> Any:
        """Read an arm's short form."""

    @abstractmethod
    def default_reference(self, arms: Sequence[Any]) -> str:
        """Return the name of the arm that the others are compared with."""

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
        """Build every arm, count it, time interleaved steps and forecast the runs' time.

        Args:
            arms: what is measured.
            rounds: timed steps of each arm; 0 leaves times out.
            former: step times of an earlier session, which need not be taken again.
            limit: of the comparison; a forecast is needed where there is one.

        Raises:
            UserError: an arm that cannot be built.
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
        """Write the pictures of a record.

        Args:
            out: the comparison's folder.
            results: the record.
            run_folders: where each arm's run with the first seed is, of arms that have a choice.
        """
