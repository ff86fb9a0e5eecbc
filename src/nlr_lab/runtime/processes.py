"""Training processes: which one this is, how many there are, and work that one does for all.

Importing this does not import torch, so that `--help` stays cheap.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def rank() -> int:
    """Return the number of this process, by its launcher's environment."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of training processes, by their launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_rank_0(function: Callable[[], T]) -> T:
    """Run a function on rank 0 alone; all processes get its result, or raise what it raised."""
    if not _distributed():
        return function()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [function(), None]
        except Exception as error:
            outcome = [None, error]
    raised = outcome[1]
    try:
        dist.broadcast_object_list(outcome, src=0)
    except Exception:
        if raised is not None:  # it cannot be pickled: raised here, the others see the lost connection
            raise raised from None
        raise
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the value of every process, in every process."""
    if not _distributed():
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def in_every_process(function: Callable[[], object]) -> None:
    """Run a function in all processes; raise in all of them if it failed in one.

    A process that waits for one that was killed ends by its group's time limit.
    """
    failure: Exception | None = None
    try:
        function()
    except Exception as error:
        failure = error
    failures = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if any(failures):
        raise RuntimeError(f"another process failed: {next(filter(None, failures))}")


@functools.cache
def warn_of_restarts() -> None:
    """Warn once, on rank 0, that a group which torchrun starts again can hang (pytorch issue 135712)."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts and shared and rank() == 0:
        print(
            "warning: a restart by torchrun can hang at the addresses of the dead group; "
            "start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment",
            file=sys.stderr,
        )


def _distributed() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
