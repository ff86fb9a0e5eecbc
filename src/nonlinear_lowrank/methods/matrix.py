"""The one matrix that a module multiplies by, whatever kind of module it is and however it stores it."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.pytorch_utils import Conv1D

Kind = Literal["linear", "conv1d", "conv2d", "embedding"]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_pre_hooks")
# Our own layers have such.
_HOOKS_OF_FILES = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Matrix:
    """The layout in which a module holds its matrix."""

    kind: Kind
    d_out: int
    d_in: int

    def of(self, weight: Tensor) -> Tensor:
        """Return a module's weight as (d_out, d_in), a view."""
        if self.kind == "conv1d":
            return weight.t()
        return weight.flatten(1) if self.kind == "conv2d" else weight


def is_hooked(module: nn.Module, plain: bool = False) -> bool:
    """Return whether something was put on a module itself: hooks, parametrizations, a forward (as accelerate does);
    of a plain one also hooks of its files."""
    own, kinds = vars(module), (*_HOOKS, *_HOOKS_OF_FILES) if plain else _HOOKS
    return is_parametrized(module) or "forward" in own or any(own[kind] for kind in kinds)


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module computes x W^T + b, no more: an `nn.Linear`, a transformers `Conv1D`, or a subclass.

    A subclass with a forward of its own (Falcon's) is tried on small tensors in place of its own, in training and in
    evaluation. One with further arguments is not plain: its callers may use them.
    """
    if type(module) in (nn.Linear, Conv1D):
        return True
    base: Any = nn.Linear if isinstance(module, nn.Linear) else Conv1D
    if not isinstance(module, base) or any(True for _ in module.children()):
        return False
    forward = type(module).forward
    if forward is base.forward:
        return True
    return len(inspect.signature(forward).parameters) == 2 and _computes(module, base)


def linear_shape(module: Any) -> tuple[int, int]:
    """Return (d_in, d_out) of a linear, plain or a method's."""
    if hasattr(module, "linear_shape"):
        shape: tuple[int, int] = module.linear_shape
        return shape
    return (module.nx, module.nf) if hasattr(module, "nx") else (module.in_features, module.out_features)


def _computes(module: nn.Module, base: Any) -> bool:
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        plain = base(3, 2) if base is Conv1D else base(2, 3, bias=module.bias is not None)
        if {name for name, _ in _own(module)} != {name for name, _ in _own(plain)}:
            return False
        tensors = {name: torch.sin(torch.arange(1.0, each.numel() + 1)).view(each.shape) for name, each in _own(plain)}
        x = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
        wanted, before = torch.func.functional_call(plain, tensors, x), module.training
        try:
            both = [torch.func.functional_call(module.train(mode), tensors, x) for mode in (True, False)]
        except Exception:  # a forward of any kind
            return False
        finally:
            module.train(before)
    return all(isinstance(y, Tensor) and y.shape == wanted.shape and torch.allclose(y, wanted) for y in both)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def matrix_of(module: nn.Module) -> Matrix | str:
    """Return the matrix a plain module multiplies by; where there is none, the reason as the end of a sentence."""
    if isinstance(module, nn.Linear):
        return Matrix("linear", module.out_features, module.in_features)
    if isinstance(module, Conv1D):
        return Matrix("conv1d", module.nf, module.nx)
    if isinstance(module, nn.Embedding):
        return Matrix("embedding", module.num_embeddings, module.embedding_dim)
    if isinstance(module, nn.Conv2d):
        if module.kernel_size != (1, 1):
            return f"is a convolution with kernel {module.kernel_size}, and only 1x1 ones are linears"
        if module.groups != 1:
            return f"is a 1x1 convolution in {module.groups} groups, and only ungrouped ones are linears"
        if module.padding not in ((0, 0), "valid", "same"):
            return "is a 1x1 convolution with padding, and only unpadded ones are linears"
        return Matrix("conv2d", module.out_channels, module.in_channels)
    d_in, d_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(d_in, int) and isinstance(d_out, int):  # GPTQ, AWQ, HQQ, ...: linears of classes of their own
        return Matrix("linear", d_out, d_in)
    return f"is a {type(module).__name__}, and adapters go on nn.Linear, Conv1D, 1x1 Conv2d and nn.Embedding"


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put every replacement where its module stands, wherever that is reachable by several names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children skips repeats
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
        # Mask2Former's blocks call their layers from a list of their own.
        for name, held in list(vars(parent).items()):
            if name not in _OF_EVERY_MODULE and (new := _replaced(held, replacements)) is not held:
                vars(parent)[name] = new


def _replaced(held: Any, replacements: Mapping[nn.Module, nn.Module], depth: int = 3) -> Any:
    """Return an attribute with every replacement in it: written into lists and dicts, a new tuple, or what it was."""
    if isinstance(held, nn.Module):
        return replacements.get(held, held)
    if depth and isinstance(held, list | dict):
        for key, each in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if (new := _replaced(each, replacements, depth - 1)) is not each:
                held[key] = new
    elif depth and type(held) is tuple:
        new = tuple(_replaced(each, replacements, depth - 1) for each in held)
        return new if any(one is not other for one, other in zip(new, held, strict=True)) else held
    return held


def holders(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return the modules that hold each parameter, with their names, by its id.

    For peft's modules_to_save the adapter's own copy counts, which replaces the original.
    """
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for tensor in module._parameters.values() if not name.endswith(".original_module") else ():
            if tensor is not None:
                found.setdefault(id(tensor), []).append((name, module))
    return found
