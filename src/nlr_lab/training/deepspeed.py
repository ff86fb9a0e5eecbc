"""DeepSpeed's needs beside Trainer.

Its engine splits the optimizer's state into flat buffers and can only pickle them. Reading a pickle can run code: its
checkpoints are written and read with `allow_torch_checkpoints` alone, from the run's own folder, with no link in it,
after every file's hash was found to be the manifest's, and by as many processes as wrote them.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nlr_lab.runtime.processes import on_rank_0
from nlr_lab.runtime.storage import read_manifest
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import install_hint


def check_engine(*, muon: bool, allowed: bool) -> None:
    """Raise UserError where DeepSpeed cannot be used, or would spoil the run."""
    if not allowed:
        raise UserError(
            "DeepSpeed's checkpoints are pickled; give --allow-torch-checkpoints (reading a pickle can run code: only "
            "for runs of your own), or use FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"DeepSpeed is not installed: {install_hint('deepspeed')}, or use FSDP2")
    if muon:
        raise UserError("Muon needs whole matrices, which DeepSpeed flattens; omit it, or use FSDP2")


def configure(plugin: Any, *, bf16: bool) -> None:
    """Make DeepSpeed's bfloat16 ours, autocast; raise UserError where it would have half-precision weights."""
    settings = plugin.hf_ds_config.config
    for name in ("bf16", "fp16"):
        if settings.get(name, {}).get("enabled") in (True, "true"):
            raise UserError(
                f"DeepSpeed's {name} casts all weights, frequencies and phases with them; take it out of its "
                "configuration and give --train.bf16, which is autocast"
            )
    if bf16:
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}


def check_readable(folder: Path, checkpoints: Path, *, deepspeed: bool, processes: int) -> None:
    """Raise UserError for a checkpoint that the engine cannot or must not read. All processes call it.

    That is one of another engine or number of processes; or one that is pickled, and damaged, not in the run's folder
    `checkpoints`, or behind a link.
    """
    pickled = (folder / "latest").is_file()  # DeepSpeed writes it into every checkpoint
    if deepspeed != pickled:
        how = "by" if pickled else "without"
        raise UserError(
            f"{folder} was written {how} DeepSpeed; resume with the engine the run began with, or start over"
        )
    if not pickled:
        return
    if folder.resolve().parent != checkpoints.resolve() or any(each.is_symlink() for each in folder.rglob("*")):
        raise UserError(f"{folder} is not in the run's own folder, or has links; pickles are read from nowhere else")
    written_by = on_rank_0(lambda: read_manifest(folder))["processes"]
    if written_by != processes:
        raise UserError(f"{folder} was written by {written_by} DeepSpeed processes and there are {processes}")


def gathered_weights(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the whole state dict on the CPU, gathered parameter by parameter; empty where it is not kept."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}  # tied ones stay one
    for name, value in model.state_dict().items():
        parameter = parameters.get(name, value)
        if id(parameter) not in seen:
            with GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                seen[id(parameter)] = parameter.detach().cpu().clone() if keep else value
        found[name] = seen[id(parameter)]
    return found if keep else {}
