"""The numbers of a finished run."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nlr_lab.tasks.task import Measure
from nonlinear_lowrank.errors import UserError

from .divergence import LossWatch

Curve = tuple[tuple[int, float], ...]
_CURVES = ("curve", "train_curve", "metric_curve", "score_curve", "plain_curve")


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The numbers of a finished run. Losses are nats a token, or means over examples.

    A task may be judged by another number than its loss (`metric`), and may have examples that are only
    scored, apart from those that rates and steps are chosen on.
    """

    arm: str
    """The arm's name."""
    arm_text: str
    """The arm's short form."""
    seed: int
    lr: float
    steps: int
    """Steps done; of a run that was stopped, the step at which it diverged."""
    final_loss: float | None
    """Evaluation loss after the last step; None if the run diverged."""
    bits_per_byte: float | None
    """The same per byte of text; None where it is not text alone."""
    curve: Curve
    """(step, evaluation loss)."""
    train_curve: Curve
    """(step, training loss averaged since the entry before)."""
    parameters: int
    parameters_added: int
    """Beyond the backbone without the arm's change."""
    tokens_per_step: int
    """At most, where examples have different lengths."""
    seconds: float
    """Of training with evaluation and checkpoints, interruptions left out."""
    fingerprint: str
    """Of the data as trained on."""
    status: Literal["done", "diverged"] = "done"
    """"diverged": it was stopped."""
    diverged_at: int | None = None
    """The step at which it diverged, stopped or not: the first loss that is no number, or from which the training
    loss was up and did not come back (`training.divergence`)."""
    spikes: int = 0
    """How often the training loss rose and came back."""
    trainable: int | None = None
    """Parameters that are trained."""
    metric: str = "loss"
    """What the run is judged by."""
    higher_is_better: bool = False
    score: float | None = None
    """The metric after the last step, on the examples that are only scored (where there are none, on the
    evaluated ones); None if the run diverged."""
    selection: float | None = None
    """The same on the examples that choices are made on."""
    best_score: float | None = None
    """The score at the step whose selection was best."""
    best_step: int | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """Every number of the scored examples after the last step."""
    metric_curve: Curve = ()
    """(step, selection)."""
    score_curve: Curve = ()
    """(step, score)."""
    plain_curve: Curve = ()
    """(step, loss on training examples without their augmentation); empty where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Exact: `TrainResult.from_json(result.to_json()) == result`."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "TrainResult":
        """Reads `to_json` or the contents of a run's result.json.

        Raises:
            UserError: it is something else.
        """
        try:
            data = json.loads(text)
            names = {each.name for each in dataclasses.fields(cls)}
            known = {name: value for name, value in data.items() if name in names}
            for name in _CURVES:
                if name in known:
                    known[name] = tuple((step, value) for step, value in known[name])
            return cls(**known)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"not the result of a run: {type(error).__name__} {error}") from error


def judged(history: Sequence[dict[str, float]], measure: Measure, apart: bool) -> dict[str, Any]:
    """The fields of a result that follow from the log: last and best score, and the curves.

    Args:
        history: Trainer's log, with "eval_..." and "test_..." entries.
        measure: what the run is judged by.
        apart: whether some examples are only scored ("test_...").
    """
    split = "test" if apart else "eval"
    selections, scores = curve_of(history, f"eval_{measure.name}"), curve_of(history, f"{split}_{measure.name}")
    fields: dict[str, Any] = {
        "metric": measure.name,
        "higher_is_better": measure.higher_is_better,
        "metric_curve": selections,
        "score_curve": scores,
    }
    if not scores:
        return fields
    best = measure.best([value for _, value in selections])
    best_step = next(step for step, value in selections if value == best)
    last = next(entry for entry in reversed(history) if f"{split}_{measure.name}" in entry)
    return fields | {
        "score": scores[-1][1],
        "selection": selections[-1][1],
        "best_score": dict(scores)[best_step],
        "best_step": best_step,
        "scores": {
            name.removeprefix(f"{split}_"): value for name, value in last.items() if name.startswith(f"{split}_")
        },
    }


def stability(curve: Curve, total_steps: int) -> dict[str, Any]:
    """The fields of a result that say whether a run that went to its end was stable.

    Args:
        curve: (step, training loss).
        total_steps: of the run.
    """
    watch = LossWatch.of(curve, total_steps)
    rise = watch.diverged
    return {"diverged_at": None if rise is None else rise.start, "spikes": len(watch.spikes)}


def curve_of(history: Sequence[dict[str, float]], key: str) -> Curve:
    """(step, value) of one number of the log."""
    return tuple((int(entry["step"]), entry[key]) for entry in history if key in entry)
