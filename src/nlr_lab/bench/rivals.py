"""NOBLE's layer computed in other ways, beside which ours is measured: the same parameters, initial values and groups.

`noble-formula` is `noble_linear_reference` through autograd. `noble-official` is the layer of the authors' release as
`NobleConfig.official` and `methods.noble.checkpoint` describe it, less its biases: it is written like this there,
product by product, and autograd saves what it will. `noble-visible` is the plain formula with its bottleneck recomputed
in backward by `torch.utils.checkpoint`: it saves what our operator saves, and the compiler sees and fuses all of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nonlinear_lowrank.methods.noble import NobleLinear
from nonlinear_lowrank.methods.noble.op import bottleneck, noble_linear_reference


def formula(layer: Any, x: Tensor) -> Tensor:
    """(..., d_in) -> (..., d_out) by the plain formula."""
    return noble_linear_reference(x, layer.weight, layer.bias, layer.branch())


def official(layer: Any, x: Tensor) -> Tensor:
    """(..., d_in) -> (..., d_out) as in the authors' release."""
    main = layer.dense(x)
    h = F.linear(x, layer.noble_down)
    h = torch.cos(layer.noble_frequency1 * h + layer.noble_phase1)
    h = F.linear(h, layer.noble_mix1)
    h = torch.cos(layer.noble_frequency2 * h + layer.noble_phase2)
    return main + F.linear(h, layer.noble_up)


def visible(layer: Any, x: Tensor) -> Tensor:
    """(..., d_in) -> (..., d_out), x and h saved alone."""
    branch = layer.branch()
    u = checkpoint(bottleneck, F.linear(x, branch.down), branch, use_reentrant=False, preserve_rng_state=False)
    return layer.dense(x) + F.linear(u, branch.up)


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "noble-formula": formula,
    "noble-official": official,
    "noble-visible": visible,
}


def put_rival(model: nn.Module, name: str) -> nn.Module:
    """Return the model with every NOBLE layer computed as a rival does."""
    for layer in model.modules():
        if isinstance(layer, NobleLinear):
            layer.forward = partial(FORWARDS[name], layer)  # type: ignore[method-assign]
    return model
