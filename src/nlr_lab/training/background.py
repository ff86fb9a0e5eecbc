"""Work beside training: a thread that writes a checkpoint while steps go on."""

import threading
from collections.abc import Callable


class Background:
    """One piece of work at a time, on copies: training changes its tensors meanwhile.

    The thread is a daemon: a process that is to end at once does, and what is half-written has a temporary name.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        """Start a piece of work, after `finish`."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, *, wait: bool = True) -> None:
        """Wait for the work, if there is any, and raise what it raised; without `wait` only where it is done."""
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
            if self._errors:
                raise self._errors.pop()
