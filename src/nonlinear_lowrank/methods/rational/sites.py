"""Find a model's activation modules: those that can become rational functions, and those skipped, with the reason.

Found by type: transformers' ACT2FN classes and torch.nn's. A found one is a `Site`, with the width of its input where
the neighbouring matrices or the config tell. A module that several places hold is a site in each of them, since they
need not stay alike. Skipped:

- activations of poolers and heads (outside the backbone, or named so), unless they are asked for by name: the methods
  adapt the network's body;
- activations without a fit;
- functions, `torch.tanh(x)` or `ACT2FN[name](x)` in a forward: no module is there to swap (see `forward_code`).

Adapters of peft's protocol are looked through if they give the module they wrap (`original()`, ours); others
hide what is in them. peft itself is not imported.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import activations as hf

from nonlinear_lowrank.methods.expert_layouts import layout_of
from nonlinear_lowrank.methods.experts import expert_count, projections
from nonlinear_lowrank.methods.matrix import matrix_of
from nonlinear_lowrank.surgery.targets import functions_called, outside_backbones, why_bypassed

_POOLERS = re.compile(r"(.*_)?(pooler|pooling|summary)(_.*)?")
_HEADS = re.compile(r"(.*_)?(heads?|classifier|predictions)|cls|score|embed_out")
_CONVOLUTIONS = (*(nn.Conv1d, nn.Conv2d, nn.Conv3d), *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
_NORMS_BEHIND_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm2d)

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
_WITHOUT_FIT: Any = (
    *(each[0] if isinstance(each, tuple) else each for each in hf.ACT2CLS.values()),
    *(nn.ELU, nn.CELU, nn.SELU, nn.GLU, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.RReLU, nn.Softplus),
    *(nn.Softshrink, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Threshold, nn.PReLU, nn.GELU),
)
"""Activations, except subclasses of those above; softmax and the like do not count."""
# Leaves of models' own classes that are activations by name (BloomGelu).
_NAMED_LIKE = re.compile(r"gelu|relu|silu|swish|mish|tanh|sigmoid|activation", re.IGNORECASE)
# Fields of configs that hold the width of an MLP.
_SIZE_FIELDS = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "mlp_dim")


@dataclass(frozen=True)
class Site:
    """An activation module that can become a rational function."""

    module: nn.Module
    """The plain activation, or a `RationalActivation`."""
    formula: str
    """One of `reference.FORMULAS`; for a rational activation, what it stands for."""
    width: int | None
    """Channels of its input; None where nothing tells."""
    channel_dim: int
    """-1; from the end behind a convolution, which takes a batch or none; 1 behind a norm that needs one."""
    neighbour: nn.Module | None
    """A module with a weight, whose device is the activation's."""
    bypassed: str = ""
    """Reason swapping would do nothing, with the fix; empty: it is used."""
    skipped: str = ""
    """Reason it is skipped unless it is asked for by name: "pooler" or "head"."""
    experts: int | None = None
    """Number of experts of the module that holds them as 3-D parameters and calls it, which has rows of each."""


@dataclass
class Survey:
    """All activations of a model, by dotted name."""

    sites: dict[str, Site] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    """Modules that cannot be replaced even on request, and why."""
    functional: dict[str, str] = field(default_factory=dict)
    """Modules whose forward calls an activation as a function, and which; "" is the model itself."""
    adapters: list[str] = field(default_factory=list)
    """Layers of peft's adapters that the model has."""

    def skipped(self) -> dict[str, str]:
        """Return what cannot be replaced even on request, and why."""
        functions = {
            name or "the model": f"{what}; a function cannot be swapped" for name, what in self.functional.items()
        }
        return self.unfit | functions


def formula_of(module: nn.Module) -> str | None:
    """Return the formula of `reference` that a module computes; None if it is not an activation with a fit."""
    kind = type(module)
    if kind is hf.GELUActivation:
        return "gelu_python" if module.act == getattr(module, "_gelu_python", None) else "gelu"
    if kind is hf.GELUTanh:
        return "gelu_new" if module.act == getattr(module, "_gelu_tanh_python", None) else "gelu_tanh"
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _FORMULAS.get(kind)


def survey(model: nn.Module) -> Survey:
    """Find the activations of a model; change nothing."""
    found = Survey()
    places = list(_places("", model, set()))
    parents = {
        f"{name}.{child}".lstrip("."): module
        for name, module in places
        if not _is_adapter(module)
        for child in module._modules
    }
    outside = outside_backbones(model)
    for name, module in places:
        if _is_adapter(module):
            found.adapters.append(name)
        plain = _plain(module)
        if plain is None:
            continue
        rational = getattr(plain, "rational_config", None)  # of a `layer.RationalActivation`
        formula = formula_of(plain) if rational is None else rational.activation
        if formula and name:
            skipped = _why_skipped(name, outside=id(module) in outside)
            found.sites[name] = _site(model, name, plain, formula, parents, skipped)
        elif formula:
            continue  # the model is itself an activation
        elif name and _is_activation_without_fit(plain):
            found.unfit[name] = f"no rational fit for {type(plain).__name__}"
        elif called := functions_called(plain):
            found.functional[name] = f"{type(plain).__name__} {called}"
    _drop_aliases(found)
    return found


def _places(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every place that holds a module; what is in a module counts once, as in `named_modules`."""
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


def _plain(module: Any) -> Any:
    """Return what an adapter was put around, None where it does not say; for other modules the module itself."""
    if not _is_adapter(module):
        return module
    return module.original() if callable(getattr(module, "original", None)) else None


def _drop_aliases(found: Survey) -> None:
    """Mark as unfit each alias by which a parent does not call its module."""
    for name, site in list(found.sites.items()):
        own = name.rpartition(".")[0]
        called = (
            other
            for other, each in found.sites.items()
            if (each.module is site.module and other.rpartition(".")[0] == own and not each.bypassed)
            and bool(each.skipped) == bool(site.skipped)
        )
        if site.bypassed and (other := next(called, None)) is not None:
            del found.sites[name]
            found.unfit[name] = f"another name of {other}, by which it is not called"


def _is_activation_without_fit(module: nn.Module) -> bool:
    leaf = not module._modules and not module._parameters
    return isinstance(module, _WITHOUT_FIT) or (leaf and bool(_NAMED_LIKE.search(type(module).__name__)))


def _why_skipped(name: str, *, outside: bool) -> str:
    segments = name.split(".")
    if any(_POOLERS.fullmatch(segment) for segment in segments):
        return "pooler"
    return "head" if outside or any(_HEADS.fullmatch(segment) for segment in segments) else ""


# Widths.


class _Shape(NamedTuple):
    """A module that multiplies by a matrix."""

    module: nn.Module
    d_in: int
    d_out: int
    channel_dim: int = -1

    def feeds(self, other: "_Shape") -> bool:
        """Return whether another may follow; a gated MLP's first may give gate and value, twice the width."""
        return self.d_out in (other.d_in, 2 * other.d_in)


def _shape(module: nn.Module | None) -> _Shape | None:
    if module is None:
        return None
    plain: Any = module if (found := _plain(module)) is None else found
    if isinstance(plain, _CONVOLUTIONS):
        return _Shape(plain, plain.in_channels, plain.out_channels, -1 - len(plain.kernel_size))
    matrix = matrix_of(plain)
    if isinstance(matrix, str) or matrix.kind == "embedding":
        return None
    return _Shape(plain, matrix.d_in, matrix.d_out)


def _shapes(modules: Iterable[nn.Module | None]) -> list[_Shape]:
    return [shape for module in modules if (shape := _shape(module))]


def _descendants(modules: Iterable[nn.Module | None]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules() if module is not None else ()


def _site(
    model: nn.Module, name: str, plain: nn.Module, formula: str, parents: dict[str, nn.Module], skipped: str
) -> Site:
    parent_name, _, attribute = name.rpartition(".")
    parent, grandparent = parents[name], parents.get(parent_name)
    place, children = list(parent._modules).index(attribute), list(parent._modules.values())
    before, after = _shapes(children[:place]), _shapes(children[place + 1 :])
    norm = next((each for each in (*children[:place], parent) if isinstance(each, _NORMS_BEHIND_THE_BATCH)), None)
    near = next(iter(before[-1:] + after[:1]), None)
    around: Any = (each for each in (parent, grandparent) if each is not None and projections(each))
    called = parent._modules[attribute]
    experts = next((each for each in around if layout_of(each).activation(each) is called), None)
    width: int | None
    if experts is not None:
        width = projections(experts)[1].d_in
    elif near is not None:
        width = _width(model, parent, before, after, grandparent)
    elif norm is not None:
        width = getattr(norm, "num_features", None) or getattr(norm, "num_channels", None)
    else:  # a residual block: what it ends with is in the children of its children
        near = next(reversed(_shapes(_descendants(children[:place]))), None)
        sizes = _sizes(model)
        width = near.d_out if near else sizes[0] if len(sizes) == 1 else None
    channel_dim = near.channel_dim if near else -1 if norm is None else 1
    neighbour = near.module if near else norm or _with_weight(parent, model)
    # Where another method has replaced experts, their own class still applies the activation.
    own: Any = getattr(parent, "experts_class", None)
    calling = parent if own is None else own.__new__(own)
    bypassed = why_bypassed(name, attribute, calling, grandparent)
    count = None if experts is None else expert_count(experts)
    return Site(plain, formula, width, channel_dim, neighbour, bypassed, skipped, count)


def _width(
    model: nn.Module, parent: nn.Module, before: list[_Shape], after: list[_Shape], grandparent: nn.Module | None
) -> int | None:
    """Return the channels of an activation's input, by the matrices around it."""
    if before and after and before[-1].feeds(after[0]):
        return after[0].d_in
    in_order = isinstance(parent, nn.Sequential)  # the children's order is that of the calls; else it need not be
    if before and in_order:
        return before[-1].d_out
    shapes = before + after
    pairs = {late.d_in for place, early in enumerate(shapes) for late in shapes[place + 1 :] if early.feeds(late)}
    if len(pairs) > 1:
        pairs &= set(_sizes(model))
        return pairs.pop() if len(pairs) == 1 else None
    if pairs:
        return pairs.pop()
    if not before:  # made before what it follows, or really the first
        first = after[0].d_in
        return first if in_order or first == after[-1].d_out else None
    following = _following(parent, grandparent)
    return following.d_in if following and before[-1].feeds(following) else before[-1].d_out


def _following(parent: nn.Module, grandparent: nn.Module | None) -> _Shape | None:
    """Return the first matrix behind the parent, in its siblings."""
    siblings = [] if grandparent is None else list(grandparent.children())
    place = next((index for index, child in enumerate(siblings) if child is parent), len(siblings))
    return next((shape for module in _descendants(siblings[place + 1 :]) if (shape := _shape(module))), None)


def _sizes(model: nn.Module) -> list[int]:
    """Return the widths of MLPs that the config names, each once."""
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return sorted({size for name in _SIZE_FIELDS if isinstance(size := getattr(config, name, None), int)})


def _with_weight(*places: nn.Module) -> nn.Module | None:
    modules = _descendants(places)
    return next((each for each in modules if isinstance(getattr(each, "weight", None), torch.Tensor)), None)
