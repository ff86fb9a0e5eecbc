"""Finding and opening a trained model, for the commands on trained models."""

import shlex
from pathlib import Path
from typing import Any

from nlr_lab.recipes import RECIPES
from nlr_lab.runtime.processes import world_size
from nlr_lab.runtime.storage import disk_errors, holds_former, read_json, write_text
from nonlinear_lowrank.errors import UserError

_SCORES = b'{\n  "checkpoint"'  # how the scores of `nlr evaluate` begin


def find_model(path: str, *, adapters: bool = False) -> Path:
    """Return the model folder (with `adapters`, also of peft) that is named: itself, or the `model` of a run folder.

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
                merge = shlex.join(["nlr", "merge", str(place), "OUT"])
                raise UserError(f"{place} holds an adapter, not a model; merge it first: {merge}")
            return place
    if (folder / "recipe.json").exists():
        entry = RECIPES.get(read_json(folder / "recipe.json", "restore it", recipe=dict)["recipe"].get("name", ""))
        command = entry.command if entry else "train"
        again = shlex.join(["nlr", command, "--config", str(folder / "recipe.json"), "--out"])
        if (folder / "result.json").exists():
            why = "it diverged, or its model was deleted"
            raise UserError(f"the run in {path} has no model: {why}; start over: {again} NEW, with a lower --lr")
        raise UserError(f"the run in {path} has not finished; resume with {again} {shlex.quote(path)} --resume")
    if (folder / "fit.json").exists():
        raise UserError(f"{path} holds a fit, no transformers model; its scores are in result.json beside its pictures")
    raise UserError(f"no model in {path}: neither config.json nor model/config.json is there")


def find_base(folder: Path, base: str | None = None) -> str | None:
    """Return the folder of an adapter's base model if it is packaged (named by `base` or by the adapter), or in the
    recipe of its run folder; else `base`."""
    from nlr_lab.tasks.finetune.pretrained import PACKAGED, Pretrained
    from nonlinear_lowrank.hub.loading import ADAPTER_CONFIG, is_adapter

    if not is_adapter(folder):
        return base
    named = base or str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
    if base is None and (recipe := folder.parent / "recipe.json").is_file():
        hint = "restore it, or pass --base"
        checkpoint = read_json(recipe, hint, recipe=dict)["recipe"]["task"].get("model", {}).get("checkpoint", "")
        named = checkpoint if checkpoint and Path(checkpoint).expanduser().exists() else named
    if named in PACKAGED or (base is None and Path(named).expanduser().exists()):
        return Pretrained(checkpoint=named).where()
    return base


def check_out(options: Any, marker: str, what: str) -> None:
    """Raise UserError where the folder --out may not be written to, before slow imports.

    One of several processes may be writing there already, so they leave the check to the run itself.
    """
    if world_size() == 1:
        holds_former(Path(options.out), marker, what, resume=options.resume, overwrite=options.overwrite)


def check_parent(path: str | Path | None, option: str, *inputs: str | Path | None) -> None:
    """Raise UserError where an output file has no folder, is a folder, or is a file that is read: an input, or one in
    an input folder, but for scores of a call before."""
    if path is not None and (target := Path(path).resolve()).is_file():
        around = {target, *target.parents}
        for each in inputs:
            if each and Path(each).expanduser().resolve() in around and not _holds_scores(target):
                raise UserError(f"{path} is, or is inside, {each}, which is read; name another file ({option})")
    if path is not None and Path(path).is_dir():
        raise UserError(f"{path} is a folder; name a file ({option})")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UserError(f"no such folder: {Path(path).parent} ({option})")


def _holds_scores(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_SCORES)) == _SCORES


def write_out(path: str, text: str) -> None:
    """Write the file of --out atomically: a former one stays until then. UserError where it cannot be written."""
    file = Path(path)
    with disk_errors(path, "make room, or name another --out"):
        if file.is_symlink() or (file.exists() and not file.is_file()):  # /dev/stdout, a pipe: nothing to replace
            file.write_text(text, encoding="utf-8")
        else:
            write_text(file, text)


def open_language_model(folder: Path, device: str, base: str | None = None) -> Any:
    """Return the causal language model of a folder, on a device; an adapter is on its base model, not merged."""
    from transformers.utils import logging

    from nlr_lab.runtime.environment import choose_device
    from nonlinear_lowrank.hub import load_model
    from nonlinear_lowrank.hub.loading import check_causal, is_adapter, load_causal_adapter

    chosen = choose_device(device)
    logging.disable_progress_bar()  # a bar of milliseconds, in the middle of what the command prints
    if is_adapter(folder):
        return load_causal_adapter(folder, base=find_base(folder, base)).to(chosen)
    if base is not None:
        raise UserError(f"--base is for adapters; {folder} holds a whole model")
    check_causal(folder)
    return load_model(folder).to(chosen)


def open_tokenizer(folder: Path, base: str | None = None) -> Any:
    """Return the tokenizer of a model's or an adapter's folder."""
    from nonlinear_lowrank.hub import load_tokenizer
    from nonlinear_lowrank.hub.loading import is_adapter, load_adapter_tokenizer

    return (
        load_adapter_tokenizer(folder, base=find_base(folder, base)) if is_adapter(folder) else load_tokenizer(folder)
    )
