"""The statistics of a comparison: pure functions on numbers, no files and no torch.

Everything is paired. Two arms that share a seed share their batches, their order and their evaluation
text, so most of the luck of a run cancels in the difference, and the seeds are the sample. The terms:

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

Means of differences are tested by the paired t-test. Ratios are tested on the log scale, and their
intervals are carried back. Intervals are 95 %. One seed gives no interval and no p-value.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq

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
        """Whether the 95 % interval excludes the null: the only ground on which a claim is made."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.null or self.high < self.null

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shown": self.shown}


def _t_estimate(values: np.ndarray) -> tuple[Any, str]:
    """scipy's one-sample t-test of the mean against 0, or None with the reason there is none."""
    if len(values) < 2:
        return None, "one seed: no interval and no p-value"
    if float(np.std(values)) <= _NO_SPREAD * max(float(np.abs(values).max()), 1e-300):
        return None, "no spread between the seeds: no interval and no p-value"
    return stats.ttest_1samp(values, 0.0), ""


def paired_mean(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences with its t interval and the p-value of the paired t-test.

    Args:
        differences: arm - reference, one for each seed, all finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) == 0:
        return Estimate(value=None, n=0, note="no seed that both arms finished")
    test, note = _t_estimate(values)
    mean = float(values.mean())
    if test is None:
        return Estimate(value=mean, n=len(values), note=note)
    interval = test.confidence_interval(CONFIDENCE)
    return Estimate(
        value=mean,
        low=float(interval.low),
        high=float(interval.high),
        p_value=float(test.pvalue),
        n=len(values),
        standard_error=float(values.std(ddof=1) / math.sqrt(len(values))),
        dof=len(values) - 1,
    )


def geometric_mean(ratios: Sequence[float]) -> Estimate:
    """Geometric mean of positive ratios; interval and p-value (against 1) from the t-test of their logs."""
    logs = paired_mean([math.log(ratio) for ratio in ratios])
    if logs.value is None:
        return Estimate(value=None, n=0, null=1.0, note=logs.note)
    return Estimate(
        value=math.exp(logs.value),
        low=None if logs.low is None else math.exp(logs.low),
        high=None if logs.high is None else math.exp(logs.high),
        p_value=logs.p_value,
        n=logs.n,
        null=1.0,
        standard_error=logs.standard_error,
        dof=logs.dof,
        note=logs.note,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment for several comparisons; None stays None and is not counted.

    The family is whatever is passed: in a comparison, every arm against the same reference.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[index] = running
    return adjusted


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


@dataclass(frozen=True, kw_only=True)
class SeedSpeed:
    """Speed of one arm against the reference at one seed.

    `bound` says that a crossing lay at or before the first evaluation of a curve, so that the number is
    only as fine as the evaluation spacing there.
    """

    reached: bool
    steps_to_reference_loss: float | None
    step_speedup: float | None
    matched_speedup: float | None
    bound: bool
    note: str = ""


def seed_speed(reference: RunCurve, arm: RunCurve) -> SeedSpeed:
    """Step speedup and matched speedup (see the module's table) of two finished runs of one seed."""
    assert reference.final_loss is not None, "the reference diverged"
    assert arm.final_loss is not None, "the arm diverged"
    steps = first_crossing(arm.steps, arm.losses, reference.final_loss)
    if steps is not None:
        bound = steps <= arm.steps[0]
        if steps <= 0:
            note = "the arm was below the reference's final loss before training"
            return SeedSpeed(
                reached=True,
                steps_to_reference_loss=steps,
                step_speedup=None,
                matched_speedup=None,
                bound=bound,
                note=note,
            )
        speedup = reference.total_steps / steps
        return SeedSpeed(
            reached=True,
            steps_to_reference_loss=steps,
            step_speedup=speedup,
            matched_speedup=speedup,
            bound=bound,
        )
    # The arm never came down to the reference's final loss, so its own final loss lies above it, and the
    # reference's curve, which ends below, crosses it.
    back = first_crossing(reference.steps, reference.losses, arm.final_loss)
    if back is None or back <= 0:
        note = "the arm ended no lower than the untrained reference" if back is not None else "no common loss"
        return SeedSpeed(
            reached=False,
            steps_to_reference_loss=None,
            step_speedup=None,
            matched_speedup=None,
            bound=False,
            note=note,
        )
    return SeedSpeed(
        reached=False,
        steps_to_reference_loss=None,
        step_speedup=None,
        matched_speedup=back / arm.total_steps,
        bound=back <= reference.steps[0],
    )


def late_change(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Change of a curve over its last steps, and the share of all steps that these are.

    The share is a fifth, or more where no evaluation lies so near the end.

    Args:
        points: (step, value), steps increasing.

    Returns:
        None where no evaluation lies in the first four fifths: nothing says then whether the curve has flattened.
    """
    before = [point for point in points if point[0] <= (1 - _LATE_SHARE) * points[-1][0]]
    if not before:
        return None
    return points[-1][1] - before[-1][1], 1 - before[-1][0] / points[-1][0]


def claim_cautions(
    difference: float,
    curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    *,
    higher_is_better: bool = False,
    speeds: Sequence[SeedSpeed] = (),
) -> tuple[str, ...]:
    """Sentences that stand beside a claim whose curves do not bear it; none where they do.

    - The curves have not flattened: over the last fifth of its steps one of the two still improved, in the mean over
      seeds, by more than the difference. Then a fifth more or fewer steps matter more than the arm does, and the
      difference may be one of speed, or of the schedule, alone.
    - Whether they have flattened is not known: no evaluation lies in the first four fifths of the steps.
    - A speed is read off fewer than ten evaluations: straight lines between them are longer than a tenth of the run,
      which is as much as most speedups are.
    - A speed's crossing lies at the first evaluation of a curve: it is no interpolation between two measured points.

    Args:
        difference: between the two, in the curves' unit; its size counts.
        curves: name -> the curves of its seeds, each (step, value) with steps increasing.
        higher_is_better: of the values.
        speeds: of the seeds, where speeds are claimed.
    """
    sign = 1 if higher_is_better else -1
    late = {name: [late_change(curve) for curve in of_seeds] for name, of_seeds in curves.items()}
    found = []
    known = {name: [each for each in changes if each is not None] for name, changes in late.items()}
    if any(len(known[name]) < len(late[name]) for name in late):
        found.append("the runs are evaluated too seldom to tell whether their curves have flattened")
    else:
        gains = {name: sign * float(np.mean([change for change, _ in changes])) for name, changes in known.items()}
        moving = [f"`{name}` by {gain:.3g}" for name, gain in gains.items() if gain > abs(difference)]
        if moving:
            share = max(share for changes in known.values() for _, share in changes)
            found.append(
                f"the curves have not flattened (over the last {100 * share:.0f} % of the steps {' and '.join(moving)} "
                "still improved, more than the difference), so it may be one of speed or schedule alone"
            )
    if speeds:
        fewest = min(len(curve) for of_seeds in curves.values() for curve in of_seeds)
        if fewest < _FEW_EVALUATIONS:
            found.append(f"the speed is read off {fewest} evaluations, fewer than {_FEW_EVALUATIONS}")
        bounds = sum(each.bound for each in speeds)
        if bounds:
            found.append(
                f"in {bounds} of {len(speeds)} seeds the crossing lies at the first evaluation: evaluate more often "
                "for a sharper speedup"
            )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RatioSummary:
    """Paired step-time ratios: median and quartiles, and the bootstrap error of the log of the median."""

    median: float
    lower_quartile: float
    upper_quartile: float
    n: int
    log_standard_error: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise_ratios(ratios: Sequence[float], resamples: int = 4000) -> RatioSummary:
    """Median and quartiles of paired ratios; the error of log(median) by the bootstrap over rounds.

    The resampling draws from a fixed stream, so the same timings always give the same numbers.
    """
    values = np.asarray(ratios, dtype=np.float64)
    assert len(values) > 0, "no ratios"
    assert (values > 0).all(), "ratios are positive"
    error = None
    if len(values) > 1:
        draws = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
        error = float(np.median(np.log(values)[draws], axis=1).std(ddof=1))
    quartiles = np.quantile(values, [0.25, 0.5, 0.75])
    return RatioSummary(
        median=float(quartiles[1]),
        lower_quartile=float(quartiles[0]),
        upper_quartile=float(quartiles[2]),
        n=len(values),
        log_standard_error=error,
    )


def wall_clock_speedup(speedup: Estimate, step_time: RatioSummary | None) -> Estimate:
    """Speedup in steps divided by the step-time ratio, with the errors of both.

    On the log scale the half-width of the interval is the root of the sum of the squared half-widths of its
    two independent parts, seeds (t) and timing rounds (bootstrap, t): Zou and Donner's MOVER. It is never
    narrower than either part, as pooled degrees of freedom (Welch and Satterthwaite's) would be for two or
    three seeds. The p-value is the level at which the interval touches 1.
    """
    if speedup.value is None:
        return Estimate(value=None, n=speedup.n, null=1.0, note=speedup.note)
    if step_time is None:
        return Estimate(value=None, n=speedup.n, null=1.0, note="step time not measured")
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
    (its curve rose again), which flatters every arm. `bounds` counts crossings at a first evaluation.
    `p_holm` is the delta's p-value after Holm's correction over all arms with this reference. `cautions` are
    those of `claim_cautions`. Runs that are
    judged by another score than their loss have no speedups, and `seeds` is empty.
    """

    n: int
    diverged: int
    reached: int
    early: int
    bounds: int
    delta: Estimate
    p_holm: float | None
    step_speedup: Estimate
    matched_speedup: Estimate
    wall_clock_speedup: Estimate
    matched_wall_clock_speedup: Estimate
    seeds: dict[int, SeedSpeed]
    cautions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        for name, value in vars(self).items():
            if isinstance(value, Estimate):
                record[name] = value.to_json()
        record["seeds"] = {str(seed): asdict(speed) for seed, speed in self.seeds.items()}
        return record


def compare_pair(
    reference: Mapping[int, RunCurve],
    arm: Mapping[int, RunCurve],
    step_time: RatioSummary | None = None,
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
    diverged = sum(reference[s].final_loss is None or arm[s].final_loss is None for s in seeds)
    whole = [s for s in seeds if reference[s].final_loss is not None and arm[s].final_loss is not None]
    speeds = {s: seed_speed(reference[s], arm[s]) for s in whole if speed}
    reached = sum(each.reached for each in speeds.values()) if speed else len(whole)
    early = sum(_passed_early(reference[s]) for s in whole if speed)

    def ratios(values: list[float | None]) -> Estimate:
        numbers = [value for value in values if value is not None]
        if len(numbers) < len(values):
            note = next(each.note for each in speeds.values() if each.note)
            return Estimate(value=None, n=len(seeds), null=1.0, note=note)
        return geometric_mean(numbers)

    if diverged:
        note = _diverged_note([arm[s] for s in seeds], [reference[s] for s in seeds])
        delta = Estimate(value=None, n=len(seeds), note=note)
        steps = matched = Estimate(value=None, n=len(seeds), null=1.0, note=note)
    else:
        # Subtraction of the two None-checked losses; mypy cannot see through `whole`.
        delta = paired_mean([_judged(arm[s]) - _judged(reference[s]) for s in whole])
        matched = ratios([each.matched_speedup for each in speeds.values()])
        if not speed:
            note = "not compared by loss"
            steps = matched = Estimate(value=None, n=len(whole), null=1.0, note=note)
        elif reached < len(whole):
            note = f"not reached (by {reached} of {len(whole)} seeds)"
            steps = Estimate(value=None, n=len(whole), null=1.0, note=note)
        else:
            steps = ratios([speeds[s].step_speedup for s in whole])
    return PairSummary(
        n=len(seeds),
        diverged=diverged,
        reached=reached,
        early=early,
        bounds=sum(each.bound for each in speeds.values()),
        delta=delta,
        p_holm=None,
        step_speedup=steps,
        matched_speedup=matched,
        wall_clock_speedup=wall_clock_speedup(steps, step_time),
        matched_wall_clock_speedup=wall_clock_speedup(matched, step_time),
        seeds=speeds,
    )


def _diverged_note(arm: Sequence[RunCurve], reference: Sequence[RunCurve]) -> str:
    """Which of the two diverged, as it stands in the arm's row."""
    own, other = (sum(run.final_loss is None for run in runs) for runs in (arm, reference))
    where = f"of {len(arm)} seeds"
    if not own:
        return f"the reference diverged in {other} {where}"
    return f"diverged in {own} {where}" + (f", and the reference in {other}" if other else "")


def _final(run: RunCurve) -> float:
    assert run.final_loss is not None
    return run.final_loss


def _judged(run: RunCurve) -> float:
    return _final(run) if run.score is None else run.score


def _passed_early(run: RunCurve) -> bool:
    crossing = first_crossing(run.steps, run.losses, _final(run))
    return crossing is not None and crossing < _EARLY * run.total_steps
