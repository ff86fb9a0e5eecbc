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

import contextlib
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import strtobool

from nlr_lab.runtime.environment import cpu_threads, deterministic, many_compiled
from nlr_lab.runtime.processes import on_first_process, warn_of_restarts
from nlr_lab.tasks.task import adapter_setup, check_batch, lengths_vary, measure_of, scored_split, tokens_per_example
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.optim import MuonAdamW, param_groups

from .checkpoints import DEEPSPEED_IS_PICKLED, CheckpointedTrainer, DivergedError, is_adapted
from .progress import ProgressLines
from .recipe import Arm, Recipe, TrainConfig
from .result import TrainResult, curve_of, judged, stability
from .run_folder import RunFolder
from .shards import check_checkpoint_format
from .trainer import RunTrainer, Schedule, SeedDropout, Stop
from .tuning import raise_up_rates, set_head_rate

__all__ = [
    *("Arm", "DivergedError", "Recipe", "TrainConfig", "TrainResult", "run_training"),
    *("apply_arm", "build_model", "count_parameters", "join_processes", "optimizer_groups", "optimizer_settings"),
]

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


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
    """Trains a recipe's arm into a folder.

    Under torchrun or accelerate launch all processes call it; the first one writes.

    Args:
        recipe: what to train and how.
        out: new or empty, unless `resume` or `overwrite`.
        resume: go on from the newest whole checkpoint in `out`, with the same recipe; start if there is none.
            A finished run's result is given back as it is.
        overwrite: empty `out` first, which must be a run of ours.
        prepared: the task's data, if they are prepared already.
        quiet: print nothing and show no bar.
        report: print what the arm changed in the model, unless `quiet`.
        allow_torch_checkpoints: under FSDP2 and DeepSpeed, write and read the engine's own sharded checkpoints, which
            are pickled. DeepSpeed has no others.
        stop: asked after each step but the last, with its number (of several processes: the first one is asked, at
            each entry of the training curve); the run then goes on from its last checkpoint when it is resumed.

    Raises:
        OutOfTimeError: a UserError; `stop` said so.
        UserError: bad input, with nothing written; no room for a checkpoint, with the last good one kept; or
            `deterministic` is set and an operation has no such kernel.
        DivergedError: a UserError; the loss is no longer finite, or it rose for good and `stop_diverged` is set.
            result.json says so, checkpoints are kept.
    """
    train = recipe.train
    with _surroundings(train):
        _check_engine(recipe, allow_torch_checkpoints)
        arguments = _arguments(recipe, Path(out))
        _configure_engine(arguments, train)
        folder = RunFolder(Path(out), recipe)
        say = (lambda text: None) if quiet or not arguments.should_save else print
        micro = _micro_batch(train, arguments.world_size)
        finished = on_first_process(lambda: folder.check(resume=resume, overwrite=overwrite))
        if finished is not None:
            return _finished(TrainResult.from_json(finished), folder)
        _try_on_meta(recipe)
        if prepared is None:
            prepared = _prepare(recipe, quiet)
        if len(prepared.train) < 1 or len(prepared.valid) < 1:
            raise UserError("the text is too short: it needs a sequence to train on and one to evaluate")
        check_batch(prepared, micro)
        if train.group_by_length and not lengths_vary(prepared):
            raise UserError(
                "group_by_length is for batches of different lengths, and these are all of one; leave it out"
            )
        on_first_process(lambda: folder.check_fingerprint(prepared.fingerprint, resume=resume))
        train = train.resolved(len(prepared.train))
        arguments.max_steps, arguments.warmup_steps = train.steps, train.warmup_steps

        model = build_model(recipe, prepared)
        before = count_parameters(model)
        folder.name_base(model)
        changed = apply_arm(recipe, recipe.arm, model, verbose=report and not quiet and arguments.should_save)
        parameters = count_parameters(changed)
        optimizer = optimizer_settings(changed, recipe, recipe.arm, recipe.lr, arguments.device)
        check_checkpoint_format(changed, sharding=_launched_with("FSDP"), allowed=allow_torch_checkpoints)

        on_first_process(lambda: folder.open(prepared.fingerprint, overwrite=overwrite))
        progress = ProgressLines(recipe.arm.name)
        arguments.per_device_train_batch_size = micro
        arguments.per_device_eval_batch_size = train.eval_batch_size or micro
        trainer = RunTrainer(
            folder.checkpoints,
            changed,
            arguments,
            prepared=prepared,
            group_by_length=train.group_by_length,
            stop_diverged=train.stop_diverged,
            allow_torch_checkpoints=allow_torch_checkpoints,
            optimizer_cls_and_kwargs=optimizer,
            callbacks=[Schedule(train), SeedDropout(), *([] if quiet else [progress]), *([Stop(stop)] if stop else [])],
        )
        trainer.remove_callback(PrinterCallback)
        measure, apart = measure_of(recipe.task), scored_split(prepared) is not None
        trainable = count_parameters(changed, trainable=True)

        def result(**numbers: Any) -> TrainResult:
            history = trainer.state.log_history
            return TrainResult(
                arm=recipe.arm.name,
                arm_text=str(recipe.arm),
                seed=train.seed,
                lr=recipe.lr,
                curve=curve_of(history, "eval_loss"),
                train_curve=curve_of(history, "loss"),
                plain_curve=curve_of(history, "plain_loss"),
                parameters=parameters,
                parameters_added=parameters - before,
                trainable=trainable,
                tokens_per_step=train.batch_size * tokens_per_example(recipe.task),
                seconds=trainer.seconds,
                fingerprint=prepared.fingerprint,
                **numbers,
            )

        def record(finished: TrainResult) -> None:
            if trainer.is_world_process_zero():
                folder.write_result({**finished.to_dict(), "data": prepared.describe()})

        try:
            checkpoint = _checkpoint(trainer, say) if resume else None
            if train.tracker == "tensorboard" and trainer.is_world_process_zero():
                trainer.add_callback(folder.tensorboard(TensorBoardCallback, checkpoint))
            with many_compiled(train.compile, lengths_vary=lengths_vary(prepared)):
                trainer.train(checkpoint)
            last = next(entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry)
            done = result(
                steps=trainer.state.global_step,
                final_loss=last["eval_loss"],
                bits_per_byte=last.get("eval_bits_per_byte"),
                **judged(trainer.state.log_history, measure, apart),
                **stability(curve_of(trainer.state.log_history, "loss"), train.steps),
            )
            folder.export(trainer, prepared.tokenizer, done)
            record(done)
            return done
        except DivergedError as error:
            fields = {"metric": measure.name, "higher_is_better": measure.higher_is_better}
            lost: dict[str, Any] = {"steps": error.step, "diverged_at": error.step, "status": "diverged"}
            record(result(final_loss=None, bits_per_byte=None, **lost, **fields))
            raise
        finally:
            progress.close()
            folder.close()
            if arguments.device.type != "cpu":
                # Trainer is part of a cycle: without this the next run's model would not fit beside it.
                del trainer, model, changed, optimizer
                gc.collect()
                torch.accelerator.empty_cache()


# --- setting up ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _surroundings(train: TrainConfig) -> Iterator[None]:
    """Process-wide settings of one run, put back after it: a comparison has many runs in one process."""
    environment = {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_threads(train.threads))
        stack.enter_context(deterministic(train.deterministic))
        try:
            yield
        finally:
            for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
                del os.environ[key]
            os.environ.update(environment)


def join_processes(recipe: Recipe, out: Path) -> None:
    """Joins torchrun's process group the way `run_training` will, so that one process can decide for all."""
    _arguments(recipe, out)


def _arguments(recipe: Recipe, out: Path) -> TrainingArguments:
    """Joins the process group, if there is one; writes nothing."""
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
            lr_scheduler_type=_SCHEDULES[train.schedule],
            max_grad_norm=train.max_grad_norm,
            bf16=train.bf16 and not _launched_with("DEEPSPEED"),
            **(_recomputing() if train.gradient_checkpointing else {}),
            torch_compile=train.compile,
            seed=train.seed,
            # Our callback says when.
            logging_strategy="no",
            eval_strategy="no",
            save_strategy="no",
            save_total_limit=train.keep_checkpoints,
            report_to=[] if train.tracker in ("none", "tensorboard") else [train.tracker],
            run_name=f"{recipe.name}-{recipe.arm.name}-seed-{train.seed}",
            logging_nan_inf_filter=False,  # it waits for the device in every step; CheckpointedTrainer looks
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=train.dataloader_workers,
            dataloader_pin_memory=not on_cpu,
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
            ddp_find_unused_parameters=False,
            ddp_timeout=6 * 3600,  # the first process may tokenize for hours
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from error
    _check_tracker(train.tracker)
    if arguments.n_gpu > 1:
        # One process drives one GPU; torchrun starts as many as there are. (Never nn.DataParallel.)
        arguments._n_gpu = 1
    return arguments


def _launched_with(engine: str) -> bool:
    """Whether accelerate launch was told to use "DEEPSPEED" or "FSDP"."""
    return bool(strtobool(os.environ.get(f"ACCELERATE_USE_{engine}", "false")))


def _check_engine(recipe: Recipe, allowed: bool) -> None:
    """Refuses DeepSpeed where it cannot be, or would spoil the run.

    Raises:
        UserError: pickled checkpoints are not allowed, it is not installed, or Muon needs whole matrices.
    """
    if not _launched_with("DEEPSPEED"):
        return
    if not allowed:
        raise UserError(DEEPSPEED_IS_PICKLED)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("DeepSpeed is not installed: pip install 'nonlinear-lowrank[deepspeed]', or use FSDP2")
    if _by_muon(recipe, recipe.arm):
        raise UserError("Muon needs whole matrices, which DeepSpeed flattens; leave it out, or use FSDP2")


def _configure_engine(arguments: TrainingArguments, train: TrainConfig) -> None:
    """Makes DeepSpeed's setting of bfloat16 ours.

    Raises:
        UserError: its configuration has half-precision weights.
    """
    if not _launched_with("DEEPSPEED"):
        return
    plugin: Any = arguments.deepspeed_plugin
    settings = plugin.hf_ds_config.config
    for name in ("bf16", "fp16"):
        if settings.get(name, {}).get("enabled") in (True, "true"):
            raise UserError(
                f"DeepSpeed's {name} casts all weights, frequencies and phases with them; take it out of its "
                "configuration and give --train.bf16, which is autocast"
            )
    if train.bf16:
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}


def _recomputing() -> dict[str, Any]:
    """Activation checkpointing, under the name that this transformers version has for it."""
    import transformers

    names = transformers.TrainingArguments.__dataclass_fields__
    kind = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {kind: True, f"{kind}_kwargs": {"use_reentrant": False}}


def _check_tracker(tracker: str) -> None:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    if tracker in ("none", "tensorboard"):
        return
    if tracker not in INTEGRATION_TO_CALLBACK:
        raise UserError(
            f"unknown tracker {tracker!r}; choose none or one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
        )
    if tracker not in get_available_reporting_integrations():
        raise UserError(f"the tracker {tracker!r} is not installed; install it, or choose tensorboard or none")


def _micro_batch(train: TrainConfig, processes: int) -> int:
    """Sequences that a process takes at once."""
    pieces = processes * train.gradient_accumulation
    if train.batch_size % pieces:
        raise UserError(
            f"batch_size {train.batch_size} does not split over {processes} processes x "
            f"{train.gradient_accumulation} micro-batches; choose a multiple of {pieces}"
        )
    return train.batch_size // pieces


def build_model(recipe: Recipe, prepared: Any, arm: Arm | None = None) -> nn.Module:
    """The task's model before the arm changes it, drawn from the run's seed."""
    return recipe.task.build_model(prepared, (arm or recipe.arm).dense_init, seed=recipe.train.seed)


def apply_arm(recipe: Recipe, arm: Arm, model: nn.Module, *, verbose: bool = False) -> nn.Module:
    """The model with the arm's change, drawn from the run's seed.

    Raises:
        UserError: the arm does not fit the model or the task.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        drawn = getattr(getattr(recipe.task, "backbone", None), "dense_init", None)
        return arm.apply(model, adapter_setup(recipe.task, model), dense_init=drawn, verbose=verbose)


def optimizer_groups(model: nn.Module, recipe: Recipe, arm: Arm, lr: float) -> list[dict[str, Any]]:
    """Fresh groups of what is trained, with each role's rate and decay, LoRA+'s where the arm asks for it, and the
    new head's own.

    Raises:
        UserError: Muon is asked for, and the arm trains an adapter or no dense matrix.
    """
    train, muon = recipe.train, _by_muon(recipe, arm)
    if muon and is_adapted(model):
        raise UserError(f"{arm.name} trains an adapter, whose factors are not Muon's to take; leave optimizer=muon out")
    groups = param_groups(model, lr, train.weight_decay, muon=muon, verbose=False)
    if muon and {group["optimizer"] for group in groups} != {"muon", "adamw"}:
        raise UserError(f"{arm.name} trains no dense matrices, which are what Muon takes; leave optimizer=muon out")
    ratio = arm.settings.get("plus") if ":" not in arm.method else None
    if ratio:
        groups = raise_up_rates(groups, ratio)
    base: Any = model
    setup = adapter_setup(recipe.task, base.get_base_model() if is_adapted(model) else base)
    if train.head_lr is not None and setup is not None:
        groups = set_head_rate(groups, setup.head, train.head_lr / lr)
    return groups


def optimizer_settings(
    model: nn.Module, recipe: Recipe, arm: Arm, lr: float, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments, its groups as "params"; a fresh dict each time, since Trainer takes
    "params" out of it."""
    groups = optimizer_groups(model, recipe, arm, lr)
    shared = {"params": groups, "lr": lr, "weight_decay": recipe.train.weight_decay, "betas": recipe.train.betas}
    if _by_muon(recipe, arm):
        return MuonAdamW, shared
    return torch.optim.AdamW, {**shared, "fused": True} if device.type in ("cpu", "cuda") else shared


def _by_muon(recipe: Recipe, arm: Arm) -> bool:
    return (arm.optimizer or recipe.train.optimizer) == "muon"


def count_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Parameters of a model, all or the trained ones."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad or not trainable)


def _try_on_meta(recipe: Recipe) -> None:
    """An arm that does not fit fails here, before any text is prepared."""
    if ":" in recipe.arm.method:  # a user's function need not know of meta devices
        recipe.arm.function()
    else:
        apply_arm(recipe, recipe.arm, recipe.task.build_on_meta())


def _prepare(recipe: Recipe, quiet: bool) -> Any:
    """The first process fills the cache, then the others read it."""
    mine: list[Any] = []
    on_first_process(lambda: mine.append(recipe.task.prepare(progress=not quiet)))
    return mine[0] if mine else recipe.task.prepare(progress=False)


def _checkpoint(trainer: CheckpointedTrainer, say: Any) -> Path | None:
    """Where to go on from, with a line about it."""
    path, passed_over = trainer.newest()
    for why in passed_over:
        say(f"passed over a damaged checkpoint: {why}")
    say(f"resuming from {path}" if path else "no whole checkpoint yet: starting at step 0")
    return path


def _finished(result: TrainResult, folder: RunFolder) -> TrainResult:
    """A run that ended before is not run again."""
    if result.status == "diverged":
        raise DivergedError(
            f"the run in {folder.path} diverged at step {result.steps}; lower the learning rate or lengthen the "
            "warm-up, and start anew",
            result.steps,
        )
    return result
