"""Steps where a finite training loss rises and does not recover.

The rule, on the entries of a training curve (means over the steps since the entry before):

- A run has learned `first - best`, its first entry less its lowest so far. It is *up* while an entry lies more than a
  quarter of that above the lowest one, and more than ten times the noise (the median change between successive
  entries, as a standard deviation; taken for larger while there are few). A run that never gets below its first entry
  has learned nothing, and is up as soon as it is above it by the noise.
- Up in at least three entries, and for at least `patience` steps, a twentieth of the run, or to its end: it *diverged*,
  at the first entry that was up. Up for less and down again: a *spike*.

Losses of large models spike and recover within a few hundred steps of hundreds of thousands (PaLM, arXiv 2204.02311,
section 5.1), so a rise alone is no divergence, and neither are counts of outliers, by which spikes are usually scored
(OLMo 2, arXiv 2501.00656). A share of what was learned needs no unit, so it fits any vocabulary and task; fixed
multiples of the best loss do not. The reference documents say "diverges" of runs and define nothing.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace

_LOST = 0.25  # of what was learned
_NOISE = 10.0  # the range of a thousand normal draws is 6.5 standard deviations, on average
_PATIENCE = 0.05  # of the run's steps
_LEAST_ENTRIES = 3
_MEDIAN_CHANGE = 0.954  # the median of |a - b| for two draws of a normal distribution, in its standard deviations
_FEW = 10  # the noise is taken for so much larger by how few changes it is known


@dataclass(frozen=True, kw_only=True)
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


class LossWatch:
    """Reads a training curve entry by entry, of a run of so many steps."""

    def __init__(self, total_steps: int) -> None:
        self.patience = max(1, round(_PATIENCE * total_steps))
        self.total_steps = total_steps
        self.rises: list[Rise] = []
        """All so far; the last one may still go on."""
        self._first = self._best = self._last = float("nan")
        self._step = 0
        self._changes: list[float] = []  # sorted

    @classmethod
    def of(cls, curve: Iterable[tuple[int, float]], total_steps: int) -> "LossWatch":
        """Return a watch that has read the curve."""
        watch = cls(total_steps)
        for step, loss in curve:
            watch.add(step, loss)
        return watch

    def add(self, step: int, loss: float) -> None:
        """Read the next entry: the mean loss of the steps up to `step`, a finite number."""
        if self._step == 0:
            self._first = self._best = loss
        else:
            self._note(step, loss)
            bisect.insort(self._changes, abs(loss - self._last))
        self._best, self._last, self._step = min(self._best, loss), loss, step

    def _note(self, step: int, loss: float) -> None:
        count = len(self._changes)
        noise = self._changes[count // 2] / _MEDIAN_CHANGE * (1 + _FEW / count) if count else 0.0
        up = loss > self._best + max(_LOST * (self._first - self._best), _NOISE * noise)
        if not self.up:
            if up and self._changes:  # two entries say nothing of the noise
                self.rises.append(Rise(start=step, peak=loss))
            return
        rise = self.rises[-1]
        if up:
            self.rises[-1] = replace(rise, peak=max(rise.peak, loss), entries=rise.entries + 1)
        else:
            self.rises[-1] = replace(rise, end=step)

    @property
    def up(self) -> bool:
        """Return whether the loss is up now."""
        return bool(self.rises) and self.rises[-1].end is None

    @property
    def diverged(self) -> Rise | None:
        """The first rise that is a divergence by now, or None."""
        return next((rise for rise in self.rises if self._is_divergence(rise)), None)

    @property
    def spikes(self) -> list[Rise]:
        """The rises that recovered soon."""
        return [rise for rise in self.rises if rise.end is not None and not self._is_divergence(rise)]

    def _is_divergence(self, rise: Rise) -> bool:
        until = self._step if rise.end is None else rise.end
        to_the_end = rise.end is None and self._step >= self.total_steps
        return rise.entries >= _LEAST_ENTRIES and (to_the_end or until - rise.start >= self.patience)
