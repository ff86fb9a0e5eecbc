"""`nlr train RECIPE`: one arm of a recipe, to a model folder. `nlr train --from RUN`: a run again."""

from dataclasses import dataclass
from pathlib import Path

from nlr_lab.runtime.processes import rank

from .run_options import RunOptions, Task, Train, parse_run, run_recipe


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions[Task, Train]):
    """Options of `nlr train`; the recipe's own settings are the nested ones."""

    arm: str
    """Arm that is trained: baseline, baseline:init=noble, noble:rank=64,activation=gelu,depth=1, or your own
    module:function (model in, model out)."""


def run(arguments: list[str]) -> None:
    """Train; print where the model is and what to do with it."""
    recipe, options, former = parse_run(TrainOptions, arguments, "train")

    from nlr_lab.tasks.images.tokens import ImageTokenTask
    from nlr_lab.tasks.text.language_model import NextTokenTask

    result = run_recipe(recipe, options)
    if rank() != 0:
        return
    measure = recipe.task.measure
    loss = f"evaluation loss {result.final_loss:.4f}{' ' + measure.unit if measure.is_loss else ''}"
    score = "" if measure.is_loss else f"{measure.name} {result.score:.4f}, "
    print(f"{score}{loss} after {result.steps} steps; {options.out}/model")
    if result.diverged_at is not None:
        print(f"it diverged: the training loss spiked at step {result.diverged_at} and did not recover")
    if former is not None:
        print(former.verdict(result, Path(options.out)))
    generate = f"   nlr generate {options.out}" if isinstance(recipe.task, NextTokenTask | ImageTokenTask) else ""
    generate += " --prompt 'def '" if isinstance(recipe.task, NextTokenTask) else ""
    print(f"next: nlr evaluate {options.out}{generate}")
