"""`nlr train RECIPE`: one arm of a recipe, to a model folder. `nlr train --from RUN`: a run again."""

from dataclasses import dataclass, replace

from .options import is_main_process, parse_recipe
from .repeat import is_repetition, take_former
from .run_options import RunOptions, Task, Train, run_recipe


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions[Task, Train]):
    """Options of `nlr train`; the recipe's own settings are the nested ones."""

    arm: str
    """What is trained: baseline, baseline:init=noble, noble:rank=64,activation=gelu,depth=1, or your own
    module:function (model in, model out)."""


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

    from nlr_lab.tasks.images.tokens import ImageTokenTask
    from nlr_lab.tasks.task import measure_of
    from nlr_lab.tasks.text.language_model import NextTokenTask
    from nlr_lab.training.recipe import Arm

    if former is None:
        recipe = replace(recipe, arm=Arm.parse(options.arm))
    result = run_recipe(recipe, options)
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
