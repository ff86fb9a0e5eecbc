"""`nlr train RECIPE` and `nlr finetune RECIPE`: one arm to a folder; `--from RUN`: a run again."""

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


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions[Task, Train]):
    """Options of `nlr train`; the recipe's own settings are the nested ones."""

    arm: str
    """Arm that is trained: baseline, baseline:init=noble, noble:rank=64,activation=gelu,depth=1, or your own
    module:function (model in, model out)."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions[Task, Train]):
    """Options of `nlr finetune`; the recipe's own settings are the nested ones."""

    arm: str
    """Way of tuning: full, head, lora:r=4, dora:r=4, peanut:r=4, sine-lora:r=4,omega=200, sine-dora:r=4,omega=200,
    nora:r=2,groups=8, nora++:r=2,lora_r=8, noble-adapter:r=16; low-rank ones may add plus=16 (LoRA+), and all of
    them lr=3e-4 and target_modules=q_proj/v_proj."""


def run_train(arguments: list[str]) -> None:
    """Train; print where the model is and what to do with it."""
    recipe, options, former = _parse_run(TrainOptions, arguments, "train")

    from nlr_lab.tasks.images.tokens import ImageTokenTask
    from nlr_lab.tasks.text.language_model import LanguageModelTask, OptLanguageModelTask

    result = _run_recipe(recipe, options)
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
    text = isinstance(recipe.task, LanguageModelTask | OptLanguageModelTask)
    generate = f"   nlr generate {options.out}" if text or isinstance(recipe.task, ImageTokenTask) else ""
    generate += " --prompt 'def '" if text else ""
    print(f"next: nlr evaluate {options.out}{generate}")


def run_finetune(arguments: list[str]) -> None:
    """Tune; print the score, where the adapter is and how it is loaded."""
    recipe, options, former = _parse_run(FinetuneOptions, arguments, "finetune")

    from nlr_lab.training.tuning import TUNINGS
    from nonlinear_lowrank.hub.card import loading_code

    arm = recipe.arm
    if arm.grid:
        raise UserError(
            f"grid= is for nlr compare, which tries several learning rates; give the arm one: {arm.method}:lr=1e-4"
        )
    if arm.method == "baseline":
        ways = ", ".join(each.name for each in TUNINGS)
        raise UserError(f"baseline changes nothing; say how the model is tuned: {ways}")
    result = _run_recipe(recipe, options)
    if rank() != 0:
        return
    total, trained = result.parameters, result.trainable or result.parameters
    print(
        f"{arm.name}: {trained:,} of {total:,} parameters trained ({100 * trained / total:.2f} %), {result.steps} steps"
    )
    scores = "   ".join(f"{key} {value:.4f}" for key, value in result.scores.items())
    print(f"last step: {scores}")
    if result.metric != "loss" and result.best_step != result.steps:
        print(f"best held-out {result.metric} at step {result.best_step}: {result.metric} {result.best_score:.4f}")
    if former is not None:
        print(former.verdict(result, Path(options.out)))
    model = Path(options.out) / "model"
    print(f"{model}\nto load it:\n{loading_code(model)}")


def _parse_run(kind: type[RunOptions[Any, Any]], arguments: list[str], command: str) -> tuple[Any, Any, Any]:
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


def _run_recipe(recipe: Any, options: FolderOptions) -> Any:
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
    from nlr_lab.training.run_folder import FormerRun

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
