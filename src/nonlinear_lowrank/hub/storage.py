"""Files that are whole or absent, whenever the process is killed.

A folder is written beside its final place under a name that starts with `.tmp-`, hashed into a manifest, synced to disk
and renamed. What is found under `.tmp-` was left by a killed process and can go.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

from safetensors import SafetensorError

from nonlinear_lowrank.errors import UserError

TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"
CARD = "README.md"
"""The model card, which users edit: no manifest lists it."""


def hash_file(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_file(file: Path) -> dict[str, Any]:
    """Return a manifest's entry of a file."""
    return {"bytes": file.stat().st_size, "sha256": hash_file(file)}


@contextmanager
def staged_folder(path: Path, manifest: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving, it is at `path`, replacing what was there.

    Args:
        path: the final place. Its parent exists.
        manifest: if given, a manifest of these entries and the hashes of all files but the card is added.

    Raises:
        OSError: it could not be written; then nothing of it is left.
    """
    staged, old = (path.with_name(f"{TEMPORARY}{kind}{path.name}") for kind in ("", "old-"))
    remove(staged)
    staged.mkdir()
    try:
        yield staged
        if manifest is not None:
            listed = sorted(each for each in staged.rglob("*") if each.is_file() and each.name != CARD)
            files = {str(file.relative_to(staged)): describe_file(file) for file in listed}
            text = json.dumps({**manifest, "files": files}, indent=2) + "\n"
            (staged / MANIFEST).write_text(text, encoding="utf-8")
        for each in (*staged.rglob("*"), staged):
            sync(each)
        remove(old)
        if path.exists():  # a rename cannot replace a folder; killed between the two, neither is at `path`
            path.rename(old)
        staged.rename(path)
        sync(path.parent)
        remove(old)
    except BaseException:
        remove(staged)
        raise


@contextmanager
def staged_output(output: Path, manifest: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield a folder as `staged_folder` does, for what a user asked for: the parents are made too.

    Raises:
        UserError: it could not be written; then nothing of it is left.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with staged_folder(output, manifest) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        if not is_disk_error(error):
            raise
        raise UserError(f"cannot write {output}: {describe_disk_error(error)}") from error


def check_new_or_empty(output: Path, hint: str = "choose another") -> None:
    """Raise UserError if there is a file, or a folder with something in it."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty folder; {hint}")


def manifest_files(folder: Path) -> dict[str, Any] | None:
    """Return the entries of a folder's manifest, by file; None where it has none, or one that is not ours."""
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def file_fault(folder: Path, name: str, entry: Any, *, content: bool = True) -> str | None:
    """Return what is wrong with a file that a folder's manifest lists, or None.

    Args:
        folder: where the manifest lies.
        name: of the file, as the manifest has it.
        entry: the manifest's entry of it.
        content: compare the hash too, not the size alone.
    """
    if not is_inside(name):
        return f"{folder / MANIFEST} names {name!r}, which is outside its folder"
    file = folder / name
    if not file.is_file():
        return f"{file} is missing"
    if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
        return f"{folder / MANIFEST} does not say how long {name} is"
    if (size := file.stat().st_size) != entry["bytes"]:
        return f"{file} is damaged (its hash does not match): {size:,} bytes of {entry['bytes']:,}"
    if content and hash_file(file) != entry.get("sha256"):
        return f"{file} is damaged (its hash does not match)"
    return None


def is_inside(name: object) -> bool:
    """Return whether a path out of a file's content stays in the folder it is meant for."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PureWindowsPath(name)  # which knows both kinds of slashes, and drives
    return not path.anchor and ".." not in path.parts


def is_disk_error(error: BaseException) -> bool:
    """Return whether an exception came from writing to the disk (safetensors has its own class for it)."""
    return isinstance(error, OSError) or (isinstance(error, SafetensorError) and "os error" in str(error))


def describe_disk_error(error: BaseException) -> str:
    """Return a disk error in a few words, for a message."""
    found = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "no space left on the disk"
    return os.strerror(number) if number else str(error)


def sync(path: Path) -> None:
    """Write a file, or a folder's list of names, through to the disk."""
    if os.name != "posix" and path.is_dir():
        return  # other systems cannot open a folder
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            # What is read back to be checked then comes from the disk, not from memory.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
