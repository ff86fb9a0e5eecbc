"""Training processes (which one this is, how many, work that one does for all) and the cores that they compute on.

A thread that shares its core keeps all others waiting at the end of every operation, and threads that spin while they
wait take the cores of those that work: with two threads on two cores that others use, a step can take ten times as long
as with one. Importing this does not import torch: with it OpenMP is loaded, which reads its settings only then.
"""

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import psutil

T = TypeVar("T")

_NO_LOAD = ("idle", "iowait", "guest", "guest_nice")  # guests are in user; nice gives way to its own session alone
_BLIP = 0.25  # of a core: less than that is no load
_LOAD, _LOOK_EVERY = 0.5, 5.0  # cores that others take for so many seconds: then a run in progress gives way
# Weak, so that torch.distributed alone keeps a group: one that it has destroyed is gone here too.
_GROUPS: WeakValueDictionary[str, Any] = WeakValueDictionary()
# For each version of control groups: where quota and period are, in microseconds.
_QUOTAS = (("/sys/fs/cgroup/cpu.max",), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def rank() -> int:
    """Return the number of this process, by its launcher's environment."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of training processes, by their launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_rank_0(function: Callable[[], T], group: Any = None) -> T:
    """Run a function on rank 0 alone; all processes get its result, or raise what it raised."""
    if not _distributed():
        return function()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return the value of every process, in every process."""
    if not _distributed():
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def together(function: Callable[[], Any], group: Any = None) -> None:
    """Run a function in every process; all raise what it raised in one."""
    failure = None
    try:
        function()
    except Exception as error:
        failure = error
    for fault in gather_objects(failure, group):
        if fault is not None:
            raise fault


def largest(*values: int) -> list[int]:
    """Return the largest of each value over all processes; they wait for each other, and for no GPU's work."""
    if not _distributed():
        return list(values)
    import torch
    import torch.distributed as dist

    found = torch.tensor(values)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=None if dist.get_backend() == "gloo" else own_group("steps"))
    return found.tolist()


def own_group(name: str, timeout: timedelta | None = None) -> Any:
    """Return the group of all processes for one purpose, between CPUs, made by all at once; None for one process.

    The messages of a group must come in one order: another thread's need another group.
    """
    if not _distributed():
        return None
    import torch.distributed as dist

    if (group := _GROUPS.get(name)) is None:
        group = _GROUPS[name] = dist.new_group(backend="gloo", timeout=timeout)
    return group


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


# --- free cores --------------------------------------------------------------------------------------------------


def free_cores() -> float:
    """Return the cores that other processes leave to this one, of those that it may use, by its group's quota too.

    This process sleeps while it looks: what runs then is not its own.
    """
    before, started = _busy(), time.monotonic()
    time.sleep(0.5)
    return _left((_busy() - before) / (time.monotonic() - started))


def let_threads_sleep() -> None:
    """Make waiting threads sleep, not spin (faster on free cores), where others use the cores.

    To be called before torch is imported.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ and free_cores() + _BLIP < len(_cores()):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


class FreeThreads:
    """torch's CPU threads for the runs of one process, each to find a core of its own.

    Nothing is chosen where runs set threads themselves (`wanted`), OMP_NUM_THREADS is set, a GPU computes, or this is
    one of several training processes.
    """

    def __init__(self, wanted: int | None) -> None:
        import torch

        several = world_size() > 1
        self._fixed = bool(wanted or os.environ.get("OMP_NUM_THREADS") or several or torch.accelerator.is_available())
        self.most = torch.get_num_threads()
        self.now = self.fewest = self.most
        """Threads chosen last, and the fewest so far."""
        self._looked = (0.0, 0.0, 0.0)

    @property
    def notes(self) -> list[str]:
        """A sentence for the report, where there were fewer than the machine's."""
        if self.fewest == self.most:
            return []
        return [f"Other processes kept cores busy: steps were taken by {self.fewest} of {self.most} threads at times."]

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Use as many threads inside it as cores are free now; takes half a second to see."""
        from .environment import cpu_threads

        count = None
        if not self._fixed and self.most > 1:
            self.now = count = max(1, min(self.most, math.floor(free_cores() + _BLIP)))
            self.fewest = min(self.fewest, count)
            self._looked = _now()
        with cpu_threads(count):
            yield

    def give_way(self) -> None:
        """Take fewer threads for the rest of `chosen` if others have begun to use its cores; to be called often."""
        import torch

        if self._fixed or self.now <= 1 or time.monotonic() - self._looked[0] < _LOOK_EVERY:
            return
        now = _now()
        passed, busy, own = (after - before for after, before in zip(now, self._looked, strict=True))
        self._looked = now
        count = max(1, math.floor(_left((busy - own) / passed) + _LOAD))
        if count < self.now:
            torch.set_num_threads(count)
            self.now, self.fewest = count, min(self.fewest, count)


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock, for which the cores have worked, and for which they worked for this process."""
    return time.monotonic(), _busy(), time.process_time()


def _left(load: float) -> float:
    """Cores that are left beside such a load."""
    return min(_quota(), max(0.0, len(_cores()) - load))


def _cores() -> set[int]:
    """Cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _busy() -> float:
    """Seconds for which those cores have worked."""
    mine = _cores()
    times = [each._asdict() for core, each in enumerate(psutil.cpu_times(percpu=True)) if core in mine]
    return sum(value for each in times for name, value in each.items() if name not in _NO_LOAD)


def _quota() -> float:
    """Cores that this process' group may use at a time."""
    for paths in _QUOTAS:
        try:
            quota, period = (float(each) for path in paths for each in Path(path).read_text().split())
        except (OSError, ValueError):  # no such group, or no limit
            continue
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
