"""`log.jsonl` of a run's or a comparison's folder: what is known so far, a line each time, for `nlr watch`."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

LOG = "log.jsonl"


def append_entry(folder: Path, **entry: Any) -> None:
    """Add a line with the time; a disk that is full, or a reader's lock, does not end what is measured."""
    line = json.dumps({"time": round(time.time(), 2), **entry})
    with contextlib.suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_entries(file: Path) -> list[dict[str, Any]]:
    """Return the entries of a log; none where there is no file. A line that a kill cut off is skipped."""
    entries = []
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(entry := json.loads(line), dict) and isinstance(entry.get("time"), int | float):
                    entries.append(entry)
    return entries
