"""Checkpoints to which every process writes its own part, in formats of torch and DeepSpeed: a model that one process
cannot hold has no other.

    step-000100/shards/            FSDP2: torch.distributed.checkpoint, whose metadata are pickled; any number of
                                   processes reads it
    step-000100/global_step100/    DeepSpeed's engine, pickled throughout; only as many processes read it as wrote it

Reading a pickle can run code. Both are therefore written and read with `allow_torch_checkpoints` alone, from the run's
own folder, with no link in it, and after every file's hash was found to be the manifest's.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nlr_lab.runtime.processes import gather_objects, on_first_process
from nlr_lab.runtime.storage import read_manifest
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import MANIFEST, describe_file
from nonlinear_lowrank.validation import one_line

from .state_files import read_plain

SHARDS, LATEST = "shards", "latest"
GATHERED_BYTES = 64 << 30
"""Weights and optimizer state up to which FSDP2's checkpoints are gathered to one process without a word: AdamW's of
some 5e9 trained numbers in float32."""

_MEND = "give --allow-torch-checkpoints (reading a pickle can run code: only for runs of your own)"


def check_checkpoint_format(model: nn.Module, *, sharding: bool, allowed: bool) -> None:
    """Refuses, before a run begins, checkpoints that one process would have to hold.

    Args:
        model: with what is to be trained.
        sharding: whether the engine shards the model.
        allowed: `allow_torch_checkpoints`.

    Raises:
        UserError: they are larger than `GATHERED_BYTES`.
    """
    size = sum(3 * each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    if sharding and not allowed and size > GATHERED_BYTES:
        raise UserError(
            f"checkpoints of {size / 2**30:,.0f} GiB would be gathered on the first process (at most "
            f"{GATHERED_BYTES >> 30} GiB are); {_MEND} and each process writes its own part"
        )


def check_readable(
    folder: Path, checkpoints: Path, *, deepspeed: bool, allowed: bool, processes: int, verified: bool = False
) -> None:
    """Refuses a checkpoint that this run may or can not go on from; all processes call it.

    Args:
        folder: the checkpoint.
        checkpoints: the run's folder of them.
        deepspeed: whether DeepSpeed trains.
        allowed: `allow_torch_checkpoints`.
        processes: how many there are.
        verified: every file has just been held against the manifest.

    Raises:
        UserError: it is pickled and that is not allowed, it lies elsewhere or behind a link, or it is of another engine
            or number of processes.
    """
    is_deepspeeds, is_sharded = (folder / LATEST).is_file(), (folder / SHARDS).is_dir()
    if deepspeed != is_deepspeeds:
        raise UserError(
            f"{folder} was {'' if is_deepspeeds else 'not '}written by DeepSpeed; go on with the engine the run began "
            "with, or start anew"
        )
    if not (is_deepspeeds or is_sharded):
        return
    if not allowed:
        raise UserError(f"{folder} is pickled; to go on from it {_MEND}")
    if folder.resolve().parent != checkpoints.resolve() or any(each.is_symlink() for each in folder.rglob("*")):
        raise UserError(f"{folder} is not in the run's own folder, or has links; pickles are read from nowhere else")
    written_by = on_first_process(lambda: (_manifest if verified else read_manifest)(folder))["processes"]
    if is_deepspeeds and written_by != processes:
        raise UserError(
            f"{folder} was written by {written_by} DeepSpeed processes and there are {processes}; start as many"
        )


def write_shards(trainer: Any, folder: Path) -> dict[str, Any]:
    """Writes weights and optimizer state; all processes call it with one folder.

    Returns:
        What the manifest says of every file in the folder, each hashed by one of the processes.
    """
    if trainer.is_deepspeed_enabled:
        trainer.model_wrapped.save_checkpoint(str(folder), exclude_frozen_parameters=trainer.adapted)
    else:
        state = {"model": _model_state(trainer.model), "optimizer": _optimizer_state(trainer)}
        dcp.save(state, checkpoint_id=folder / SHARDS)
    gather_objects(None)  # all have written
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    mine = files[trainer.args.process_index :: trainer.args.world_size]
    parts = gather_objects({str(file.relative_to(folder)): describe_file(file) for file in mine})
    return {name: entry for part in parts for name, entry in part.items()}


def read_model(trainer: Any, model: nn.Module, folder: Path) -> None:
    """FSDP2's weights into a model, sharded or whole."""
    state = {"model": _model_state(model)}
    _load(state, folder)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))


def read_optimizer_state(trainer: Any, folder: Path) -> None:
    """FSDP2's optimizer state into the trainer's."""
    state = {"optimizer": _optimizer_state(trainer)}
    _load(state, folder)
    set_optimizer_state_dict(trainer.model, plain_optimizer(trainer.optimizer), state["optimizer"])


def trained_is_finite(model: nn.Module) -> bool:
    """Whether this process's part of what is trained is finite."""
    parts = (_own_part(each).detach() for each in model.parameters() if each.requires_grad)
    return all(bool(torch.isfinite(part).all()) for part in parts)


def gathered_weights(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """A DeepSpeed model's whole state dict on the CPU, one parameter after the other; empty where it is not kept."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: dict[int, torch.Tensor] = {}  # tied ones stay one
    found = {}
    for name, value in model.state_dict().items():
        parameter = parameters.get(name)
        if parameter is None:
            whole = value
        elif id(parameter) in seen:
            whole = seen[id(parameter)]
        else:
            with GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                whole = parameter.detach().cpu().clone() if keep else value
            seen[id(parameter)] = whole
        if keep:
            found[name] = whole
    return found


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """accelerate's wrapper has the optimizer inside."""
    return getattr(optimizer, "optimizer", optimizer)


def _manifest(folder: Path) -> Any:
    return read_plain(folder / MANIFEST)


def _model_state(model: nn.Module) -> dict[str, Any]:
    partly_frozen = not all(each.requires_grad for each in model.parameters())
    return dict(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=partly_frozen)))


def _optimizer_state(trainer: Any) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(trainer.model, plain_optimizer(trainer.optimizer)))


def _load(state: dict[str, Any], folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*load in a single process")
            dcp.load(state, checkpoint_id=folder / SHARDS)
    except Exception as error:  # torch raises whatever its planner met
        why = one_line(error, 200)
        raise UserError(
            f"{folder} does not fit the model: {why}; resume with the recipe and version it was written with"
        ) from error


def _own_part(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "to_local"):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)  # ZeRO-3 leaves an empty one in its place
