"""Checks of a model folder's files, before anything is loaded from them. No pickle is ever opened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .registration import FIELD, TYPE_PREFIX
from .storage import MANIFEST, file_fault, is_inside, manifest_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """Return the config.json of a folder that holds a whole model.

    Raises:
        UserError: one line with the file and what is wrong with it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = check_folder(path)
    place = folder / "config.json"
    config = read_json(place)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{place} is not a model config: it has no model_type")
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{place}: this transformers version does not know model_type {model_type!r}")
    if model_type.startswith(TYPE_PREFIX) and not isinstance(config.get(FIELD), list):
        raise UserError(f"{place} has model_type {model_type!r} but no list {FIELD!r} of methods")
    weight_files(folder)
    check_hashes(folder)
    return config


def check_folder(path: str | Path) -> Path:
    """Return the path of a folder that exists; UserError otherwise."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise UserError(f"{folder} does not exist; give a folder that save_pretrained wrote")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that holds config.json and {WEIGHTS}")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; UserError if the file is missing or anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}; give a folder that save_pretrained wrote") from error
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
        size = path.stat().st_size
        raise UserError(
            f"{path} is not a whole safetensors file ({size:,} bytes: {one_line(error)}); copy or download it again"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the whole safetensors files of a folder, as its index says where there is one.

    Raises:
        UserError: there are none, or one is missing or not whole.
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if (fault := next(index_faults(folder / INDEX, index), None)) is not None:
            raise UserError(f"{fault}; copy or download it again")
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    elif not files:
        if any((folder / name).exists() for name in _PICKLES):
            raise UserError(f"{folder} has only pickled weights, which are never read; save it as safetensors first")
        raise UserError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    for file in files:
        tensor_shapes(file)
    return files


def index_faults(index: Path, content: Any) -> Iterator[str]:
    """Yield what is wrong with an index of shards: one that is not there or not whole, or lacks tensors.

    Args:
        index: its file, beside the shards.
        content: what the file holds.
    """
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        yield f"{index} is not an index of shards: it has no weight_map"
        return
    for shard in sorted(set(places.values())):
        file = index.parent / shard
        if not is_inside(shard) or not file.is_file():
            yield f"{index} names the shard {shard!r}, which is not there"
            continue
        try:
            absent = sorted({name for name, place in places.items() if place == shard} - tensor_shapes(file).keys())
        except UserError as error:
            yield str(error)
            continue
        if absent:
            yield f"{file} lacks {len(absent):,} tensors of its index, such as {absent[0]}"


def check_hashes(folder: Path) -> None:
    """Raise UserError if weights differ from those of the folder's manifest, where it has one of ours."""
    for name, entry in (manifest_files(folder) or {}).items():
        if name.endswith(".safetensors") and (fault := file_fault(folder, name, entry)) is not None:
            raise UserError(f"{fault}; copy it again, or delete {folder / MANIFEST} if it was changed on purpose")
