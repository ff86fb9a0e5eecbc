"""`nlr bench memory`: what a method keeps for backward, and the peak memory of its training step.

Both are deterministic. Kept bytes are those of saved.py: activations without parameters. The peak is that of a step of
forward, loss, backward and AdamW, beyond the model's weights and the optimizer's state, which are there before:
activations, gradients, and what is formed in passing.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nlr_lab.plan.inspect import readable_bytes
from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nonlinear_lowrank.analysis.saved import saved_bytes

from .methods import bench_arms
from .model import BenchResult, Point, describe, describe_machine, table_with
from .peak import peak_bytes
from .training import TrainBenchConfig, make_stepper


@dataclass(frozen=True, kw_only=True)
class MemoryBenchConfig(TrainBenchConfig):
    """What `nlr bench memory` measures.

    Raises:
        UserError: a value is out of range.
    """


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One arm, beside the one it is measured against."""

    mode: str
    arm: str
    over: str | None
    """None: others are measured against it."""
    trained: int
    """Parameters that are trained."""
    weights: int
    """Bytes of the model's parameters and buffers."""
    kept: int
    """Bytes kept for backward."""
    peak: int
    """Bytes at the step's highest moment beyond weights and optimizer state."""
    kept_ratio: float | None
    """kept over that of `over`."""
    peak_ratio: float | None
    """weights + peak over those of `over`."""


@dataclass(frozen=True, kw_only=True)
class MemoryBench(BenchResult):
    """Result of `bench_memory`; `print(result)` gives the table."""

    config: MemoryBenchConfig
    rows: list[MemoryRow]

    def __str__(self) -> str:
        table = table_with(
            "mode", "arm", "trained", "weights", "kept for backward", "peak of a step", "over", "kept x", "peak x"
        )
        for row in self.rows:
            table.add_row(
                row.mode,
                row.arm,
                f"{row.trained:,}",
                *(readable_bytes(nbytes) for nbytes in (row.weights, row.kept, row.peak)),
                row.over or "",
                *("" if ratio is None else f"{ratio:.4f}" for ratio in (row.kept_ratio, row.peak_ratio)),
            )
        return describe(self.config, table, self.config.setting, self.machine, timed=False)

    def points(self) -> tuple[str, list[Point]]:
        """Kept bytes by mode."""
        marks = [
            Point(panel=row.mode, label=row.arm, value=row.kept / 2**20, low=row.kept / 2**20, high=row.kept / 2**20)
            for row in self.rows
        ]
        return "MiB kept for backward", marks


def bench_memory(config: MemoryBenchConfig, *, progress: Callable[[str], object] | None = None) -> MemoryBench:
    """Measures it, one arm after the other.

    Args:
        config: see `MemoryBenchConfig`; clock, rounds and warmup play no part.
        progress: called with a line for each arm, e.g. `print`.

    Raises:
        UserError: a method does not fit the model.
    """
    rows: dict[tuple[str, str], MemoryRow] = {}
    with cpu_threads(config.threads), many_compiled():
        for mode in config.modes:
            for arm in bench_arms(config.methods, config.ranks):
                if progress is not None:
                    progress(f"{mode}: {arm.name}")
                torch._dynamo.reset()
                stepper = make_stepper(config, mode, arm)
                state = [*stepper.model.parameters(), *stepper.model.buffers()]
                stepper.step()  # compiles, and makes the optimizer's state
                kept = saved_bytes(stepper.loss, parameters=state)
                weights = sum(each.nbytes for each in state)
                peak = peak_bytes(stepper.step, config.device)
                base = rows.get((mode, arm.over)) if arm.method is not None else None
                rows[mode, arm.name] = MemoryRow(
                    mode=mode,
                    arm=arm.name,
                    over=None if base is None else base.arm,
                    trained=stepper.trained,
                    weights=weights,
                    kept=kept,
                    peak=peak,
                    kept_ratio=None if base is None else kept / base.kept,
                    peak_ratio=None if base is None else (weights + peak) / (base.weights + base.peak),
                )
                del stepper, state
                gc.collect()
        machine = describe_machine(config)
    return MemoryBench(config=config, rows=list(rows.values()), times={}, machine=machine)
