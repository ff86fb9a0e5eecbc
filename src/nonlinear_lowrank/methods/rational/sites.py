"""Finds a model's activation modules: which can become rational functions, and which stay and why.

Found by type: transformers' ACT2FN classes and torch.nn's. A found one is a `Site`, with the width of what it is
given where the neighbouring matrices or the config tell. One module that several places hold is a site in each of
them, since they need not stay alike. Left and named:

- activations of poolers and heads (outside the backbone, or named so): the methods adapt the network's body;
- activations that we have no fit for;
- functional ones, `torch.tanh(x)` or `ACT2FN[name](x)` in somebody's forward: no module is there to swap. They are
  found in the compiled code of the forwards, by the names it uses.

A module that is found but that its parent's forward does not read is bypassed (a fused MLP): swapping it would do
nothing, so the site says so.

Adapters of peft's protocol are looked through where they tell what they were put around (`original()`, ours), and
hide what is in them where they do not. peft itself is not imported.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import activations as hf

from nonlinear_lowrank.methods.forward_code import functions_called, why_bypassed
from nonlinear_lowrank.methods.matrix import matrix_of

_POOLERS = re.compile(r"(.*_)?(pooler|pooling|summary)(_.*)?")
_HEADS = re.compile(r"(.*_)?(heads?|classifier|predictions)|cls|score|embed_out")
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMS_BEHIND_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm2d)

# Activations by type that are not in ACT2FN; softmax and its like are none.
_OTHER_ACTIVATIONS = (
    *(nn.ELU, nn.CELU, nn.SELU, nn.GLU, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.RReLU, nn.Softplus),
    *(nn.Softshrink, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Threshold, nn.PReLU, nn.GELU),
)
_KNOWN_ACTIVATIONS: Any = (
    *(each[0] if isinstance(each, tuple) else each for each in hf.ACT2CLS.values()),
    *_OTHER_ACTIVATIONS,
)
# Leaves of models' own classes that are activations by name (BloomGelu).
_NAMED_LIKE = re.compile(r"gelu|relu|silu|swish|mish|tanh|sigmoid|activation", re.IGNORECASE)
_FORMULAS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    hf.AccurateGELUActivation: "gelu_new",
    hf.FastGELUActivation: "gelu_fast",
    hf.NewGELUActivation: "gelu_new",
    hf.QuickGELUActivation: "quick_gelu",
    hf.SiLUActivation: "silu",
}
# Fields of configs that hold the width of an MLP.
_SIZE_FIELDS = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "mlp_dim")


@dataclass(frozen=True)
class Site:
    """An activation module that can become a rational function."""

    module: nn.Module
    """The plain activation, or a `RationalActivation`."""
    formula: str
    """Of `ops.activations.FORMULAS`; for a rational activation, what it stands for."""
    width: int | None
    """Channels of its input; None where nothing tells."""
    channel_dim: int
    """-1, or 1 behind a convolution."""
    neighbour: nn.Module | None
    """A module with a weight, whose device is the activation's."""
    bypassed: str = ""
    """Why swapping would do nothing, and the mend; empty: it is used."""


@dataclass
class Survey:
    """All activations of a model, by dotted name."""

    sites: dict[str, Site] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Modules that stay as they are, and why."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Those of them that cannot be taken even when asked for."""
    functional: dict[str, str] = field(default_factory=dict)
    """Modules whose forward calls an activation as a function, and which; "" is the model itself."""
    aside: dict[str, Site] = field(default_factory=dict)
    """Sites of poolers and heads: taken when they are asked for by name."""
    adapters: list[str] = field(default_factory=list)
    """Layers of peft's adapters that the model has."""


def formula_of(module: nn.Module) -> str | None:
    """The formula of `ops.activations` that a module computes; None if it is not an activation we have a fit for."""
    kind = type(module)
    if kind is hf.GELUActivation:
        return "gelu_python" if module.act == getattr(module, "_gelu_python", None) else "gelu"
    if kind is hf.GELUTanh:
        return "gelu_new" if module.act == getattr(module, "_gelu_tanh_python", None) else "gelu_tanh"
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _FORMULAS.get(kind)


def is_rational(module: nn.Module) -> bool:
    """Whether it is a `rational.RationalActivation`, which is above this file."""
    return hasattr(module, "rational_config")


def survey(model: nn.Module) -> Survey:
    """Looks through a model; changes nothing."""
    found = Survey()
    places = list(_places("", model, set()))
    parents = {
        f"{name}.{child}".lstrip("."): module
        for name, module in places
        if not _is_adapter(module)
        for child in module._modules
    }
    backbone = getattr(model, "base_model", None)
    whole = not isinstance(backbone, nn.Module) or backbone is model
    inside = None if whole else {id(module) for module in backbone.modules()}  # type: ignore[union-attr]
    for name, module in places:
        plain = module
        if _is_adapter(module):
            found.adapters.append(name)
            if not callable(getattr(module, "original", None)):
                continue
            plain = module.original()  # type: ignore[operator]
        formula = plain.rational_config.activation if is_rational(plain) else formula_of(plain)  # type: ignore[union-attr]
        if formula is None:
            if name and _is_another_activation(plain):
                found.unfit[name] = found.left[name] = f"no rational fit for {type(plain).__name__}"
            elif called := functions_called(plain):
                found.functional[name] = f"{type(plain).__name__} {called}"
            continue
        if not name:
            continue  # the model is itself an activation
        site = _site(model, name, plain, formula, parents)  # type: ignore[arg-type]
        why = _why_left(name, outside=inside is not None and id(module) not in inside)
        if why:
            found.left[name] = why
            found.aside[name] = site
        else:
            found.sites[name] = site
    _set_aliases_aside(found)
    return found


def _places(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every place that holds a module, in the model's order; what is in a module counts once, as in `named_modules`."""
    if module._modules:
        if id(module) in seen:
            return
        seen.add(id(module))
    yield name, module
    if not _is_adapter(module):
        for child, each in module._modules.items():
            if each is not None:
                yield from _places(f"{name}.{child}".lstrip("."), each, seen)


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(type(module), "adapter_layer_names")


def _set_aliases_aside(found: Survey) -> None:
    """Of two names that one parent has for one module, the one that is not called needs no swap."""
    for sites in (found.sites, found.aside):
        for name, site in list(sites.items()):
            own = name.rpartition(".")[0]
            called = (
                other
                for other, each in sites.items()
                if each.module is site.module and not each.bypassed and other.rpartition(".")[0] == own
            )
            if site.bypassed and (other := next(called, None)) is not None:
                del sites[name]
                found.unfit[name] = found.left[name] = f"another name of {other}, by which it is not called"


def _is_another_activation(module: nn.Module) -> bool:
    leaf = not module._modules and not module._parameters
    return isinstance(module, _KNOWN_ACTIVATIONS) or (leaf and bool(_NAMED_LIKE.search(type(module).__name__)))


def _why_left(name: str, *, outside: bool) -> str:
    segments = name.split(".")
    if any(_POOLERS.fullmatch(segment) for segment in segments):
        return "pooler"
    if outside or any(_HEADS.fullmatch(segment) for segment in segments):
        return "head"
    return ""


# Widths.


@dataclass(frozen=True)
class _Shape:
    index: int
    """Place among the parent's children."""
    d_in: int
    d_out: int
    convolution: bool
    module: nn.Module


def _shape(index: int, module: nn.Module) -> _Shape | None:
    plain: Any = module.original() if _is_adapter(module) and hasattr(module, "original") else module  # type: ignore[operator]
    if isinstance(plain, _CONVOLUTIONS):
        return _Shape(index, plain.in_channels, plain.out_channels, True, plain)
    matrix = matrix_of(plain)
    if isinstance(matrix, str) or matrix.kind == "embedding":
        return None
    return _Shape(index, matrix.d_in, matrix.d_out, False, plain)


def _shapes(parent: nn.Module) -> list[_Shape]:
    children = enumerate(parent._modules.values())
    return [shape for index, child in children if child is not None and (shape := _shape(index, child))]


def _site(model: nn.Module, name: str, plain: nn.Module, formula: str, parents: dict[str, nn.Module]) -> Site:
    parent_name, _, attribute = name.rpartition(".")
    parent = parents[name]
    children = list(parent._modules.values())
    place = list(parent._modules).index(attribute)
    shapes = _shapes(parent)
    before = [shape for shape in shapes if shape.index < place]
    after = [shape for shape in shapes if shape.index > place]
    grandparent = parents.get(parent_name)
    norm = next((each for each in (*children[:place], parent) if isinstance(each, _NORMS_BEHIND_THE_BATCH)), None)
    near = before[-1] if before else shapes[0] if shapes else None
    if near is None and norm is None:  # a residual block: what it ends with is in the children of its children
        near = _last_shape(children[:place])
        width = near.d_out if near else _only_size(model)
    elif near is None:
        width = getattr(norm, "num_features", None) or getattr(norm, "num_channels", None)
    else:
        width = _width(model, parent, before, after, shapes, grandparent)
    behind_batch = near.convolution if near else norm is not None
    neighbour = near.module if near else norm or _anything_with_a_weight(parent, model)
    bypassed = why_bypassed(name, attribute, parent, grandparent)
    return Site(plain, formula, width, 1 if behind_batch else -1, neighbour, bypassed)


def _last_shape(modules: Sequence[nn.Module | None]) -> _Shape | None:
    found = None
    for module in modules:
        for each in module.modules() if module is not None else ():
            found = _shape(0, each) or found
    return found


def _width(
    model: nn.Module,
    parent: nn.Module,
    before: Sequence[_Shape],
    after: Sequence[_Shape],
    shapes: Sequence[_Shape],
    grandparent: nn.Module | None,
) -> int | None:
    """Channels of an activation's input, from the matrices around it.

    A gated MLP may have one matrix for gate and value, twice as wide as what the activation sees.
    """
    if before and after and _feeds(before[-1], after[0]):
        return after[0].d_in
    if before and isinstance(parent, nn.Sequential):  # the children's order is that of the calls; else it need not be
        return before[-1].d_out
    pairs = {late.d_in for place, early in enumerate(shapes) for late in shapes[place + 1 :] if _feeds(early, late)}
    if len(pairs) == 1:
        return pairs.pop()
    if pairs:
        said = [size for size in _sizes(model) if size in pairs]
        return said[0] if len(said) == 1 else None
    if not before:  # made before what it follows, or really the first
        first = after[0].d_in
        return first if isinstance(parent, nn.Sequential) or first == shapes[-1].d_out else None
    last, following = before[-1], _next_matrix(parent, grandparent)
    return following.d_in if following and _feeds(last, following) else last.d_out


def _feeds(early: _Shape, late: _Shape) -> bool:
    return early.d_out in (late.d_in, 2 * late.d_in)


def _sizes(model: nn.Module) -> list[int]:
    """Widths of MLPs that the config names, each once."""
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    sizes = {getattr(config, name, None) for name in _SIZE_FIELDS}
    return sorted(size for size in sizes if isinstance(size, int))


def _only_size(model: nn.Module) -> int | None:
    sizes = _sizes(model)
    return sizes[0] if len(sizes) == 1 else None


def _next_matrix(parent: nn.Module, grandparent: nn.Module | None) -> _Shape | None:
    """The first matrix behind the parent, in its siblings."""
    if grandparent is None:
        return None
    siblings = list(grandparent.children())
    place = next((index for index, child in enumerate(siblings) if child is parent), len(siblings))
    for sibling in siblings[place + 1 :]:
        for module in sibling.modules():
            if shape := _shape(0, module):
                return shape
    return None


def _anything_with_a_weight(*places: nn.Module) -> nn.Module | None:
    for place in places:
        for module in place.modules():
            if isinstance(getattr(module, "weight", None), torch.Tensor):
                return module
    return None
