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
"""(step, value)."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The numbers of a finished run. Losses are nats a token, or means over examples.

    A task may be judged by another number than its loss (`metric`), and may have examples that are only scored, apart
    from those that learning rates and steps are chosen on.
    """

    arm: str
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
    """Evaluation loss."""
    train_curve: Curve
    """Training loss, averaged since the entry before."""
    parameters: int
    parameters_added: int
    """Beyond the backbone without the arm's change."""
    tokens_per_step: int
    """At most, where examples have different lengths."""
    seconds: float
    """Seconds of training with evaluation and checkpoints, without interruptions."""
    fingerprint: str
    """Hash of the data as trained on."""
    status: Literal["done", "diverged"] = "done"
    """"diverged": it was stopped."""
    diverged_at: int | None = None
    """The step at which it diverged, stopped or not: the first loss that is no number, or at which the training loss
    spiked and did not recover (`divergence`)."""
    spikes: int = 0
    """Number of times that the training loss rose and recovered."""
    trainable: int | None = None
    """Parameters that are trained."""
    metric: str = "loss"
    """Name of the number that the run is judged by."""
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
    """Selection."""
    score_curve: Curve = ()
    """Score."""
    plain_curve: Curve = ()
    """Loss on training examples without their augmentation; empty where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return JSON that `from_json` reads back exactly."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "TrainResult":
        """Read `to_json` or the contents of a run's result.json; raise UserError if it is something else."""
        try:
            data = json.loads(text)
            known = {each.name: data[each.name] for each in dataclasses.fields(cls) if each.name in data}
            for name in known:
                if name.endswith("curve"):
                    known[name] = tuple((step, value) for step, value in known[name])
            return cls(**known)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"not the result of a run: {type(error).__name__} {error}") from error


def judged(history: Sequence[dict[str, float]], measure: Measure, apart: bool) -> dict[str, Any]:
    """Return the fields of a result that follow from the log: last and best score, and the curves.

    Args:
        history: Trainer's log, with "eval_..." and "test_..." entries.
        measure: what the run is judged by.
        apart: whether some examples are only scored ("test_...").
    """
    prefix = "test_" if apart else "eval_"
    selections, scores = curve_of(history, f"eval_{measure.name}"), curve_of(history, prefix + measure.name)
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
    last = next(entry for entry in reversed(history) if prefix + measure.name in entry)
    return fields | {
        "score": scores[-1][1],
        "selection": selections[-1][1],
        "best_score": dict(scores)[best_step],
        "best_step": best_step,
        "scores": {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)},
    }


def stability(curve: Curve, total_steps: int) -> dict[str, Any]:
    """Return the fields of a result that say whether the training loss of a run that ended was stable."""
    watch = LossWatch.of(curve, total_steps)
    return {"diverged_at": watch.diverged.start if watch.diverged else None, "spikes": len(watch.spikes)}


def curve_of(history: Sequence[dict[str, float]], key: str) -> Curve:
    """Return the curve of one number of the log."""
    return tuple((int(entry["step"]), entry[key]) for entry in history if key in entry)
