"""Conversion of a sine adapter to a plain LoRA adapter, for tools that know LoRA only; it reports the error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import transpose
from safetensors.torch import save_file
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import check_new_or_empty, staged_output
from nonlinear_lowrank.validation import one_line

from .sine import SineLayer


@torch.no_grad()
def convert_to_lora(
    model: nn.Module,
    rank: float,
    adapter_name: str = "default",
    *,
    path: str | Path | None = None,
    report: Callable[[str], Any] = print,
) -> tuple[peft.LoraConfig, dict[str, Tensor]]:
    """Return the nearest LoRA adapter of a rank (peft's conversion), and report for every layer how far away it is.

    The sine gives a delta a far higher rank than r, so a LoRA that comes near needs a rank far above r; merging
    is exact and costs nothing afterwards.

    Args:
        model: a PeftModel with a sine adapter on linears.
        rank: LoRA's rank; a float in (0, 1] is the share of squared singular values to keep, layer by layer.
        adapter_name: which adapter.
        path: a new or empty folder to save the LoRA adapter in.
        report: called with a line for each layer: name, rank, Frobenius norm of the error over that of the delta.

    Returns:
        LoRA's config and state dict.

    Raises:
        UserError: there is no such adapter, a rank is out of range, some adapted module is not a linear, or the folder
            is not empty.
    """
    ours = {name: each for name, each in model.named_modules() if isinstance(each, SineLayer)}
    layers = {name: each for name, each in ours.items() if each.present([adapter_name])}
    if not layers:
        raise UserError(f"the model has no adapter {adapter_name!r} of this library to convert")
    if isinstance(rank, bool) or rank <= 0 or (isinstance(rank, float) and rank > 1):
        raise UserError(f"rank must be a positive integer, or a share in (0, 1], got {rank!r}")
    output = Path(path).expanduser() if path is not None else None
    if output is not None:
        check_new_or_empty(output)
    try:
        config, tensors = peft.convert_to_lora(model, rank, adapter_name)
    except (ValueError, TypeError) as reason:  # peft's, of ranks and of layers that are no linear
        raise UserError(one_line(reason)) from reason
    config.fan_in_fan_out = all(layer.transposed for layer in layers.values())
    errors, norms = 0.0, 0.0
    for name, layer in layers.items():
        if f"{name}.lora_A.weight" not in tensors:
            continue
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        delta = transpose(layer.get_delta_weight(adapter_name), layer.transposed)
        error, norm = (b @ a - delta).norm().item(), delta.norm().item()
        errors, norms = errors + error**2, norms + norm**2
        report(f"{name}: rank {len(a)}, relative error {error / norm if norm else 0.0:.4f}")
    report(f"all {len(layers)} layers: relative error {(errors / norms) ** 0.5 if norms else 0.0:.4f}")
    if output is not None:
        with staged_output(output) as folder:
            save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME)
            config.save_pretrained(str(folder))
    return config, tensors
