"""`nlr bench step`: time of a training step over the baseline's, beside the ratio of FLOPs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nlr_lab.runtime.environment import cpu_threads, many_compiled

from .machine import describe_machine, describe_model
from .methods import bench_arms
from .result import BenchResult, TimedRow
from .settings import TrainBenchConfig
from .timing import interleaved_step_times
from .training import make_stepper


@dataclass(frozen=True, kw_only=True)
class StepRow(TimedRow):
    """One arm over the one it is measured against, in one mode."""

    method: str
    rank: int | None
    parameter_ratio: float
    """Trained parameters over those of `over`."""
    flop_ratio: float
    """FLOPs of the matrix products of forward and backward, as eager mode calls them, over those of `over`."""

    step_over_flops: float = field(init=False)
    """step.median / flop_ratio: 1 where a method costs just what its FLOPs do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_over_flops", self.step.median / self.flop_ratio)

    def own_cells(self) -> dict[str, str]:
        """Return the columns beside those of times."""
        return {
            "trained x": f"{self.parameter_ratio:.4f}",
            "FLOPs x": f"{self.flop_ratio:.4f}",
            "step / FLOPs": f"{self.step_over_flops:.3f}",
        }


def bench_step(config: TrainBenchConfig, *, progress: Callable[[str], object] = lambda line: None) -> BenchResult:
    """Measure the steps of every arm, interleaved.

    Raises:
        UserError: the clock does not fit the machine, or a method does not fit the model.
    """
    arms = bench_arms(config.methods, config.ranks)
    rows: list[StepRow] = []
    times: dict[str, dict[str, list[float]]] = {}
    flops: dict[str, int] = {}
    with cpu_threads(config.threads), many_compiled():
        for mode in config.modes:
            torch._dynamo.reset()  # of other modes and models: their code is no longer needed
            steppers = {arm.name: make_stepper(config, mode, arm) for arm in arms}
            flops = flops or {name: stepper.flops() for name, stepper in steppers.items()}
            progress(f"{mode}: {len(arms)} arms, {config.warmup} warm-up and {config.rounds} timed steps each")
            steps = {name: stepper.step for name, stepper in steppers.items()}
            times[mode] = interleaved_step_times(steps, config.rounds, config.warmup, config.clock)
            rows += [
                StepRow.measured(
                    times[mode],
                    mode,
                    arm.name,
                    arm.over,
                    method=arm.method,
                    rank=arm.rank,
                    parameter_ratio=steppers[arm.name].trained / steppers[arm.over].trained,
                    flop_ratio=flops[arm.name] / flops[arm.over],
                )
                for arm in arms
                if arm.over in steppers
            ]
        machine = describe_machine(config.device, bf16=config.bf16)
    about = describe_model(config, f"{config.setting}, fused AdamW included", machine)
    axis = "step time ratio"
    return BenchResult(config=config, rows=rows, about=about, axis=axis, times=times, flops=flops, machine=machine)
