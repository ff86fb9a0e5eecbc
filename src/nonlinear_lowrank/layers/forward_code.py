"""What the forwards of a model's modules read, by the names in their compiled code: which activations they call."""

import inspect
from collections.abc import Iterator
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


def functions_called(module: nn.Module) -> str:
    """Activations that a module's own forward calls as functions, as the end of a sentence; empty: none."""
    if type(module).__module__.startswith(f"{__package__}."):
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
