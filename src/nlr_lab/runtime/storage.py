"""Folders of runs: JSON files that are written atomically, checkpoints `step-N`, and a lock on the whole."""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import MANIFEST, TEMPORARY, disk_errors, file_fault, manifest_files, remove, sync
from nonlinear_lowrank.validation import one_line

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, the rest works
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
AGAIN = "make room and run the same command again"
"""Advice for a full disk, of commands that resume by themselves."""


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically: readers see the old one or the new one."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    staged = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_json(path: Path, hint: str = "restore it, or use another folder", **kinds: type) -> dict[str, Any]:
    """Return the object in a JSON file that this library wrote, with values of these `kinds`; UserError otherwise,
    with a `hint` that every command reading it can follow."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, {one_line(error)}; {hint}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold a JSON object; {hint}")
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise UserError(f"{path} has no valid {key!r}; {hint}")
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder whose files all match it; UserError names what is missing, cut off or changed."""
    files = manifest_files(folder)
    if files is None:
        raise UserError(f"{folder} has no {MANIFEST} that can be read")
    for name, entry in files.items():
        if (fault := file_fault(folder, name, entry)) is not None:
            raise UserError(fault)
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def step_folders(folder: Path) -> dict[int, Path]:
    """Checkpoint folders `step-N` by N, ascending, whole or not."""
    found = {}
    for child in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"step-(\d+)", child.name)
        if match and child.is_dir():
            found[int(match[1])] = child
    return dict(sorted(found.items()))


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files match its manifest, and why newer ones were skipped.

    UserError where one cannot be read: it may be whole.
    """
    skipped = []
    with _read_errors(folder):
        for child in reversed(step_folders(folder).values()):
            try:
                read_manifest(child)
            except UserError as error:
                skipped.append(str(error))
            else:
                return child, skipped
    return None, skipped


def prune(folder: Path, newest: int, keep: int) -> None:
    """Keep checkpoint `newest` and the `keep - 1` whole ones before it; delete the others.

    Nothing is deleted before `newest` has been read back and every hash matched, so that a good one always remains. The
    others are checked by size alone. What is numbered above `newest` was found damaged when the run resumed
    from before it. UserError where `newest` does not read back as it was written, or another cannot be read.
    """
    folders = step_folders(folder)
    before = [child for step, child in folders.items() if step < newest]
    if len(folders) == 1 + len(before) <= keep:
        return
    with _read_errors(folder):
        read_manifest(folders[newest])
        whole = [child for child in before if is_whole(child)]
    kept = [*whole[::-1][: keep - 1], folders[newest]]
    for child in folders.values():
        if child not in kept:
            discard(child)


@contextmanager
def _read_errors(folder: Path) -> Iterator[None]:
    """Raise UserError, in one line, where the disk cannot read a checkpoint of a folder."""
    try:
        yield
    except OSError as error:
        why = f"cannot read {error.filename or folder}: {error.strerror or error}"
        raise UserError(f"{why}; no checkpoint was removed, continue with --resume when they can be read") from error


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint, renamed first: a kill halfway through must not leave half of one under a good name."""
    doomed = checkpoint.with_name(f"{TEMPORARY}gone-{checkpoint.name}")
    remove(doomed)
    checkpoint.rename(doomed)
    remove(doomed)


def is_whole(folder: Path, most: int = 0) -> bool:
    """Return whether files are those of the folder's manifest: by content up to `most` bytes, longer ones by size."""
    files = manifest_files(folder)
    return files is not None and all(
        file_fault(folder, name, entry, content=entry["bytes"] <= most) is None for name, entry in files.items()
    )


def holds_former(folder: Path, marker: str, what: str, *, resume: bool, overwrite: bool) -> bool:
    """Return whether there is something of ours to resume in a folder that is to be written to.

    `marker` is the file that marks a folder of ours, `what` its content. Leftovers of a process that was killed before
    its first file do not count, nor does a lock. UserError where the folder is in use for something else, or not
    exactly one of `resume` and `overwrite` is given.
    """
    if resume and overwrite:
        raise UserError("--resume keeps what is in the folder and --overwrite deletes it; choose one")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder")
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError(f"cannot write to {folder}: {above} is not a folder that may be written to")
    names = [child.name for child in folder.iterdir()] if folder.exists() else []
    if all(name == LOCK or name.startswith(TEMPORARY) for name in names):
        return False
    ours = (folder / marker).is_file()
    if not resume and not overwrite:
        more = ", --resume to continue or --overwrite to start over" if ours else ""
        raise UserError(f"{folder} is not empty; choose another folder{more}")
    if not ours:
        raise UserError(f"{folder} holds no {what} (it has no {marker}); choose another folder")
    return resume


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left directly in a folder, but bring back a folder that was being replaced."""
    for child in list(folder.iterdir()) if folder.is_dir() else ():
        former = folder / child.name.removeprefix(f"{TEMPORARY}old-")
        if former != child and not former.exists():
            child.rename(former)
        elif child.name.startswith(TEMPORARY):
            remove(child)


@contextmanager
def opened(folder: Path, *ours: str, overwrite: bool) -> Iterator[None]:
    """Make a folder, and keep other processes out of it for as long as this one writes there.

    With `overwrite` the files and folders of `ours` are removed, and nothing else; by the last one it is known as ours.
    UserError where it cannot be written, or another process writes there.
    """
    with ExitStack() as stack:
        with disk_errors(f"to {folder}", "choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / LOCK).open("a"))
            try:  # not flock: data-loading workers, being forks, would keep holding it after a kill
                if fcntl is not None:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise UserError(f"another process is writing to {folder}; wait for it, or stop it") from error
            remove_temporaries(folder)
            for name in ours if overwrite else ():
                remove(folder / name)
        yield


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dataclasses and mappings as one dict; tuples as lists, which is what JSON makes of them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if not isinstance(value, Mapping):
        return {prefix: list(value) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def as_option(name: str, value: Any) -> list[str]:
    """Return the words of a command line for a setting by its dotted name."""
    stem, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{stem}{dot}{'' if value else 'no-'}{last}"]
    if isinstance(value, list):
        return [f"--{stem}{dot}{last}", *map(str, value)]
    return [f"--{stem}{dot}{last}={value}"]  # joined: it may begin with a dash
