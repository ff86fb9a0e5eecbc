"""Is a checkpoint whole: every hash, header, number and JSON file under a path, one line for each fault.

| what                       | how                                                                              |
|----------------------------|----------------------------------------------------------------------------------|
| files of a manifest        | there, of their size, sha256 equal; names stay inside; nothing beside them       |
| *.safetensors              | header whole, types, shapes and places fit (`bounds.safetensors_header`), every  |
|                            | value finite                                                                     |
| *.json                     | reads as JSON                                                                    |
| *.safetensors.index.json   | its shards are there and hold the tensors that it names                          |
| a model, adapter, step-N   | has the files that make it one                                                   |

Pickled files are never opened, only named. What begins with a dot (the remains of a killed process too) is no part.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .adapter import CONFIG as ADAPTER_CONFIG
from .adapter import WEIGHTS as ADAPTER_WEIGHTS
from .files import INDEX, WEIGHTS
from .safetensors_header import safetensors_header
from .storage import CARD, MANIFEST, file_fault, is_inside

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
_AT_ONCE = 1 << 26  # values that are looked at together


@dataclass(kw_only=True)
class Verification:
    """What `verify` found."""

    path: Path
    faults: list[str] = field(default_factory=list)
    """A line each."""
    notes: list[str] = field(default_factory=list)
    """What is no fault, and worth a line."""
    hashed: int = 0
    """Files whose hashes a manifest has."""
    tensors: int = 0
    nbytes: int = 0
    """Of the safetensors files."""
    read: int = 0
    """JSON files."""

    def __str__(self) -> str:
        """A line for each fault and note, and one of totals."""
        lines = [f"fault: {line}" for line in self.faults] + [f"note: {line}" for line in self.notes]
        seen = f"{self.tensors:,} tensors ({self.nbytes:,} bytes), {self.hashed:,} hashes, {self.read:,} JSON files"
        verdict = f"{len(self.faults):,} at fault" if self.faults else "whole"
        return "\n".join([*lines, f"{self.path}: {seen}; {verdict}"])


def verify(path: str | Path) -> Verification:
    """Checks everything under a path; see this file's table.

    Args:
        path: a checkpoint, a run or comparison folder, a model's, an adapter's, or one file of them.

    Returns:
        The faults, if any; nothing is changed, and no more than a piece of a tensor is held in memory.

    Raises:
        UserError: there is nothing at the path that could be checked.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    found = Verification(path=path)
    if path.is_file():
        if path.suffix not in (".safetensors", ".json"):
            raise UserError(f"{path} is neither .safetensors nor .json; name a checkpoint's folder, or one such file")
        _check_file(path, found)
        return found
    for folder in (path, *sorted(each for each in path.rglob("*") if each.is_dir())):
        if any(part.startswith(".") for part in folder.relative_to(path).parts):
            continue
        _check_folder(folder, found)
    if not (found.hashed or found.tensors or found.read or found.faults):
        raise UserError(f"{path} holds no checkpoint: no {MANIFEST}, no .safetensors and no .json file")
    return found


def _check_folder(folder: Path, found: Verification) -> None:
    if (folder / MANIFEST).is_file():
        _check_manifest(folder, found)
    elif folder.parent.name == "checkpoints" and folder.name.startswith("step-"):
        found.faults.append(f"{folder} has no {MANIFEST}: it was not written whole")
    for file in sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith(".")):
        if file.suffix in (".safetensors", ".json"):
            _check_file(file, found)
        elif file.suffix in _PICKLED:
            found.notes.append(f"{file} is pickled: it is read by --resume with --allow-torch-checkpoints alone")
    names = {each.name for each in folder.iterdir()}
    if ADAPTER_CONFIG in names and ADAPTER_WEIGHTS not in names:
        found.faults.append(f"{folder} has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}")
    model = "config.json" in names and not names & {ADAPTER_CONFIG, WEIGHTS, INDEX}
    if model and not any(name.endswith(".safetensors") for name in names):
        found.faults.append(f"{folder} has config.json and no weights: neither {WEIGHTS} nor {INDEX}")


def _check_manifest(folder: Path, found: Verification) -> None:
    try:
        files = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        found.faults.append(f"{folder / MANIFEST} lists no files: it is damaged, or not ours")
        return
    for name, entry in files.items():
        found.hashed += 1
        if (fault := file_fault(folder, name, entry)) is not None:
            found.faults.append(fault)
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = file.relative_to(folder)
        if (
            name.as_posix() not in files
            and name.name not in (MANIFEST, CARD)
            and not any(part[0] == "." for part in name.parts)
        ):
            found.faults.append(f"{file} is not in {folder / MANIFEST}: it was added later")


def _check_file(file: Path, found: Verification) -> None:
    try:
        if file.suffix == ".safetensors":
            _check_tensors(file, found)
            return
        found.read += 1
        content = json.loads(file.read_text(encoding="utf-8"))
    except UserError as error:
        found.faults.append(str(error))
    except (ValueError, RecursionError) as error:
        found.faults.append(f"{file} is no JSON: {one_line(error)}")
    except OSError as error:
        found.faults.append(f"cannot read {file}: {error.strerror}")
    else:
        if file.name.endswith(".safetensors.index.json"):
            _check_index(file, content, found)


def _check_tensors(file: Path, found: Verification) -> None:
    entries = safetensors_header(file)
    found.tensors, found.nbytes = found.tensors + len(entries), found.nbytes + file.stat().st_size
    try:
        with safe_open(file, framework="pt") as opened:
            for name, entry in entries.items():
                if entry.dtype.startswith(("F", "BF", "C")) and (bad := _not_finite(opened, name, entry.shape)):
                    found.faults.append(f"{file}: tensor {name!r} has {bad}")
    except SafetensorError as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}") from error


def _not_finite(opened: Any, name: str, shape: tuple[int, ...]) -> str:
    """How many values are NaN or infinite, in words; empty where there are none."""
    count = torch.Size(shape).numel()
    rows = max(1, _AT_ONCE * shape[0] // count) if shape and count else 1
    nans = infinite = 0
    for start in range(0, shape[0], rows) if count > _AT_ONCE else (None,):
        part = opened.get_tensor(name) if start is None else opened.get_slice(name)[start : start + rows]
        if part.is_floating_point() and part.element_size() == 1:
            part = part.float()  # torch looks into no float8
        if bool(torch.isfinite(part).all()):
            continue
        broken = torch.isnan(part)
        nans, infinite = nans + int(broken.sum()), infinite + int((~torch.isfinite(part) & ~broken).sum())
    words = [f"{number:,} {what}" for number, what in ((nans, "NaN"), (infinite, "infinite")) if number]
    return f"{' and '.join(words)} of {count:,} values" if words else ""


def _check_index(file: Path, content: Any, found: Verification) -> None:
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        found.faults.append(f"{file} is not an index of shards: it has no weight_map")
        return
    for shard in sorted(set(places.values())):
        if not is_inside(shard) or not (file.parent / shard).is_file():
            found.faults.append(f"{file} names the shard {shard!r}, which is not there")
            continue
        try:
            held = safetensors_header(file.parent / shard)
        except UserError:
            continue  # named where the shard itself is looked at
        absent = sorted(name for name, place in places.items() if place == shard and name not in held)
        if absent:
            found.faults.append(
                f"{file.parent / shard} lacks {len(absent):,} tensors of its index, such as {absent[0]}"
            )
