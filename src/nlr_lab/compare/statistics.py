"""Estimates with their uncertainty, from numbers that are paired by seed; see "What is printed" in docs/compare.md.

Means of differences are tested by the paired t-test. Ratios are tested on the log scale, and their intervals carried
back. Intervals are 95 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from nlr_lab.bench.timing import Ratio

from .trial import Run

CONFIDENCE = 0.95
# Seeds whose differences agree to this relative size did not vary: a t interval on them would have no
# width and would "show" anything.
_NO_SPREAD = 1e-9
# How much of a curve's end tells whether it has flattened, and how many evaluations a speed needs to be read from: with
# ten, a crossing is known to a tenth of the steps.
_LATE_SHARE = 0.2
_FEW_EVALUATIONS = 10
# A reference that passed its own final loss before this share of its steps has a curve that rose again.
_EARLY = 0.98

Points = Sequence[tuple[float, float]]
"""(step, value), steps increasing."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with what is known of its uncertainty.

    `value` is None where there is no number to give, and `note` says why. `low`, `high` and `p_value` are
    None where there is no interval (one seed, or no spread). `standard_error` and `dof` are on the scale of
    the test: the plain scale for differences (null 0), the log scale for ratios (null 1).
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    n: int
    null: float = 0.0
    standard_error: float | None = None
    dof: float | None = None
    note: str = ""

    @property
    def shown(self) -> bool:
        """Return whether the 95 % interval excludes the null: the only ground on which a claim is made."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.null or self.high < self.null

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shown": self.shown}


def paired_mean(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences with its t interval and the p-value of the paired t-test.

    Args:
        differences: arm - reference, one for each seed, all finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n == 0:
        return Estimate(value=None, n=0, note="no seed that both arms finished")
    mean = float(values.mean())
    if n == 1:
        return Estimate(value=mean, n=1, note="one seed: no interval and no p-value")
    if float(np.std(values)) <= _NO_SPREAD * max(float(np.abs(values).max()), 1e-300):
        return Estimate(value=mean, n=n, note="no spread between the seeds: no interval and no p-value")
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(CONFIDENCE)
    return Estimate(
        value=mean,
        low=float(interval.low),
        high=float(interval.high),
        p_value=float(test.pvalue),
        n=n,
        standard_error=float(values.std(ddof=1) / math.sqrt(n)),
        dof=n - 1,
    )


def geometric_mean(ratios: Sequence[float]) -> Estimate:
    """Geometric mean of positive ratios; interval and p-value (against 1) from the t-test of their logs."""
    logs = paired_mean([math.log(ratio) for ratio in ratios])
    value, low, high = (None if each is None else math.exp(each) for each in (logs.value, logs.low, logs.high))
    return replace(logs, value=value, low=low, high=high, null=1.0)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment for the p-values of one family; None stays None and is not counted."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[index] = running
    return adjusted


def late_change(points: Points) -> tuple[float, float] | None:
    """Change of a curve over its last steps, and the share of all steps that these are.

    The share is a fifth, or more where no evaluation lies so near the end; None where no evaluation lies in the first
    four fifths: nothing says then whether the curve has flattened.
    """
    before = [point for point in points if point[0] <= (1 - _LATE_SHARE) * points[-1][0]]
    if not before:
        return None
    return points[-1][1] - before[-1][1], 1 - before[-1][0] / points[-1][0]


def curve_cautions(
    difference: float, curves: Mapping[str, Sequence[Points]], *, higher_is_better: bool = False
) -> dict[str, str]:
    """Say where two arms' curves (name -> those of its seeds) do not support a claim about their difference.

    They have not flattened: over the last fifth of its steps one of the two still improved, in the mean over seeds, by
    more than the difference ("flattened"). Or this is unknown ("seldom"). Or one has risen again from its best by more
    than the difference ("rose").
    """
    late = {name: [late_change(curve) for curve in of_seeds] for name, of_seeds in curves.items()}
    known = {name: [each for each in changes if each is not None] for name, changes in late.items()}
    if any(len(known[name]) < len(late[name]) for name in late):
        return {"seldom": "the runs are evaluated too seldom to tell whether their curves have flattened"}
    sign = 1 if higher_is_better else -1
    gains = {name: sign * float(np.mean([change for change, _ in changes])) for name, changes in known.items()}
    moving = [f"`{name}` by {gain:.3g}" for name, gain in gains.items() if gain > abs(difference)]
    cautions = {}
    if moving:
        share = max(share for changes in known.values() for _, share in changes)
        cautions["flattened"] = (
            f"the curves have not flattened (over the last {100 * share:.0f} % of the steps "
            f"{' and '.join(moving)} still improved, more than the difference), so it may be one of speed or schedule "
            "alone"
        )
    # The best of a score's evaluations is their noise's; a loss is of the same examples each time.
    lost = {
        name: float(np.mean([curve[-1][1] - min(value for _, value in curve) for curve in of_seeds]))
        for name, of_seeds in curves.items()
        if not higher_is_better
    }
    if risen := [f"`{name}` by {each:.3g}" for name, each in lost.items() if each > abs(difference)]:
        cautions["rose"] = f"{' and '.join(risen)} ended above the best of its curve, by more than the difference"
    return cautions


def speed_cautions(curves: Mapping[str, Sequence[Points]], bounds: int) -> dict[str, str]:
    """Say where a speed is read off too coarse a curve, or one crossed at its first point ("evaluations")."""
    found = []
    lengths = [len(curve) for of_seeds in curves.values() for curve in of_seeds]
    if min(lengths) < _FEW_EVALUATIONS:
        found.append(f"the speed is read off {min(lengths)} evaluations, fewer than {_FEW_EVALUATIONS}")
    if bounds:
        found.append(
            f"in {bounds} of {len(lengths) // 2} seeds the crossing lies at the first evaluation: evaluate more often "
            "for a sharper speedup"
        )
    return {"evaluations": "; ".join(found)} if found else {}


# --- one arm against another -------------------------------------------------------------------------------------


def first_crossing(points: Points, target: float) -> float | None:
    """First step at which the linearly interpolated evaluation curve is at or below `target`.

    NaN and infinity count as above any target.

    Returns:
        The step (a float), the first of the curve when it is already below there, or None when it never comes down to
        the target. After a non-finite loss the later step is taken.
    """
    x, y = np.asarray(points, dtype=np.float64).reshape(-1, 2).T
    assert (np.diff(x) > 0).all(), "steps must increase"
    below = y <= target
    if not below.any():
        return None
    k = int(np.argmax(below))
    if k == 0 or not np.isfinite(y[k - 1]):
        return float(x[k])
    fraction = (y[k - 1] - target) / (y[k - 1] - y[k])
    return float(x[k - 1] + fraction * (x[k] - x[k - 1]))


def _passed_early(run: Run) -> bool:
    """Return whether a run was below its own final loss well before its end."""
    assert run.final_loss is not None
    crossing = first_crossing(run.losses, run.final_loss)
    return crossing is not None and crossing < _EARLY * run.steps


@dataclass(frozen=True, kw_only=True)
class SeedSpeed:
    """Speed of one arm against the reference at one seed."""

    reached: bool
    steps_to_reference_loss: float | None = None
    step_speedup: float | None = None
    matched_speedup: float | None = None
    bound: bool = False
    """A crossing lay at or before the first evaluation: the number is only as fine as the spacing there."""
    note: str = ""


def seed_speed(reference: Run, arm: Run) -> SeedSpeed:
    """Step speedup and matched speedup of two finished runs of one seed."""
    assert reference.final_loss is not None, "the reference diverged"
    assert arm.final_loss is not None, "the arm diverged"
    steps = first_crossing(arm.losses, reference.final_loss)
    if steps is not None:
        known: dict[str, Any] = {"reached": True, "steps_to_reference_loss": steps, "bound": steps <= arm.losses[0][0]}
        if steps <= 0:
            return SeedSpeed(**known, note="the arm was below the reference's final loss before training")
        speedup = reference.steps / steps
        return SeedSpeed(**known, step_speedup=speedup, matched_speedup=speedup)
    # The arm never came down to the reference's final loss, so its own final loss lies above it, and the
    # reference's curve, which ends below, crosses it.
    back = first_crossing(reference.losses, arm.final_loss)
    if back is None:
        return SeedSpeed(reached=False, note="no common loss")
    if back <= 0:
        return SeedSpeed(reached=False, note="the arm ended no lower than the untrained reference")
    return SeedSpeed(reached=False, matched_speedup=back / arm.steps, bound=back <= reference.losses[0][0])


def wall_clock_speedup(speedup: Estimate, step_time: Ratio | None) -> Estimate:
    """Speedup in steps divided by the step-time ratio, with the errors of both.

    On the log scale the half-width of the interval is the root of the sum of the squared half-widths of its
    two independent parts, seeds (t) and timing rounds (bootstrap, t): Zou and Donner's MOVER. It is never
    narrower than either part, as pooled degrees of freedom (Welch and Satterthwaite's) would be for two or
    three seeds. The p-value is the level at which the interval touches 1.
    """
    if speedup.value is None or step_time is None:
        note = speedup.note if speedup.value is None else "step time not measured"
        return Estimate(value=None, n=speedup.n, null=1.0, note=note)
    log_value = math.log(speedup.value) - math.log(step_time.median)
    seed_error, seed_dof, time_error = speedup.standard_error, speedup.dof, step_time.log_standard_error
    if seed_error is None or seed_dof is None or time_error is None:
        note = speedup.note or "one timing: no interval and no p-value"
        return Estimate(value=math.exp(log_value), n=speedup.n, null=1.0, note=note)

    def half_width(level: float) -> float:
        seeds = float(stats.t.isf(level / 2, seed_dof)) * seed_error
        rounds = float(stats.t.isf(level / 2, step_time.n - 1)) * time_error
        return math.hypot(seeds, rounds)

    reach, distance, smallest = half_width(1 - CONFIDENCE), abs(log_value), 1e-15
    # The level whose interval just reaches 1; the half-width falls from infinity to 0 over (0, 1].
    p_value = smallest
    if half_width(smallest) > distance:
        p_value = float(brentq(lambda level: half_width(level) - distance, smallest, 1.0))
    return Estimate(
        value=math.exp(log_value),
        low=math.exp(log_value - reach),
        high=math.exp(log_value + reach),
        p_value=p_value,
        n=speedup.n,
        null=1.0,
        standard_error=math.hypot(seed_error, time_error),
    )


def compare_pair(
    reference: Mapping[int, Run], arm: Mapping[int, Run], step_time: Ratio | None = None, *, speed: bool = True
) -> dict[str, Any]:
    """All paired statistics of one arm against one reference, both seed -> run, over the seeds that both have.

    A seed in which either run diverged has no difference. Dropping only those seeds would flatter an arm that diverges,
    so with any of them there is no aggregate number, and `note` says so. `reached` of `n` seeds came down to the
    reference's final loss; `early` counts the seeds in which the reference passed its own final loss well before its
    end (its curve rose again), which flatters every arm; `bounds` counts crossings at a first evaluation.

    Args:
        reference: its runs.
        arm: its runs.
        step_time: the arm's step-time ratio over this reference, if it was measured.
        speed: compare the losses' curves too; else there are no speedups, and `seeds` is empty.
    """
    seeds = sorted(set(reference) & set(arm))
    whole = [s for s in seeds if reference[s].final_loss is not None and arm[s].final_loss is not None]
    speeds = {s: seed_speed(reference[s], arm[s]) for s in whole if speed}
    reached = sum(each.reached for each in speeds.values()) if speed else len(whole)
    diverged = _diverged_note([arm[s] for s in seeds], [reference[s] for s in seeds])
    none = diverged or ("" if speed else "not compared by loss")

    def ratio(name: str, note: str) -> Estimate:
        numbers = [getattr(each, name) for each in speeds.values()]
        if None in numbers:
            note = note or next(each.note for each in speeds.values() if each.note)
        return Estimate(value=None, n=len(seeds), null=1.0, note=note) if note else geometric_mean(numbers)

    not_reached = f"not reached (by {reached} of {len(whole)} seeds)" if reached < len(whole) else ""
    steps, matched = ratio("step_speedup", none or not_reached), ratio("matched_speedup", none)
    delta = Estimate(value=None, n=len(seeds), note=diverged)
    if not diverged:
        delta = paired_mean([arm[s].judged - reference[s].judged for s in whole])  # type: ignore[operator]
    return {
        "n": len(seeds),
        "diverged": len(seeds) - len(whole),
        "reached": reached,
        "early": sum(_passed_early(reference[s]) for s in whole if speed),
        "bounds": sum(each.bound for each in speeds.values()),
        "delta": delta.to_json(),
        "step_speedup": steps.to_json(),
        "matched_speedup": matched.to_json(),
        "wall_clock_speedup": wall_clock_speedup(steps, step_time).to_json(),
        "matched_wall_clock_speedup": wall_clock_speedup(matched, step_time).to_json(),
        "seeds": {seed: asdict(each) for seed, each in speeds.items()},
    }


def _diverged_note(arm: Sequence[Run], reference: Sequence[Run]) -> str:
    """Return which of the two diverged, as it stands in the arm's row; nothing where neither did."""
    own, other = (sum(run.final_loss is None for run in runs) for runs in (arm, reference))
    where = f"of {len(arm)} seeds"
    if not own:
        return f"the reference diverged in {other} {where}" if other else ""
    return f"diverged in {own} {where}" + (f", and the reference in {other}" if other else "")
