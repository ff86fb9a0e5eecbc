"""The numbers of a finished run, and the rule that says whether its training loss diverged.

On the entries of a training curve (means over the steps since the entry before):

- A run began at its first entry, or at the loss of its first step if the entry is over ten times that, and has learned
  that less its lowest entry so far. It is *up* while an entry lies more than a quarter of that above the lowest one,
  and more than ten times the noise (the median change between successive entries, as a standard deviation; taken for
  larger while there are few). Once the noise is known, entries that are up tell nothing of it. Above twice where it
  began a run is up, whatever the noise.
- Up in at least three entries, and for at least a twentieth of the run so far or to its end: it *diverged*, at the
  first entry that was up. At the end one entry is enough that is above where the run began by more than the noise. Up
  and down again: a *spike*.

Losses of large models spike and recover within a few hundred steps of hundreds of thousands (PaLM, arXiv 2204.02311,
section 5.1), so a rise alone is not divergence, and neither are counts of outliers, by which spikes are usually scored
(OLMo 2, arXiv 2501.00656). A share of what was learned needs no unit, so it fits any vocabulary and task; fixed
multiples of the best loss do not. The reference documents say "diverges" of runs and define nothing.
"""

import bisect
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nlr_lab.tasks.task import Measure
from nonlinear_lowrank.errors import UserError

Curve = tuple[tuple[int, float], ...]
"""(step, value)."""


class DivergedError(UserError):
    """The loss or the weights are no longer finite, or the loss spiked and did not recover."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
        """The first step whose loss was not finite, or spiked."""

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.step)  # to travel between processes


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
    untrained_loss: float | None = None
    """Training loss of the first step, before any update."""
    status: Literal["done", "diverged"] = "done"
    """"diverged": it was stopped."""
    diverged_at: int | None = None
    """The step at which it diverged, stopped or not: the first loss that is not finite, or at which the training loss
    rose and did not recover."""
    spikes: int = 0
    """Number of times that the training loss rose and recovered."""
    trainable: int | None = None
    """Parameters that are trained."""
    metric: str = "loss"
    """Name of the number that the run is judged by."""
    higher_is_better: bool = False
    score: float | None = None
    """The metric after the last step, on the examples that are only scored (where there are none, on the evaluated
    ones); None if the run diverged."""
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

    @classmethod
    def from_json(cls, text: str) -> "TrainResult":
        """Read the contents of a run's result.json; raise UserError if it is something else."""
        try:
            data = json.loads(text)
            known = {each.name: data[each.name] for each in dataclasses.fields(cls) if each.name in data}
            curves = {name: tuple(map(tuple, known[name])) for name in known if name.endswith("curve")}
            return cls(**known | curves)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"not the result of a run: {type(error).__name__} {error}") from error


def curve_of(history: Sequence[dict[str, float]], key: str) -> Curve:
    """Return the curve of one number of Trainer's log."""
    return tuple((int(entry["step"]), entry[key]) for entry in history if key in entry)


def after_divergence(step: int) -> str:
    """Return what to do about a run whose loss diverged at a step."""
    if step == 1:  # before any update
        return "its model or data are broken: nlr verify checks a checkpoint's weights"
    return "lower the learning rate or lengthen the warm-up, and start over"


def untrained_loss(history: Sequence[dict[str, float]]) -> float | None:
    """Return the loss of the first step, out of Trainer's log."""
    return next((entry["untrained_loss"] for entry in history if "untrained_loss" in entry), None)


def judged(history: Sequence[dict[str, float]], measure: Measure, apart: bool) -> dict[str, Any]:
    """Return the fields of a result that follow from Trainer's log: last and best score, and the curves.

    Entries "eval_..." are of the examples that choices are made on; `apart`: "test_..." are of those only scored.
    """
    prefix = "test_" if apart else "eval_"
    selections, scores = curve_of(history, f"eval_{measure.name}"), curve_of(history, prefix + measure.name)
    fields: dict[str, Any] = {"metric": measure.name, "higher_is_better": measure.higher_is_better}
    fields |= {"metric_curve": selections, "score_curve": scores}
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


def before(curve: Curve, step: int) -> Curve:
    """Return the entries of a curve before a step."""
    return tuple(entry for entry in curve if entry[0] < step)


# --- losses that rise and stay finite -------------------------------------------------------------------------

_LOST = 0.25  # of what was learned
_NOISE = 10.0  # the range of a thousand normal draws is 6.5 standard deviations, on average
_PATIENCE = 0.05  # of the run's steps
_LEAST_ENTRIES = 3
_MEDIAN_CHANGE = 0.954  # the median of |a - b| for two draws of a normal distribution, in its standard deviations
_BLOWN = 10.0  # times the loss of the first step, which is one batch's and so may be far below the mean
_FEW = 10  # the noise is taken for so much larger by how few changes it is known


@dataclass(kw_only=True)
class Rise:
    """A stretch of the training curve in which the loss was up."""

    start: int
    """Step of the first entry that was up."""
    end: int | None = None
    """Step of the first entry that was down again; None: it never was."""
    peak: float
    """Its highest loss."""
    entries: int = 1
    """Number of entries that were up."""
    diverged: bool = False
    """It is a divergence by now, and no spike."""


def rises(curve: Sequence[tuple[int, float]], total_steps: int, untrained: float | None = None) -> list[Rise]:
    """Return the stretches in which a run's training loss was up, so far; see the rule at the top.

    `untrained`: the loss of the first step.
    """
    if untrained is not None and curve and curve[0][1] > _BLOWN * abs(untrained):
        curve = ((0, untrained), *curve)
    found: list[Rise] = []
    changes: list[float] = []  # sorted
    first = best = last = float("nan")
    step, calm, above = 0, True, False
    for step, loss in curve:
        if math.isnan(last):
            first = best = last = loss
            continue
        count = len(changes)
        noise = changes[count // 2] / _MEDIAN_CHANGE * (1 + _FEW / count) if count else math.inf
        far = first + abs(first)
        up = loss > min(best + max(_LOST * (first - best), _NOISE * noise), far)
        above = loss > min(first + _NOISE * noise, far)
        if found and found[-1].end is None:
            if up:
                found[-1].peak, found[-1].entries = max(found[-1].peak, loss), found[-1].entries + 1
            else:
                found[-1].end = step
        elif up:
            found.append(Rise(start=step, peak=loss))
        # The changes of an explosion would hide it. With few changes one cannot tell yet, up to twice the first entry.
        was_calm, calm = calm, not up or (count < _FEW and loss <= far)
        if was_calm and calm:
            bisect.insort(changes, abs(loss - last))
        best, last = min(best, loss), loss
    if found and found[-1].end is None:
        rise, at_end = found[-1], step >= total_steps
        lasted = at_end or step - rise.start >= max(1, round(_PATIENCE * total_steps))
        rise.diverged = (rise.entries >= _LEAST_ENTRIES and lasted) or (at_end and above)
    return found


def stability(curve: Curve, total_steps: int, untrained: float | None = None) -> dict[str, Any]:
    """Return the fields of a result that say whether the training loss of a run that ended was stable."""
    found = rises(curve, total_steps, untrained)
    diverged = next((rise.start for rise in found if rise.diverged), None)
    return {"diverged_at": diverged, "spikes": sum(each.end is not None for each in found)}
