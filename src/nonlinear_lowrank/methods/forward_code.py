"""Names that the forwards of a model's modules read, in their compiled code: the activations they call, and the linears
whose tensors they take without calling them."""

import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_PLAIN_FUNCTIONS = {"gelu", "relu", "silu", "tanh", "sigmoid", "quick_gelu", "leaky_relu", "elu", "mish", "softplus"}
_CLASSES = {"ReLU", "GELU", "SiLU", "Tanh", "Sigmoid"}
_TABLES = {"ACT2FN", "get_activation"}
_FUNCTIONS = {F.relu: "relu", F.gelu: "gelu", F.silu: "silu", torch.tanh: "tanh", torch.relu: "relu", F.tanh: "tanh"}
_LOOKS = {
    *("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_meta", "is_cuda", "requires_grad"),
    *("is_floating_point", "element_size", "layout", "get_device"),
}
_SILENT = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME", "COPY_FREE_VARS"}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CALLERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BASES = ("transformers.modeling_utils", "transformers.generation")


def why_bypassed(name: str, attribute: str, parent: nn.Module, grandparent: nn.Module | None) -> str:
    """Why swapping a child would do nothing, and the mend; empty: its parent, or the one around it, reads it."""
    if isinstance(parent, nn.TransformerEncoderLayer) and parent.activation_relu_or_gelu:
        return (
            f"{name} is bypassed in inference by nn.TransformerEncoderLayer's fused path; set activation_relu_or_gelu "
            "= 0 on the layer"
        )
    if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return ""
    readers = [parent] if grandparent is None else [parent, grandparent]
    if any(attribute in _names_read(reader) for reader in readers):
        return ""
    return (
        f"{name} is bypassed: the forward of {type(parent).__name__} does not call it (a fused MLP?); use the unfused "
        "model"
    )


@dataclass(frozen=True)
class Bypass:
    """Why a layer in a module's place would not act."""

    why: str
    refused: bool
    """Whether it is not to be put there on request either: it would never act, or not in inference. Else there are
    paths on which it would."""


def bypassed_linears(model: nn.Module) -> dict[str, Bypass]:
    """Modules whose weight or bias the code around them takes as a tensor, by whole name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    taken = {name: _tensors_taken(module) for name, module in modules.items()}
    found = {}
    for name, module in modules.items():
        if not name or next(module.children(), None) is not None:
            continue
        parts = name.split(".")
        readers = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        called = any(parts[-1] in taken[reader].called for reader in readers[:2])
        for place, reader_name in enumerate(readers):
            # From further away a name alone may mean another module.
            own = ".".join(parts[-1:] if place < 2 else parts[-2:])
            reader, tensors = modules[reader_name], taken[reader_name].get(own)
            if tensors is None or _is_switched_off(reader, own):
                continue
            why = f"the forward of {type(reader).__name__} takes its {' and '.join(sorted(tensors))} without calling it"
            fused = isinstance(reader, nn.TransformerEncoderLayer)
            if fused:
                why += " in inference (set activation_relu_or_gelu = 0 on that layer to have it called)"
            elif called:
                why += " on one of its paths"
            found[name] = Bypass(why=why, refused=fused or not called)
            break
    return found


def _is_switched_off(reader: nn.Module, own: str) -> bool:
    """Return whether this module's settings never enter the path that takes a child's tensors."""
    if isinstance(reader, nn.TransformerEncoderLayer):
        return not reader.activation_relu_or_gelu and own != "out_proj"
    return getattr(reader, "pretraining_tp", None) == 1  # Bloom's, of checkpoints made by several devices


class _Taken(dict[str, set[str]]):
    """ "weight" and "bias" that a module's code takes as tensors, by the name of the child, or of a child's child, that
    has them, alone and after the name before it ("attention.output")."""

    called: set[str]
    """Names that the code also uses in any other way."""


def _tensors_taken(module: nn.Module) -> _Taken:
    """Return the tensors that a module's code takes of the modules in it.

    A look at type, device, shape or presence is none: `self.wo.weight.dtype`, `isinstance(self.wo.weight, Tensor)`.
    """
    taken = _Taken()
    taken.called = set()
    if isinstance(module, _CALLERS):
        return taken
    for code in _reached(module):
        steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
        for place in range(1, len(steps) - 1):
            child, tensor, after = steps[place - 1 : place + 2]
            if child.opname not in _ATTRIBUTES:
                continue
            if tensor.opname not in _ATTRIBUTES or tensor.argval not in ("weight", "bias"):
                taken.called.add(child.argval)
            elif not (_is_look(after) or _of_isinstance(steps, place)):
                around = steps[place - 2] if place > 1 else None
                names = [child.argval]
                if around is not None and around.opname in _ATTRIBUTES:
                    names.append(f"{around.argval}.{child.argval}")
                for name in names:
                    taken.setdefault(name, set()).add(tensor.argval)
    return taken


def _is_look(after: dis.Instruction) -> bool:
    """Return whether what is done with a tensor next only looks at what it is."""
    if after.opname in _ATTRIBUTES:
        return after.argval in _LOOKS
    return after.opname.startswith("POP_JUMP") or (after.opname == "LOAD_CONST" and after.argval is None)


def _of_isinstance(steps: list[dis.Instruction], place: int) -> bool:
    while place > 0 and steps[place].opname in _ATTRIBUTES:
        place -= 1
    return place > 0 and steps[place - 1].argval == "isinstance"


def functions_called(module: nn.Module) -> str:
    """Activations that a module's own forward calls as functions, as the end of a sentence; empty: none."""
    if type(module).__module__.startswith("nonlinear_lowrank."):
        return ""  # the functions of other methods' layers are theirs
    held = {key: _FUNCTIONS[value] for key, value in vars(module).items() if _is_plain_function(value)}
    holds = [f"holds the function {function} as .{key}" for key, function in held.items()]
    if type(module).__module__.startswith("torch.nn."):
        return ", ".join(holds)
    read = _names_read(module) - set(module._modules)
    called = sorted(read & (_PLAIN_FUNCTIONS | _CLASSES))
    words = [f"calls {', '.join(called)}"] if called else []
    if read & _TABLES:
        words.append("looks its activation up in its forward")
    return " and ".join(words + holds)


def _is_plain_function(value: Any) -> bool:
    return inspect.isroutine(value) and value in _FUNCTIONS


def _names_read(module: nn.Module) -> set[str]:
    """Every global and attribute name in the code of a module's forward and of the methods it calls on itself."""
    return {name for code in _reached(module) for name in code.co_names}


def _reached(module: nn.Module) -> Iterator[CodeType]:
    """The code of a module's forward and of the methods it calls on itself."""
    own = module.__dict__.get("forward")
    start = getattr(own, "__func__", own) if own is not None else type(module).forward
    pending: list[Any] = [start]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        for code in _codes(function):
            if id(code) in seen:
                continue
            seen.add(id(code))
            yield code
            for name in code.co_names:
                methods = _own_methods(type(module), name)
                pending += methods if "super" in code.co_names else methods[:1]


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
