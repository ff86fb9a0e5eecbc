"""`nlr bench step`: what a method adds to the time of a training step, beside what it adds in FLOPs.

The arms take turns step by step (timing.py); the ratio of a round is a method's time over that of the arm it is
measured against (bench_methods.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nlr_lab.runtime.environment import cpu_threads, many_compiled

from .methods import bench_arms
from .model import BenchResult, Point, describe, describe_machine, table_with
from .timing import Ratio, interleaved_step_times, paired_ratio
from .training import TrainBenchConfig, make_stepper


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(TrainBenchConfig):
    """What `nlr bench step` measures.

    Raises:
        UserError: a value is out of range.
    """


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One arm over the one it is measured against, in one mode."""

    mode: str
    arm: str
    over: str
    method: str
    rank: int | None
    parameter_ratio: float
    """Of trained parameters."""
    flop_ratio: float
    """Of the matrix products of forward and backward, as eager mode calls them."""
    step: Ratio
    """Of step times."""
    step_over_flops: float
    """step.median / flop_ratio: 1 means that a method costs just what its FLOPs do."""
    over_seconds: float
    """Median step of the arm it is measured against."""


@dataclass(frozen=True, kw_only=True)
class StepBench(BenchResult):
    """Result of `bench_step`; `print(result)` gives the table."""

    config: StepBenchConfig
    rows: list[StepRow]
    flops: dict[str, int]
    """arm -> FLOPs of the matrix products of one forward and backward pass."""

    def __str__(self) -> str:
        table = table_with(
            "mode", "arm", "over", "trained x", "FLOPs x", "step time x [95 %]", "quartiles", "step / FLOPs", "over, ms"
        )
        for row in self.rows:
            table.add_row(
                row.mode,
                row.arm,
                row.over,
                f"{row.parameter_ratio:.4f}",
                f"{row.flop_ratio:.4f}",
                str(row.step),
                f"{row.step.lower_quartile:.3f} to {row.step.upper_quartile:.3f}",
                f"{row.step_over_flops:.3f}",
                f"{1000 * row.over_seconds:.1f}",
            )
        return describe(self.config, table, f"{self.config.setting}, fused AdamW included", self.machine)

    def points(self) -> tuple[str, list[Point]]:
        """Step time ratios by mode."""
        marks = [Point.of_ratio(row.mode, f"{row.arm} / {row.over}", row.step) for row in self.rows]
        return "step time ratio", marks


def bench_step(config: StepBenchConfig, *, progress: Callable[[str], object] | None = None) -> StepBench:
    """Measures it.

    Args:
        config: see `StepBenchConfig`.
        progress: called with a line now and then, e.g. `print`.

    Raises:
        UserError: the clock does not fit the machine, or a method does not fit the model.
    """
    say = progress or (lambda line: None)
    arms = {arm.name: arm for arm in bench_arms(config.methods, config.ranks)}
    with cpu_threads(config.threads), many_compiled():
        rows: list[StepRow] = []
        times: dict[str, dict[str, list[float]]] = {}
        flops: dict[str, int] = {}
        for mode in config.modes:
            torch._dynamo.reset()  # of other modes and models: their code is no longer needed
            steppers = {name: make_stepper(config, mode, arm) for name, arm in arms.items()}
            flops = flops or {name: stepper.flops() for name, stepper in steppers.items()}
            say(f"{mode}: {len(arms)} arms, {config.warmup} warm-up and {config.rounds} timed steps each")
            found = interleaved_step_times(
                {name: stepper.step for name, stepper in steppers.items()}, config.rounds, config.warmup, config.clock
            )
            times[mode] = found
            for name, arm in arms.items():
                if arm.method is None or arm.over not in arms:
                    continue  # what others are measured against, and is over nothing here
                over = found[arm.over]
                flop_ratio, step = flops[name] / flops[arm.over], paired_ratio(found[name], over)
                rows.append(
                    StepRow(
                        mode=mode,
                        arm=name,
                        over=arm.over,
                        method=arm.method.name,
                        rank=arm.rank,
                        parameter_ratio=steppers[name].trained / steppers[arm.over].trained,
                        flop_ratio=flop_ratio,
                        step=step,
                        step_over_flops=step.median / flop_ratio,
                        over_seconds=sorted(over)[len(over) // 2],
                    )
                )
        machine = describe_machine(config)
    return StepBench(config=config, rows=rows, times=times, flops=flops, machine=machine)
