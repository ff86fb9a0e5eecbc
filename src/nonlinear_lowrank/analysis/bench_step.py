"""`nlr bench step`: what a NOBLE branch adds to the time of a training step, beside what it adds in FLOPs.

The model is the paper's backbone (GLM) in small, with a vocabulary so small that the linears inside the
blocks are what is measured. A step is forward, loss, backward, AdamW and zero_grad. Baseline and NOBLE take
turns step by step (timing.py); the ratio of a round is NOBLE's time over the baseline's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..environment import cpu_threads
from ..optim import param_groups
from .bench_model import (
    BASELINE,
    BenchResult,
    Mode,
    ModelBenchConfig,
    check_at_least_1,
    describe,
    describe_machine,
    make_model,
    table_with,
)
from .cost import ModelCost, model_cost
from .timing import Ratio, interleaved_step_times, paired_ratio


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(ModelBenchConfig):
    """What `nlr bench step` measures.

    Raises:
        UserError: a value is out of range.
    """

    sequence_length: int = 128
    """Tokens of a sequence."""
    batch_size: int = 8
    """Sequences of a step."""
    bf16: bool = False
    """Train under bfloat16 autocast."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequence_length", "batch_size"):
            check_at_least_1(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """NOBLE at one rank over the baseline, in one mode."""

    mode: str
    rank: int
    parameter_ratio: float
    flop_ratio: float
    """Of forward FLOPs: linears, attention scores and values, head."""
    step: Ratio
    """Of step times."""
    step_over_flops: float
    """step.median / flop_ratio: 1 means that a branch costs just what its FLOPs do."""
    baseline_seconds: float
    """Median step of the baseline."""


@dataclass(frozen=True, kw_only=True)
class StepBench(BenchResult):
    """Result of `bench_step`; `print(result)` gives the table."""

    config: StepBenchConfig
    rows: list[StepRow]

    def __str__(self) -> str:
        table = table_with(
            "mode", "r", "parameters x", "FLOPs x", "step time x [95 %]", "quartiles", "step / FLOPs", "baseline ms"
        )
        for row in self.rows:
            table.add_row(
                row.mode,
                str(row.rank),
                f"{row.parameter_ratio:.4f}",
                f"{row.flop_ratio:.4f}",
                str(row.step),
                f"{row.step.lower_quartile:.3f} to {row.step.upper_quartile:.3f}",
                f"{row.step_over_flops:.3f}",
                f"{1000 * row.baseline_seconds:.1f}",
            )
        config = self.config
        tokens = f"{config.batch_size} x {config.sequence_length} tokens a step"
        kind = "bfloat16 autocast" if config.bf16 else "float32"
        return describe(config, table, f"{tokens}, {kind}, fused AdamW included", self.machine)


def bench_step(config: StepBenchConfig, *, progress: Callable[[str], object] | None = None) -> StepBench:
    """Measures it.

    Args:
        config: see `StepBenchConfig`.
        progress: called with a line now and then, e.g. `print`.

    Raises:
        UserError: the clock does not fit the machine.
    """
    say = progress or (lambda line: None)
    with cpu_threads(config.threads):
        rows: list[StepRow] = []
        times: dict[str, dict[str, list[float]]] = {}
        for mode in config.modes:
            torch._dynamo.reset()  # compiled arms are equal classes: their code must not share a cache limit
            arms = {BASELINE: make_stepper(config, mode, None)}
            arms |= {f"r={rank}": make_stepper(config, mode, rank) for rank in config.ranks}
            say(f"{mode}: {len(arms)} arms, {config.warmup} warm-up and {config.rounds} timed steps each")
            times[mode] = interleaved_step_times(
                {name: stepper.step for name, stepper in arms.items()}, config.rounds, config.warmup, config.clock
            )
            base = times[mode][BASELINE]
            for rank in config.ranks:
                cost, step = arms[f"r={rank}"].cost, paired_ratio(times[mode][f"r={rank}"], base)
                rows.append(
                    StepRow(
                        mode=mode,
                        rank=rank,
                        parameter_ratio=cost.parameter_ratio,
                        flop_ratio=cost.flop_ratio,
                        step=step,
                        step_over_flops=step.median / cost.flop_ratio,
                        baseline_seconds=sorted(base)[len(base) // 2],
                    )
                )
        machine = describe_machine()
    return StepBench(config=config, rows=rows, times=times, machine=machine)


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One arm, ready to take steps."""

    model: nn.Module
    cost: ModelCost
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]
    """Trains on one batch and returns the loss (a tensor: reading it would wait for the device)."""


def make_stepper(
    config: StepBenchConfig,
    mode: Mode,
    rank: int | None,
    *,
    batch: Callable[[], torch.Tensor] | None = None,
    lr: float = 1e-6,
) -> Stepper:
    """The arm of a rank (None: the baseline), equal batches and equal seed in all arms.

    Args:
        config: sizes, device and type.
        mode: "eager" or "compiled".
        rank: NOBLE's r.
        batch: gives the token ids (batch_size, sequence_length) of each step; None: the same random ids.
        lr: of AdamW. On one batch again and again, a rate that trains would end in subnormal numbers, whose
            arithmetic is slow.
    """
    model = make_model(config, rank, config.sequence_length)
    model.train()
    groups = param_groups(model, lr, weight_decay=0.01, verbose=False)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    forward: Callable[..., Any] = torch.compile(model) if mode == "compiled" else model
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.sequence_length)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(config.device)
    kind = torch.device(config.device).type

    def step() -> torch.Tensor:
        tokens = ids if batch is None else batch()
        with torch.autocast(kind, torch.bfloat16, enabled=config.bf16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    cost = model_cost(model, config.sequence_length)
    return Stepper(model=model, cost=cost, optimizer=optimizer, step=step)
