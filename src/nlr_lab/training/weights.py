"""The weights of a checkpoint, in files that load as a model or an adapter, read back in place."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.names import in_files
from nonlinear_lowrank.validation import one_line

from .state_files import read_tensors, tensor_names


def is_adapted(model: Any) -> bool:
    """Return whether it is a model of peft's; without importing peft, which takes seconds."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def without_frozen(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights without the parameters that are not trained; of an adapter all, which peft sorts out itself."""
    if is_adapted(model):
        return weights
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def is_finite(model: nn.Module) -> bool:
    """Return whether this process's part of what is trained is finite: a loss can be, and its gradient not."""
    trained = (_own_part(each).detach() for each in model.parameters() if each.requires_grad)
    return all(bool(torch.isfinite(part).all()) for part in trained)


def write_weights(folder: Path, model: Any, weights: dict[str, Any], *, everything: bool) -> None:
    """Write a model's, or an adapter's, files.

    A checkpoint has the buffers of an adapted model too (running means change in training), and of a model that is
    partly frozen only what is trained.

    Args:
        folder: of the files.
        model: whose weights they are.
        weights: by their names in memory.
        everything: write what is frozen too, and no buffers beside an adapter.
    """
    if is_adapted(model):
        # Whether embeddings were resized peft would ask the hub; ours never are.
        model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        buffers = {name: value.contiguous() for name, value in _buffers(model, weights).items()}
        if buffers and not everything:
            save_file(buffers, folder / "buffers.safetensors")
    elif not everything and not all(each.requires_grad for each in model.parameters()):
        trained = {name: value.contiguous() for name, value in in_files(model, weights).items()}
        save_file(trained, folder / "trainable.safetensors")
    elif not isinstance(model, PreTrainedModel):
        kept: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
        for name, value in weights.items():  # tied tensors once
            kept.setdefault((value.data_ptr() or name, value.shape), (name, value.contiguous()))
        save_file(dict(kept.values()), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        # Training has no use for the cache, but who loads the model to generate does.
        cached, model.config.use_cache = model.config.use_cache, True
        try:
            with _no_progress_bars():
                # Nothing is converted, so that resuming is exact.
                model.save_pretrained(folder, state_dict=in_files(model, weights), save_original_format=False)
        finally:
            model.config.use_cache = cached


def read_weights(folder: Path, model: Any) -> None:
    """Fill a model, whole or sharded, from what `write_weights` wrote for a checkpoint. All processes call it.

    Raises:
        UserError: the files are of another model.
    """
    weights = model.state_dict()
    if is_adapted(model):
        from peft import get_peft_model_state_dict

        wanted = {
            **get_peft_model_state_dict(model, save_embedding_layers=False, state_dict=dict(weights)),
            **_buffers(model, weights),
        }
    else:
        wanted = in_files(model, without_frozen(model, weights))
    saved = tensor_names(folder)
    places = {_own_part(wanted[name]).data_ptr() for name in wanted.keys() & saved}
    # A tied tensor is saved once.
    missing = [name for name in wanted.keys() - saved if _own_part(wanted[name]).data_ptr() not in places]
    if odd := sorted(missing) or sorted(saved - wanted.keys()):
        raise _does_not_fit(folder, f"{'missing' if missing else 'unexpected'} tensor {odd[0]!r}")
    try:
        read_tensors(folder, {name: tensor for name, tensor in wanted.items() if name in saved})
    except ValueError as error:  # a tensor of another shape
        raise _does_not_fit(folder, one_line(error, 200)) from error


def _own_part(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor; ZeRO-3 leaves an empty one in its place."""
    return tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "ds_tensor", tensor)


def _buffers(model: nn.Module, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in weights.items() if name not in parameters}


def _does_not_fit(folder: Path, why: str) -> UserError:
    return UserError(f"{folder} does not fit the model: {why}; resume with the recipe and version it was written with")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
