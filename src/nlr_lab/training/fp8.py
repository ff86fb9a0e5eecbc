"""Dense linears in float8, by torchao; branches, output heads, embeddings and norms stay as they are."""

from typing import Any

import torch
from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.surgery.targets import output_head_names, unreached_experts
from nonlinear_lowrank.validation import require

from .arms import is_adapted

_MULTIPLE = 16  # of the widths, for the device's float8 products


def to_float8(model: Any, *, verbose: bool = False) -> None:
    """Have the model's linears multiply in float8, forward and backward, in place; weights stay what they are.

    Without a device that has float8 products (CPUs, GPUs before compute capability 8.9) their rounding is emulated,
    which is slower and gives the same numbers.

    Raises:
        UserError: torchao is missing, the model has an adapter, or no linear fits.
    """
    float8 = require("quantized", "torchao.float8")
    if is_adapted(model):
        raise UserError("train.fp8 is for runs that train the weights themselves, and this arm trains an adapter")
    heads, taken = output_head_names(model), [0, 0]

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name in heads:
            return False
        good = module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
        taken[not good] += 1
        return good

    native = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    config = float8.Float8LinearConfig(emulate=not native)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=fits)
    if not taken[0]:
        raise UserError(f"train.fp8 finds no linear whose widths are multiples of {_MULTIPLE}; omit it")
    if verbose:
        how = "" if native else ", emulated on this device"
        print(f"float8: {taken[0]} linears{how}; {taken[1]} of other widths stay in bfloat16")
        if experts := unreached_experts(model):
            print(f"float8: {experts}, and stay in bfloat16")
