"""A recipe -> Trainer -> a folder: `run_training`.

The same seed gives the same sequences in the same order and the same evaluation in every arm, whatever the arm draws
and however many processes and micro-batches share the work.
"""

import contextlib
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging, strtobool

from nlr_lab.runtime.environment import cpu_threads, deterministic, many_compiled
from nlr_lab.runtime.processes import on_rank_0, warn_of_restarts, world_size
from nlr_lab.runtime.signals import StoppedBySignal, StopRequest, noted_signals
from nlr_lab.runtime.storage import newest_valid, remove_temporaries
from nonlinear_lowrank.analysis.cost import count_parameters
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from . import deepspeed
from .arms import apply_arm, build_model, optimizer_settings, uses_muon
from .checkpoints import check_optimizer
from .progress import RunLog, progress_of
from .recipe import Recipe, TrainConfig
from .result import DivergedError, TrainResult, after_divergence, curve_of, judged, stability, untrained_loss
from .run_folder import RunFolder
from .trainer import RunTrainer, Schedule, WarmOptimizer


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
    """Train a recipe's arm into a folder (`run_folder` says what is in it).

    Under torchrun or accelerate launch all processes call it; rank 0 writes.

    Args:
        recipe: what to train and how.
        out: new or empty, unless `resume` or `overwrite`.
        resume: continue from the newest whole checkpoint in `out`, with the same recipe; start if there is none.
            A finished run's result is returned as it is.
        overwrite: empty `out` first, which must be a run of ours.
        prepared: the task's data, if they are prepared already.
        quiet: print nothing and show no bar.
        report: print what the arm changed in the model, unless `quiet`.
        allow_torch_checkpoints: under DeepSpeed, write and read its engine's checkpoints, which are pickled; it has no
            others.
        stop: asked after each step but the last, with its number, on rank 0; the run then resumes from its last
            checkpoint.

    Raises:
        OutOfTimeError: a UserError; `stop` said so.
        StoppedBySignal: a KeyboardInterrupt; SIGTERM, SIGINT or SIGUSR1 came, and a checkpoint was written first.
        UserError: bad input, with nothing written; no room for a checkpoint, with the last good one kept; or
            `deterministic` is set and an operation has no such kernel.
        DivergedError: a UserError; the loss is no longer finite, or it rose for good and `stop_diverged` is set.
            result.json says so, checkpoints are kept.
    """
    arm = recipe.arm
    if arm.grid or len(arm.head_lr) > 1:
        name = "grid" if arm.grid else "a head_lr of several rates"
        raise UserError(f"{name} is for nlr compare; give the arm one learning rate: {arm.method}:lr=1e-4")
    folder = RunFolder(Path(out), recipe)
    with _surroundings(recipe.train):
        if _uses_deepspeed():
            deepspeed.check_engine(muon=uses_muon(recipe, arm), allowed=allow_torch_checkpoints)
        arguments = training_arguments(recipe, folder.path)
        quiet = quiet or not arguments.should_save
        start = _optimizer_start(recipe)
        micro = _micro_batch(recipe.train, arguments.world_size)
        finished: TrainResult | None = on_rank_0(
            lambda: folder.check(resume=resume, overwrite=overwrite, prepared=prepared)
        )
        if finished is not None and finished.status == "diverged":
            what = f"the run in {out} diverged at step {finished.steps}"
            raise DivergedError(f"{what}; {after_divergence(finished.steps)}", finished.steps)
        if finished is not None:
            return finished
        if ":" in arm.method:  # a user's function need not know of meta devices
            arm.function()
        else:  # an arm that does not fit fails here, before any text is prepared
            changed = apply_arm(recipe, arm, recipe.task.build_on_meta())
            if start is not None:
                check_optimizer(start, changed)
        if prepared is None:
            prepared = _prepare(recipe, quiet)
        if len(prepared.train) < 1 or len(prepared.valid) < 1:
            raise UserError("the text is too short: it needs a sequence to train on and one to evaluate")
        if recipe.train.group_by_length and not prepared.lengths_vary:
            raise UserError("group_by_length is for batches of different lengths, and these are all of one; omit it")
        if recipe.train.label_smoothing and prepared.score is not None and not prepared.classes:
            raise UserError("label_smoothing is for a cross-entropy, and this task is a regression; omit it")
        prepared.check_batch(micro)
        train = recipe.train.resolved(len(prepared.train))
        arguments.max_steps, arguments.warmup_steps = train.steps, train.warmup_steps
        arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs = _schedule(train, recipe.lr)
        arguments.per_device_train_batch_size = micro
        arguments.per_device_eval_batch_size = train.eval_batch_size or micro

        model: Any = build_model(recipe, prepared)
        plain_parameters = count_parameters(model)
        if (begun := getattr(recipe.task, "init_from", "")) and report and not quiet:
            kind = type(model).__name__
            print(f"from {begun}: {kind}, {plain_parameters:,} parameters, in place of the recipe's backbone")
        if recipe.task.pretrained:  # peft writes it into the adapter's config
            model.name_or_path = model.config.name_or_path = recipe.task.model.portable_name()
        model = apply_arm(recipe, arm, model, verbose=report and not quiet)
        if train.embedding_noise and not _embeds_tokens(model):
            raise UserError("embedding_noise is for token embeddings, and the model has none; omit it")
        if train.fp8:
            from .fp8 import to_float8

            to_float8(model, verbose=report and not quiet)
        parameters = count_parameters(model)
        known = {
            "arm": arm.name,
            "arm_text": str(arm),
            "seed": train.seed,
            "lr": recipe.lr,
            "parameters": parameters,
            "parameters_added": parameters - plain_parameters,
            "trainable": count_parameters(model, trainable=True),
            "tokens_per_step": train.batch_size * recipe.task.sequence_length,
            "fingerprint": prepared.fingerprint,
        }
        optimizer = optimizer_settings(model, recipe, arm, recipe.lr, arguments.device)

        on_rank_0(lambda: folder.open(prepared.fingerprint, overwrite=overwrite))
        if report and not quiet:
            print(_said(prepared, parameters, arguments.max_steps * known["tokens_per_step"], folder.path))
        warm = [] if start is None else [WarmOptimizer(start)]
        progress, request = progress_of(recipe, model, prepared, arguments.world_size), StopRequest()
        log = RunLog(folder.path, progress.tokens)
        trainer = RunTrainer(
            model,
            arguments,
            prepared=prepared,
            config=train,
            checkpoints=folder.path / "checkpoints",
            optimizer_cls_and_kwargs=optimizer,
            callbacks=[Schedule(train, stop, request), log, *([] if quiet else [progress]), *warm],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            with noted_signals(request):  # before training there is nothing to save
                _train(trainer, recipe, folder, resume=resume, quiet=quiet)
                result = _result(trainer, known, recipe)
                folder.export(trainer, prepared.tokenizer, result)
                folder.write_result(trainer, prepared, result)
            if request.number:  # in the last step: this run is whole, and nothing is to follow it
                raise StoppedBySignal(request.number, " when the run was done")
            return result
        except DivergedError as error:
            folder.write_result(trainer, prepared, _result(trainer, known, recipe, diverged_at=error.step))
            raise
        finally:
            progress.bar.close()
            folder.close()
            if arguments.device.type != "cpu":
                # Trainer is part of a cycle: without this the next run's model would not fit beside it.
                del trainer, model, optimizer
                gc.collect()
                torch.accelerator.empty_cache()


@contextlib.contextmanager
def _surroundings(train: TrainConfig) -> Iterator[None]:
    """Process-wide settings of one run, put back after it: a comparison has many runs in one process."""
    environment, bars = dict(os.environ), logging.is_progress_bar_enabled()
    if train.compile_fullgraph:  # accelerate's; TrainingArguments have no field for it
        os.environ["ACCELERATE_DYNAMO_USE_FULLGRAPH"] = "true"
    logging.disable_progress_bar()  # of milliseconds, whenever a model is saved
    try:
        with cpu_threads(train.threads), deterministic(train.deterministic):
            yield
    finally:
        os.environ.clear()  # accelerate writes its settings there
        os.environ.update(environment)
        if bars:
            logging.enable_progress_bar()


def _schedule(train: TrainConfig, lr: float) -> tuple[SchedulerType, dict[str, Any]]:
    """Return transformers' schedule and its settings; `train` has steps."""
    floor = train.min_lr_share
    match train.schedule:
        case "constant":
            return SchedulerType.CONSTANT_WITH_WARMUP, {}
        case "wsd":
            settings = {"num_decay_steps": train.decay_steps, "decay_type": "linear", "min_lr_ratio": floor}
            return SchedulerType.WARMUP_STABLE_DECAY, settings
        case "cosine" if floor:
            return SchedulerType.COSINE_WITH_MIN_LR, {"min_lr_rate": floor}
        case "linear" if floor:
            return SchedulerType.POLYNOMIAL, {"power": 1.0, "lr_end": floor * lr}
    return SchedulerType(train.schedule), {}


def _embeds_tokens(model: Any) -> bool:
    """Return whether a model's input is a table of embeddings; a user's function may have left none that says so."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (AttributeError, NotImplementedError):
        return False


def _optimizer_start(recipe: Recipe) -> Path | None:
    """Return the checkpoint whose optimizer's state the run begins with."""
    if not recipe.train.init_optimizer:
        return None
    path = getattr(recipe.task, "init_from", "")
    if not path or _uses_deepspeed():
        why = "continues from the checkpoint that --init-from names" if not path else "cannot be used with DeepSpeed"
        raise UserError(f"init_optimizer {why}; {'give one' if not path else 'omit it'}")
    return Path(path)


def _uses_deepspeed() -> bool:
    return bool(strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))


def training_arguments(recipe: Recipe, out: Path) -> TrainingArguments:
    """Return Trainer's arguments, with the process group joined, if there is one; write nothing."""
    train = recipe.train
    warn_of_restarts()
    on_cpu = not torch.accelerator.is_available()
    try:
        arguments = TrainingArguments(
            output_dir=str(out),
            max_steps=train.steps or 1,  # of epochs, when the data are known
            gradient_accumulation_steps=train.gradient_accumulation,
            learning_rate=recipe.lr,
            weight_decay=train.weight_decay,
            warmup_steps=train.warmup_steps,
            max_grad_norm=train.max_grad_norm,
            neftune_noise_alpha=train.embedding_noise or None,
            bf16=train.bf16 and not _uses_deepspeed(),
            activation_checkpointing=train.gradient_checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": False},
            torch_compile=train.compile,
            torch_compile_mode=train.compile_mode if train.compile else None,
            seed=train.seed,
            # Our callback says when.
            logging_strategy="no",
            eval_strategy="no",
            save_strategy="no",
            save_total_limit=train.keep_checkpoints,
            report_to=[] if train.tracker in ("none", "tensorboard") else [train.tracker],
            run_name=f"{recipe.name}-{recipe.arm.name}-seed-{train.seed}",
            logging_nan_inf_filter=False,  # it waits for the device in every step; RunTrainer looks
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=train.dataloader_workers,
            dataloader_pin_memory=not on_cpu,
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu and world_size() > 1 else None,
            ddp_find_unused_parameters=False,
            ddp_timeout=6 * 3600,  # rank 0 may tokenize for hours
        )
        _check_trackers(arguments)
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(one_line(error)) from error
    if arguments.n_gpu > 1:
        # One process drives one GPU; torchrun starts as many as there are. (Never nn.DataParallel.)
        arguments._n_gpu = 1
    if _uses_deepspeed():
        deepspeed.configure(arguments.deepspeed_plugin, bf16=train.bf16)
    return arguments


def _check_trackers(arguments: TrainingArguments) -> None:
    """Raise UserError where the package of a tracker is not installed."""
    names: Any = arguments.report_to
    for name, callback in zip(names, get_reporting_integration_callbacks(names), strict=True):
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            install = re.search(r"pip install [\w.-]+", str(error))
            hint = install[0] if install else one_line(error)
            raise UserError(f"the tracker {name} is not installed: {hint}, or --tracker tensorboard") from error


def _micro_batch(train: TrainConfig, processes: int) -> int:
    """Return the sequences that a process takes at once."""
    pieces = processes * train.gradient_accumulation
    if train.batch_size % pieces:
        raise UserError(
            f"batch_size {train.batch_size} does not split over {processes} processes x "
            f"{train.gradient_accumulation} micro-batches; choose a multiple of {pieces}"
        )
    return train.batch_size // pieces


def _prepare(recipe: Recipe, quiet: bool) -> Any:
    """Rank 0 fills the cache, then the others read it."""
    mine: list[Any] = []
    on_rank_0(lambda: mine.append(recipe.task.prepare(progress=not quiet)))
    return mine[0] if mine else recipe.task.prepare(progress=False)


def _said(prepared: Any, parameters: int, tokens: int, out: Path) -> str:
    """Return in a line what is trained on what, and where the run is written."""
    text, known = "", prepared.facts.get("train")
    if isinstance(known, dict) and known.get("tokens"):
        documents = f"{known['documents']:,} documents, " if known.get("documents") else ""
        times = f", seen {tokens / known['tokens']:.2g} times" if tokens > 0 else ""
        text = f"; {documents}{known['tokens']:,} tokens to train on{times}"
    return f"{parameters:,} parameters{text}; into {out}"


def _train(trainer: RunTrainer, recipe: Recipe, folder: RunFolder, *, resume: bool, quiet: bool) -> None:
    checkpoint, damaged = None, list[str]()
    if resume:
        on_rank_0(lambda: remove_temporaries(trainer.checkpoints))
        checkpoint, damaged = on_rank_0(lambda: newest_valid(trainer.checkpoints))
    if resume and not quiet:
        for why in damaged:
            print(f"skipped a damaged checkpoint: {why}")
        print(f"resuming from {checkpoint}" if checkpoint else "no whole checkpoint yet: starting at step 0")
    if recipe.train.tracker == "tensorboard" and trainer.is_world_process_zero():
        from torch.utils.tensorboard import SummaryWriter

        # The curves of a resumed run continue from its checkpoint.
        purge = int(checkpoint.name.removeprefix("step-")) + 1 if checkpoint else None
        writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge)
        trainer.add_callback(TensorBoardCallback(writer))
    with many_compiled(recipe.train.compile, lengths_vary=trainer.prepared.lengths_vary):
        trainer.train(checkpoint)


def _result(trainer: RunTrainer, known: dict[str, Any], recipe: Recipe, diverged_at: int | None = None) -> TrainResult:
    history, measure = trainer.state.log_history, recipe.task.measure
    names = {"curve": "eval_loss", "train_curve": "loss", "plain_curve": "plain_loss"}
    found: dict[str, Any] = {name: curve_of(history, key) for name, key in names.items()}
    found["untrained_loss"] = untrained_loss(history)
    if diverged_at is None:
        last = next(entry for entry in reversed(history) if "eval_loss" in entry)
        found |= {"final_loss": last["eval_loss"], "bits_per_byte": last.get("eval_bits_per_byte")}
        found |= judged(history, measure, trainer.prepared.test is not None)
        found |= stability(found["train_curve"], trainer.args.max_steps, found["untrained_loss"])
        found["steps"] = trainer.state.global_step
    else:
        found |= {"final_loss": None, "bits_per_byte": None, "metric": measure.name}
        found |= {"higher_is_better": measure.higher_is_better, "status": "diverged"}
        found |= {"steps": diverged_at, "diverged_at": diverged_at}
    return TrainResult(**known, **found, seconds=trainer.seconds)
