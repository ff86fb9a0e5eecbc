"""Sine and cosine for kernels, and the description of a kernel in one block shape."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Variant(NamedTuple):
    """A kernel in one block shape, as it is launched."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    """tl.constexpr arguments."""
    warps: int
    stages: int = 2
    products: int = 0
    """tl.dot calls in it."""

    @property
    def options(self) -> dict[str, Any]:
        """Options for triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run it on its tensors' GPU, which need not be the current one; arguments are the kernel's, in order."""
        with torch.cuda.device_of(arguments[0]):
            self.kernel[grid](*arguments, **self.constants, **self.options)


def cdiv(n: int, by: int) -> int:
    """Return n / by, rounded up; triton's own, called in Python, takes ten times as long."""
    return -(-n // by)


def power_of_2(n: int, least: int) -> int:
    """Return the smallest power of 2 that is at least n and at least `least`."""
    return max(least, triton.next_power_of_2(n))


@triton.jit
def cosine(x, FAST: tl.constexpr):
    """cos of a float32 tile.

    FAST: a step of argument reduction, then the hardware's cos.approx, right to 5e-7 for |x| <= 1e4; else to 2e-7 by a
    polynomial (SLEEF's, without its slow path, which would need a stack).
    """
    if FAST and not INTERPRETED:
        value = libdevice.fast_cosf(_one_turn(x))
    else:
        half_turns = 2.0 * tl.floor(x * 0.3183098861837907) + 1.0
        value = _sine_polynomial(_less(x, 0.5 * half_turns))
        # of x - (2 k + 1) pi / 2; the sign alternates with k, the plus at odd k
        value = tl.where(_is_odd(0.5 * (half_turns - 1.0)), value, -value)
    return value


@triton.jit
def sine(x, FAST: tl.constexpr):
    """sin of a float32 tile; as `cosine`."""
    if FAST and not INTERPRETED:
        value = libdevice.fast_sinf(_one_turn(x))
    else:
        half_turns = tl.floor(x * 0.3183098861837907 + 0.5)
        value = _sine_polynomial(_less(x, half_turns))
        value = tl.where(_is_odd(half_turns), -value, value)
    return value


@triton.jit
def _one_turn(x):
    """x less whole turns; both constants together are 2 pi, and fma rounds once."""
    turns = tl.floor(x * 0.15915494309189535 + 0.5)
    return tl.fma(turns, 1.7484555316954187e-07, tl.fma(turns, -6.2831854820251465, x))


@triton.jit
def _less(x, n):
    """x - n pi; the first parts of pi have so few bits that n times them is exact (n below 2^13)."""
    x = x - n * 3.140625
    x = x - n * 0.0009670257568359375
    x = x - n * 6.2771141529083251953e-07
    return x - n * 1.2154201256553420762e-10


@triton.jit
def _is_odd(n):
    return n - 2.0 * tl.floor(0.5 * n) > 0.5


@triton.jit
def _sine_polynomial(x):
    """sin on [-pi / 2, pi / 2]."""
    s = x * x
    p = 2.6083159809786593541503e-06 * s - 0.0001981069071916863322258
    p = p * s + 0.00833307858556509017944336
    p = p * s - 0.166666597127914428710938
    return x + x * (s * p)
