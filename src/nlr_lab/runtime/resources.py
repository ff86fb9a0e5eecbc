"""Devices and memory that this machine lets a process use, asked for before anything is taken or written."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nonlinear_lowrank.errors import UserError

if TYPE_CHECKING:
    import torch

RESERVE = 100_000_000
"""Bytes that are left free."""


def choose_device(name: str, *, dtype: "torch.dtype | None" = None) -> "torch.device":
    """Return the device of that name, as torch has it; where it is empty, the GPU if there is one.

    Raises:
        UserError: there is no such device here, or it holds no numbers of that dtype (None: torch's default).
    """
    import torch

    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; use cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name}: torch sees no NVIDIA GPU here; use --device cpu")
    try:
        torch.zeros((), dtype=dtype, device=device).item()  # "meta" gives nothing back
    except Exception as error:  # each backend has errors of its own
        words = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(f"device {name} cannot be used here ({words}); omit --device") from error
    return device


# Of each version of control groups: limit, use, and how the whole group's parts of it begin.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", ""),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "total_"),
)


def free_memory() -> int:
    """Return the bytes that this process may still take: the machine's, or its group's where that is less."""
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


def check_bytes(needed: int, what: str, hint: str) -> None:
    """Raise UserError unless so many bytes fit the memory that is free."""
    free = free_memory()
    if needed + RESERVE > free:
        raise UserError(f"{what} takes {(needed + RESERVE) / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; {hint}")


# On the CPU torch has no class for it.
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|Storage size calculation overflowed|Overflow when")


@contextlib.contextmanager
def told_of_memory(what: str) -> Iterator[None]:
    """Raise UserError, which says in one line what did not fit memory, where it did not."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error))):
            raise
        raise UserError(f"{what} does not fit memory; choose a smaller width, or fewer points or rays") from error
