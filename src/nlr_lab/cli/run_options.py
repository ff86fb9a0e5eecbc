"""The common part of `nlr train` and `nlr finetune`: the options of one run, `--from RUN`, and the run."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff

from nlr_lab.runtime.processes import rank
from nonlinear_lowrank.errors import UserError

from .options import parse, parse_recipe

Task = TypeVar("Task")
Train = TypeVar("Train")


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """The folder of a run, and what is done with it."""

    out: str
    """Folder for checkpoints, the trained model or adapter, and result.json; must be empty or new."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the newest complete checkpoint in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""
    allow_torch_checkpoints: FlagCreatePairsOff[bool] = False
    """Under DeepSpeed: write and read its engine's checkpoints. They are pickled, and reading a pickle can run code:
    only for runs of your own."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(FolderOptions, Generic[Task, Train]):
    """Options of one run; the recipe's own settings are the nested ones."""

    arm: str
    task: Task
    """The data and the model."""
    train: Train
    """The optimization."""


@dataclass(frozen=True, kw_only=True)
class RepeatOptions(FolderOptions):
    """Repeat a run folder: the same recipe, arm and seed, into a new folder."""

    run: Annotated[str, tyro.conf.arg(name="from")]
    """The run folder that is repeated."""
    allow_code: FlagCreatePairsOff[bool] = False
    """Import and call the function that the run's arm names, where it is a module:function."""


def parse_run(kind: type[RunOptions[Any, Any]], arguments: list[str], command: str) -> tuple[Any, Any, Any]:
    """Read `RECIPE --arm ARM ...` or `--from RUN ...`.

    Returns:
        The recipe with its arm, the options, and the `FormerRun` that is repeated or None.
    """
    if any(argument == "--from" or argument.startswith("--from=") for argument in arguments):
        former, options = _parse_repetition(arguments, command)
        return former.recipe, options, former
    recipe, options = parse_recipe(
        kind,
        arguments,
        command=command,
        defaults=lambda recipe: {"out": f"runs/{recipe.name}", "arm": recipe.arm_text},
    )
    from nlr_lab.training.arms import Arm

    return replace(recipe, arm=Arm.parse(options.arm)), options, None


def run_recipe(recipe: Any, options: FolderOptions) -> Any:
    """Train the recipe's arm as the options say; return its `TrainResult`."""
    from nlr_lab.training.run import run_training

    return run_training(
        recipe,
        Path(options.out),
        resume=options.resume,
        overwrite=options.overwrite,
        allow_torch_checkpoints=options.allow_torch_checkpoints,
    )


def _parse_repetition(arguments: list[str], command: str) -> tuple[Any, RepeatOptions]:
    """Read `--from RUN`; print a warning for all that is not as it was."""
    if not arguments[0].startswith("-"):
        raise UserError(f"--from takes the recipe of the run it names: omit {arguments[0]}")
    options = parse(RepeatOptions, arguments, command=command)
    from nlr_lab.training.repeat import FormerRun

    run, out = Path(options.run), Path(options.out)
    if run.resolve() == out.resolve():
        raise UserError(f"--out {out} is the run itself; name a new folder")
    former = FormerRun.read(run, command)
    if ":" in former.recipe.arm.method and not options.allow_code:
        raise UserError(
            f"the arm of {run} calls {former.recipe.arm.method}, code that the folder only names; "
            "if you know what it does, add --allow-code"
        )
    if rank() == 0:
        for line in former.changes():
            print(f"warning: {line}", file=sys.stderr)
    return former, options
