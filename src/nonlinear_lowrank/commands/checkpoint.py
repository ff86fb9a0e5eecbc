"""What the commands on trained models share: where the model lies, and where it runs."""

import re
from pathlib import Path
from typing import Any

from ..errors import UserError


def find_model(path: str) -> Path:
    """The model folder behind what a user names: the folder itself, or the run folder of `nlr train`.

    Raises:
        UserError: there is no such folder, or no model in it; the message says what was looked for.
    """
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"no such folder: {path}")
    if not folder.is_dir():
        raise UserError(f"{path} is a file; name the folder that holds config.json and model.safetensors")
    if (folder / "config.json").exists():
        return folder
    if (folder / "model" / "config.json").exists():
        return folder / "model"
    if (folder / "recipe.json").exists():
        raise UserError(f"the run in {path} has not finished; go on with nlr train ... --out {path} --resume")
    raise UserError(f"no model in {path}: neither config.json nor model/config.json is there")


def find_recipe_file(folder: Path) -> Path | None:
    """recipe.json of the run that made a model folder: beside `model`, or above `checkpoints/step-N`."""
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "recipe.json").exists():
            return place / "recipe.json"
    return None


def open_model(folder: Path, device: str) -> Any:
    """The model of a folder, on a device; see `hub.load_model` for what is refused."""
    from transformers.utils import logging

    from ..hub import load_model

    device = choose_device(device)
    logging.disable_progress_bar()  # a bar of milliseconds, in the middle of what the command prints
    return load_model(folder).to(device)


def choose_device(name: str) -> str:
    """The device of that name; by default the GPU when there is one.

    Raises:
        UserError: no such device here.
    """
    import torch

    if not name:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        raise UserError(f"unknown device {name!r}; use cpu, cuda or cuda:0")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {name}: torch sees no NVIDIA GPU here; leave --device away")
    return name
