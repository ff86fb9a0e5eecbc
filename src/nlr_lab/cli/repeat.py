"""`--from RUN` of `nlr train` and `nlr finetune`: a run folder's own recipe and arm, into a new folder."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff

from nonlinear_lowrank.errors import UserError

from .options import is_main_process, parse


@dataclass(frozen=True, kw_only=True)
class RepeatOptions:
    """Options of a repetition, which has no others: its recipe is that of the former run."""

    run: Annotated[str, tyro.conf.arg(name="from")]
    """The run folder that is repeated."""
    out: str
    """Folder for the repetition; must be empty or new."""
    allow_code: FlagCreatePairsOff[bool] = False
    """Import and call the function that the run's arm names, where it is a module:function."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the newest complete checkpoint in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""
    allow_torch_checkpoints: FlagCreatePairsOff[bool] = False
    """Under FSDP2 and DeepSpeed: write and read the engine's own sharded checkpoints, which are pickled."""


def is_repetition(arguments: list[str]) -> bool:
    """Whether a run is to be repeated, rather than a recipe begun."""
    return any(argument == "--from" or argument.startswith("--from=") for argument in arguments)


def take_former(arguments: list[str], command: str) -> tuple[Any, Any]:
    """The `FormerRun` that `--from` names, and the `RepeatOptions`; prints a warning for all that is not as it was.

    Raises:
        UserError: no such run, a recipe beside it, or an option that would change it.
    """
    if arguments and not arguments[0].startswith("-"):
        raise UserError(f"--from takes the recipe of the run it names: leave {arguments[0]} out")
    options = parse(
        RepeatOptions,
        arguments,
        command=command,
        description=f"Repeats a run folder of nlr {command}: the same recipe, arm and seed, into a new folder.",
    )
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
    if is_main_process():
        for line in former.changes():
            print(f"warning: {line}", file=sys.stderr)
    return former, options
