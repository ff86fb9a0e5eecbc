"""Derivatives that an operator's own backward does not give: there its plain formula runs, and torch differentiates it.

That is every transform of `torch.func` (grad, vmap, jvp, ...), forward-mode differentiation, the backward of a
backward, and `torch.export`, whose programs then have no op of ours. The formula saves what any PyTorch code of its
kind saves. No `autograd.Function` of ours meets a transform, so they take ctx in forward: the other form
inspects a signature in every call (14 microseconds).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from .plain import exporting
from .precision import no_autocast


def transformed() -> bool:
    """Return whether an operator must run its plain formula, for a transform or trace that goes through it.

    That is `torch.func`, forward-mode differentiation, `torch.export` and `torch.jit.trace`. torch has no public name
    for the first two. It asks the first itself in front of every `autograd.Function`.
    """
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0 or exporting() or torch.jit.is_tracing()


def differentiated(*dys: Tensor) -> bool:
    """Return whether a backward of these gradients is itself differentiated (`create_graph=True`) or transformed.

    `is_grads_batched=True` has tensors of its own, which no in-place operation on others can take.
    """
    if torch.compiler.is_compiling():
        return transformed()
    return torch.is_grad_enabled() or transformed() or any(map(is_legacy_batchedtensor, dys))


def formula_gradients(
    formula: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool], dy: Any
) -> list[Tensor | None]:
    """Return the gradients of a formula's inputs, None where not wanted; they can be differentiated again.

    Args:
        formula: of all inputs; its result is a tensor or a tuple of them.
        inputs: tensors, and what has no gradient.
        wanted: of which inputs.
        dy: the gradient of the formula's result, as this is.
    """

    def given(*chosen: Tensor) -> Any:
        left = iter(chosen)
        return formula(*(next(left) if want else each for each, want in zip(inputs, wanted, strict=True)))

    with no_autocast(dy if isinstance(dy, Tensor) else dy[0]):
        result: Any = torch.func.vjp(given, *(each for each, want in zip(inputs, wanted, strict=True) if want))
        found = iter(result[1](dy))
    return [next(found) if want else None for want in wanted]
