"""The files of a checkpoint, a folder `step-000100` that is complete when it has that name.

    config.json, model.safetensors   as save_pretrained writes them, with a modeling file: it loads as a model too,
        also where it was sharded: then a file of whole tensors from each process, and an index;
        or adapter_config.json, adapter_model.safetensors    of an adapter, its head with it
        or trainable.safetensors     of a model that is partly frozen: what is trained
    optimizer/*.safetensors          the optimizer's state, a file from each process that has a part of it
    state.json                       parameter groups, schedule and the random states of every process
    trainer_state.json               step and log history, as Trainer has it
    manifest.json                    step, seconds, bytes and sha256 of every file

Nothing is pickled, except DeepSpeed's own state in the place of weights and optimizer (see `deepspeed`). The folder
must be visible to all processes. With another number of processes a run resumes, but not bit-exactly.
"""

import base64
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

from nlr_lab.runtime.processes import on_rank_0
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.classes import in_files
from nonlinear_lowrank.ops.precision import all_finite
from nonlinear_lowrank.validation import one_line

from . import deepspeed
from .arms import is_adapted

_FILE = 1 << 28  # bytes of a file of the optimizer's, by all processes


# --- weights: files that load as a model or an adapter, read back in place ------------------------------------


def whole_weights(trainer: Trainer) -> dict[str, Any]:
    """Return weights by their names in memory; of a sharded model whole, and on rank 0 alone."""
    if trainer.is_fsdp_enabled:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(trainer.model, options=options))  # type: ignore[arg-type]
    plain: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if trainer.is_deepspeed_enabled:
        return deepspeed.gathered_weights(plain, keep=trainer.is_world_process_zero())
    return dict(plain.state_dict())


def write_model(folder: Path, model: Any, weights: dict[str, Any]) -> None:
    """Write a model, or an adapter alone, as save_pretrained does; `weights` are by their names in memory."""
    if is_adapted(model):
        # Whether embeddings were resized peft would ask the hub; ours never are.
        model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
    elif isinstance(model, PreTrainedModel):
        # Training has no use for the cache, but who loads the model to generate does.
        config: Any = model.config
        cached, config.use_cache = config.use_cache, True
        try:  # nothing is converted, so that resuming is exact
            model.save_pretrained(folder, state_dict=in_files(model, weights), save_original_format=False)
        finally:
            config.use_cache = cached
    else:
        kept: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
        for name, value in weights.items():  # tied tensors once
            kept.setdefault((value.data_ptr() or name, value.shape), (name, value.contiguous()))
        save_file(dict(kept.values()), folder / "model.safetensors", metadata={"format": "pt"})


def copied_weights(folder: Path, model: Any, *, rank: int, processes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Copy this process's share of what a checkpoint holds of a model to the CPU, by file and name in it.

    Other files go into `folder` at once. With several `processes` a share is whole tensors: a sharded one is put
    together in all processes, one after another, and stays in one of them, so that none ever holds the model, and
    `from_pretrained` finds shards and an index as of save_pretrained. An adapter is one file. All processes call it.
    """
    weights = model.state_dict()
    laid_out = on_rank_0(lambda: _lay_out(folder, model, weights))
    share: dict[str, dict[str, torch.Tensor]] = {}
    for file, names in laid_out.items():
        shards = 1 if is_adapted(model) else processes
        places, sizes = dict[str, str](), [weights[name].nbytes for name in names.values()]
        for (key, name), owner in zip(names.items(), _owners(sizes, shards), strict=True):
            tensor = weights[name].detach()
            places[key] = file if shards == 1 else f"{Path(file).stem}-{owner + 1:05}-of-{shards:05}.safetensors"
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if owner == rank:
                share.setdefault(places[key], {})[key] = whole.to("cpu", copy=True).contiguous()
        if shards > 1 and rank == 0:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
            (folder / file).unlink()
            (folder / f"{file}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return share


def _owners(sizes: Sequence[int], processes: int) -> list[int]:
    """Return for tensors of these bytes the process that writes each: an equal share of the bytes for all."""
    total = max(sum(sizes), 1)
    starts = list(accumulate(sizes, initial=0))[:-1]
    return [min(start * processes // total, processes - 1) for start in starts]


def write_weights(folder: Path, share: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Write this process's share of the weights."""
    for file, tensors in share.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})


def _lay_out(folder: Path, model: Any, weights: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Write a checkpoint of numbers in the places of tensors; return the names in memory, by file and name there.

    So save_pretrained alone knows names, and which of tied tensors is kept, and need not be called with the weights.
    """
    numbers: dict[Any, torch.Tensor] = {}
    stand_ins, names = {}, list(weights)
    for number, (name, tensor) in enumerate(weights.items()):
        place = (_own_part(tensor).data_ptr() or name, tensor.shape)
        stand_ins[name] = numbers.setdefault(place, torch.tensor(number))
    write_trained(folder, model, stand_ins)
    files = sorted(folder.glob("*.safetensors"))
    return {file.name: {key: names[int(each)] for key, each in load_file(file).items()} for file in files}


def write_trained(folder: Path, model: Any, weights: dict[str, Any]) -> None:
    """Write for a checkpoint what training changes: of an adapted model also buffers, such as running means."""
    if is_adapted(model) or all(each.requires_grad for each in model.parameters()):
        write_model(folder, model, weights)
        name, tensors = "buffers", _buffers(model, weights) if is_adapted(model) else {}
    else:
        name, tensors = "trainable", in_files(model, _without_frozen(model, weights))
    if tensors:
        save_file({key: each.contiguous() for key, each in tensors.items()}, folder / f"{name}.safetensors")


def read_weights(folder: Path, model: Any) -> None:
    """Fill a model, whole or sharded, from a checkpoint; raise UserError where it is of another model."""
    weights = model.state_dict()
    if is_adapted(model):
        from peft import get_peft_model_state_dict

        adapter = get_peft_model_state_dict(model, save_embedding_layers=False, state_dict=dict(weights))
        wanted = {**adapter, **_buffers(model, weights)}
    else:
        wanted = in_files(model, _without_frozen(model, weights))
    saved = tensor_names(folder)
    places = {_own_part(wanted[name]).data_ptr() for name in wanted.keys() & saved}  # a tied tensor is saved once
    missing = [name for name in wanted.keys() - saved if _own_part(wanted[name]).data_ptr() not in places]
    odd = [f"missing tensor {name!r}" for name in sorted(missing)]
    odd += [f"unexpected tensor {name!r}" for name in sorted(saved - wanted.keys())]
    try:
        if not odd:
            _read_tensors(folder, {name: tensor for name, tensor in wanted.items() if name in saved})
    except ValueError as error:  # a tensor of another shape
        odd = [one_line(error, 200)]
    if odd:
        hint = "resume with the recipe and version it was written with"
        raise UserError(f"{folder} does not fit the model: {odd[0]}; {hint}")


def is_finite(model: nn.Module) -> bool:
    """Return whether this process's part of all trained weights is finite."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return all(all_finite(_own_part(each).detach()) for each in trained)


def _without_frozen(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, each in parameters if not each.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def _own_part(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor; ZeRO-3 leaves an empty one in its place."""
    return tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "ds_tensor", tensor)


def _buffers(model: nn.Module, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in weights.items() if name not in parameters}


# --- the optimizer's tensors, whole or sharded, by torch's distributed checkpoints ----------------------------


class OptimizerPart(NamedTuple):
    """A process's part of an optimizer's state."""

    tensors: dict[str, Any]
    """Copies on the CPU, as "exp_avg/<parameter>"."""
    files: dict[str, int]
    """Number of the file of every tensor, also of other processes'."""
    groups: Any
    """Parameter groups."""


def copied_optimizer(model: nn.Module, wrapped: Any, *, rank: int, processes: int) -> OptimizerPart:
    """Copy this process's part to the CPU: its shards, and a share of the tensors that every process has whole."""
    state: Any = get_optimizer_state_dict(model, getattr(wrapped, "optimizer", wrapped))
    tensors = _tensors(state)
    whole = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    owners = dict(zip(whole, _owners([tensors[name].nbytes for name in whole], processes), strict=True))
    own = {name: tensor for name, tensor in tensors.items() if owners.get(name, rank) == rank}
    copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in own.items()}
    starts = accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
    # torch copies a whole file in memory before it writes it, and lets no other thread run meanwhile.
    files = {name: 1 + before // _FILE for name, before in zip(tensors, starts, strict=False)}
    return OptimizerPart(copies, files, state["param_groups"])


def write_optimizer(folder: Path, part: OptimizerPart, group: Any = None) -> None:
    """Write optimizer/*.safetensors, each process its own part; all call it, and exchange plans in `group`."""
    with _plain_errors():
        writer = HuggingFaceStorageWriter(str(folder / "optimizer"), part.files, save_distributed=True)
        dcp.save(part.tensors, storage_writer=writer, process_group=group)


def read_optimizer(folder: Path, model: nn.Module, wrapped: Any, groups: Any = None) -> None:
    """Fill the optimizer from a checkpoint, and its groups where those are given; UserError if it was another one."""
    optimizer = getattr(wrapped, "optimizer", wrapped)  # inside accelerate's wrapper
    state: Any = get_optimizer_state_dict(model, optimizer)
    wanted = _tensors(state)
    if missing := sorted(wanted.keys() - tensor_names(folder / "optimizer")):
        raise UserError(f"the optimizer of {folder} has no {missing[0]}: it was a different one; use that")
    _read_tensors(folder / "optimizer", wanted)
    if groups is not None:  # JSON has no tuples
        state["param_groups"] = [{key: tuple(v) if key == "betas" else v for key, v in each.items()} for each in groups]
    set_optimizer_state_dict(model, optimizer, state)


def check_optimizer(folder: Path, model: nn.Module) -> None:
    """Raise UserError unless a checkpoint has the optimizer's state of all that is trained in a model, and no other."""
    if not (folder / "optimizer").is_dir():
        hint = "init_from must be a run's checkpoint, as in runs/first/checkpoints/step-000100"
        raise UserError(f"init_optimizer: there is no {folder / 'optimizer'}; {hint}")
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    saved = {name.partition("/")[2] for name in tensor_names(folder / "optimizer")}
    if odd := sorted(trained ^ saved):
        where = "has no state of" if odd[0] in trained else "is of a model with"
        hint = "omit init_optimizer, or --arm baseline trains what the checkpoint has"
        raise UserError(f"init_optimizer: {folder} {where} {odd[0]}; {hint}")


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def _read_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    with _plain_errors():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}/{name}": tensor for name, own in state["state"].items() for key, tensor in own.items()}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of the process that failed, which torch wraps into a BaseException in every process."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


# --- schedule, groups and random states -----------------------------------------------------------------------


def read_state(folder: Path | str) -> dict[str, Any]:
    """Return what is in state.json."""
    return dict(json.loads((Path(folder) / "state.json").read_text(encoding="utf-8")))


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and this process's device, as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 # type: ignore[misc]
    states = {"torch": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    coded = {name: base64.b64encode(state.cpu().numpy().tobytes()).decode() for name, state in states.items()}
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], **coded}  # type: ignore[union-attr]


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Reverse `random_state`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
    for name in ("torch", device.type):
        if name in state:
            coded = torch.frombuffer(bytearray(base64.b64decode(state[name])), dtype=torch.uint8)
            torch.set_rng_state(coded) if name == "torch" else getattr(torch, name).set_rng_state(coded, device)
