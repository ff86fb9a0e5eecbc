"""What a result depends on beside its settings: versions, the kind of machine, and how many threads compute."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("nonlinear-lowrank", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Python and the packages that a loss may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(threads: int | None = None) -> dict[str, Any]:
    """The kind of machine: never its name, its user or a path on it.

    Args:
        threads: CPU threads that the runs set; None: torch's own choice.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "device": device,
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """So many of torch's CPU threads inside it; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processor() -> str:
    # platform.processor() is empty or only the architecture on Linux.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()
