"""State dicts of the authors' release (github.com/canva-research/noble), read into augmented models.

The release is a layer, `NOBLELinear` (or `NOBLELinearCosNet`), that its users put in the place of linears. Its names,
of the linear L:

| theirs                                                  | ours                                         |
|---------------------------------------------------------|----------------------------------------------|
| L.linear.weight, .bias                                  | L.weight, .bias                              |
| L.lora_down.weight, .bias; L.lora_up.weight             | L.noble_down, .noble_bias1; L.noble_up       |
| N.act.freq_scale, .freq_bias; N.second_act, N.third_act | L.noble_frequency{k}, .noble_phase{k}        |
| N.fc.weight, .bias; N.fc1, N.fc2                        | L.noble_mix{k}, .noble_bias{k + 1}           |

N is `L.lora_middle_nonlinearity` or `L.cos_net`; of one cosine alone ("cos") it is the activation itself.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.surgery.report import AugmentReport
from nonlinear_lowrank.validation import check_shapes

from .config import NobleConfig

_OURS = {
    "linear.weight": "weight",
    "linear.bias": "bias",
    "lora_down.weight": "noble_down",
    "lora_down.bias": "noble_bias1",
    "lora_up.weight": "noble_up",
}
_MIDDLE = re.compile(r"(?:lora_middle_nonlinearity|cos_net)\.(?:(act|second_act|third_act|fc|fc1|fc2)\.)?(\w+)")
_ACTIVATIONS = {None: 1, "act": 1, "second_act": 2, "third_act": 3}
_MIXES = {"fc": 1, "fc1": 1, "fc2": 2}
_OTHER = "{} has another nonlinearity than the release's cos, cos_net and cos_net_double, the only readable ones"


@torch.no_grad()
def load_released(model: nn.Module, state: Mapping[str, Tensor], *, verbose: bool = True) -> AugmentReport:
    """Put branches beside the linears that have one in a released model's state dict, and load all its tensors.

    Args:
        model: the plain model, with linears where the released one has `NOBLELinear`; changed in place.
        state: the released model's `state_dict()`.
        verbose: print the report.

    Returns:
        The report of `augment`, whose config is `NobleConfig.official` with the rank and the depth of the state.

    Raises:
        UserError: no linear has a branch, branches have other nonlinearities than cosines or differ in rank or depth,
            or the state does not fit the model, which then is as it was.
    """
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}  # of torch.compile
    layers = sorted(name.removesuffix(".lora_down.weight") for name in state if name.endswith(".lora_down.weight"))
    if not layers:
        raise UserError("the state dict has no '<linear>.lora_down.weight': it is not of a model with NOBLELinear")
    ours = {_translated(name, layers): tensor for name, tensor in state.items()}
    sizes = {
        (len(ours[f"{layer}.noble_down"]), sum(f"{layer}.noble_phase{k}" in ours for k in (1, 2, 3)))
        for layer in layers
    }
    rank, depth = sizes.pop()
    if sizes:
        raise UserError("the state dict has branches of several ranks or depths, and NobleConfig has one for all")
    if depth == 0:
        raise UserError(_OTHER.format(f"the branch of {layers[0]}"))
    config = NobleConfig.official(rank=rank, depth=depth, init="pretrained")
    _check({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, ours, layers, config)
    report = augment(model, config, select=layers, verbose=verbose)
    model.load_state_dict(ours)
    return report


def _translated(name: str, layers: list[str]) -> str:
    """Return our name of a released tensor; one outside a branch keeps its own."""
    layer = next((each for each in layers if name.startswith(f"{each}.")), None)
    if layer is None:
        return name
    own = name.removeprefix(f"{layer}.")
    if own in _OURS:
        return f"{layer}.{_OURS[own]}"
    if (found := _MIDDLE.fullmatch(own)) is not None:
        part, kind = found.groups()
        if part in _ACTIVATIONS and kind in ("freq_scale", "freq_bias"):
            return f"{layer}.noble_{'frequency' if kind == 'freq_scale' else 'phase'}{_ACTIVATIONS[part]}"
        if part in _MIXES:
            return f"{layer}.noble_{f'mix{_MIXES[part]}' if kind == 'weight' else f'bias{_MIXES[part] + 1}'}"
    raise UserError(_OTHER.format(name))


def _check(
    plain: dict[str, tuple[int, ...]], given: Mapping[str, Tensor], layers: list[str], config: NobleConfig
) -> None:
    """Raise UserError unless tensors are those of the plain model, by its shapes, and of the layers' branches."""
    wanted = dict(plain)
    for layer in layers:
        d_out, d_in = plain.get(f"{layer}.weight", (0, 0))
        wanted |= {f"{layer}.noble_{name}": shape for name, shape in config.shapes(d_in, d_out).items()}
    check_shapes("the state dict is not of this model", wanted, given)
