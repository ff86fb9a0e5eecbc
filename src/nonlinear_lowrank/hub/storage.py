"""Files that are whole or absent, whenever the process is killed.

A folder is written beside its final place under a name that starts with `.tmp-`, hashed into a manifest,
synced to disk and renamed. What is found under `.tmp-` is a killed process's and can go.
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

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, the rest works
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"
CARD = "README.md"
"""For people, who go on writing it: no manifest lists it."""
LOCK = ".lock"

# No space, over quota, over the file size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_json(path: Path, data: Any) -> None:
    """Writes a JSON file at once: readers see the old one or the new one."""
    staged = path.with_name(f"{TEMPORARY}{path.name}")
    with staged.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    _sync(path.parent)


def read_json(path: Path, **kinds: type) -> dict[str, Any]:
    """The object in a JSON file that this library wrote.

    Args:
        path: the file.
        kinds: keys that it has, and the types of their values.

    Raises:
        UserError: it is damaged, or another file of that name.
    """
    mend = "use another folder, or --overwrite"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, {' '.join(str(error).split())}; {mend}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object, as ours does; {mend}")
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise UserError(f"{path} has no {key!r}, as ours has; {mend}")
    return found


def hash_file(file: Path) -> str:
    """sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_file(file: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": file.stat().st_size, "sha256": hash_file(file)}


@contextmanager
def staged_folder(path: Path, manifest: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Gives an empty folder to fill; on leaving, it is at `path`, replacing what was there.

    Args:
        path: the final place. Its parent exists.
        manifest: if given, a manifest of these entries and the hashes of all files but the card is added. What its
            "files" have on leaving is taken as it is.

    Raises:
        OSError: it could not be written; then nothing of it is left.
    """
    staged = path.with_name(f"{TEMPORARY}{path.name}")
    _remove(staged)
    staged.mkdir()
    try:
        yield staged
        if manifest is not None:
            files = dict(manifest.get("files", {}))
            for file in _files(staged):
                if file.name != CARD and (name := str(file.relative_to(staged))) not in files:
                    files[name] = describe_file(file)
            text = json.dumps({**manifest, "files": files}, indent=2) + "\n"
            (staged / MANIFEST).write_text(text, encoding="utf-8")
        for file in _files(staged):
            _sync(file)
        for folder in (*(each for each in staged.rglob("*") if each.is_dir()), staged):
            _sync(folder)
        if path.exists():
            # A rename cannot replace a folder; killed between the two, neither is at `path`.
            old = path.with_name(f"{TEMPORARY}old-{path.name}")
            _remove(old)
            path.rename(old)
            staged.rename(path)
            _sync(path.parent)
            _remove(old)
        else:
            staged.rename(path)
            _sync(path.parent)
    except BaseException:
        _remove(staged)
        raise


@contextmanager
def staged_output(output: Path, manifest: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """As `staged_folder`, for what a user asked for: makes the parents too.

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


def check_new_or_empty(output: Path) -> None:
    """Refuses to write over anything.

    Raises:
        UserError: there is a file, or a folder with something in it.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty folder; choose another")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose files all match it.

    Raises:
        UserError: the manifest or a file is missing, cut short or changed; the message names it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"].items()
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {MANIFEST}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be read") from error
    for name, entry in files:
        if (fault := file_fault(folder, name, entry)) is not None:
            raise UserError(fault)
    return manifest


def file_fault(folder: Path, name: str, entry: Any, *, content: bool = True) -> str | None:
    """What is wrong with a file that a manifest lists; None: nothing.

    Args:
        folder: where the manifest lies.
        name: of the file, as the manifest has it.
        entry: what the manifest says of it.
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
    """Whether a path out of a file's content stays in the folder it is meant for: relative, and never upwards."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    pure = PureWindowsPath(name)  # which knows both kinds of slashes, and drives
    return not (pure.is_absolute() or pure.anchor or name.startswith("/") or ".." in pure.parts)


def step_folders(folder: Path) -> dict[int, Path]:
    """Checkpoint folders `step-N` by N, ascending, whole or not."""
    found = {}
    for child in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"step-(\d+)", child.name)
        if match and child.is_dir():
            found[int(match[1])] = child
    return dict(sorted(found.items()))


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files match its manifest, and why newer ones were passed over."""
    passed_over = []
    for child in reversed(step_folders(folder).values()):
        try:
            read_manifest(child)
        except UserError as error:
            passed_over.append(str(error))
        else:
            return child, passed_over
    return None, passed_over


def prune(folder: Path, newest: int, keep: int) -> None:
    """Keeps checkpoint `newest` and the `keep - 1` whole ones before it; the others go.

    Nothing goes before `newest` has been read back and every hash matched, so that a good one is always left. Of the
    others a look at their sizes has to do. What is numbered above `newest` was found damaged when the run resumed
    from before it.

    Raises:
        UserError: `newest` does not read back as it was written.
    """
    folders = step_folders(folder)
    before = [child for step, child in folders.items() if step < newest]
    if len(folders) == 1 + len(before) <= keep:
        return
    read_manifest(folders[newest])
    whole = [child for child in before if _has_its_sizes(child)]
    kept = [*whole[::-1][: keep - 1], folders[newest]]
    for child in folders.values():
        if child not in kept:
            # Renamed first: a kill halfway through must not leave half a checkpoint under a good name.
            doomed = child.with_name(f"{TEMPORARY}old-{child.name}")
            _remove(doomed)
            child.rename(doomed)
            _remove(doomed)


def _has_its_sizes(folder: Path) -> bool:
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(file_fault(folder, name, entry, content=False) is None for name, entry in files)


def is_free(folder: Path, *, resume: bool, overwrite: bool) -> bool:
    """Whether a folder that is to be written to is new or empty.

    What a process that was killed before its first file left does not count, nor does a lock.

    Raises:
        UserError: it is a file, or both ways to use a former folder are asked for.
    """
    if resume and overwrite:
        raise UserError("--resume keeps what is in the folder and --overwrite deletes it; choose one")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder")
    return not folder.exists() or all(
        child.name == LOCK or child.name.startswith(TEMPORARY) for child in folder.iterdir()
    )


def remove_temporaries(folder: Path) -> None:
    """Removes what killed processes left directly in a folder."""
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.name.startswith(TEMPORARY):
            _remove(child)


def clear_folder(folder: Path, *names: str) -> None:
    """Removes files and folders of ours from a folder, and nothing else; by the last one it is known as ours."""
    remove_temporaries(folder)
    for name in names:
        _remove(folder / name)


def is_disk_error(error: BaseException) -> bool:
    """Whether an exception came from writing to the disk (safetensors has its own class for it)."""
    return isinstance(error, OSError) or (isinstance(error, SafetensorError) and "os error" in str(error))


def describe_disk_error(error: BaseException) -> str:
    """A few words for the message."""
    found = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number in _FULL:
        return "no space left on the disk"
    return os.strerror(number) if number else str(error)


class FolderLock:
    """Held by the process that writes to a folder; gone when the process is, however it ends."""

    def __init__(self, folder: Path) -> None:
        # Not flock: data-loading workers, being forks, would go on holding it after a kill.
        self._file = (folder / LOCK).open("w")
        if fcntl is None:
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(f"another process is training in {folder}; wait for it, or stop it") from error
            raise

    def release(self) -> None:
        """Lets others in."""
        self._file.close()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()
