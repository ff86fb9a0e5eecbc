"""Linears that keep a model's own draw when the others get the paper's init.

Examples: residual projections scaled down by the depth (GPT-2, ModernBERT), T5's queries, whose attention has no
scale, gates that start at zero (xLSTM), nonzero biases. They are detected by what was drawn: most weights of a model
have one standard deviation, or one that falls with the square root of a width.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from nonlinear_lowrank.methods.matrix import linear_shape

from .branch import folded

_LAWS: Sequence[Callable[[int, int], float]] = (
    lambda d_in, d_out: 1.0,
    lambda d_in, d_out: d_in**-0.5,
    lambda d_in, d_out: (d_in + d_out) ** -0.5,
    lambda d_in, d_out: d_out**-0.5,
)
_NEAR = 0.25  # of a standard deviation's law; that of 256 numbers is off by 0.04


def own_inits(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Return, of these linears, the weights and biases that the model has drawn unlike most, by folded name."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for name in names:
        module: Any = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point() and not weight.is_meta:
            groups[folded(name)].append(module)
    stds = {name: fmean(each.weight.std(correction=0).item() for each in of) for name, of in groups.items()}
    usual: set[str] = set()
    for law in _LAWS:
        scaled = {name: std / law(*linear_shape(groups[name][0])) for name, std in stds.items()}
        for middle in scaled.values():
            near = {name for name, value in scaled.items() if abs(value - middle) <= _NEAR * middle}
            usual = max(usual, near, key=lambda names: sum(len(groups[name]) for name in names))
    with_bias = {name: of for name, of in groups.items() if getattr(of[0], "bias", None) is not None}
    drawn = [name for name, of in with_bias.items() if any(each.bias.any() for each in of)]
    biases = drawn if 2 * len(drawn) < len(with_bias) else []
    return (*(f"{name}.weight" for name in stds if name not in usual), *(f"{name}.bias" for name in biases))


def zero_weights(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Return the weights of these linears that are all zero, by folded name: gates and outputs that start closed."""
    weights = ((folded(name), getattr(model.get_submodule(name), "weight", None)) for name in names)
    held = ((name, each) for name, each in weights if isinstance(each, Tensor) and not each.is_meta)
    return tuple(dict.fromkeys(f"{name}.weight" for name, each in held if not each.any()))
