"""A branch's draws and sum; in modeling files too, and so it imports torch and transformers alone."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import initialization as init

LEAKY_SLOPE = 0.01
BRANCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": torch.cos,
    "tanh": torch.tanh,
    "leaky_relu": lambda z: F.leaky_relu(z, LEAKY_SLOPE),
    "gelu": F.gelu,
    "silu": F.silu,
}


def draw_up(up: Tensor, settings: Any) -> None:
    """Draw up projections (..., d_out, r) as in a model from scratch."""
    init.normal_(up, std=settings.up_scale / up.shape[-1] ** 0.5)


def draw_branch(tensors: Mapping[str, Tensor | None], settings: Any, d_in: int) -> None:
    """Draw a branch's tensors, or those of all experts, by the ends of their names; the table is in `layer`."""
    for name, tensor in tensors.items():
        kind = name.rstrip("0123456789")
        if tensor is None:
            continue
        r = tensor.shape[-1]
        if kind == "down":
            init.normal_(tensor, std=d_in**-0.5)
        elif kind == "up" and settings.init != "pretrained":
            draw_up(tensor, settings)
        elif kind == "mix" and settings.mix_scale is not None:
            init.normal_(tensor, std=settings.mix_scale / r**0.5)
        elif kind == "mix" and tensor.ndim == 2:
            init.xavier_uniform_(tensor)
        elif kind == "mix":  # with the fans of one expert
            init.uniform_(tensor, -((3 / r) ** 0.5), (3 / r) ** 0.5)
        elif kind == "frequency":
            init.uniform_(tensor, *settings.frequency_range)
        elif kind == "phase":
            init.normal_(tensor, std=settings.phase_std)
        elif kind == "bias":  # before the activations: the first zero
            bound = 0.0 if name == "bias1" else r**-0.5
            init.uniform_(tensor, -bound, bound)
        else:
            init.zeros_(tensor)


def joined(dense: Tensor, branch: Tensor, gate: Tensor | None, scale: float) -> Tensor:
    """Return dense part and branch as one output: their sum, or the gate's mixture of both."""
    branch = branch.to(dense.dtype)
    if gate is None:
        y = dense + branch
    else:
        gate = gate.to(dense.dtype)
        y = gate * dense + (1 - gate) * branch
    return y if scale == 1 else y * scale


def folded(name: str) -> str:
    """Return a module's name without the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def has_own_init(name: str, tensor: str, own: Iterable[str]) -> bool:
    """Return whether a linear's "weight" or "bias" is among `own_init`; a head's prefix may be there or not."""
    ours = f".{folded(name)}.{tensor}"
    return any(ours.endswith(f".{folded(each)}") or f".{folded(each)}".endswith(ours) for each in own)
