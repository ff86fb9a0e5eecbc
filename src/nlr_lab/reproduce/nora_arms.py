"""Rivals of NoRA that neither peft nor this library has, as arms of the form `nlr_lab.reproduce.nora_arms:prompts`.

Each freezes a pretrained ViT, puts something trained into it (nora.txt, Tables 1 and 3, appendix C.1), and trains that
and the new head.

| tensor                     | init                                                       |
|----------------------------|------------------------------------------------------------|
| prompts (count, d)         | U(+-sqrt(6 / (3 p^2 + d))), p a patch's side, as VPT's own |
| down of a bottleneck       | nn.Linear's own                                            |
| up of a bottleneck         | 0: starts as the pretrained network                        |
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nlr_lab.tasks.finetune.pretrained import head_modules
from nonlinear_lowrank.methods.rational.parametric import ELU, AReLU, PReLU
from nonlinear_lowrank.methods.rational.sites import survey
from nonlinear_lowrank.validation import check_choice


def prompts(model: Any, count: int = 10) -> Any:
    """Put `count` learned tokens behind the class token of the first block's input (VPT, shallow)."""
    _freeze(model)
    embeddings, config = model.base_model.embeddings, model.config
    made = torch.empty(count, config.hidden_size, device=model.device)
    bound = math.sqrt(6 / (3 * config.patch_size**2 + config.hidden_size))
    embeddings.prompts = nn.Parameter(nn.init.uniform_(made, -bound, bound))

    def add(module: Any, inputs: Any, x: Tensor) -> Tensor:  # (B, T, d)
        return torch.cat([x[:, :1], module.prompts.expand(len(x), -1, -1), x[:, 1:]], dim=1)

    embeddings.register_forward_hook(add)
    return model


def bottlenecks(model: Any, width: int = 48) -> Any:
    """Put x + up(gelu(down(x))) behind every block (Adapter)."""
    _freeze(model)
    d = model.config.hidden_size
    for block in model.base_model.layers:
        up = nn.Linear(width, d)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        block.bottleneck = nn.Sequential(nn.Linear(d, width), nn.GELU(), up).to(model.device)
        block.register_forward_hook(lambda module, inputs, x: x + module.bottleneck(x))
    return model


_ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "prelu": PReLU,
    "arelu": lambda width: AReLU(),
    "elu": lambda width: ELU(),
}


def activations(model: Any, kind: str) -> Any:
    """Put another trained function in every activation's place: "prelu", "arelu" or "elu"."""
    check_choice("kind", kind, _ACTIVATIONS)
    _freeze(model)
    for name, site in survey(model).sites.items():
        if not site.skipped:
            model.set_submodule(name, _ACTIVATIONS[kind](site.width or 1).to(model.device))
    return model


def _freeze(model: Any) -> None:
    """Leave the head trained alone."""
    model.requires_grad_(False)
    for name in head_modules(model):
        model.get_submodule(name).requires_grad_(True)
