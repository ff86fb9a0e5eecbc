"""Settings that all timed benchmarks share, and how they are checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .timing import Clock

Mode = Literal["eager", "compiled", "graphs"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """How a benchmark measures. Integers must be positive, and values of a tuple different, at least one.

    Raises:
        UserError: a value is out of range.
    """

    modes: tuple[Mode, ...] = ("compiled", "eager")
    """eager, compiled (torch.compile) or graphs (torch.compile with CUDA graphs, "reduce-overhead")."""
    rounds: int = 30
    """Timed steps of each arm."""
    warmup: int = 4
    """Untimed steps of each arm; the first compiles."""
    clock: Clock = "process"
    """process: CPU seconds. wall: seconds passed. cuda: CUDA events."""
    threads: int | None = 1
    """CPU threads; None leaves torch's number."""
    device: str = "cpu"
    """Where it runs."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            _check(name, hint, getattr(self, name))
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device {self.device!r} is not there; use --device cpu")


def _check(name: str, kind: Any, value: Any) -> None:
    """Check a field by its type."""
    values = (value,)
    if get_origin(kind) is tuple:
        kind, values = get_args(kind)[0], value
        if not values or len(set(values)) < len(values):
            given = " ".join(map(str, values)) or "none"
            raise UserError(f"{name} must be different, and at least one, got {given}")
    for each in values:
        if get_origin(kind) is Literal and each not in get_args(kind):
            raise UserError(f"unknown {name} {each!r}; choose {' or '.join(map(str, get_args(kind)))}")
        if kind is int or (kind == int | None and each is not None):
            check_integer(name, each, minimum=1)


def check_low(ranks: tuple[int, ...], limit: int) -> None:
    """Raise UserError unless the ranks are below the smaller side of what they are put on."""
    for rank in ranks:
        if rank >= limit:
            raise UserError(f"rank {rank} is not low; choose a rank below {limit}")


def in_mode(function: Callable[..., Any], mode: Mode, *, dynamic: bool | None = None) -> Callable[..., Any]:
    """Return the function as it is, or compiled."""
    if mode == "eager":
        return function
    return torch.compile(function, mode="reduce-overhead" if mode == "graphs" else None, dynamic=dynamic)
