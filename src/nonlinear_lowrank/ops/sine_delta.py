"""One sine delta of a weight: its factors, its value, and its gradients (sine_lowrank.txt, equation (3)).

Formulas and shapes are those of `sine`. Product, phase and sine are float32 or wider whatever the types of the factors,
autocast and the process's settings say.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import product, wide_dtype


class SineFactors(NamedTuple):
    """One delta: its factors and settings."""

    up: Tensor
    down: Tensor
    omega: float
    gain: float
    scale: float = 1.0
    magnitude: Tensor | None = None
    """Given: the delta of sine-DoRA."""

    @property
    def amplitude(self) -> float:
        """Amplitude of the sine."""
        return self.scale / self.gain


def dora_norm(weight: Tensor, *, transposed: bool = False) -> Tensor:
    """Return the norms (d_out) of a plain weight's rows in float32 or wider: a magnitude that changes nothing."""
    with torch.no_grad():
        matrix = as_matrix(weight, transposed)
        return torch.linalg.vector_norm(matrix.to(wide_dtype(matrix)), dim=0 if transposed else 1)


def as_matrix(weight: Tensor, transposed: bool) -> Tensor:
    """Return a weight of any shape as (d_out, d_in), or (d_in, d_out) where transposed."""
    return weight if transposed else weight.reshape(weight.shape[0], -1)


def compute_type(weight: Tensor | None, factors: Sequence[SineFactors]) -> torch.dtype:
    """Return the type in which a weight with these deltas is formed."""
    return wide_dtype(weight, *(tensor for each in factors for tensor in (each.up, each.down)))


class Delta:
    """One delta and what its gradients need; made anew in forward and in backward, under no_grad.

    All d_out x d_in tensors are in the weight's layout, (d_in, d_out) where transposed.

    Args:
        weight: the plain weight as a matrix in its layout; needed with a magnitude.
        factors: the delta's.
        transposed: whether the layout is (d_in, d_out).
        dtype: float32 or wider; everything is computed in it.
        multiply: the product of (d_out, r) and (r, d_in).
    """

    def __init__(
        self,
        weight: Tensor | None,
        factors: SineFactors,
        *,
        transposed: bool,
        dtype: torch.dtype,
        multiply: Callable[[Tensor, Tensor], Tensor] = product,
    ) -> None:
        self.up, self.down = factors.up.to(dtype), factors.down.to(dtype)
        self.omega, self.amplitude, self.transposed = factors.omega, factors.amplitude, transposed
        scaled = self.up * self.omega  # on the narrow side: one pass over the wide one less
        self.phase = multiply(self.down.t(), scaled.t()) if transposed else multiply(scaled, self.down)
        self.dora = None if factors.magnitude is None else _Direction(self, weight, factors.magnitude)

    def sine(self, *, in_place: bool) -> Tensor:
        """Return amplitude * sin(phase); in the phase's memory if in_place."""
        return (self.phase.sin_() if in_place else self.phase.sin()).mul_(self.amplitude)

    def rows(self, per_row: Tensor) -> Tensor:
        """Return (d_out) so that it multiplies rows in the layout."""
        return per_row if self.transposed else per_row[:, None]

    def value(self, *, keep_phase: bool = False) -> Tensor:
        """Return the delta, a new tensor; it takes the phase's memory unless that is still needed."""
        sine = self.sine(in_place=not keep_phase)
        if self.dora is None:
            return sine
        # ratio * (W + D') - W, written so that ratio = 1 and D' = 0 give an exact 0
        ratio = self.dora.ratio
        return sine.mul_(self.rows(ratio)).add_(self.dora.weight * self.rows(ratio - 1))

    def factor_gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of up and down, by the gradient of the weight; overwrites the phase."""
        dphase = self.phase.cos_().mul_(gradient)
        if self.dora is not None:
            dphase.mul_(self.rows(self.dora.ratio))
        if self.transposed:
            dphase = dphase.t()
        chain = self.omega * self.amplitude
        return product(dphase, self.down.t()).mul_(chain), product(self.up.t(), dphase).mul_(chain)


class _Direction:
    """The part of sine-DoRA: direction W + D', its norms, and the ratio of the magnitude to them."""

    def __init__(self, delta: Delta, weight: Tensor | None, magnitude: Tensor) -> None:
        assert weight is not None
        self.weight, self.dim = weight, 0 if delta.transposed else 1
        self.direction = delta.sine(in_place=False).add_(weight)
        self.norm = torch.linalg.vector_norm(self.direction, dim=self.dim)
        # a row of zeros (a padding token's, a pruned one) has no direction and stays as it is
        self.ratio = torch.where(self.norm > 0, magnitude.to(self.norm.dtype) / self.norm, 1.0)

    def magnitude_gradient(self, gradient: Tensor) -> Tensor:
        """Return that of m (d_out), by the gradient of the weight; overwrites the direction.

        The norm is a constant (DoRA, arXiv:2402.09353, section 4.3).
        """
        projection = self.direction.mul_(gradient).sum(self.dim)
        return torch.where(self.norm > 0, projection / self.norm, 0.0)


def added(total: Tensor | None, value: Tensor, base: Tensor | None) -> Tensor:
    """Return the running sum ((base + first) + second) + ..., in the first delta's memory."""
    if total is not None:
        return total.add_(value)
    return value if base is None else value.add_(base)


def delta_gradients(
    deltas: Iterable[Delta], n: int, gradient: Tensor, base: Tensor | None, wanted: Sequence[bool], *, value: bool
) -> tuple[dict[int, Tensor], Tensor, Tensor | None]:
    """Return wanted gradients by their place, the slope of base and n deltas by the weight, and with `value` their sum.

    The gradient is that of the sum; places are those among ups, downs, and the magnitudes of deltas that have one.
    """
    gradients, total, dora = dict[int, Tensor](), None, 2 * n
    slope = torch.tensor(float(base is not None))
    for up, delta in enumerate(deltas):
        down = up + n
        if value:
            total = added(total, delta.value(keep_phase=wanted[up] or wanted[down]), base)
        if delta.dora is not None:
            if wanted[dora]:
                gradients[dora] = delta.dora.magnitude_gradient(gradient)
            slope = slope + delta.rows(delta.dora.ratio - 1)
            dora += 1
        if wanted[up] or wanted[down]:
            gradients[up], gradients[down] = delta.factor_gradients(gradient)
    return gradients, slope, total


def stochastic_bfloat16(total: Tensor, seed: int) -> Tensor:
    """Round up or down at random so that the mean is the number: 16 random bits are added and 16 cut off."""
    generator = torch.Generator(total.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, total.shape, generator=generator, device=total.device, dtype=torch.int32)
    bits = total.float().contiguous().view(torch.int32)
    rounded = (torch.where(total.isfinite(), bits + noise, bits) & -65536).view(torch.float32)
    return rounded.to(torch.bfloat16)


# How a list of deltas passes autograd's border, which takes no lists, and an op's.


def flatten(factors: Sequence[SineFactors]) -> tuple[list[Tensor], tuple[float, ...]]:
    """Return ups, downs, magnitudes (of those that have one) in one list, and three settings for each delta."""
    flat = [each.up for each in factors] + [each.down for each in factors]
    flat += [each.magnitude for each in factors if each.magnitude is not None]
    settings = [(float(each.omega), each.amplitude, float(each.magnitude is not None)) for each in factors]
    return flat, tuple(value for each in settings for value in each)


def split(flat: Sequence[Tensor], settings: Sequence[float]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return ups, downs, magnitudes out of the one list."""
    n = len(settings) // 3
    return list(flat[:n]), list(flat[n : 2 * n]), list(flat[2 * n :])


def unflatten(
    ups: Sequence[Tensor], downs: Sequence[Tensor], magnitudes: Sequence[Tensor], settings: Sequence[float]
) -> list[SineFactors]:
    """Return the deltas; their scale is the amplitude, their gain 1."""
    rest = iter(magnitudes)
    return [
        SineFactors(up, down, omega, 1.0, amplitude, next(rest) if dora else None)
        for up, down, omega, amplitude, dora in zip(
            ups, downs, settings[::3], settings[1::3], settings[2::3], strict=True
        )
    ]


def in_order(gradients: dict[int, Tensor], parameters: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """Return wanted gradients in their parameters' types, new empty tensors (an op returns none twice) for the rest."""
    device = next(each.device for each in parameters if each is not None)
    return [
        gradients[index].to(parameter.dtype) if want and parameter is not None else torch.empty(0, device=device)
        for index, (parameter, want) in enumerate(zip(parameters, wanted, strict=True))
    ]
