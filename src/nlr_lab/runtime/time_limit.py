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

from nonlinear_lowrank.errors import UserError

from .cores import FreeThreads
from .processes import on_rank_0

LEAST_STEPS = 10
"""Below this a run is not shortened: it would be over before its evaluations say anything."""

TIMING_SHARE = 0.1
"""Share of a limit that timing steps may take."""

PACE_ROUNDS = 3
"""Of steps that are timed for the limit alone."""

_MARGIN = 1.3  # of the forecast that a length is chosen by: to begin once more costs more than to take fewer steps
_REPORT_SHARE, _REPORT_SECONDS = 0.05, 30.0  # kept for the pictures and the report
_SURE = 0.1  # of a run's steps, after which its own pace says when it ends
_EVALUATION = 0.4  # of a training step, for as many examples: a forward pass and its batch

Config = TypeVar("Config")
T = TypeVar("T")


class OutOfTimeError(UserError):
    """A run was stopped because it would not end within its time limit."""


class TimeLimit:
    """Seconds from now that a comparison may take, its report included; None: no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float]) -> None:
        self.seconds, self._clock, self._started = seconds, clock, clock()
        self._kept = 0.0 if seconds is None else min(_REPORT_SHARE * seconds, _REPORT_SECONDS)

    def keep(self, seconds: float) -> None:
        """Keep so many more for the report and its pictures."""
        self._kept += seconds

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def left(self) -> float:
        """Seconds left to runs; infinite without a limit."""
        return math.inf if self.seconds is None else self.seconds - self._kept - self.passed

    def words(self, expected: float) -> str:
        """Return the time to go, for the screen: what is expected, or the limit where that is sooner."""
        if expected <= self.left:
            return f"about {duration(expected)} to go"
        return f"at most {duration(max(self.left, 0.0))} to go"


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


class TooLongError(Exception):
    """Runs of one length do not end in time; those of `steps` would. See `Lengths`."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class Lengths:
    """Numbers of steps at which the runs that a comparison cannot do without end within the limit.

    A length is None where it is the one that was asked for.

    Args:
        full: steps that were asked for.
        forecast: of runs; None: they are not shortened.
        limit: of the comparison.
        earlier: lengths to which its runs were shortened before; the first that fits goes on.
        missing: the arms of those runs that are still to be done at a length; where its second argument says so, as if
            none were finished.
    """

    def __init__(
        self,
        full: int,
        forecast: Forecast | None,
        limit: TimeLimit,
        earlier: Callable[[], Sequence[int]],
        missing: Callable[[int | None, bool], Sequence[str]],
    ) -> None:
        self.full, self.forecast, self.limit, self.earlier, self.missing = full, forecast, limit, earlier, missing

    def choose(self, *, fewer_than: int | None = None, anew: bool = False) -> int | None:
        """Return a length that fits, also fewer than so many steps; with `anew`, as if no run were finished.

        Raises:
            UserError: not even `LEAST_STEPS` fit; the message names the limit that would do.
        """
        return on_rank_0(lambda: self._choose(self.full if fewer_than is None else fewer_than - 1, anew))

    def _choose(self, most: int, anew: bool) -> int | None:
        forecast, limit = self.forecast, self.limit
        if forecast is None:
            return None
        for steps in (most, *([] if anew else [each for each in self.earlier() if each < most])):
            arms = self.missing(None if steps == self.full else steps, anew)
            if not arms or _MARGIN * forecast.total(arms, steps) <= limit.left:
                return None if steps == self.full else steps
        arms = self.missing(None, True)
        steps, least = min(most, forecast.steps_within(arms, limit.left / _MARGIN)), min(self.full, LEAST_STEPS)
        if steps < least:
            needed = limit.passed + _MARGIN * forecast.total(arms, least)
            needed += max(_REPORT_SECONDS, needed * _REPORT_SHARE / (1 - _REPORT_SHARE))
            raise UserError(
                f"the time limit of {duration(limit.seconds or 0.0)} does not hold {least} steps of every arm; give it "
                f"at least {duration(needed, up=True)} (--max-minutes), or compare fewer arms or smaller models"
            )
        return steps

    def shorten(self, steps: int | None, error: OutOfTimeError) -> None:
        """Raise TooLongError where a necessary run was stopped, and fewer steps would have done."""
        try:
            fewer = self.choose(fewer_than=steps or self.full)
        except UserError:
            return
        if fewer is not None:
            raise TooLongError(fewer) from error

    def run(self, session: Callable[[int | None], T], steps: int | None) -> T:
        """Return what a session of the comparison gives, of so many steps or, after TooLongError, of fewer."""
        while True:
            try:
                return session(steps)
            except TooLongError as error:
                steps = error.steps

    def note(self, steps: int) -> str:
        """Return what the report says of runs that were shortened to so many steps."""
        return (
            f"Every run was shortened from {self.full} to {steps} steps, its whole schedule with it, so that one seed "
            f"of every arm ends within {duration(self.limit.seconds or 0.0)}: this compares arms at {steps} steps, and "
            f"says nothing of {self.full}. --resume with more time, or on a free machine, runs those."
        )


class Pace:
    """Says of a run at each of its steps whether it must stop; its threads give way to others meanwhile.

    Args:
        limit: of the comparison.
        threads: of the run.
        forecast: takes in the pace of a run that is stopped; None: it stops at the limit alone.
        arm: what is trained.
        steps: of the run.
        reserve: seconds that the runs after it need.
        looks_ahead: also stop when its pace says that it will not end in time.
    """

    def __init__(
        self,
        limit: TimeLimit,
        threads: FreeThreads,
        forecast: Forecast | None,
        *,
        arm: str,
        steps: int,
        reserve: float,
        looks_ahead: bool,
    ) -> None:
        self.limit, self.threads, self.forecast = limit, threads, forecast
        self.arm, self.steps, self.reserve, self.looks_ahead = arm, steps, reserve, looks_ahead
        self._begun: tuple[int, float] | None = None

    def __call__(self, step: int) -> bool:
        """Return whether to stop after this step."""
        self.threads.give_way()
        if self.limit.seconds is None:
            return False
        now, left = self.limit.passed, self.limit.left - self.reserve
        if self._begun is None:
            self._begun = step, now
        done, seconds = step - self._begun[0], now - self._begun[1]
        over = left < 0
        if self.forecast is None or not done:
            return over
        each = seconds / done
        if self.looks_ahead and done >= max(2, _SURE * self.steps):
            over = over or each * (self.steps - step) > left
        if over:
            self.forecast.observe(self.arm, self.steps, each * self.steps)
        return over


def duration(seconds: float, *, up: bool = False) -> str:
    """Return words of one unit: 40 s, 3 min, 2.5 h."""
    whole = math.ceil if up else round
    if seconds < 90:
        return f"{whole(seconds)} s"
    if seconds < 5400:
        return f"{whole(seconds / 60)} min"
    return f"{whole(seconds / 360) / 10:g} h"
