"""A recipe's settings as Trainer's arguments; making them joins the process group, if there is one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from nlr_lab.runtime.environment import cpu_threads, deterministic
from nlr_lab.runtime.processes import warn_of_restarts, world_size
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from . import deepspeed
from .recipe import Recipe, TrainConfig

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@contextlib.contextmanager
def surroundings(train: TrainConfig) -> Iterator[None]:
    """Process-wide settings of one run, put back after it: a comparison has many runs in one process."""
    environment = {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}
    with cpu_threads(train.threads), deterministic(train.deterministic):
        try:
            yield
        finally:
            for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
                del os.environ[key]
            os.environ.update(environment)


def training_arguments(recipe: Recipe, out: Path) -> TrainingArguments:
    """Return Trainer's arguments, with the process group joined; write nothing.

    Raises:
        UserError: a setting does not fit this machine, or the tracker is unknown or not installed.
    """
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
            bf16=train.bf16 and not deepspeed.is_launched(),
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
            ddp_backend="gloo" if on_cpu and world_size() > 1 else None,
            ddp_find_unused_parameters=False,
            ddp_timeout=6 * 3600,  # rank 0 may tokenize for hours
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(one_line(error)) from error
    _check_tracker(train.tracker)
    if arguments.n_gpu > 1:
        # One process drives one GPU; torchrun starts as many as there are. (Never nn.DataParallel.)
        arguments._n_gpu = 1
    if deepspeed.is_launched():
        deepspeed.configure(arguments.deepspeed_plugin, bf16=train.bf16)
    return arguments


def micro_batch(train: TrainConfig, processes: int) -> int:
    """Return the sequences that a process takes at once.

    Raises:
        UserError: the batch does not split evenly.
    """
    pieces = processes * train.gradient_accumulation
    if train.batch_size % pieces:
        raise UserError(
            f"batch_size {train.batch_size} does not split over {processes} processes x "
            f"{train.gradient_accumulation} micro-batches; choose a multiple of {pieces}"
        )
    return train.batch_size // pieces


def _recomputing() -> dict[str, Any]:
    """Activation checkpointing, under the name that this transformers version has for it."""
    names = transformers.TrainingArguments.__dataclass_fields__
    kind = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {kind: True, f"{kind}_kwargs": {"use_reentrant": False}}


def _check_tracker(tracker: str) -> None:
    if tracker in ("none", "tensorboard"):
        return
    if tracker not in INTEGRATION_TO_CALLBACK:
        known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
        raise UserError(f"unknown tracker {tracker!r}; choose none or one of {known}")
    if tracker not in get_available_reporting_integrations():
        raise UserError(f"the tracker {tracker!r} is not installed; install it, or choose tensorboard or none")
