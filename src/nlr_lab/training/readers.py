"""Processes that read data may die (memory ran out, a scheduler killed them): told of where a batch is waited for."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data._utils import signal_handling


@contextmanager
def told_where_waited_for() -> Iterator[None]:
    """Keeps torch from installing its handler of SIGCHLD for the loaders that begin to read in here.

    The handler tells of a dead reader by an exception out of whatever the main process is doing: in the middle of a
    checkpoint, of a message, or of another exception's handling, which then is the one seen. Without it torch finds the
    dead reader when it waits for its next batch, after 5 s at most, as it does on Windows.
    """
    before = signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = before


def is_dead_reader(error: BaseException) -> bool:
    """Whether torch's DataLoader raised this because a process of its own died; torch has no class for it.

    A reader that dies while it hands a batch over breaks the connection before it counts as dead: then the error is the
    connection's, raised where the loader fetches.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker", "Pin memory thread exited"))
    frames = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    fetching = "_MultiProcessingDataLoaderIter._try_get_data"
    return isinstance(error, OSError | EOFError) and fetching in frames
