"""Hugging Face folders of models that other programs train: their tensors there and back, and the list of layers."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import Origin, write_card
from nonlinear_lowrank.hub.classes import in_memory, listed_problems, register
from nonlinear_lowrank.hub.conversion import copy_companions
from nonlinear_lowrank.hub.registration import FIELD
from nonlinear_lowrank.hub.storage import (
    check_folder,
    check_model_folder,
    check_new_or_empty,
    staged_output,
    weight_files,
)
from nonlinear_lowrank.methods.base import all_methods
from nonlinear_lowrank.surgery.augment import read_entry
from nonlinear_lowrank.validation import one_line

# Settings that change what a layer computes; the others are of its init and training.
_FUNCTION = {"rank", "rank_ratio", "activation", "depth", "fusion", "up_bias", "output_scale", "share_down"}
_FUNCTION |= {"omega", "gain"}


def config_with(plain_config: Any, entries: Sequence[dict[str, Any]]) -> Any:
    """Return the config of a causal language model with these layers, to be saved beside its weights.

    Args:
        plain_config: transformers' config of the model without them.
        entries: what was put in: "method", "config" and "modules", as `augment` lists it.

    Raises:
        UserError: transformers has no causal language model of this config.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(plain_config)
    if entries:
        config.__class__ = register(type(config))
        setattr(config, FIELD, [dict(entry) for entry in entries])
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise UserError(f"{type(plain_config).__name__} is the config of no causal language model")
    config.architectures = [known[type(config)].__name__]
    return config


def write_folder(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    config: Any,
    origin: Origin,
    *,
    assets: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a causal language model's folder; it appears when it is whole.

    Args:
        folder: new or empty.
        tensors: by the names of the Hugging Face model.
        config: of `config_with`.
        origin: for the card.
        assets: folder whose tokenizer and licence are copied.
        dtype: of the weights; default: as they are. Tensors that a method keeps in float32 stay so.

    Raises:
        UserError: the folder is not empty or cannot be written, or tensors are missing, extra or of another shape.
    """
    from transformers import AutoModelForCausalLM

    output = Path(folder).expanduser().resolve()
    check_new_or_empty(output)
    source = None if assets is None else check_folder(assets)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied: dict[str, str] = model.all_tied_weights_keys
    whole = {**{name: tensors[of] for name, of in tied.items() if of in tensors}, **tensors}
    whole = in_memory(model, whole)
    check_state(whole, model.state_dict(), "the exported state")
    if dtype is not None:
        wide = {own for entry in getattr(config, FIELD, None) or [] for own in all_methods()[entry["method"]].float32}
        whole = {key: each if key.rpartition(".")[2] in wide else each.to(dtype) for key, each in whole.items()}
    model.load_state_dict(whole, assign=True)
    model.tie_weights()
    with staged_output(output, {}) as staged:
        model.save_pretrained(staged)
        if source is not None:
            copy_companions(source, staged)
        write_card(staged, origin)
    return output


def read_folder(folder: str | Path, entries: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors, by their names in the files, of a model folder that has these very layers.

    Args:
        folder: as `save_pretrained` writes it.
        entries: as in `config_with`.

    Raises:
        UserError: the folder is not whole, or has other layers, or ones that compute something else.
    """
    saved = check_model_folder(folder).get(FIELD) or []
    theirs, ours = _settings(saved), _settings(entries)
    if theirs != ours:
        name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        there, here = (each.get(name, "a plain linear") for each in (theirs, ours))
        raise UserError(f"{folder} has other layers than the model, first at {name}: {there} there, {here} here")
    return {name: tensor for file in weight_files(check_folder(folder)) for name, tensor in load_file(file).items()}


def read_torch_checkpoint(state: dict[str, Any], folder: str | Path, *, allow: bool) -> None:
    """Fill a state with that of a checkpoint of torch.distributed, in this process alone.

    Args:
        state: tensors of the right shapes, by name; changed in place.
        folder: the checkpoint, of any number of processes.
        allow: its metadata is a pickle, which can run code; whether the user has said that it may.

    Raises:
        UserError: it may not, or the folder holds no checkpoint, or not one with all of these tensors.
    """
    path = check_folder(folder)
    if not (path / ".metadata").is_file():
        raise UserError(f"{path} is no checkpoint of torch.distributed: it has no .metadata")
    if not allow:
        raise UserError(
            f"{path}/.metadata is a pickle, which can run code when it is read; if the checkpoint is your own, pass "
            "allow_torch_checkpoints=True"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what no_dist asks for
            dcp.load(state, checkpoint_id=str(path), no_dist=True)
    except (RuntimeError, ValueError, KeyError, OSError, dcp.CheckpointException) as error:
        raise UserError(f"{path} is not a whole checkpoint of this model: {one_line(error)}") from error


def renamed(convert: Callable[[dict[str, Any]], dict[str, Any]], name: str, shape: tuple[int, int]) -> str:
    """Return a linear's name in the Hugging Face model, by what another program's conversion makes of its weight's.

    Raises:
        UserError: it knows no such weight.
    """
    keys = list(convert({f"{name}.weight": torch.empty(shape, device="meta")}))
    if len(keys) != 1 or not keys[0].endswith(".weight"):
        raise UserError(f"{name} has no name in the Hugging Face model; leave it out with exclude=")
    return keys[0].removesuffix(".weight")


def row_order(convert: Callable[[dict[str, Any]], dict[str, Any]], name: str, shape: tuple[int, int]) -> Tensor:
    """Return which row of a linear's weight a conversion puts at each place (d_out): some permute them for rotary use.

    Raises:
        UserError: it does something else to the weight.
    """
    numbers = torch.arange(shape[0], dtype=torch.int32)
    (moved,) = convert({f"{name}.weight": numbers[:, None].expand(shape)}).values()
    if moved.shape != shape or not moved[:, 0].sort().values.equal(numbers):
        raise UserError(f"{name} is changed by more than the order of its rows; leave it out with exclude=")
    return moved[:, 0].long()


def take_rows(value: Tensor, order: Tensor) -> Tensor:
    """Return `value[order]`, also of a tensor that is split over devices; it is whole on each of them then."""
    if not isinstance(value, DTensor):
        return value[order.to(value.device)]
    mesh = value.device_mesh
    whole: list[Placement] = [Replicate()] * mesh.ndim
    local = value.redistribute(mesh, whole).to_local()
    return DTensor.from_local(local[order.to(local.device)], mesh, whole, run_check=False)


def check_state(state: Mapping[str, Any], wanted: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless a state has exactly the names and shapes of a model's."""
    problems = {
        "missing": sorted(wanted.keys() - state.keys()),
        "extra": sorted(state.keys() - wanted.keys()),
        "of another shape": [k for k in sorted(wanted.keys() & state.keys()) if wanted[k].shape != state[k].shape],
    }
    if words := listed_problems(problems):
        raise UserError(f"{where} does not fit the model: tensors {words}")


def _settings(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the settings that decide what each layer computes, by its name."""
    found: dict[str, str] = {}
    for entry in entries:
        method, config = read_entry(entry)
        values = {key: value for key, value in asdict(config).items() if key in _FUNCTION}
        if hasattr(config, "scale"):
            values["output_scale"] = config.scale
        text = f"{method.name}({', '.join(f'{key}={value}' for key, value in values.items())})"
        found |= dict.fromkeys(entry["modules"], text)
    return found
