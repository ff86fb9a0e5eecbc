"""What the commands on trained models share: where the model lies, and where it runs."""

from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError


def find_model(path: str, *, adapters: bool = False) -> Path:
    """The model folder behind what a user names: the folder itself, or the run folder that one was trained into.

    Args:
        path: as it was typed.
        adapters: whether an adapter of peft, whose base model lies elsewhere, is one too.

    Raises:
        UserError: there is no such folder, or no model in it; the message says what was looked for.
    """
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"no such folder: {path}")
    if not folder.is_dir():
        raise UserError(f"{path} is a file; name the folder that holds config.json and model.safetensors")
    for place in (folder, folder / "model"):
        if (place / "config.json").exists():
            return place
        if (place / "adapter_config.json").exists():
            if not adapters:
                raise UserError(f"{place} holds an adapter, no model; merge it first: nlr merge {place} OUT")
            return place
    if (folder / "recipe.json").exists():
        raise UserError(f"the run in {path} has not finished; go on with nlr train ... --out {path} --resume")
    raise UserError(f"no model in {path}: neither config.json nor model/config.json is there")


def find_recipe_file(folder: Path) -> Path | None:
    """recipe.json of the run that made a model folder: beside `model`, or above `checkpoints/step-N`."""
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "recipe.json").exists():
            return place / "recipe.json"
    return None


def open_language_model(folder: Path, device: str, base: str | None = None) -> Any:
    """The causal language model of a folder, on a device; an adapter is on its base model, not merged.

    See `hub.load_model` and `hub.adapter.load_causal_adapter` for what is refused.

    Args:
        folder: from `find_model`.
        device: see `resources.choose_device`.
        base: of an adapter, folder or name of its base model; None: as it names it.
    """
    from transformers.utils import logging

    from nlr_lab.runtime.resources import choose_device
    from nonlinear_lowrank.hub import load_model
    from nonlinear_lowrank.hub.adapter import is_adapter, load_causal_adapter
    from nonlinear_lowrank.hub.loading import check_causal

    chosen = choose_device(device)
    logging.disable_progress_bar()  # a bar of milliseconds, in the middle of what the command prints
    if is_adapter(folder):
        return load_causal_adapter(folder, base=base).to(chosen)
    if base is not None:
        raise UserError(f"--base is for adapters; {folder} holds a whole model")
    check_causal(folder)
    return load_model(folder).to(chosen)


def open_tokenizer(folder: Path, base: str | None = None) -> Any:
    """The tokenizer of a model's or an adapter's folder."""
    from nonlinear_lowrank.hub import load_tokenizer
    from nonlinear_lowrank.hub.adapter import is_adapter, load_adapter_tokenizer

    return load_adapter_tokenizer(folder, base=base) if is_adapter(folder) else load_tokenizer(folder)
