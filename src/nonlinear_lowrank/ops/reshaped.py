"""The shape of an operator's result."""

from collections.abc import Sequence

import torch
from torch import Tensor

_unsafe_view = torch.ops.aten._unsafe_view.default


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor in another shape, without a copy, that is no view to autograd.

    A view that leaves an `autograd.Function` refuses every in-place operation. `F.linear` with a bias returns one for
    an input of more than two dimensions, so its results pass through here too.

    Args:
        result: made by the caller, who keeps no other reference to it.
        shape: of as many numbers.
    """
    return _unsafe_view(result, shape)
