"""Processes that read data may die (memory ran out, a scheduler killed them): noticed where a batch is waited for."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data._utils import signal_handling


@contextmanager
def without_signal_handler() -> Iterator[None]:
    """Keep torch from installing its handler of SIGCHLD for the loaders that begin to read in here.

    The handler raises out of whatever the parent process is doing: a checkpoint, a message, or another exception's
    handling. Without it torch finds the dead reader when it waits for its next batch, after 5 s at most.
    """
    before = signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = before


def is_dead_reader(error: BaseException) -> bool:
    """Return whether torch's DataLoader raised this because a process of its own died; torch has no class for it.

    A reader that dies while it hands a batch over breaks the connection first: then the error is the connection's.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker", "Pin memory thread exited"))
    frames = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    fetching = "_MultiProcessingDataLoaderIter._try_get_data"
    return isinstance(error, OSError | EOFError) and fetching in frames
