"""A run's part of its model's card: data, recipe and the final numbers."""

import json
from pathlib import PurePath
from typing import Any

from nlr_lab.runtime.settings import flatten
from nonlinear_lowrank.hub.card import Origin, shown_name, table

from .recipe import Recipe
from .result import TrainResult

_PATHS = ("source", "valid_source", "tokenizer", "checkpoint", "cache_dir")


def origin_of(recipe: Recipe, result: TrainResult, data: dict[str, Any]) -> Origin:
    """Return the card's content that the model's files do not hold.

    Args:
        recipe: of the run.
        result: its final numbers.
        data: content of the run's data.json.
    """
    tuned = recipe.task.pretrained
    command = f"nlr {'finetune' if tuned else 'train'} {recipe.name} --arm {recipe.arm}"
    bases = [value for name, value in flatten(recipe.task).items() if name.endswith("checkpoint") and value]
    how = f"tuned by {recipe.arm.name}" if tuned else f"trained from scratch, arm {recipe.arm.name}"
    return Origin(
        title=f"{recipe.name}, {recipe.arm.name}",
        summary=f"A model {how}, {result.steps:,} steps, by nonlinear-lowrank's recipe `{recipe.name}`.",
        command=command,
        base=bases[0] if tuned and bases else None,
        sections={"Data": _data(data), "Training": _training(recipe), "Results": _results(result)},
        limits=("The numbers are of one run (n = 1): they say nothing about how much a seed moves them.",),
    )


def _data(data: dict[str, Any]) -> str:
    rows = {"fingerprint of the data as trained on": f"`{data['fingerprint']}`"}
    for setting, about in data["sources"].items():
        hashed = f", sha256 `{about['sha256']}`" if about.get("sha256") else ""
        rows[setting] = f"{shown_name(about['name'])}{hashed}"
    return table(rows)


def _training(recipe: Recipe) -> str:
    """The recipe, setting by setting; paths by their last part."""
    settings = {}
    for name, value in flatten(recipe.to_dict()).items():
        if name.rpartition(".")[2] in _PATHS and isinstance(value, str) and PurePath(value).name != value:
            value = shown_name(value)
        if name.startswith(("task.", "train.", "arm.")) and value not in (None, [], ""):
            settings[name] = value
    again = "`nlr train --from RUN`, or `nlr finetune --from RUN`, repeats it from its run folder."
    return f"{again}\n\n```json\n{json.dumps(settings, indent=1)}\n```"


def _results(result: TrainResult) -> str:
    rows: dict[str, Any] = {"runs": "n = 1", "seed": result.seed, "learning rate": result.lr, "steps": result.steps}
    rows["evaluation loss"] = result.final_loss
    if result.bits_per_byte is not None:
        rows["bits per byte"] = result.bits_per_byte
    rows |= {f"{name} (scored examples)": value for name, value in result.scores.items()}
    if result.metric != "loss":
        rows[f"{result.metric}, held out"] = result.selection
    rows["parameters"] = f"{result.parameters:,}, {result.parameters_added:,} of them added by the method"
    if result.trainable is not None:
        rows["trained parameters"] = f"{result.trainable:,}"
    if result.diverged_at is not None:
        rows["diverged"] = f"the training loss spiked at step {result.diverged_at} and did not recover"
    return table(rows)
