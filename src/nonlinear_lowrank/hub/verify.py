"""Verification of a checkpoint: every hash, header, number and JSON file under a path, one line for each fault.

| part                       | check                                                                        |
|----------------------------|------------------------------------------------------------------------------|
| files of a manifest        | there, of their size, sha256 equal; names stay inside; nothing beside them   |
| *.safetensors              | header fits the file, every value finite                                     |
| *.json                     | reads as JSON                                                                |
| *.safetensors.index.json   | its shards are there and hold the tensors that it names                      |
| a model, adapter, step-N   | has the files that make it one                                               |

Pickled files are never opened, only named. Names that begin with a dot are skipped.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.precision import all_finite
from nonlinear_lowrank.validation import one_line

from .loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE
from .storage import CARD, INDEX, MANIFEST, WEIGHTS, file_fault, index_faults, manifest_files, tensor_shapes

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
_AT_ONCE = 1 << 26  # values that are looked at together


@dataclass(kw_only=True)
class Verification:
    """Findings of `verify`."""

    path: Path
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # not faults
    hashed: int = 0  # files whose hashes a manifest has
    tensors: int = 0
    nbytes: int = 0  # of the safetensors files
    read: int = 0  # JSON files

    def __str__(self) -> str:
        lines = [f"fault: {line}" for line in self.faults] + [f"note: {line}" for line in self.notes]
        seen = f"{self.tensors:,} tensors ({self.nbytes:,} bytes), {self.hashed:,} hashes, {self.read:,} JSON files"
        verdict = f"{len(self.faults):,} at fault" if self.faults else "whole"
        return "\n".join([*lines, f"{self.path}: {seen}; {verdict}"])


def verify(path: str | Path) -> Verification:
    """Check everything under a path, a folder or a file of one; see this file's table.

    No more than a piece of a tensor is held in memory. UserError where there is nothing that could be checked.
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
        if not _is_hidden(folder.relative_to(path)):
            _check_folder(folder, found)
    if not (found.hashed or found.tensors or found.read or found.faults):
        raise UserError(f"{path} holds no checkpoint: no {MANIFEST}, no .safetensors and no .json file")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_folder(folder: Path, found: Verification) -> None:
    names = {each.name for each in folder.iterdir()}
    if MANIFEST in names:
        _check_manifest(folder, found)
    elif folder.parent.name == "checkpoints" and folder.name.startswith("step-"):
        found.faults.append(f"{folder} has no {MANIFEST}: it was not written completely")
    for file in sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith(".")):
        if file.suffix in (".safetensors", ".json"):
            _check_file(file, found)
        elif file.suffix in _PICKLED:
            found.notes.append(f"{file} is pickled: only --resume with --allow-torch-checkpoints reads it")
    if ADAPTER_CONFIG in names and ADAPTER_WEIGHTS not in names:
        found.faults.append(f"{folder} has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}")
    weights = any(name.endswith((".safetensors", INDEX)) for name in names)
    of_adapter = folder.name == BASE and (folder.parent / ADAPTER_CONFIG).is_file()  # the encoder's are elsewhere
    if "config.json" in names and ADAPTER_CONFIG not in names and not (weights or of_adapter):
        found.faults.append(f"{folder} has config.json and no weights: neither {WEIGHTS} nor {INDEX}")


def _check_manifest(folder: Path, found: Verification) -> None:
    if (files := manifest_files(folder)) is None:
        found.faults.append(f"{folder / MANIFEST} lists no files: it is damaged, or not ours")
        return
    found.hashed += len(files)
    found.faults += filter(None, (file_fault(folder, name, entry) for name, entry in files.items()))
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = file.relative_to(folder)
        if name.as_posix() not in files and name.name not in (MANIFEST, CARD) and not _is_hidden(name):
            found.faults.append(f"{file} is not in {folder / MANIFEST}: it was added later")


def _check_file(file: Path, found: Verification) -> None:
    try:
        if file.suffix == ".safetensors":
            _check_tensors(file, found)
            return
        found.read += 1
        content = json.loads(file.read_text(encoding="utf-8"))
        if file.name.endswith(".safetensors.index.json"):
            found.faults += [fault for fault in index_faults(file, content) if fault not in found.faults]
    except UserError as error:
        found.faults.append(str(error))
    except (OSError, ValueError, RecursionError) as error:
        found.faults.append(f"{file} is not JSON: {one_line(error)}")


def _check_tensors(file: Path, found: Verification) -> None:
    shapes = tensor_shapes(file)
    found.tensors, found.nbytes = found.tensors + len(shapes), found.nbytes + file.stat().st_size
    with safe_open(file, framework="pt") as opened:
        for name, shape in shapes.items():
            kind = opened.get_slice(name).get_dtype()
            # Floats of 4 and 6 bits have neither NaN nor infinity.
            if kind.startswith(("F8", "F16", "F32", "F64", "BF", "C")) and (bad := _not_finite(opened, name, shape)):
                found.faults.append(f"{file}: tensor {name!r} has {bad}")


def _not_finite(opened: Any, name: str, shape: tuple[int, ...]) -> str:
    """Return how many values are NaN or infinite, in words; empty where there are none."""
    count = torch.Size(shape).numel()
    rows = max(1, _AT_ONCE * shape[0] // count) if shape and count else 1
    nans = infinite = 0
    for start in range(0, shape[0], rows) if count > _AT_ONCE else (None,):
        part = opened.get_tensor(name) if start is None else opened.get_slice(name)[start : start + rows]
        if part.element_size() == 1:
            part = part.float()  # torch cannot inspect float8
        if all_finite(part):
            continue
        broken = int(part.isnan().sum())
        nans, infinite = nans + broken, infinite + int((~part.isfinite()).sum()) - broken
    words = [f"{number:,} {what}" for number, what in ((nans, "NaN"), (infinite, "infinite")) if number]
    return f"{' and '.join(words)} of {count:,} values" if words else ""
