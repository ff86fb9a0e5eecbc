"""One arm against another: difference of the score, and speed read off the evaluation curves.

==================  ==================================================================================
final loss          evaluation loss at the last step
score               what a task is judged by, at the last step: its final loss unless it says otherwise
delta               score of the arm - score of the reference, per seed (of a loss, below 0 is better)
step speedup        steps of the reference / steps of the arm to the first crossing of the reference's
                    final loss on the linearly interpolated evaluation curve (noble.txt 4.1.1), per seed
matched speedup     the step speedup where the arm reached that loss; where it did not, the reverse
                    measure: steps of the reference to the first crossing of the arm's final loss /
                    steps of the arm, which is below 1. So it exists for slow arms as well as fast ones
step-time ratio     seconds of a step of the arm / of the reference, interleaved; median of paired ratios
wall-clock speedup  step speedup / step-time ratio
==================  ==================================================================================
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from nlr_lab.bench.timing import Ratio

from .statistics import CONFIDENCE, Estimate, geometric_mean, paired_mean

# A reference that passed its own final loss before this share of its steps has a curve that rose again.
_EARLY = 0.98


def first_crossing(steps: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """First step at which the linearly interpolated evaluation curve is at or below `target`.

    Args:
        steps: strictly increasing, in optimizer steps.
        losses: evaluation losses at those steps; NaN and infinity count as above any target.
        target: a loss.

    Returns:
        The step (a float), the first of `steps` when the curve is already below there, or None when the
        curve never comes down to the target. After a non-finite loss the later step is taken.
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    assert x.shape == y.shape, "one loss for each step"
    assert (np.diff(x) > 0).all(), "steps must increase"
    below = y <= target
    if not below.any():
        return None
    k = int(np.argmax(below))
    if k == 0 or not np.isfinite(y[k - 1]):
        return float(x[k])
    fraction = (y[k - 1] - target) / (y[k - 1] - y[k])
    return float(x[k - 1] + fraction * (x[k] - x[k - 1]))


@dataclass(frozen=True, kw_only=True)
class RunCurve:
    """One finished run: its evaluation curve, its length and where it ended.

    `final_loss` is None for a run that diverged. `score` is what the run is judged by, where that is not its
    final loss.
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    total_steps: int
    final_loss: float | None
    score: float | None = None

    @property
    def judged(self) -> float | None:
        return self.final_loss if self.score is None else self.score

    @property
    def passed_early(self) -> bool:
        """Return whether it was below its own final loss well before its end."""
        assert self.final_loss is not None
        crossing = first_crossing(self.steps, self.losses, self.final_loss)
        return crossing is not None and crossing < _EARLY * self.total_steps


@dataclass(frozen=True, kw_only=True)
class SeedSpeed:
    """Speed of one arm against the reference at one seed.

    `bound` says that a crossing lay at or before the first evaluation of a curve, so that the number is
    only as fine as the evaluation spacing there.
    """

    reached: bool
    steps_to_reference_loss: float | None = None
    step_speedup: float | None = None
    matched_speedup: float | None = None
    bound: bool = False
    note: str = ""


def seed_speed(reference: RunCurve, arm: RunCurve) -> SeedSpeed:
    """Step speedup and matched speedup (see the module's table) of two finished runs of one seed."""
    assert reference.final_loss is not None, "the reference diverged"
    assert arm.final_loss is not None, "the arm diverged"
    steps = first_crossing(arm.steps, arm.losses, reference.final_loss)
    if steps is not None:
        known: dict[str, Any] = {"reached": True, "steps_to_reference_loss": steps, "bound": steps <= arm.steps[0]}
        if steps <= 0:
            return SeedSpeed(**known, note="the arm was below the reference's final loss before training")
        speedup = reference.total_steps / steps
        return SeedSpeed(**known, step_speedup=speedup, matched_speedup=speedup)
    # The arm never came down to the reference's final loss, so its own final loss lies above it, and the
    # reference's curve, which ends below, crosses it.
    back = first_crossing(reference.steps, reference.losses, arm.final_loss)
    if back is None:
        return SeedSpeed(reached=False, note="no common loss")
    if back <= 0:
        return SeedSpeed(reached=False, note="the arm ended no lower than the untrained reference")
    return SeedSpeed(reached=False, matched_speedup=back / arm.total_steps, bound=back <= reference.steps[0])


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

    reach = half_width(1 - CONFIDENCE)
    return Estimate(
        value=math.exp(log_value),
        low=math.exp(log_value - reach),
        high=math.exp(log_value + reach),
        p_value=_level_of(half_width, abs(log_value)),
        n=speedup.n,
        null=1.0,
        standard_error=math.hypot(seed_error, time_error),
    )


def _level_of(half_width: Callable[[float], float], distance: float) -> float:
    """The level whose interval just reaches `distance`; half_width falls from infinity to 0 over (0, 1]."""
    smallest = 1e-15
    if half_width(smallest) <= distance:
        return smallest
    return float(brentq(lambda level: half_width(level) - distance, smallest, 1.0))


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """One arm against one reference over the seeds that both finished.

    `reached` of `n` seeds came down to the reference's final loss; the step speedup is a number only when
    all did. `early` counts the seeds in which the reference passed its own final loss well before its end
    (its curve rose again), which flatters every arm. `bounds` counts crossings at a first evaluation. Runs that are
    judged by another score than their loss have no speedups, and `seeds` is empty.
    """

    n: int
    diverged: int
    reached: int
    early: int
    bounds: int
    delta: Estimate
    p_holm: float | None = None
    """The delta's p-value after Holm's correction over the family."""
    step_speedup: Estimate
    matched_speedup: Estimate
    wall_clock_speedup: Estimate
    matched_wall_clock_speedup: Estimate
    seeds: dict[int, SeedSpeed]
    cautions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        estimates = {name: each.to_json() for name, each in vars(self).items() if isinstance(each, Estimate)}
        return asdict(self) | estimates


def compare_pair(
    reference: Mapping[int, RunCurve],
    arm: Mapping[int, RunCurve],
    step_time: Ratio | None = None,
    *,
    speed: bool = True,
) -> PairSummary:
    """All paired statistics of one arm against one reference.

    Args:
        reference: seed -> run.
        arm: seed -> run; only the seeds that both have are used.
        step_time: the arm's step-time ratio over this reference, if it was measured.
        speed: whether the losses' curves are compared too.

    A seed in which either run diverged has no difference. Dropping only those seeds would flatter an arm
    that diverges, so with any of them there is no aggregate number, and `note` says so.
    """
    seeds = sorted(set(reference) & set(arm))
    whole = [s for s in seeds if reference[s].final_loss is not None and arm[s].final_loss is not None]
    speeds = {s: seed_speed(reference[s], arm[s]) for s in whole if speed}
    reached = sum(each.reached for each in speeds.values()) if speed else len(whole)

    def ratio(name: str) -> Estimate:
        numbers = [getattr(each, name) for each in speeds.values()]
        if None in numbers:
            return no_ratio(next(each.note for each in speeds.values() if each.note))
        return geometric_mean(numbers)

    def no_ratio(note: str) -> Estimate:
        return Estimate(value=None, n=len(seeds), null=1.0, note=note)

    if len(whole) < len(seeds):
        note = _diverged_note([arm[s] for s in seeds], [reference[s] for s in seeds])
        delta = Estimate(value=None, n=len(seeds), note=note)
        steps = matched = no_ratio(note)
    else:
        delta = paired_mean([arm[s].judged - reference[s].judged for s in whole])  # type: ignore[operator]
        if not speed:
            steps = matched = no_ratio("not compared by loss")
        else:
            not_reached = f"not reached (by {reached} of {len(whole)} seeds)"
            steps = no_ratio(not_reached) if reached < len(whole) else ratio("step_speedup")
            matched = ratio("matched_speedup")
    return PairSummary(
        n=len(seeds),
        diverged=len(seeds) - len(whole),
        reached=reached,
        early=sum(reference[s].passed_early for s in whole if speed),
        bounds=sum(each.bound for each in speeds.values()),
        delta=delta,
        step_speedup=steps,
        matched_speedup=matched,
        wall_clock_speedup=wall_clock_speedup(steps, step_time),
        matched_wall_clock_speedup=wall_clock_speedup(matched, step_time),
        seeds=speeds,
    )


def _diverged_note(arm: Sequence[RunCurve], reference: Sequence[RunCurve]) -> str:
    """Return which of the two diverged, as it stands in the arm's row."""
    own, other = (sum(run.final_loss is None for run in runs) for runs in (arm, reference))
    where = f"of {len(arm)} seeds"
    if not own:
        return f"the reference diverged in {other} {where}"
    return f"diverged in {own} {where}" + (f", and the reference in {other}" if other else "")
