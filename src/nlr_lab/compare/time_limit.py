"""A time limit that holds: what fits in it, when a run must stop, and how runs are shortened.

A comparison needs one run of every arm at the least (and one more of each that is tuned). Their time is forecast from
timed steps before anything is trained. Where they would not end within the limit, all arms get the same smaller number
of steps, and with it a schedule of that length: warm-up, decay and the spacing of evaluations shrink alike, which a
schedule that is cut short would not. While runs go on the forecast follows what they take, and a run that can no
longer end in time beside those that must follow stops.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from nlr_lab.runtime.environment import duration
from nlr_lab.runtime.processes import FreeThreads
from nonlinear_lowrank.errors import UserError

LEAST_STEPS = 10
"""Below this a run is not shortened: it would be over before its evaluations say anything."""

TIMING_SHARE = 0.1
"""Share of a limit that timing steps may take."""

PACE_ROUNDS = 3
"""Rounds of steps that are timed for the limit alone."""

_MARGIN = 1.3  # of the forecast that a length is chosen by: to begin once more costs more than to take fewer steps
_REPORT_SHARE, _REPORT_SECONDS = 0.05, 30.0  # kept for the pictures and the report
_SURE = 0.1  # of a run's steps, after which its own pace says when it ends
_EVALUATION = 0.4  # of a training step, for as many examples: a forward pass and its batch

Config = TypeVar("Config")


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


@dataclass(kw_only=True)
class Forecast:
    """Seconds that a run takes, by arm, from timed steps; it follows what runs really take."""

    step: Mapping[str, float]
    """Seconds of a training step."""
    evaluation: Mapping[str, float]
    """Seconds of an evaluation."""
    evaluations: int
    """Evaluations of a run, whatever its number of steps."""
    start: float
    """Seconds before the first step and after the last, such as for building and compiling the model."""
    at_once: int = 1
    """Runs side by side."""
    slower: float = field(default=1.0, init=False)
    """Factor by which runs took longer than was forecast; at least 1."""

    def seconds(self, arm: str, steps: int) -> float:
        """Return the seconds of a run of so many steps."""
        return self.slower * (steps * self.step[arm] + self.evaluations * self.evaluation[arm] + self.start)

    def total(self, arms: Sequence[str], steps: int) -> float:
        """Return the seconds of one run of each arm, as often as it is named."""
        return self._side_by_side([self.seconds(arm, steps) for arm in arms])

    def steps_within(self, arms: Sequence[str], seconds: float) -> int:
        """Return the most steps at which one run of each arm, as often as it is named, fits; below 1: none."""
        each = self.slower * self._side_by_side([self.step[arm] for arm in arms])
        steps = math.floor((seconds - self.total(arms, 0)) / each)
        return steps - steps % 10 if steps > 20 else steps

    def _side_by_side(self, seconds: Sequence[float]) -> float:
        return max(sum(seconds) / self.at_once, max(seconds, default=0.0))

    def observe(self, arm: str, steps: int, seconds: float) -> None:
        """Take in what a whole run of so many steps took, or would at its pace."""
        self.slower *= max(1.0, seconds / self.seconds(arm, steps))


def median_steps(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the seconds of a step by arm."""
    return {name: sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}


def seconds_around(passed: float, times: Mapping[str, Sequence[float]], least: float) -> float:
    """Return the seconds that an arm took beside its timed steps, of `passed` in all; at least `least`."""
    return max(least, (passed - sum(map(sum, times.values()))) / len(times))


def evaluation_seconds(step: float, examples: int, batch_size: int) -> float:
    """Return the seconds of an evaluation of so many examples, by those of a training step of `batch_size`."""
    return _EVALUATION * step * max(1.0, examples / batch_size)


def shortened(config: Config, steps: int) -> Config:
    """Return the same training (of steps, not epochs) in fewer: the whole schedule, with as many evaluations."""
    plain: Any = config
    share = steps / plain.steps
    names = {each.name for each in fields(plain)} & {"eval_every", "save_every", "log_every"}
    spacing = {name: max(1, round(share * value)) for name in names if (value := getattr(plain, name))}
    return replace(plain, steps=steps, warmup_steps=min(steps, round(share * plain.warmup_steps)), **spacing)


def choose_length(
    most: int,
    full: int,
    forecast: Forecast,
    limit: TimeLimit,
    earlier: Sequence[int],
    missing: Callable[[int | None], Sequence[str]],
    every: Sequence[str],
) -> int | None:
    """Return the most steps up to `most` at which the runs that a comparison needs end in time; None: all of `full`.

    Lengths to which runs were shortened `earlier` go on if they fit. `missing` gives the arms of those runs that are
    still to be done at a length, `every` the arms of all of them.

    Raises:
        UserError: not even `LEAST_STEPS` fit; the message names the limit that would do.
    """
    for steps in (most, *(each for each in earlier if each < most)):
        length = None if steps == full else steps
        arms = missing(length)
        if not arms or _MARGIN * forecast.total(arms, steps) <= limit.left:
            return length
    steps, least = min(most, forecast.steps_within(every, limit.left / _MARGIN)), min(full, LEAST_STEPS)
    if steps < least:
        needed = limit.passed + _MARGIN * forecast.total(every, least)
        needed += max(_REPORT_SECONDS, needed * _REPORT_SHARE / (1 - _REPORT_SHARE))
        raise UserError(
            f"the time limit of {duration(limit.seconds or 0.0)} does not hold {least} steps of every arm; give it "
            f"at least {duration(needed, up=True)} (--max-minutes), or compare fewer arms or smaller models"
        )
    return steps


def stop_rule(
    limit: TimeLimit,
    threads: FreeThreads,
    forecast: Forecast | None,
    *,
    arm: str,
    steps: int,
    reserve: float,
    looks_ahead: bool,
) -> Callable[[int], bool]:
    """Return what says of a run at each of its steps whether it must stop; its threads give way to others meanwhile.

    Seconds in `reserve` are for the runs after it. The forecast takes in the pace of a run that is stopped; without one
    it stops at the limit alone. One that `looks_ahead` also stops when its pace says that it will not end in time.
    """
    begun: list[tuple[int, float]] = []

    def stop(step: int) -> bool:
        threads.give_way()
        if limit.seconds is None:
            return False
        now, left = limit.passed, limit.left - reserve
        if not begun:
            begun.append((step, now))
        done, seconds = step - begun[0][0], now - begun[0][1]
        over = left < 0
        if forecast is None or not done:
            return over
        each = seconds / done
        if looks_ahead and done >= max(2, _SURE * steps):
            over = over or each * (steps - step) > left
        if over:
            forecast.observe(arm, steps, each * steps)
        return over

    return stop
