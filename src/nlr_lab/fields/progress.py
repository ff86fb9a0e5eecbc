"""The progress of a fit: a bar on a terminal, else a line at each evaluation."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nlr_lab.runtime.time_limit import duration


class FitProgress:
    """Show step, loss, scores and speed on stderr.

    Args:
        title: stands before the numbers.
        steps: of the whole fit.
        quiet: show nothing.
    """

    def __init__(self, title: str, steps: int, *, quiet: bool) -> None:
        self.title, self.steps = title, steps
        self.console = Console(stderr=True, highlight=False, quiet=quiet)
        self.bar: Progress | None = None
        self.task: Any = None
        self.first, self.started, self.drawn = 0, 0.0, 0.0

    @contextlib.contextmanager
    def shown(self, step: int) -> Iterator[None]:
        """Show progress while it trains from this step on."""
        self.first, self.started = step, time.monotonic()
        if step and step < self.steps:
            self.console.print(f"{self.title}  going on at step {step}", soft_wrap=True, markup=False)
        if sys.stderr.isatty() and not self.console.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            more = (TextColumn("{task.fields[numbers]}"), TimeRemainingColumn())
            self.bar = Progress(*columns, *more, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task(self.title, total=self.steps, completed=step, numbers="")
            self.bar.start()
        try:
            yield
        finally:
            if self.bar is not None:
                self.bar.stop()

    def moved(self, step: int) -> None:
        """Move the bar; at most ten times a second, for steps take a millisecond."""
        if self.bar is not None and time.monotonic() - self.drawn > 0.1:
            self.bar.update(self.task, completed=step)
            self.drawn = time.monotonic()

    def evaluated(self, step: int, entry: Mapping[str, float]) -> None:
        """Show an evaluation's numbers."""
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in entry.items() if name != "step")
        if self.bar is not None:
            self.bar.update(self.task, completed=step, numbers=numbers)
        speed = (step - self.first) / max(time.monotonic() - self.started, 1e-9)
        to_go = f"  {duration((self.steps - step) / speed)} to go" if step < self.steps and speed else ""
        line = f"{self.title}  step {step}/{self.steps}  {numbers}  {speed:.1f} steps/s{to_go}"
        # without wrapping, so that a log file has one line an evaluation
        self.console.print(line, soft_wrap=True, markup=False)
