"""Finds a model's activation modules: which can become rational functions, and which stay and why.

Found by type: transformers' ACT2FN classes and torch.nn's. A found one is a `Site`, with the width of what it is
given where the neighbouring matrices or the config tell. Left and named:

- activations of poolers and heads (outside the backbone, or named so): the methods adapt the network's body;
- activations that we have no fit for;
- functional ones, `torch.tanh(x)` or `ACT2FN[name](x)` in somebody's forward: no module is there to swap. They are
  found in the compiled code of the forwards, by the names it uses.

A module that is found but that its parent's forward does not read is bypassed (a fused MLP): swapping it would do
nothing, so the site says so.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from ..layers.rational import RationalActivation, formula_of
from .base import AdapterLayer
from .weights import matrix_of

_POOLERS = re.compile(r"(.*_)?(pooler|pooling|summary)(_.*)?")
_HEADS = re.compile(r"(.*_)?(heads?|classifier|predictions)|cls|score|embed_out")
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMS_BEHIND_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm2d)

_PLAIN_FUNCTIONS = {"gelu", "relu", "silu", "tanh", "sigmoid", "quick_gelu", "leaky_relu", "elu", "mish", "softplus"}
_CLASSES = {"ReLU", "GELU", "SiLU", "Tanh", "Sigmoid"}
_TABLES = {"ACT2FN", "get_activation"}
# Activations by type that are not in ACT2FN; softmax and its like are none.
_OTHER_ACTIVATIONS = (
    *(nn.ELU, nn.CELU, nn.SELU, nn.GLU, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.RReLU, nn.Softplus),
    *(nn.Softshrink, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Threshold, nn.PReLU, nn.GELU),
)
_KNOWN_ACTIVATIONS: Any = (
    *(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()),
    *_OTHER_ACTIVATIONS,
)
# Leaves of models' own classes that are activations by name (BloomGelu).
_NAMED_LIKE = re.compile(r"gelu|relu|silu|swish|mish|tanh|sigmoid|activation", re.IGNORECASE)
_FUNCTIONS = {F.relu: "relu", F.gelu: "gelu", F.silu: "silu", torch.tanh: "tanh", torch.relu: "relu", F.tanh: "tanh"}
_BASES = ("transformers.modeling_utils", "transformers.generation")
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
    """Why swapping would do nothing, as a whole sentence; empty: it is used."""


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


def survey(model: nn.Module) -> Survey:
    """Looks through a model; changes nothing. Adapter layers are looked through to what they wrap."""
    found = Survey()
    parents = {
        f"{name}.{child}".lstrip("."): parent
        for name, parent in model.named_modules()
        for child, module in parent._modules.items()
        if module is not None
    }
    backbone = model.base_model if isinstance(model, PreTrainedModel) else None
    inside = {id(module) for module in backbone.modules()} if backbone is not None and backbone is not model else None
    hidden: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(hidden) and hidden:
            continue
        plain = module
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            hidden = (*hidden, f"{name}.")
            if not isinstance(module, AdapterLayer):
                continue
            plain = original(module)
        formula = plain.rational_config.activation if isinstance(plain, RationalActivation) else formula_of(plain)
        if formula is None:
            if name and _is_another_activation(plain):
                found.unfit[name] = found.left[name] = f"no rational fit for {type(plain).__name__}"
            elif called := _functions_called(plain):
                found.functional[name] = f"{type(plain).__name__} {called}"
            continue
        if not name:
            continue  # the model is itself an activation
        site = _site(model, name, plain, formula, parents)
        why = _why_left(name, outside=inside is not None and id(module) not in inside)
        if why:
            found.left[name] = why
            found.aside[name] = site
        else:
            found.sites[name] = site
    return found


def _is_another_activation(module: nn.Module) -> bool:
    leaf = not module._modules and not module._parameters
    return isinstance(module, _KNOWN_ACTIVATIONS) or (leaf and bool(_NAMED_LIKE.search(type(module).__name__)))


def original(layer: AdapterLayer) -> nn.Module:
    """The module that an adapter layer was put around, also while adapters are merged into it."""
    kept = getattr(layer, "original", None)
    return kept() if callable(kept) else layer.get_base_layer()


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
    plain = module.get_base_layer() if isinstance(module, AdapterLayer) else module
    if isinstance(plain, _CONVOLUTIONS):
        return _Shape(index, plain.in_channels, plain.out_channels, True, plain)
    matrix = matrix_of(plain)
    if isinstance(matrix, str) or matrix.kind == "embedding":
        return None
    return _Shape(index, matrix.d_in, matrix.d_out, False, plain)


def _shapes(parent: nn.Module) -> list[_Shape]:
    return [shape for index, child in enumerate(parent.children()) if (shape := _shape(index, child))]


def _site(model: nn.Module, name: str, plain: nn.Module, formula: str, parents: dict[str, nn.Module]) -> Site:
    parent_name, _, attribute = name.rpartition(".")
    parent = parents[name]
    children = list(parent._modules.values())
    place = next(index for index, child in enumerate(children) if child is parent._modules[attribute])
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
    bypassed = _bypassed(name, attribute, parent, grandparent)
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


# What forwards read.


def _bypassed(name: str, attribute: str, parent: nn.Module, grandparent: nn.Module | None) -> str:
    if isinstance(parent, nn.TransformerEncoderLayer) and parent.activation_relu_or_gelu:
        return (
            f"{name} is bypassed in inference by nn.TransformerEncoderLayer's fused path; set activation_relu_or_gelu "
            "= 0 on the layer, or name the activation in exclude_modules"
        )
    if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return ""
    readers = [parent] if grandparent is None else [parent, grandparent]
    if any(attribute in _names_read(reader) for reader in readers):
        return ""
    return (
        f"{name} is bypassed: the forward of {type(parent).__name__} does not call it (a fused MLP?); use the unfused "
        "model, or name the activation in exclude_modules"
    )


def _functions_called(module: nn.Module) -> str:
    """Activations that a module's own forward calls as functions, as the end of a sentence; empty: none."""
    if type(module).__module__.startswith("torch.nn."):
        held = {key: _FUNCTIONS[value] for key, value in vars(module).items() if _is_plain_function(value)}
        return ", ".join(f"holds the function {function} as .{key}" for key, function in held.items())
    read = _names_read(module) - set(module._modules)
    called = sorted(read & (_PLAIN_FUNCTIONS | _CLASSES))
    words = [f"calls {', '.join(called)}"] if called else []
    if read & _TABLES:
        words.append("looks its activation up in its forward")
    held = {key: _FUNCTIONS[value] for key, value in vars(module).items() if _is_plain_function(value)}
    words += [f"holds the function {function} as .{key}" for key, function in held.items()]
    return " and ".join(words)


def _is_plain_function(value: Any) -> bool:
    return inspect.isroutine(value) and value in _FUNCTIONS


def _names_read(module: nn.Module) -> set[str]:
    """Every global and attribute name in the code of a module's forward and of the methods it calls on itself."""
    own = module.__dict__.get("forward")
    start = getattr(own, "__func__", own) if own is not None else type(module).forward
    names: set[str] = set()
    pending: list[Any] = [start]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        for code in _codes(function):
            if id(code) in seen:
                continue
            seen.add(id(code))
            names.update(code.co_names)
            for name in code.co_names:
                methods = _own_methods(type(module), name)
                pending += methods if "super" in code.co_names else methods[:1]
    return names


def _own_methods(cls: type, name: str) -> list[Any]:
    """Methods that a model's code defines, the one in use first; not those of the bases of all modules and models."""
    found = []
    for each in cls.__mro__:
        # torch.nn's own layers count: TransformerDecoderLayer calls its activation in _ff_block.
        if each is nn.Module or each.__module__.startswith(_BASES):
            continue
        if callable(value := each.__dict__.get(name)):
            found.append(value)
    return found


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function, of what it wraps, and of the functions in it."""
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, partial):
            pending.append(value.func)
        elif isinstance(value, CodeType):
            yield value
            pending += [constant for constant in value.co_consts if isinstance(constant, CodeType)]
        elif inspect.ismethod(value):
            pending.append(value.__func__)
        elif inspect.isfunction(value):
            pending.append(value.__code__)
            # Decorators: what they wrap is an attribute or in the closure.
            pending.append(getattr(value, "__wrapped__", None))
            for cell in value.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:  # still empty
                    continue
                if inspect.isfunction(content) or inspect.ismethod(content):
                    pending.append(content)
