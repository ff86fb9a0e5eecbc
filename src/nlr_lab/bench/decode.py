"""`nlr bench decode`: what a method adds to the time of generating one token (noble_notes_zh.md, section 6.3).

Every sequence of a batch has the same context in its cache of keys and values; a step is the forward pass of one more
token each, and the choice of the next. The cache is cut back after each step, so that all steps are equal. The arms
take turns step by step; the ratio of a round is a method's time over the plain model's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache

from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.inference import can_be_optimized, optimize_for_inference
from nonlinear_lowrank.validation import check_integer

from .methods import BASELINE, BenchArm, bench_arms
from .model import (
    BenchResult,
    Mode,
    ModelBenchConfig,
    Point,
    check_different,
    describe,
    describe_machine,
    in_mode,
    make_model,
    table_with,
)
from .timing import Ratio, interleaved_step_times, paired_ratio


@dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig(ModelBenchConfig):
    """What `nlr bench decode` measures.

    Raises:
        UserError: a value is out of range.
    """

    modes: tuple[Mode, ...] = ("eager",)
    """eager, compiled (torch.compile) or graphs (torch.compile with CUDA graphs, "reduce-overhead")."""
    context: int = 256
    """Tokens of each sequence that are in the cache."""
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    """Sequences that are generated at once; each is measured."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    optimized: bool = True
    """Also measure each arm after `nlr.optimize_for_inference`, where that can make it faster."""
    rounds: int = 50
    """Timed steps of each arm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        check_integer("context", self.context, minimum=1)
        for size in self.batch_sizes:
            check_integer("batch_sizes", size, minimum=1)
        check_different("batch_sizes", self.batch_sizes)
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"unknown dtype {self.dtype!r}; choose float32 or bfloat16")


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """One arm over the plain model, at one batch size."""

    mode: str
    batch_size: int
    arm: str
    method: str
    rank: int | None
    parameter_ratio: float
    """Numbers in the model, which a step at batch 1 reads, over the plain model's."""
    step: Ratio
    """Of the times of a token."""
    baseline_seconds: float
    """Median time of a step of the plain model."""


@dataclass(frozen=True, kw_only=True)
class DecodeBench(BenchResult):
    """Result of `bench_decode`; `print(result)` gives the table."""

    config: DecodeBenchConfig
    rows: list[DecodeRow]

    def __str__(self) -> str:
        table = table_with("mode", "batch", "arm", "parameters x", "token time x [95 %]", "quartiles", "plain, ms")
        for row in self.rows:
            table.add_row(
                row.mode,
                str(row.batch_size),
                row.arm,
                f"{row.parameter_ratio:.4f}",
                str(row.step),
                f"{row.step.lower_quartile:.3f} to {row.step.upper_quartile:.3f}",
                f"{1000 * row.baseline_seconds:.2f}",
            )
        what = f"one token after {self.config.context}, {self.config.dtype}"
        return describe(self.config, table, what, self.machine)

    def points(self) -> tuple[str, list[Point]]:
        """Token time ratios by mode and batch size."""
        marks = [Point.of_ratio(f"{row.mode}, batch {row.batch_size}", row.arm, row.step) for row in self.rows]
        return "token time ratio", marks


def bench_decode(config: DecodeBenchConfig, *, progress: Callable[[str], object] | None = None) -> DecodeBench:
    """Measures it.

    Args:
        config: see `DecodeBenchConfig`.
        progress: called with a line now and then, e.g. `print`.

    Raises:
        UserError: the clock does not fit the machine.
    """
    say = progress or (lambda line: None)
    arms = {arm.name: arm for arm in (BenchArm(), *bench_arms(config.methods, config.ranks))}
    with cpu_threads(config.threads), many_compiled():
        rows: list[DecodeRow] = []
        times: dict[str, dict[str, list[float]]] = {}
        models = {name: _model(config, arm) for name, arm in arms.items()}
        if config.optimized:
            able = {name: arm for name, arm in arms.items() if can_be_optimized(models[name])}
            arms |= {f"{name}, optimized": arm for name, arm in able.items()}
            models |= {f"{name}, optimized": optimize_for_inference(_model(config, arm)) for name, arm in able.items()}
        sizes = {name: _numbers(model) for name, model in models.items()}
        for mode in config.modes:
            for size in config.batch_sizes:
                torch._dynamo.reset()  # of other modes and models: their code is no longer needed
                steppers = {name: make_decoder(config, mode, model, size) for name, model in models.items()}
                say(f"{mode}, batch {size}: {len(models)} arms, {config.rounds} timed tokens each")
                found = interleaved_step_times(steppers, config.rounds, config.warmup, config.clock)
                times[f"{mode}, {size}"] = found
                base = found[BASELINE]
                rows += [
                    DecodeRow(
                        mode=mode,
                        batch_size=size,
                        arm=name,
                        method=arm.method.name,
                        rank=arm.rank,
                        parameter_ratio=sizes[name] / sizes[BASELINE],
                        step=paired_ratio(found[name], base),
                        baseline_seconds=sorted(base)[len(base) // 2],
                    )
                    for name, arm in arms.items()
                    if arm.method is not None
                ]
        machine = describe_machine(config)
    return DecodeBench(config=config, rows=rows, times=times, machine=machine)


def _model(config: DecodeBenchConfig, arm: BenchArm) -> Any:
    model = make_model(config, arm, config.context + 2, cache=True)
    return model.to(getattr(torch, config.dtype)).eval()


def _numbers(model: Any) -> int:
    """Of parameters and, where an optimized model has its weights, buffers."""
    return sum(each.numel() for each in (*model.parameters(), *model.buffers()))


def make_decoder(config: DecodeBenchConfig, mode: Mode, model: Any, size: int) -> Callable[[], torch.Tensor]:
    """A function that generates the token after the context, (size, 1), and leaves the cache as it was.

    Args:
        config: length of the context.
        mode: as in the settings.
        model: a language model in evaluation mode.
        size: sequences.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (size, config.context), generator=generator).to(config.device)
    forward = in_mode(model, mode)
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        token = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        logits = forward(input_ids=token, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits.argmax(-1)

    return step
