"""Folders of prepared data, made once: in $NLR_CACHE, else in the user's cache folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nonlinear_lowrank.errors import UserError

T = TypeVar("T")


def cache_folder(given: str | None = None) -> Path:
    """Return the folder of all caches: the given one, $NLR_CACHE, or the user's cache folder."""
    if given or os.environ.get("NLR_CACHE"):
        return Path(given or os.environ["NLR_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nonlinear-lowrank"


def cached(folder: Path, read: Callable[[Path], T | None], build: Callable[[Path], object]) -> T:
    """Return what `read` finds in a folder, built first if it is absent or not whole; several processes build it once.

    Args:
        folder: the place.
        read: gives None where the folder is not whole; may raise what reading a damaged file raises.
        build: makes the folder.

    Raises:
        UserError: the cache cannot be written.
    """
    from filelock import FileLock

    if (found := _read(folder, read)) is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if (found := _read(folder, read)) is None:
                    build(folder)
                    found = read(folder)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write the cache {folder.parent} ({reason}); set cache_dir or NLR_CACHE") from error
    assert found is not None
    return found


def are_whole(folder: Path, facts: dict[str, Any]) -> bool:
    """Return whether train.npy and valid.npy hold as many tokens as the facts say; raise ValueError for one cut off."""
    sides = ("train", "valid")
    return all(len(np.load(folder / f"{side}.npy", mmap_mode="r")) == facts[side]["tokens"] for side in sides)


def _read(folder: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(folder)
    except (OSError, ValueError, KeyError, TypeError, EOFError):  # among them UserError
        return None
