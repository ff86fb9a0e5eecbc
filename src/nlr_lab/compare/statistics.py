"""Estimates with their uncertainty, from paired numbers: pure functions, no files and no torch.

Two arms that share a seed share their batches, their order and their evaluation data, so most of the luck of a run
cancels in the difference, and the seeds are the sample. Means of differences are tested by the paired t-test. Ratios
are tested on the log scale, and their intervals are carried back. Intervals are 95 %. One seed gives no interval and
no p-value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
# Seeds whose differences agree to this relative size did not vary: a t interval on them would have no
# width and would "show" anything.
_NO_SPREAD = 1e-9
# How much of a curve's end tells whether it has flattened, and how many evaluations a speed needs to be read from: with
# ten, a crossing is known to a tenth of the steps.
_LATE_SHARE = 0.2
_FEW_EVALUATIONS = 10

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
) -> tuple[str, ...]:
    """Say where two arms' curves do not bear a claim on their difference.

    They have not flattened: over the last fifth of its steps one of the two still improved, in the mean over seeds, by
    more than the difference. Then a fifth more or fewer steps matter more than the arm does. Or whether they have
    flattened is not known.

    Args:
        difference: between the two, in the curves' unit; its size counts.
        curves: name -> the curves of its seeds.
        higher_is_better: of the values.
    """
    late = {name: [late_change(curve) for curve in of_seeds] for name, of_seeds in curves.items()}
    known = {name: [each for each in changes if each is not None] for name, changes in late.items()}
    if any(len(known[name]) < len(late[name]) for name in late):
        return ("the runs are evaluated too seldom to tell whether their curves have flattened",)
    sign = 1 if higher_is_better else -1
    gains = {name: sign * float(np.mean([change for change, _ in changes])) for name, changes in known.items()}
    moving = [f"`{name}` by {gain:.3g}" for name, gain in gains.items() if gain > abs(difference)]
    if not moving:
        return ()
    share = max(share for changes in known.values() for _, share in changes)
    return (
        f"the curves have not flattened (over the last {100 * share:.0f} % of the steps {' and '.join(moving)} "
        "still improved, more than the difference), so it may be one of speed or schedule alone",
    )


def speed_cautions(curves: Mapping[str, Sequence[Points]], at_first_evaluation: Sequence[bool]) -> tuple[str, ...]:
    """Say where a speed is read off too coarse a curve: fewer than ten evaluations, or a crossing at the first one.

    Args:
        curves: name -> the curves of its seeds.
        at_first_evaluation: of each seed's crossing.
    """
    found = []
    fewest = min(len(curve) for of_seeds in curves.values() for curve in of_seeds)
    if fewest < _FEW_EVALUATIONS:
        found.append(f"the speed is read off {fewest} evaluations, fewer than {_FEW_EVALUATIONS}")
    if any(at_first_evaluation):
        found.append(
            f"in {sum(at_first_evaluation)} of {len(at_first_evaluation)} seeds the crossing lies at the first "
            "evaluation: evaluate more often for a sharper speedup"
        )
    return tuple(found)
