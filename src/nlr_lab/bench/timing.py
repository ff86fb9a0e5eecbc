"""Step times that can be compared: the arms take turns, and ratios are formed within a round.

A machine's speed drifts (frequency, neighbours, caches), often by more than the difference that is to be measured.
Arms that alternate step by step see the same drift, so the ratio within a round hardly does.
"""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nonlinear_lowrank.errors import UserError

from .settings import Clock, Mode

_LEAST = 6  # rounds: of fewer, not even the lowest and the highest ratio hold the median between them in 95 %


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Paired ratios of step times. The interval is of the median, by the bootstrap over rounds."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    """Lower end of the 95 % interval; the bootstrap's of fewer than `_LEAST` rounds holds the median less often."""
    high: float
    """Upper end."""
    n: int
    """Rounds."""
    log_standard_error: float | None = None
    """Bootstrap error of the median's logarithm; None for one round."""

    def __str__(self) -> str:
        if self.n < _LEAST:
            return f"{self.median:.3f} (n = {self.n})"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def in_mode(function: Callable[..., Any], mode: Mode, *, dynamic: bool | None = None) -> Callable[..., Any]:
    """Return the function as it is, or compiled."""
    if mode == "eager":
        return function
    return torch.compile(function, mode="reduce-overhead" if mode == "graphs" else None, dynamic=dynamic)


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees: memory that one arm gives back, another would fetch page by page.

    That cost up to twice an activation's time, in whichever arm it hit. Other C libraries are left alone.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        trim_threshold, mmap_max = -1, -4  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of the step's kernels as one CUDA graph: its time on the GPU, without Python's and launches'."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is compiled or cached in a first call cannot be captured
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def interleaved_step_times(
    steppers: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    clock: Clock = "process",
    *,
    max_seconds: float | None = None,
) -> dict[str, list[float]]:
    """Time single steps of several arms in turn.

    In every round each arm takes one step; the order is rotated by one place each round, so that no arm always
    follows the same neighbour. Garbage is collected between rounds only.

    Args:
        steppers: arm -> a function that takes one step (its return value is ignored).
        rounds: timed steps of each arm.
        warmup: untimed rounds before; compilation, caches and optimizer state belong there.
        clock: see `Clock`.
        max_seconds: no further round begins after this many, except the first warm-up and the first timed one.

    Returns:
        arm -> seconds of its steps; the k-th entries of all arms belong to one round.
    """
    names = list(steppers)
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    # Hide existing objects from the collector: scanning them takes long.
    freezing = gc.get_freeze_count() == 0
    gc.collect()
    if freezing:
        gc.freeze()
    end = math.inf if max_seconds is None else time.monotonic() + max_seconds
    try:
        for index in range(-warmup, rounds):
            if time.monotonic() > end and index not in (-warmup, 0):
                continue
            gc.collect()
            gc.disable()
            first = index % len(names)
            for name in names[first:] + names[:first]:
                seconds = _seconds(steppers[name], clock)
                if index >= 0:
                    times[name].append(seconds)
            if collecting:
                gc.enable()
    finally:
        if freezing:
            gc.unfreeze()
        if collecting:
            gc.enable()
    return times


def paired_ratio(times: Sequence[float], base: Sequence[float], *, resamples: int = 4000) -> Ratio:
    """Return median, quartiles and interval of times[k] / base[k]; the same times always give the same interval.

    Raises:
        UserError: a time is not above 0.
    """
    above, below = np.asarray(times, dtype=np.float64), np.asarray(base, dtype=np.float64)
    if not ((above > 0).all() and (below > 0).all()):
        raise UserError("a step took no measurable time; use larger steps")
    ratios = above / below
    draws = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975]).tolist()
    lower, median, upper = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    error = float(np.median(np.log(ratios)[draws], axis=1).std(ddof=1)) if len(ratios) > 1 else None
    return Ratio(
        median=median,
        lower_quartile=lower,
        upper_quartile=upper,
        low=low,
        high=high,
        n=len(ratios),
        log_standard_error=error,
    )


def _seconds(step: Callable[[], object], clock: Clock) -> float:
    if clock == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    now = time.process_time if clock == "process" else time.perf_counter
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = now()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return now() - began
