"""Files of models and of runs: written whole or not at all, and checked before anything is loaded from them.

A folder is written beside its final place under a name that starts with `.tmp-`, hashed into a manifest, synced to disk
and renamed. A leftover `.tmp-` folder is from a killed process and can be deleted; `.tmp-old-NAME` is the former NAME:
rename it back if NAME is missing. No pickle is ever opened.
"""

import errno
import functools
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .registration import FIELD, TYPE_PREFIX

TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"
CARD = "README.md"
"""The model card, which users edit: no manifest lists it."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PACKAGES = (
    *("nonlinear-lowrank", "torch", "triton", "transformers", "accelerate", "peft", "trl", "tokenizers", "datasets"),
    *("safetensors", "numpy", "scipy", "scikit-learn", "scikit-image", "pillow"),
)


def hash_file(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def staged_folder(path: Path, manifest: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill; on exit it replaces what was at `path`, or on an error is deleted.

    If a manifest is given, one of its entries and the hashes of all files but the card is added.
    """
    staged, old = (path.with_name(f"{TEMPORARY}{kind}{path.name}") for kind in ("", "old-"))
    remove(staged)
    staged.mkdir()
    try:
        yield staged
        if manifest is not None:
            listed = sorted(each for each in staged.rglob("*") if each.is_file() and each.name != CARD)
            files = {
                str(each.relative_to(staged)): {"bytes": each.stat().st_size, "sha256": hash_file(each)}
                for each in listed
            }
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
        if old.exists() and not path.exists():
            old.rename(path)
        raise


@contextmanager
def staged_output(output: Path) -> Iterator[Path]:
    """Yield a folder as `staged_folder` does, with a manifest, for a user's output: make parents, raise UserErrors."""
    with disk_errors(str(output), hint=""):
        output.parent.mkdir(parents=True, exist_ok=True)
        with staged_folder(output, {}) as folder:
            yield folder


@contextmanager
def disk_errors(what: str, hint: str = "make room and continue with --resume") -> Iterator[None]:
    """Raise UserError, in one line, where something cannot be written because the disk is full or refuses."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        found = re.search(r"os error (\d+)", str(error))  # safetensors has an error of its own for these
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if not isinstance(error, OSError) and number is None:
            raise
        why = os.strerror(number) if number else str(error)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = "no space left on the disk"
        else:
            hint = hint.replace("make room", "fix that")
        raise UserError(f"cannot write {what}: {why}{hint and '; '}{hint}") from error


def check_output(output: Path, *, overwrite: bool | None = None) -> None:
    """Raise UserError unless a model can be written to a folder: new, empty, or a model's to overwrite.

    Args:
        output: the folder.
        overwrite: whether a former model is replaced; None: there is no such option.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / "config.json").is_file():  # a user's own, which no overwrite may delete
        raise UserError(f"{output} is not an empty folder, and holds no model (no config.json); choose another")
    if not overwrite:
        more = ", or pass overwrite=True (--overwrite)" if overwrite is not None else ""
        raise UserError(f"{output} is not an empty folder; choose another{more}")


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


def is_inside(name: object) -> bool:
    """Return whether a path read from a file stays within its folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PureWindowsPath(name)  # splits at both kinds of slashes, and knows drives
    return not path.anchor and ".." not in path.parts


def manifest_files(folder: Path) -> dict[str, Any] | None:
    """Return the entries of a folder's manifest, by file; None where it has none, or one that is not ours.

    OSError where it cannot be read, which says nothing against the folder.
    """
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return None


def file_fault(folder: Path, name: str, entry: Any, *, content: bool = True) -> str | None:
    """Return how a file differs from its entry in the folder's manifest, or None; by size alone without `content`."""
    if not is_inside(name):
        return f"{folder / MANIFEST} names {name!r}, which is outside its folder"
    file = folder / name
    if not file.is_file():
        return f"{file} is missing"
    if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
        return f"{folder / MANIFEST} does not give the size of {name}"
    if (size := file.stat().st_size) != entry["bytes"]:
        return f"{file} is damaged (its hash does not match): {size:,} bytes of {entry['bytes']:,}"
    if content and hash_file(file) != entry.get("sha256"):
        return f"{file} is damaged (its hash does not match)"
    return None


def check_hashes(folder: Path) -> None:
    """Raise UserError if weights differ from those of the folder's manifest, where it has one of ours."""
    for name, entry in (manifest_files(folder) or {}).items():
        if name.endswith(".safetensors") and (fault := file_fault(folder, name, entry)) is not None:
            raise UserError(f"{fault}; copy it again, or delete {folder / MANIFEST} if it was changed on purpose")


def check_folder(path: str | Path) -> Path:
    """Return the path of a folder that exists; UserError otherwise."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {why}; give a folder that save_pretrained wrote")
    return folder


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """Return the config.json of a folder that holds a whole model; UserError that names the file otherwise."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = check_folder(path)
    config = read_json(folder / "config.json")
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{folder / 'config.json'}: this transformers version does not know model_type {model_type!r}")
    if model_type.startswith(TYPE_PREFIX) and not isinstance(config.get(FIELD), list):
        raise UserError(f"{folder / 'config.json'} has model_type {model_type!r} but no list {FIELD!r} of methods")
    weight_files(folder)
    check_hashes(folder)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; UserError if the file is missing or anything else."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; give a folder that save_pretrained wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{path} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is JSON but not an object")
    return content


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a safetensors file, by name; UserError if its header does not fit its length."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        why = f"{path.stat().st_size:,} bytes: {one_line(error)}"
        raise UserError(f"{path} is not a whole safetensors file ({why}); copy it again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, by its index if it has one; UserError unless all are whole."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if faults := index_faults(folder / INDEX, index):
            raise UserError(f"{faults[0]}; copy or download it again")
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    elif not files:
        pickled = any(folder.glob("pytorch_model.bin*"))
        why = "only pickled weights, which are never read" if pickled else f"no weights: neither {WEIGHTS} nor {INDEX}"
        raise UserError(f"{folder} has {why}; save it as safetensors first")
    for file in files:
        tensor_shapes(file)
    return files


def index_faults(index: Path, content: Any) -> list[str]:
    """Return what is wrong with an index of shards: those that are not there or not whole, or lack tensors."""
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        return [f"{index} is not an index of shards: it has no weight_map"]
    faults = []
    for shard in sorted(set(places.values())):
        file = index.parent / shard
        if not is_inside(shard) or not file.is_file():
            faults.append(f"{index} names the shard {shard!r}, which is not there")
            continue
        try:
            absent = sorted({name for name, place in places.items() if place == shard} - tensor_shapes(file).keys())
        except UserError as error:
            faults.append(str(error))
        else:
            faults += [f"{file} lacks {len(absent):,} tensors of its index, such as {name}" for name in absent[:1]]
    return faults


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages that a saved model or a result may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
