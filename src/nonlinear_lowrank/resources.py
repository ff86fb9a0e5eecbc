"""What this machine lets a process use: devices, memory, cores. Asked before anything is taken or written."""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from .environment import cpu_threads
from .errors import UserError

RESERVE = 100_000_000
"""Bytes that are left free."""


def choose_device(name: str, *, dtype: torch.dtype = torch.float32) -> torch.device:
    """The device of that name; by default the GPU where there is one.

    Args:
        name: as torch has it, "cuda:0" for example; empty: the default.
        dtype: of numbers that it must hold.

    Raises:
        UserError: there is no such device here, or it holds no such numbers.
    """
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; use cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name}: torch sees no NVIDIA GPU here; leave --device away")
    try:
        torch.zeros((), dtype=dtype, device=device).item()  # "meta" gives nothing back
    except Exception as error:  # each backend has errors of its own
        words = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(f"device {name} cannot be used here ({words}); leave --device away") from error
    return device


def free_memory() -> int:
    """Bytes that this process may still take: the machine's, or its group's where that is less."""
    free = psutil.virtual_memory().available
    for limit, used, prefix in _CGROUPS:
        try:
            most, now = int(Path(limit).read_text()), int(Path(used).read_text())
            parts = dict(line.split() for line in Path(used).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit
            continue
        cached = sum(int(parts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))  # given up on demand
        free = min(free, max(0, most - now + cached))
    return free


# Of each version of control groups: limit, use, and how the whole group's parts of it begin.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", ""),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "total_"),
)


def check_bytes(needed: int, what: str, mend: str) -> None:
    """Asks whether so many bytes fit the memory that is free.

    Raises:
        UserError: they do not.
    """
    free = free_memory()
    if needed + RESERVE > free:
        raise UserError(f"{what} takes {(needed + RESERVE) / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; {mend}")


_NO_LOAD = ("idle", "iowait", "nice", "guest", "guest_nice")  # what is nice gives way, guests are in user
_BLIP = 0.25  # of a core: less than that is no load


def free_cores(seconds: float = 0.5) -> float:
    """Cores that other processes leave to this one, of those that it may use, its group's quota included.

    This process sleeps while it looks: what runs then is the others'.

    Args:
        seconds: to look for.
    """
    before, started = _busy(), time.monotonic()
    time.sleep(seconds)
    load = (_busy() - before) / (time.monotonic() - started)
    return min(_quota(), max(0.0, len(_cores()) - load))


def _cores() -> set[int]:
    """Those that this process may run on."""
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


# Of each version of control groups: where quota and period are, in microseconds.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


class FreeThreads:
    """torch's CPU threads for the runs of one process, each to find a core of its own.

    A thread that shares its core keeps all others waiting at the end of every operation: with two threads on two cores
    that others use, a step can take ten times as long as with one.

    Args:
        wanted: threads that the runs set themselves; then nothing is chosen, nor where OMP_NUM_THREADS is set, a GPU
            computes, or this is one of several training processes.
    """

    def __init__(self, wanted: int | None) -> None:
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._fixed = bool(wanted or os.environ.get("OMP_NUM_THREADS") or several or torch.accelerator.is_available())
        self.most = torch.get_num_threads()
        self.now = self.fewest = self.most
        """Those that were chosen last, and the fewest so far."""

    @property
    def notes(self) -> list[str]:
        """A sentence for the report, where there were fewer than the machine's."""
        if self.fewest == self.most:
            return []
        return [f"Other processes kept cores busy: steps were taken by {self.fewest} of {self.most} threads at times."]

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """So many threads inside it as cores are free now; takes half a second to see."""
        count = None
        if not self._fixed and self.most > 1:
            count = max(1, min(self.most, math.floor(free_cores() + _BLIP)))
            self.now, self.fewest = count, min(self.fewest, count)
        with cpu_threads(count):
            yield


# On the CPU torch has no class for it.
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|Storage size calculation overflowed|Overflow when")


@contextlib.contextmanager
def told_of_memory(what: str) -> Iterator[None]:
    """Says in one line what did not fit memory.

    Raises:
        UserError: it did not.
    """
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error))):
            raise
        raise UserError(f"{what} does not fit memory; choose a smaller width, or fewer points or rays") from error
