"""`nlr train RECIPE`: one arm of a recipe, to a model folder. `nlr train --from RUN`: a run again."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tyro.conf import FlagCreatePairsOff

from .options import is_main_process, parse_recipe
from .repeat import is_repetition, take_former

Task = TypeVar("Task")
Train = TypeVar("Train")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Generic[Task, Train]):
    """Options of `nlr train`; the recipe's own settings are the nested ones."""

    out: str
    """Folder for checkpoints, the final model and result.json; must be empty or new."""
    arm: str
    """What is trained: baseline, baseline:init=noble, noble:rank=64,activation=gelu,depth=1, or your own
    module:function (model in, model out)."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the newest complete checkpoint in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""
    allow_torch_checkpoints: FlagCreatePairsOff[bool] = False
    """Under FSDP2 and DeepSpeed: write and read the engine's own sharded checkpoints. They are pickled, and reading a
    pickle can run code: only for runs of your own."""
    task: Task
    """The data and the model."""
    train: Train
    """The optimization."""


def run(arguments: list[str]) -> None:
    """Trains and prints where the model is and what to do with it."""
    former = None
    if is_repetition(arguments):
        former, options = take_former(arguments, "train")
        recipe = former.recipe
    else:
        recipe, options = parse_recipe(
            TrainOptions,
            arguments,
            command="train",
            defaults=lambda recipe: {"out": f"runs/{recipe.name}", "arm": str(recipe.arm)},
        )

    from pathlib import Path

    from ..tasks.image_tokens import ImageTokenTask
    from ..tasks.language_model import NextTokenTask
    from ..tasks.task import measure_of
    from ..training.recipe import Arm
    from ..training.run import run_training

    if former is None:
        recipe = replace(recipe, arm=Arm.parse(options.arm))
    result = run_training(
        recipe,
        Path(options.out),
        resume=options.resume,
        overwrite=options.overwrite,
        allow_torch_checkpoints=options.allow_torch_checkpoints,
    )
    if not is_main_process():
        return
    measure = measure_of(recipe.task)
    loss = f"evaluation loss {result.final_loss:.4f}{' ' + measure.unit if measure.is_loss else ''}"
    score = "" if measure.is_loss else f"{measure.name} {result.score:.4f}, "
    print(f"{score}{loss} after {result.steps} steps; {options.out}/model")
    if result.diverged_at is not None:
        print(f"it diverged: from step {result.diverged_at} the training loss was up and did not come back")
    if former is not None:
        print(former.verdict(result, Path(options.out)))
    generate = f"   nlr generate {options.out}" if isinstance(recipe.task, NextTokenTask | ImageTokenTask) else ""
    generate += " --prompt 'def '" if isinstance(recipe.task, NextTokenTask) else ""
    print(f"next: nlr evaluate {options.out}{generate}")
