"""Names that forwards of a model's modules use, read from their compiled code, which is there also without a source.

Two questions: which activations does a forward call, and which linears' tensors does it take without calling them.
"""

import dis
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_ACTIVATIONS = {
    *("gelu", "relu", "silu", "tanh", "sigmoid", "quick_gelu", "leaky_relu", "elu", "mish", "softplus"),
    *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid"),
}
_TABLES = {"ACT2FN", "get_activation"}
_FUNCTIONS: Any = {
    F.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    torch.tanh: "tanh",
    torch.relu: "relu",
    F.tanh: "tanh",
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BASES = ("transformers.modeling_utils", "transformers.generation")

# Code as `_text` writes it: " LOAD_FAST:self.wo.weight.dtype COMPARE_OP:...".
_SILENT = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME", "COPY_FREE_VARS"}
_IN_ISINSTANCE = re.compile(r":isinstance \S+")
_LOOK = (
    r"\.(?:dtype|device|shape|size|ndim|dim|numel|is_meta|is_cuda|requires_grad|is_floating_point|element_size|layout"
    r"|get_device)\b| POP_JUMP| LOAD_CONST:None\b"
)
_TAKEN = re.compile(rf"(?:\.(\w+))?\.(\w+)\.(weight|bias)\b(?!{_LOOK})")
_CALLED = re.compile(r"\.(\w+)\b(?!\.(?:weight|bias)\b)")


@dataclass(frozen=True)
class Bypass:
    """Why a layer in a module's place would not act."""

    why: str
    refused: bool
    """Whether it is not put there on request either: it would never act, or not in inference. Else on some paths it
    would."""


def bypassed_linears(model: nn.Module) -> dict[str, Bypass]:
    """Return the modules whose weight or bias the code around them takes as a tensor, by whole name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    taken = {name: _tensors_taken(module) for name, module in modules.items()}
    found = {}
    for name, module in modules.items():
        if not name or next(module.children(), None) is not None:
            continue
        parts = name.split(".")
        readers = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        called = any(parts[-1] in taken[reader][1] for reader in readers[:2])
        for place, reader in enumerate(readers):
            # From further away a name alone may mean another module.
            own = ".".join(parts[-1:] if place < 2 else parts[-2:])
            tensors = taken[reader][0].get(own)
            if tensors and not _is_switched_off(modules[reader], own):
                found[name] = _bypass(modules[reader], tensors, called)
                break
    return found


def _bypass(reader: nn.Module, tensors: set[str], called: bool) -> Bypass:
    why = f"the forward of {type(reader).__name__} takes its {' and '.join(sorted(tensors))} without calling it"
    if isinstance(reader, nn.TransformerEncoderLayer):
        why += " in inference (set activation_relu_or_gelu = 0 on that layer to have it called)"
        return Bypass(why=why, refused=True)
    return Bypass(why=why + " on one of its paths" * called, refused=not called)


def _is_switched_off(reader: nn.Module, own: str) -> bool:
    """Return whether this module's settings never enter the path that takes a child's tensors."""
    if isinstance(reader, nn.TransformerEncoderLayer):
        return not reader.activation_relu_or_gelu and own != "out_proj"
    return getattr(reader, "pretraining_tp", None) == 1  # Bloom's, of checkpoints made by several devices


def _tensors_taken(module: nn.Module) -> tuple[dict[str, set[str]], set[str]]:
    """Return what a module's code takes as tensors, and the names that it uses in any other way.

    The first is "weight" and "bias" by the name of the child that has them, alone and after the name before it
    ("attention.output"). A look at a tensor's type, device, shape or presence takes nothing.
    """
    taken, called = defaultdict[str, set[str]](set), set[str]()
    for code in () if isinstance(module, _CONTAINERS) else _codes(module):
        text = _IN_ISINSTANCE.sub("", _text(code))
        called.update(_CALLED.findall(text))
        for around, child, tensor in _TAKEN.findall(text):
            taken[child].add(tensor)
            taken[f"{around}.{child}"].add(tensor)
    return taken, called


def _text(code: CodeType) -> str:
    """Write a function's code as one line, in which chains of attributes stand as in its source."""
    return "".join(
        f".{step.argval}"
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        else f" {step.opname}:" + re.sub(r"\W", "_", str(step.argval))
        for step in dis.get_instructions(code)
        if step.opname not in _SILENT
    )


def why_bypassed(name: str, attribute: str, parent: nn.Module, grandparent: nn.Module | None) -> str:
    """Return why swapping an activation would do nothing, with the fix; empty: a module around it calls it."""
    if isinstance(parent, nn.TransformerEncoderLayer) and parent.activation_relu_or_gelu:
        return (
            f"{name} is bypassed in inference by nn.TransformerEncoderLayer's fused path; set activation_relu_or_gelu "
            "= 0 on the layer"
        )
    readers = [parent] if grandparent is None else [parent, grandparent]
    if isinstance(parent, _CONTAINERS) or any(attribute in _names_read(reader) for reader in readers):
        return ""
    return (
        f"{name} is bypassed: the forward of {type(parent).__name__} does not call it (a fused MLP?); use the unfused "
        "model"
    )


def functions_called(module: nn.Module) -> str:
    """Return the activations that a module's forward calls as functions, as the end of a sentence; empty: none."""
    if type(module).__module__.startswith("nonlinear_lowrank."):
        return ""  # the functions of other methods' layers are theirs
    holds = [
        f"holds the function {_FUNCTIONS[value]} as .{key}"
        for key, value in vars(module).items()
        if inspect.isroutine(value) and value in _FUNCTIONS
    ]
    if type(module).__module__.startswith("torch.nn."):
        return ", ".join(holds)
    read = _names_read(module) - set(module._modules)
    called = sorted(read & _ACTIVATIONS)
    words = [f"calls {', '.join(called)}"] if called else []
    if read & _TABLES:
        words.append("looks its activation up in its forward")
    return " and ".join(words + holds)


def _names_read(module: nn.Module) -> set[str]:
    """Return every global and attribute name in a module's code."""
    return {name for code in _codes(module) for name in code.co_names}


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code of a module's forward, of the methods it calls on itself, and of functions in and around both."""
    pending: list[Any] = [module.__dict__.get("forward", type(module).forward)]
    seen: set[int] = set()
    while pending:
        match each := pending.pop():
            case CodeType() if id(each) not in seen:
                yield each
                pending += each.co_consts
                for name in each.co_names:
                    methods = _own_methods(type(module), name)
                    pending += methods if "super" in each.co_names else methods[:1]
            case FunctionType() if id(each) not in seen:
                # Decorators: what they wrap is an attribute or in the closure.
                cells = [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
                wrapped = [cell for cell in cells if isinstance(cell, FunctionType | MethodType)]
                pending += [each.__code__, getattr(each, "__wrapped__", None), *wrapped]
            case MethodType():
                pending.append(each.__func__)
            case partial():
                pending.append(each.func)
        seen.add(id(each))


def _own_methods(cls: type, name: str) -> list[Any]:
    """Return the methods that a model's code defines, the one in use first, without those of all modules' bases."""
    # torch.nn's own layers count: TransformerDecoderLayer calls its activation in _ff_block.
    own = [each for each in cls.__mro__ if each is not nn.Module and not each.__module__.startswith(_BASES)]
    return [value for each in own if callable(value := each.__dict__.get(name))]
