"""Peak memory of a call, on a CPU as on a GPU, without counting what was there before."""

import itertools
import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Return the most bytes that `function()` holds at any moment beyond those held when it begins.

    On a GPU it is the caching allocator's own account. On a CPU it is added up from the allocations and frees that
    torch's profiler reports; memory that a library takes by itself is not among them (scratch of matrix products).

    Args:
        function: called once; call it before, so that compilation and lazily made state are not counted.
        device: as in torch.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # says nothing on standard error
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes, initial=0))
