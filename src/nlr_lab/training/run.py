"""A recipe -> Trainer -> a folder: `run_training`.

    out/recipe.json                what was asked for, with versions, machine and git state; by it the folder is ours
    out/data.json                  the files that were read, with their hashes
    out/checkpoints/step-000100/   whole checkpoints, the newest few
    out/tensorboard/               curves, if that is the tracker
    out/model/                     the final model or adapter, for from_pretrained
    out/result.json                the numbers; written last, so that it stands for a finished run

The same seed gives the same sequences in the same order and the same evaluation in every arm, whatever the
arm draws and however many processes and micro-batches share the work.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from nlr_lab.runtime.environment import many_compiled
from nlr_lab.runtime.processes import on_rank_0
from nonlinear_lowrank.errors import DivergedError, UserError

from . import deepspeed
from .arguments import micro_batch, surroundings, training_arguments
from .callbacks import ProgressLines, Schedule, SeedDropout, Stop
from .model import apply_arm, build_model, count_parameters, optimizer_settings, uses_muon
from .recipe import Recipe
from .result import TrainResult, curve_of, judged, stability
from .run_folder import RunFolder
from .trainer import RunTrainer


def run_training(
    recipe: Recipe,
    out: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    prepared: Any = None,
    quiet: bool = False,
    report: bool = True,
    allow_torch_checkpoints: bool = False,
    stop: Callable[[int], bool] | None = None,
) -> TrainResult:
    """Train a recipe's arm into a folder.

    Under torchrun or accelerate launch all processes call it; rank 0 writes.

    Args:
        recipe: what to train and how.
        out: new or empty, unless `resume` or `overwrite`.
        resume: go on from the newest whole checkpoint in `out`, with the same recipe; start if there is none.
            A finished run's result is returned as it is.
        overwrite: empty `out` first, which must be a run of ours.
        prepared: the task's data, if they are prepared already.
        quiet: print nothing and show no bar.
        report: print what the arm changed in the model, unless `quiet`.
        allow_torch_checkpoints: under DeepSpeed, write and read its engine's checkpoints, which are pickled; it has no
            others.
        stop: asked after each step but the last, with its number (of several processes: rank 0 is asked, at each entry
            of the training curve); the run then goes on from its last checkpoint when it is resumed.

    Raises:
        OutOfTimeError: a UserError; `stop` said so.
        UserError: bad input, with nothing written; no room for a checkpoint, with the last good one kept; or
            `deterministic` is set and an operation has no such kernel.
        DivergedError: a UserError; the loss is no longer finite, or it rose for good and `stop_diverged` is set.
            result.json says so, checkpoints are kept.
    """
    folder = RunFolder(Path(out), recipe)
    with surroundings(recipe.train):
        deepspeed.check_engine(muon=uses_muon(recipe, recipe.arm), allowed=allow_torch_checkpoints)
        arguments = training_arguments(recipe, folder.path)
        quiet = quiet or not arguments.should_save
        micro = micro_batch(recipe.train, arguments.world_size)
        finished = on_rank_0(lambda: folder.check(resume=resume, overwrite=overwrite))
        if finished is not None:
            return _finished(TrainResult.from_json(finished), folder)
        _try_on_meta(recipe)
        if prepared is None:
            prepared = _prepare(recipe, quiet)
        _check_data(recipe, prepared, micro)
        on_rank_0(lambda: folder.check_fingerprint(prepared.fingerprint, resume=resume))
        train = recipe.train.resolved(len(prepared.train))
        arguments.max_steps, arguments.warmup_steps = train.steps, train.warmup_steps
        arguments.per_device_train_batch_size = micro
        arguments.per_device_eval_batch_size = train.eval_batch_size or micro

        model = build_model(recipe, prepared)
        plain_parameters = count_parameters(model)
        folder.name_base(model)
        model = apply_arm(recipe, recipe.arm, model, verbose=report and not quiet)
        parameters = count_parameters(model)
        known = {
            "arm": recipe.arm.name,
            "arm_text": str(recipe.arm),
            "seed": train.seed,
            "lr": recipe.lr,
            "parameters": parameters,
            "parameters_added": parameters - plain_parameters,
            "trainable": count_parameters(model, trainable=True),
            "tokens_per_step": train.batch_size * recipe.task.sequence_length,
            "fingerprint": prepared.fingerprint,
        }
        optimizer = optimizer_settings(model, recipe, recipe.arm, recipe.lr, arguments.device)

        on_rank_0(lambda: folder.open(prepared.fingerprint, overwrite=overwrite))
        progress = ProgressLines(recipe.arm.name)
        trainer = RunTrainer(
            folder.checkpoints,
            model,
            arguments,
            prepared=prepared,
            group_by_length=train.group_by_length,
            stop_diverged=train.stop_diverged,
            allow_torch_checkpoints=allow_torch_checkpoints,
            optimizer_cls_and_kwargs=optimizer,
            callbacks=[Schedule(train), SeedDropout(), *([] if quiet else [progress]), *([Stop(stop)] if stop else [])],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            _train(trainer, recipe, folder, resume=resume, quiet=quiet)
            result = _result(trainer, known, recipe, apart=prepared.test is not None)
            folder.export(trainer, prepared.tokenizer, result)
            _record(trainer, folder, prepared, result)
            return result
        except DivergedError as error:
            _record(trainer, folder, prepared, _result_of_diverged(trainer, known, recipe, error.step))
            raise
        finally:
            progress.close()
            folder.close()
            if arguments.device.type != "cpu":
                # Trainer is part of a cycle: without this the next run's model would not fit beside it.
                del trainer, model, optimizer
                gc.collect()
                torch.accelerator.empty_cache()


def join_processes(recipe: Recipe, out: Path) -> None:
    """Join torchrun's process group the way `run_training` will, so that one process can decide for all."""
    training_arguments(recipe, out)


def _finished(result: TrainResult, folder: RunFolder) -> TrainResult:
    """A run that ended before is not run again."""
    if result.status == "diverged":
        raise DivergedError(
            f"the run in {folder.path} diverged at step {result.steps}; lower the learning rate or lengthen the "
            "warm-up, and start anew",
            result.steps,
        )
    return result


def _try_on_meta(recipe: Recipe) -> None:
    """An arm that does not fit fails here, before any text is prepared."""
    if ":" in recipe.arm.method:  # a user's function need not know of meta devices
        recipe.arm.function()
    else:
        apply_arm(recipe, recipe.arm, recipe.task.build_on_meta())


def _prepare(recipe: Recipe, quiet: bool) -> Any:
    """Rank 0 fills the cache, then the others read it."""
    mine: list[Any] = []
    on_rank_0(lambda: mine.append(recipe.task.prepare(progress=not quiet)))
    return mine[0] if mine else recipe.task.prepare(progress=False)


def _check_data(recipe: Recipe, prepared: Any, micro: int) -> None:
    if len(prepared.train) < 1 or len(prepared.valid) < 1:
        raise UserError("the text is too short: it needs a sequence to train on and one to evaluate")
    prepared.check_batch(micro)
    if recipe.train.group_by_length and not prepared.lengths_vary:
        raise UserError("group_by_length is for batches of different lengths, and these are all of one; omit it")


def _train(trainer: RunTrainer, recipe: Recipe, folder: RunFolder, *, resume: bool, quiet: bool) -> None:
    checkpoint, damaged = trainer.newest() if resume else (None, [])
    if resume and not quiet:
        for why in damaged:
            print(f"skipped a damaged checkpoint: {why}")
        print(f"resuming from {checkpoint}" if checkpoint else "no whole checkpoint yet: starting at step 0")
    if recipe.train.tracker == "tensorboard" and trainer.is_world_process_zero():
        trainer.add_callback(folder.tensorboard(TensorBoardCallback, checkpoint))
    with many_compiled(recipe.train.compile, lengths_vary=trainer.prepared.lengths_vary):
        trainer.train(checkpoint)


def _result(trainer: RunTrainer, known: dict[str, Any], recipe: Recipe, *, apart: bool) -> TrainResult:
    history = trainer.state.log_history
    last = next(entry for entry in reversed(history) if "eval_loss" in entry)
    return TrainResult(
        **known,
        **_curves(trainer),
        steps=trainer.state.global_step,
        final_loss=last["eval_loss"],
        bits_per_byte=last.get("eval_bits_per_byte"),
        **judged(history, recipe.task.measure, apart),
        **stability(curve_of(history, "loss"), trainer.args.max_steps),
    )


def _result_of_diverged(trainer: RunTrainer, known: dict[str, Any], recipe: Recipe, step: int) -> TrainResult:
    measure = recipe.task.measure
    return TrainResult(
        **known,
        **_curves(trainer),
        steps=step,
        diverged_at=step,
        status="diverged",
        final_loss=None,
        bits_per_byte=None,
        metric=measure.name,
        higher_is_better=measure.higher_is_better,
    )


def _curves(trainer: RunTrainer) -> dict[str, Any]:
    history = trainer.state.log_history
    return {
        "curve": curve_of(history, "eval_loss"),
        "train_curve": curve_of(history, "loss"),
        "plain_curve": curve_of(history, "plain_loss"),
        "seconds": trainer.seconds,
    }


def _record(trainer: RunTrainer, folder: RunFolder, prepared: Any, result: TrainResult) -> None:
    if trainer.is_world_process_zero():
        folder.write_result({**result.to_dict(), "data": prepared.describe()})
