"""Checks of a model folder's files, before anything is loaded from them.

Only JSON and safetensors are read: no pickle is ever opened.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.models.auto import configuration_auto

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .classes import FIELD, TYPE_PREFIX
from .storage import MANIFEST, file_fault

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """Checks that a folder holds a whole model.

    Args:
        path: a folder as `save_pretrained` writes it.

    Returns:
        The content of config.json.

    Raises:
        UserError: one line with the file and what is wrong with it.
    """
    folder = check_folder(path)
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{folder / 'config.json'} is not a model config: it has no model_type")
    if model_type not in configuration_auto.CONFIG_MAPPING:
        raise UserError(f"{folder / 'config.json'}: this transformers version does not know model_type {model_type!r}")
    if model_type.startswith(TYPE_PREFIX) and not isinstance(config.get(FIELD), list):
        raise UserError(f"{folder / 'config.json'} has model_type {model_type!r} but no list {FIELD!r} of methods")
    _check_weights(folder)
    check_hashes(folder)
    return config


def check_folder(path: str | Path) -> Path:
    """The path of a folder that exists; UserError otherwise."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise UserError(f"{folder} does not exist; give a folder that save_pretrained wrote")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that holds config.json and {WEIGHTS}")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError if the file is missing or anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}; give a folder that save_pretrained wrote") from error
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{path} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is JSON but not an object")
    return content


def tensor_names(path: Path) -> set[str]:
    """Names in a safetensors file, whose header is checked against its length; UserError if it is not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise UserError(
            f"{path} is not a whole safetensors file ({size:,} bytes: {one_line(error)}); copy or download it again"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The whole safetensors files of a folder, as its index says where there is one.

    Raises:
        UserError: there are none, or one is missing or not whole.
    """
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        _check_weights(folder)
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        return [folder / name for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))]
    if not (files := sorted(folder.glob("*.safetensors"))):
        _check_weights(folder)  # says what is missing
    return files


def check_hashes(folder: Path) -> None:
    """Holds a folder's weights against its manifest, where it has one of ours.

    Raises:
        UserError: a file is missing, cut short or changed.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # none, or another tool's
    for name, entry in files:
        if str(name).endswith(".safetensors") and (fault := file_fault(folder, name, entry)) is not None:
            raise UserError(f"{fault}; copy it again, or delete {folder / MANIFEST} if it was changed on purpose")


def _check_weights(folder: Path) -> None:
    if (folder / WEIGHTS).is_file():
        tensor_names(folder / WEIGHTS)
        return
    if not (folder / INDEX).is_file():
        if any((folder / name).exists() for name in _PICKLES):
            raise UserError(f"{folder} has only pickled weights, which are never read; save it as safetensors first")
        raise UserError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{folder / INDEX} is not an index of shards: it has no weight_map")
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise UserError(f"{folder} lacks the shard {shard} that {INDEX} names; copy or download it again")
        absent = {tensor for tensor, name in shards.items() if name == shard} - tensor_names(folder / shard)
        if absent:
            raise UserError(f"{folder / shard} lacks {len(absent)} tensors of {INDEX}, among them {min(absent)}")
