"""Work that one of several training processes does for all."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def on_first_process(function: Callable[[], T]) -> T:
    """Runs it in the first process alone; all get its result, or raise what it raised."""
    if not _distributed():
        return function()
    outcome: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [function(), None]
        except Exception as error:
            outcome = [None, error]
            raised = error
    try:
        torch.distributed.broadcast_object_list(outcome, src=0)
    except Exception:
        # An exception that cannot travel: say it here, the others see the lost connection.
        if torch.distributed.get_rank() == 0 and outcome[1] is not None:
            raise raised from None
        raise
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather_objects(value: Any) -> list[Any]:
    """The value of every process, in every process."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


@functools.cache
def warn_of_restarts() -> None:
    """Says once, in the first process, that a group which torchrun starts again can hang (pytorch issue 135712)."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts and shared and os.environ.get("RANK") == "0":
        print(
            "warning: a restart by torchrun can hang at the addresses of the dead group; "
            "start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment",
            file=sys.stderr,
        )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
