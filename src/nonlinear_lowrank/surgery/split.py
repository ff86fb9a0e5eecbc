"""Fused projections (`qkv_proj`, `c_attn`, `gate_up_proj`) as one linear a part, so that each has a layer of its own.

`augment(..., split_fused=True)` puts a `SplitLinear` in the place of each whose parts can be told by its name, its
width and the module around it. Its children are plain linears with names that methods know, which they then swap.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init  # skips tensors that were loaded from a checkpoint
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.attention import fused_widths
from nonlinear_lowrank.methods.base import dense_part, method_of_layer
from nonlinear_lowrank.methods.experts import ExpertsLayer
from nonlinear_lowrank.methods.matrix import is_plain_linear, linear_shape, replace_modules
from nonlinear_lowrank.methods.names import BY_HEAD, FUSED

from .attention import kept_back
from .targets import bypassed_linears, holds_numbers, names_read

_GATED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),  # GraniteMoe's
    "Wi": ("gate_proj", "up_proj"),  # ModernBERT's
}
_LOADED = "_is_hf_initialized"  # transformers' mark of modules and tensors that are not to be drawn


class Parts(NamedTuple):
    """Rows of a fused projection: `groups` times a share of each part, one after another."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    groups: int = 1

    def split(self, rows: Tensor) -> list[Tensor]:
        """(sum of widths, ...) -> (width, ...) for each part."""
        shares = [width // self.groups for width in self.widths]
        return [each.flatten(0, 1) for each in rows.unflatten(0, (self.groups, -1)).split(shares, 1)]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """(..., width) for each part -> (..., sum of widths), where the model looks for them."""
        return torch.cat([each.unflatten(-1, (self.groups, -1)) for each in parts], -1).flatten(-2)


class SplitLinear(nn.Module):
    """A linear (..., d_in) -> (..., d_out) whose parts are linears of their own, its children.

    The fused tensors `weight` and `bias` load too; `state_dict()` has those of the parts.

    Args:
        fused: an `nn.Linear` or transformers' `Conv1D`; the parts' tensors may be views of its own until `copy_views`.
        parts: names of the children, their widths, and how they take turns.
    """

    def __init__(self, fused: Any, parts: Parts) -> None:
        super().__init__()
        self.parts, self.transposed = parts, isinstance(fused, Conv1D)
        self.linear_shape, self.has_bias = linear_shape(fused), fused.bias is not None
        d_in = self.linear_shape[0]
        with torch.device("meta"):
            linears = [
                Conv1D(width, d_in) if self.transposed else nn.Linear(d_in, width, self.has_bias)
                for width in parts.widths
            ]
        for tensor in ("weight", "bias") if self.has_bias else ("weight",):
            old = getattr(fused, tensor)
            for linear, own in zip(linears, self.rows(tensor, old.detach()), strict=True):
                setattr(linear, tensor, nn.Parameter(own, old.requires_grad))
                if hasattr(old, _LOADED):
                    setattr(getattr(linear, tensor), _LOADED, getattr(old, _LOADED))
        for name, linear in zip(parts.names, linears, strict=True):
            if hasattr(fused, _LOADED):
                setattr(linear, _LOADED, getattr(fused, _LOADED))
            setattr(self, name, linear)
        self.train(fused.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        # Each part gets the tensor as it came: those of one input may share its product.
        return self.parts.join([self._modules[name](x) for name in self.parts.names])  # type: ignore[misc]

    def rows(self, tensor: str, fused: Tensor) -> list[Tensor]:
        """Return each part's share of the fused "weight" or "bias", in the layout of its linear."""
        turned = self.transposed and tensor == "weight"
        return [each.t() if turned else each for each in self.parts.split(fused.t() if turned else fused)]

    def copy_views(self) -> "SplitLinear":
        """Give each tensor a storage of its own; a view holds all of the fused one, and files refuse it."""
        for own in self.parameters():
            own.data = own.data.clone(memory_format=torch.contiguous_format)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the fused tensors too."""
        for tensor in ("weight", "bias"):
            if (joined := prefix + tensor) in state_dict:
                rows = self.rows(tensor, state_dict.pop(joined))
                state_dict |= {
                    f"{prefix}{name}.{tensor}": each for name, each in zip(self.parts.names, rows, strict=True)
                }
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"widths={self.parts.widths}, groups={self.parts.groups}"


def find_parts(name: str, module: nn.Module, parent: nn.Module) -> Parts | str:
    """Return the parts of a fused projection inside `parent`; where they cannot be told, the reason."""
    own, (d_in, d_out), around = name.rpartition(".")[2], linear_shape(module), type(parent).__name__
    if own not in _GATED:
        found = fused_widths(name, module, parent)
        return found if isinstance(found, str) else Parts(*found)
    # The projection back says how wide the product of gate and up is.
    back = [each for each in parent.children() if each is not module and is_plain_linear(each)]
    if "chunk" not in names_read(parent) or d_out % 2 or all(linear_shape(each)[0] * 2 != d_out for each in back):
        return f"{around} does not say that its {d_in} -> {d_out} are gate and up, a half each"
    return Parts(_GATED[own], (d_out // 2, d_out // 2))


@contextmanager
def split_linears(model: nn.Module, wanted: bool) -> Iterator[dict[str, str]]:
    """Split every fused projection of a model inside a `with` block; yield those that stay whole, and why.

    Nothing is done where it is not wanted. On leaving, those in which no part was swapped are whole again.
    """
    new, whole = _planned(model) if wanted else ({}, {})
    replace_modules(model, new)
    try:
        yield whole
    finally:
        idle: dict[nn.Module, nn.Module] = {}
        for old, each in new.items():
            if not any(map(method_of_layer, each.children())):
                idle[each] = old
        replace_modules(model, idle)
    while new:  # tensors of one at a time are there twice
        if (each := new.popitem()[1]) not in idle:
            each.copy_views()


def _planned(model: nn.Module) -> tuple[dict[nn.Module, SplitLinear], dict[str, str]]:
    """Return what is to stand in the place of fused projections, and the names of those that stay whole, with why."""
    new: dict[nn.Module, SplitLinear] = {}
    whole: dict[str, str] = {}
    bypassed = bypassed_linears(model)
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        # bitsandbytes' linears have a forward of their own.
        linear = is_plain_linear(module) or (isinstance(module, nn.Linear) and not _in_numbers(module))
        if name.rpartition(".")[2] not in (*FUSED, BY_HEAD, *_GATED) or not linear:
            continue
        if isinstance(parent, SplitLinear) or method_of_layer(parent) is not None:
            continue
        why = bypassed[name].why if name in bypassed else kept_back(module, model)
        found = why or find_parts(name, module, parent)
        if isinstance(found, str):
            whole[name] = found
        else:
            new[module] = SplitLinear(module, found)
    return new, whole


@contextmanager
def drawn_whole(model: nn.Module) -> Iterator[None]:
    """Let a model's init, inside a `with` block, draw the fused tensors of its split linears, as in the plain model.

    The parts' tensors that are not loaded then get their rows of what was drawn. Inits that draw an attention's
    weights (T5's) find one marked as loaded where a layer has none.
    """
    new: dict[nn.Module, Any] = {each: _undrawn(each) for each in model.modules() if isinstance(each, SplitLinear)}
    found = [each for each in model.modules() if _is_bare(each)]
    inside = {own for each in found for own in each.modules() if own is not each}
    bare = {each: _stand_in(each) for each in found if each not in inside}
    replace_modules(model, new | bare)
    try:
        yield
    finally:
        for swapped in (new, bare):  # layers inside of splits are found again once these are back
            replace_modules(model, {other: each for each, other in swapped.items()})
    split: Any
    for split, fused in new.items():
        for tensor, drawn in fused.named_parameters():
            for linear, rows in zip(_linears(split), split.rows(tensor, drawn), strict=True) if drawn.numel() else ():
                if linear is not None:
                    init.copy_(getattr(linear, tensor), rows)


def _is_bare(module: nn.Module) -> bool:
    method = method_of_layer(module)
    has_weight = hasattr(type(module), "weight") or "weight" in module._parameters
    return method is not None and method.kind == "linear" and not has_weight and not isinstance(module, ExpertsLayer)


def _stand_in(layer: Any) -> nn.Module:
    """Return the plain linear inside a layer, or one that counts as loaded."""
    if method_of_layer(layer).wraps:  # type: ignore[union-attr]
        inside: nn.Module = layer.projection
        return inside if hasattr(inside, "weight") else _stand_in(inside)
    linear = nn.Linear(1, 1, device="meta")  # where nothing is drawn
    for parameter in linear.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return linear


def _linears(split: Any) -> list[Any]:
    """Return the plain linear of each part, inside of a layer where there is one; None where it was replaced."""
    parts = [split.get_submodule(name) for name in split.parts.names]
    return [dense_part(part) if method_of_layer(part) else part for part in parts]


def _undrawn(split: Any) -> nn.Module:
    """Return a fused linear to be drawn; where all parts have a tensor that is loaded, with an empty, loaded one."""
    linears, (d_in, d_out) = [each for each in _linears(split) if each is not None], split.linear_shape
    with torch.device("meta"):
        fused = Conv1D(d_out, d_in) if split.transposed else nn.Linear(d_in, d_out, split.has_bias)
    for tensor, whole in fused.named_parameters():
        own = [getattr(linear, tensor) for linear in linears]
        loaded = all(getattr(each, _LOADED, False) for each in own)
        shape, like = (0,) if loaded else whole.shape, next(split.parameters())
        setattr(fused, tensor, nn.Parameter(like.new_empty(shape)))
        setattr(getattr(fused, tensor), _LOADED, loaded)
    return fused


def check_split(chosen: Collection[str], model: nn.Module, whole: Mapping[str, str]) -> None:
    """Raise UserError where no part of a fused projection is among the linears to swap, or a quantized one is."""
    for name in chosen:
        if name in whole and not _in_numbers(model.get_submodule(name)):
            hint = "augment the unquantized model, save it, and quantize it as it is loaded, or use an adapter instead"
            raise UserError(f"{name} is quantized or split over devices, and split_fused cannot split it; {hint}")
    if any(isinstance(model.get_submodule(name.rpartition(".")[0]), SplitLinear) for name in chosen):
        return
    why = "; ".join(f"{name}: {reason}" for name, reason in list(whole.items())[:3])
    raise UserError(
        "split_fused needs a fused projection, of queries, keys and values or of gate and up, whose parts can be told "
        f"among the linears to swap, and there is none{why and f' ({why})'}; omit it"
    )


def _in_numbers(module: nn.Module) -> bool:
    return all(map(holds_numbers, module.parameters()))


def saved_splits(model: nn.Module, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return, in the form that files have, the split projections whose parts are among these names."""
    rows: dict[Parts, list[str]] = defaultdict(list)
    for place in dict.fromkeys(name.rpartition(".")[0] for name in names):
        if isinstance(split := model.get_submodule(place), SplitLinear):
            rows[split.parts].append(place)
    return [{**parts._asdict(), "modules": places} for parts, places in rows.items()]


def apply_splits(model: nn.Module, rows: Iterable[Mapping[str, Any]]) -> None:
    """Split projections of a plain model, real or meta, as `saved_splits` has them; those that are split stay.

    Raises:
        UserError: one is not a linear, or has another width.
    """
    for row in rows:
        parts = Parts(tuple(row["names"]), tuple(row["widths"]), row["groups"])
        for name in row["modules"]:
            module = model.get_submodule(name)
            if isinstance(module, SplitLinear) and module.parts == parts:
                continue
            if not is_plain_linear(module) or linear_shape(module)[1] != sum(parts.widths):
                raise UserError(f"the config splits {name!r} into {parts.widths}, which is a {module}")
            replace_modules(model, {module: SplitLinear(module, parts).copy_views()})
