"""NOBLE's formula: a linear map plus a nonlinear low-rank branch (noble.txt, sections 3.1 and 3.2).

    h = x down^T                                  (T, r)
    u = bottleneck(h)                             (T, r)   CosNet: cos(f2 * (M cos(f1 * h + p1)) + p2)
    y = x weight^T + bias + u up^T                (T, d_out)

A bottleneck of depth n has n activations and n - 1 mixes. The fast operator (`op.py`) is held to it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

LEAKY_SLOPE = 0.01
_NARROW = (torch.bfloat16, torch.float16)
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "leaky_relu": lambda z: F.leaky_relu(z, LEAKY_SLOPE),
    "gelu": F.gelu,
    "silu": F.silu,
}


class Branch(NamedTuple):
    """The tensors of a branch beside a linear d_in -> d_out, of rank r and depth n.

    The last mix, frequency and phase may have some of the r rows alone, and `up` as many columns.
    """

    down: Tensor | None
    """(r, d_in); None where h is given, or the first branch of a group has it."""
    up: Tensor
    """(d_out, r)"""
    mixes: Sequence[Tensor] = ()
    """n - 1 matrices (r, r)."""
    frequencies: Sequence[Tensor] = ()
    """n vectors (r) for "cosine", else none."""
    phases: Sequence[Tensor] = ()
    """Like `frequencies`."""
    activation: str = "cosine"
    """One of `config.Activation`."""

    def flat(self) -> list[Tensor | None]:
        """Return the tensors in one list, for autograd and custom ops, which take no tuples of lists."""
        return [self.down, self.up, *self.mixes, *self.frequencies, *self.phases]

    @classmethod
    def of_flat(cls, tensors: Sequence[Tensor | None], activation: str) -> Self:
        """Return the branch whose `flat` this is."""
        n = (len(tensors) - 1) // 3 if activation == "cosine" else len(tensors) - 1
        mixes, frequencies, phases = tensors[2 : n + 1], tensors[n + 1 : 2 * n + 1], tensors[2 * n + 1 :]
        return cls(tensors[0], tensors[1], mixes, frequencies, phases, activation)  # type: ignore[arg-type]

    def with_matrices(self, dtype: torch.dtype) -> Self:
        """Return it with matrices of this type; frequencies and phases stay as they are."""
        down = None if self.down is None else self.down.to(dtype)
        return self._replace(down=down, up=self.up.to(dtype), mixes=[mix.to(dtype) for mix in self.mixes])


def wide(tensor: Tensor) -> Tensor:
    """Return it in float32 or wider: phases of low-precision arguments lose the cosine entirely."""
    return tensor.float() if tensor.dtype in _NARROW else tensor


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return a nonlinearity of `config.Activation` as a function of its argument."""
    return torch.cos if name == "cosine" else _PLAIN[name]


def argument(z: Tensor, branch: Branch, layer: int) -> Tensor:
    """Return what an activation is given, float32 or wider; a new tensor for the cosine."""
    if branch.activation == "cosine":
        return torch.addcmul(wide(branch.phases[layer]), wide(z), wide(branch.frequencies[layer]))
    return wide(z)


def bottleneck(h: Tensor, branch: Branch) -> Tensor:
    """Return the branch between its two projections: (..., r) -> (..., r), in the type of h.

    Source: noble.txt, equation (2) and appendix A (5)-(7); other activations: Table 5.
    """
    function = activation_function(branch.activation)
    if branch.activation == "cosine" and not torch.is_grad_enabled():
        function = torch.cos_  # on r-wide tensors memory is the cost
    u = h
    for layer in range(len(branch.mixes) + 1):
        if layer > 0:
            u = F.linear(u, branch.mixes[layer - 1])
        u = function(argument(u, branch, layer)).to(h.dtype)
    return u


def noble_linear_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, branch: Branch, h: Tensor | None = None
) -> Tensor:
    """Return the plain formula, term by term; arguments as in `op.noble_linear`."""
    if h is None:
        assert branch.down is not None
        h = F.linear(x, branch.down)
    u_up = F.linear(bottleneck(h, branch), branch.up)
    return u_up if weight is None else F.linear(x, weight, bias) + u_up
