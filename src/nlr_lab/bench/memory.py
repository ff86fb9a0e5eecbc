"""`nlr bench memory`: bytes saved for backward, and the peak memory of a training step. Both are deterministic.

Saved bytes are those of `analysis.saved`: activations without parameters. The peak is that of a step of forward, loss,
backward and AdamW, beyond the model's weights and the optimizer's state, which are there before: activations,
gradients, and what is formed in passing.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nlr_lab.runtime.tables import readable_bytes
from nonlinear_lowrank.analysis.saved import saved_bytes

from .machine import describe_machine, describe_model
from .methods import bench_arms
from .peak import peak_bytes
from .result import BenchResult, Point, Row
from .settings import TrainBenchConfig
from .training import make_stepper


@dataclass(frozen=True, kw_only=True)
class MemoryRow(Row):
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
    """Bytes saved for backward."""
    peak: int
    """Bytes at the step's highest moment beyond weights and optimizer state."""
    kept_ratio: float | None
    """kept over that of `over`."""
    peak_ratio: float | None
    """weights + peak over those of `over`."""

    def cells(self) -> dict[str, str]:
        """Return the texts by column."""
        return {
            "mode": self.mode,
            "arm": self.arm,
            "trained": f"{self.trained:,}",
            "weights": readable_bytes(self.weights),
            "saved for backward": readable_bytes(self.kept),
            "peak of a step": readable_bytes(self.peak),
            "over": self.over or "",
            "saved x": "" if self.kept_ratio is None else f"{self.kept_ratio:.4f}",
            "peak x": "" if self.peak_ratio is None else f"{self.peak_ratio:.4f}",
        }

    def point(self) -> Point:
        """Return the saved bytes."""
        mebibytes = self.kept / 2**20
        return Point(panel=self.mode, label=self.arm, value=mebibytes, low=mebibytes, high=mebibytes)


def bench_memory(config: TrainBenchConfig, *, progress: Callable[[str], object] = lambda line: None) -> BenchResult:
    """Measure one arm after the other; clock, rounds and warmup play no part.

    Raises:
        UserError: a method does not fit the model.
    """
    rows: dict[tuple[str, str | None], MemoryRow] = {}
    with cpu_threads(config.threads), many_compiled():
        for mode in config.modes:
            for arm in bench_arms(config.methods, config.ranks):
                progress(f"{mode}: {arm.name}")
                torch._dynamo.reset()
                stepper = make_stepper(config, mode, arm)
                state = [*stepper.model.parameters(), *stepper.model.buffers()]
                stepper.step()  # compiles, and makes the optimizer's state
                kept = saved_bytes(stepper.loss, parameters=state)
                weights = sum(each.nbytes for each in state)
                peak = peak_bytes(stepper.step, config.device)
                base = rows.get((mode, arm.over))
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
        machine = describe_machine(config.device, bf16=config.bf16)
    about = describe_model(config, config.setting, machine, timed=False)
    axis = "MiB saved for backward"
    return BenchResult(config=config, rows=list(rows.values()), about=about, axis=axis, machine=machine)
