"""Two control figures beside every measured time: how fast this machine copies, and how fast it multiplies."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

# Bytes copied, and rows of the square matrices multiplied: well beyond caches, short on one CPU core.
_COPY = {"cpu": 1 << 26, "cuda": 1 << 30}
_ROWS = {"cpu": 768, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Medians of five, in wall time, in the minute of the measurement."""

    copy_bytes_per_second: float
    """Of a large tensor; a byte that is read and written counts twice."""
    product_flops_per_second: float
    """Of a large square matrix product."""
    product_dtype: str
    """Type of the matrices."""

    @classmethod
    def measure(cls, device: str, dtype: torch.dtype) -> Self:
        """About a tenth of a second.

        Args:
            device: as in torch.
            dtype: of the matrices; float32 on the CPU whatever is asked for.
        """
        kind = torch.device(device).type
        dtype = torch.float32 if kind == "cpu" else dtype
        source = torch.ones(_COPY.get(kind, _COPY["cpu"]), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = 2 * source.numel() / _seconds(lambda: target.copy_(source), kind)
        rows = _ROWS.get(kind, _ROWS["cpu"])
        matrix = torch.randn(rows, rows, dtype=torch.float32, device=device).to(dtype)
        product = 2 * rows**3 / _seconds(lambda: matrix @ matrix, kind)
        return cls(
            copy_bytes_per_second=copied,
            product_flops_per_second=product,
            product_dtype=str(dtype).removeprefix("torch."),
        )

    def __str__(self) -> str:
        return (
            f"control: copies {self.copy_bytes_per_second / 1e9:,.1f} GB/s, multiplies "
            f"{self.product_flops_per_second / 1e9:,.0f} GFLOP/s ({self.product_dtype})"
        )


def _seconds(function: Callable[[], object], kind: str) -> float:
    times = []
    for _ in range(_REPEATS + 1):  # the first warms up
        start = time.perf_counter()
        function()
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
