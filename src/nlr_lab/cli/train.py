"""`nlr train`, `nlr finetune` and `nlr fit RECIPE`: one arm to a folder; `--from RUN`: a run again."""

import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff

from nlr_lab.runtime.processes import rank
from nonlinear_lowrank.errors import UserError

from .checkpoint import check_out
from .options import gives, parse, parse_recipe, take_option


@dataclass(frozen=True, kw_only=True)
class _Options:
    out: str
    """Folder for checkpoints, what is trained, its pictures and result.json; must be empty or new."""
    resume: FlagCreatePairsOff[bool] = False
    """Resume from the newest complete checkpoint in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""


@dataclass(frozen=True, kw_only=True)
class FitOptions(_Options):
    """Options of `nlr fit`; the recipe's own settings are the nested ones."""

    arm: str
    """The linears: dense, low-rank:rank=5, or sine:rank=5,omega=50; each may add init=kaiming_sqrt5 or
    init=kaiming_zero, and sine gain=."""


@dataclass(frozen=True, kw_only=True)
class _ModelOptions(_Options):
    allow_torch_checkpoints: FlagCreatePairsOff[bool] = False
    """Under DeepSpeed: write and read its engine's checkpoints. They are pickled, and reading a pickle can run code:
    only for runs of your own."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(_ModelOptions):
    """Options of `nlr train` and `nlr finetune`; the recipe's own settings are the nested ones."""

    arm: str
    """Arm that is trained. From scratch: baseline, baseline:init=noble, noble:rank=64,activation=gelu,depth=1, or your
    own module:function (model in, model out). For a pretrained model: full, head, lora:r=4, dora:r=4, peanut:r=4, oft,
    sine-lora:r=4,omega=200, sine-dora:r=4,omega=200, nora:r=2,groups=8, nora++:r=2,lora_r=8, noble-adapter:r=16;
    low-rank ones may add plus=16 (LoRA+), and all of them lr=3e-4 and target_modules=q_proj/v_proj."""


@dataclass(frozen=True, kw_only=True)
class RepeatOptions(_ModelOptions):
    """Repeat a run folder: the same recipe, arm and seed, into a new folder."""

    run: Annotated[str, tyro.conf.arg(name="from")]
    """The run folder that is repeated."""
    allow_code: FlagCreatePairsOff[bool] = False
    """Import and call the function that the run's arm names, where it is a module:function."""


def run_train(arguments: list[str]) -> None:
    """Train; print where the model is and what to do with it."""
    recipe, options, former = _parse_run(arguments, "train")

    from nlr_lab.tasks.images.tokens import ImageTokenTask
    from nlr_lab.tasks.text.language_model import LanguageModelTask, OptLanguageModelTask

    result = _run(recipe, options)
    if rank() != 0:
        return
    measure = recipe.task.measure
    numbers = f"evaluation loss {result.final_loss:.4f} {measure.unit}"
    if not measure.is_loss:  # both of the examples that are scored
        numbers = f"{measure.name} {result.score:.4f}, loss {result.scores['loss']:.4f}"
    print(f"{numbers} after {result.steps} steps; {options.out}/model")
    _print_divergence(result.diverged_at)
    if measure.is_loss and result.best_score is not None and result.final_loss > 1.01 * result.best_score:
        print(f"the lowest was {result.best_score:.4f} at step {result.best_step}: train for fewer, or on more data")
    if former is not None:
        print(former.verdict(result, Path(options.out)))
    text = isinstance(recipe.task, LanguageModelTask | OptLanguageModelTask)
    out = shlex.quote(options.out)
    generate = f"   nlr generate {out}" if text or isinstance(recipe.task, ImageTokenTask) else ""
    generate += " --prompt 'def '" if text else ""
    print(f"next: nlr evaluate {out}{generate}")


def run_finetune(arguments: list[str]) -> None:
    """Tune; print the score, where the adapter is and how it is loaded."""
    recipe, options, former = _parse_run(arguments, "finetune")

    from nlr_lab.training.methods import TUNINGS
    from nonlinear_lowrank.hub.card import loading_code

    arm = recipe.arm
    if arm.method == "baseline":
        ways = ", ".join(each.name for each in TUNINGS)
        raise UserError(f"baseline changes nothing; say how the model is tuned: {ways}")
    result = _run(recipe, options)
    if rank() != 0:
        return
    total, trained = result.parameters, result.trainable or result.parameters
    share = f"({100 * trained / total:.2f} %)"
    print(f"{arm.name}: {trained:,} of {total:,} parameters trained {share}, {result.steps} steps")
    print("last step:", "   ".join(f"{key} {value:.4f}" for key, value in result.scores.items()))
    _print_divergence(result.diverged_at)
    if result.metric != "loss" and result.best_step != result.steps:
        print(f"best held-out {result.metric} at step {result.best_step}: {result.metric} {result.best_score:.4f}")
    if former is not None:
        print(former.verdict(result, Path(options.out)))
    model = Path(options.out) / "model"
    print(f"{model}\nto load it:\n{loading_code(model, recipe.task.model.where())}")
    print(f"next: nlr evaluate {shlex.quote(options.out)}")


def run_fit(arguments: list[str]) -> None:
    """Fit; print the scores and where the files are."""
    recipe, options = parse_recipe(
        FitOptions,
        arguments,
        command="fit",
        defaults=lambda recipe: {"out": f"runs/{recipe.name}", "arm": str(recipe.method)},
    )

    check_out(options, "fit.json", "fit")

    from nlr_lab.fields.fit import fit
    from nlr_lab.fields.problem import FieldMethod

    method = FieldMethod.parse(options.arm)
    problem, about = recipe.problem.prepare(), asdict(recipe.problem)
    again = {"resume": options.resume, "overwrite": options.overwrite}
    result = fit(problem, method, recipe.train, options.out, about=about, **again)
    numbers = ", ".join(f"{each.replace('_', ' ')} {value:.4g}" for each, value in result.metrics.items())
    print(f"{numbers} after {result.steps} steps; {result.parameters:,} parameters, {method}")
    _print_divergence(result.diverged_at)
    print(f"in {options.out}: model/model.safetensors, result.json, {', '.join(result.files)}")


def _print_divergence(step: int | None) -> None:
    if step is not None:
        print(f"it diverged: the training loss rose at step {step} and did not recover; lower the learning rate")


def _parse_run(arguments: list[str], command: str) -> tuple[Any, Any, Any]:
    """Read `RECIPE --arm ARM ...`, or `--from RUN ...` with a warning for everything that has changed.

    With settings beside it, that is another run: `--config RUN/recipe.json ...`.

    Returns:
        The recipe with its arm, the options, and the `FormerRun` that is repeated or None.
    """
    run, rest = take_option("--from", arguments)
    if run and (file := take_option("--config", rest)[0]) is not None:
        raise UserError(f"--from {run} takes that run's settings, and --config {file} others; omit one of them")
    own = {"--help", *(f"--{each.name}".replace("_", "-") for each in fields(RepeatOptions))}
    if run and {each.partition("=")[0] for each in rest if each.startswith("--")} - own:
        arguments, run = [*rest, f"--config={run}/recipe.json"], None
    if run is None:
        defaults = lambda recipe: {"out": f"runs/{recipe.name}", "arm": recipe.arm_text}  # noqa: E731
        recipe, chosen = parse_recipe(TrainOptions, arguments, command=command, defaults=defaults)
        check_out(chosen, "recipe.json", "training run of ours")
        from nlr_lab.training.arms import Arm

        arm = Arm.parse(chosen.arm)
        for name, option in (("lr", "--lr"), ("head_lr", "--head-lr")):
            if getattr(arm, name) and gives(arguments, f"train.{name}"):
                if gives(arguments, "arm"):
                    raise UserError(f"{option} does nothing beside the {name}= of --arm; omit one of them")
                arm = replace(arm, **{name: getattr(Arm, name)})  # the recipe's own
        if arm.method == "head" and gives(arguments, "train.head_lr"):
            raise UserError("--head-lr does nothing: the arm head trains the new head alone; give --lr instead")
        return replace(recipe, arm=arm), chosen, None
    if not arguments[0].startswith("-"):
        raise UserError(f"--from takes the recipe of the run it names: omit {arguments[0]}")
    options = parse(RepeatOptions, arguments, command=command)
    from nlr_lab.training.run_folder import FormerRun

    place, out = Path(options.run), Path(options.out)
    if place.resolve() == out.resolve():
        raise UserError(f"--out {out} is the run itself; name a new folder")
    former = FormerRun.read(place, command)
    if ":" in former.recipe.arm.method and not options.allow_code:
        raise UserError(
            f"the arm of {place} calls {former.recipe.arm.method}, code that the folder only names; "
            "if you know what it does, add --allow-code"
        )
    if rank() == 0:
        for line in former.changes():
            print(f"warning: {line}", file=sys.stderr)
    return former.recipe, options, former


def _run(recipe: Any, options: _ModelOptions) -> Any:
    """Train the recipe's arm as the options say; return its `TrainResult`."""
    from nlr_lab.training.run import run_training

    given = {name: getattr(options, name) for name in ("resume", "overwrite", "allow_torch_checkpoints")}
    return run_training(recipe, options.out, **given)
