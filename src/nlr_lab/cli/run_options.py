"""What `nlr train` and `nlr finetune` have in common: the options of one run, and the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tyro.conf import FlagCreatePairsOff

if TYPE_CHECKING:
    from nlr_lab.training.recipe import Recipe
    from nlr_lab.training.result import TrainResult

Task = TypeVar("Task")
Train = TypeVar("Train")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Generic[Task, Train]):
    """Options of one run; the recipe's own settings are the nested ones."""

    out: str
    """Folder for checkpoints, the trained model or adapter, and result.json; must be empty or new."""
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


def run_recipe(recipe: "Recipe", options: RunOptions[Any, Any]) -> "TrainResult":
    """Trains the recipe's arm as the options say."""
    from nlr_lab.training.run import run_training

    return run_training(
        recipe,
        Path(options.out),
        resume=options.resume,
        overwrite=options.overwrite,
        allow_torch_checkpoints=options.allow_torch_checkpoints,
    )
