"""SIGTERM, SIGINT and SIGUSR1 as a request to stop once a checkpoint is written: spot machines, Slurm, Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .processes import rank

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StoppedBySignal(KeyboardInterrupt):
    """The end of a run that was asked to stop; no `except Exception` on the way holds it up."""

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{where}")
        self.exit_code = 128 + number


@dataclass
class StopRequest:
    """The first signal that arrived, or 0."""

    number: int = 0


@contextmanager
def noted_signals(request: StopRequest) -> Iterator[None]:
    """Note the first of these signals inside it; a second one stops at once. Only in a process's main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _: Any) -> None:
        if request.number:
            raise StoppedBySignal(number, " again, at once")
        request.number = number
        name = signal.Signals(number).name
        if rank() == 0:
            text = f"{name}: stopping after a checkpoint of this step; once more stops at once"
            print(text, file=sys.stderr, flush=True)

    # A shell starts background jobs with SIGINT ignored, so that Ctrl-C is not for them.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
