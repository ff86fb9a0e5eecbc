"""`nlr bench step` and `nlr bench memory`: one training step of each arm, on one batch again and again.

A step is forward, loss, backward, AdamW and zero_grad. Memory is deterministic: bytes saved for backward (activations
without parameters, see `analysis.saved`), and the peak of a step beyond the weights and the optimizer's state.
"""

import gc
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.ops.kernels import use_kernels
from nonlinear_lowrank.optim import param_groups

from .arms import BenchArm, bench_arms, make_model
from .result import BenchResult, Row, TimedRow, describe_machine, describe_model
from .settings import Mode, TrainBenchConfig
from .timing import in_mode, interleaved_step_times


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One arm, ready to take steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], torch.Tensor]
    """The forward pass on one batch."""
    eager_loss: Callable[[], torch.Tensor]
    """The same without torch.compile."""

    def step(self) -> torch.Tensor:
        """Train on one batch and return the loss, a tensor: reading it would wait for the device."""
        found = self.loss()
        found.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found.detach()

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def flops(self) -> int:
        """Return the FLOPs of the matrix products of one forward and backward pass, counted as they are called.

        A product that a method computes again for backward counts again. Takes the time of an eager pass.
        """
        with FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_TORCH) as counter, use_kernels(False):
            self.eager_loss().backward()
        self.optimizer.zero_grad()
        return counter.get_total_flops()


# Of operators that torch's counter does not know, by the shapes of their arguments. Attention counts whole, as there.
_UNKNOWN_TO_TORCH = {
    torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy, q, k, v)
    ),
}


def make_stepper(
    config: TrainBenchConfig,
    mode: Mode,
    arm: BenchArm,
    *,
    batch: Callable[[], torch.Tensor] | None = None,
    lr: float = 1e-6,
) -> Stepper:
    """Return an arm's stepper; batches and seed are the same in all arms.

    Args:
        config: sizes, device and type.
        mode: as in the settings.
        arm: one of `bench_arms`.
        batch: gives the token ids (batch_size, sequence_length) of each step; None: the same random ids.
        lr: of AdamW. On one batch again and again, a learning rate that trains would end in subnormal numbers, whose
            arithmetic is slow.
    """
    model = make_model(config, arm, config.sequence_length, frozen_dtype=getattr(torch, config.frozen_dtype)).train()
    groups = param_groups(model, lr, weight_decay=0.01, verbose=False)
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.sequence_length)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(config.device)
    kind = torch.device(config.device).type

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        tokens = ids if batch is None else batch()
        if mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(kind, torch.bfloat16, enabled=config.bf16):
            return run(input_ids=tokens, labels=tokens).loss

    forward = in_mode(model, mode)
    return Stepper(
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True),
        loss=lambda: loss(forward),
        eager_loss=lambda: loss(model),
    )


def bench_step(config: TrainBenchConfig, *, progress: Callable[[str], object] = lambda line: None) -> BenchResult:
    """Measure the steps of every arm, interleaved, beside the FLOPs of their matrix products in eager mode.

    Raises:
        UserError: the clock does not fit the machine, or a method does not fit the model.
    """
    arms = bench_arms(config.methods, config.ranks)
    rows: list[TimedRow] = []
    times: dict[str, dict[str, list[float]]] = {}
    flops: dict[str, int] = {}
    with cpu_threads(config.threads), many_compiled():
        for mode in config.modes:
            torch._dynamo.reset()  # of other modes and models: their code is no longer needed
            steppers = {arm.name: make_stepper(config, mode, arm) for arm in arms}
            flops = flops or {name: stepper.flops() for name, stepper in steppers.items()}
            progress(f"{mode}: {len(arms)} arms, {config.warmup} warm-up and {config.rounds} timed steps each")
            steps = {name: stepper.step for name, stepper in steppers.items()}
            found = times[mode] = interleaved_step_times(steps, config.rounds, config.warmup, config.clock)
            for name, over in ((arm.name, arm.over) for arm in arms if arm.over in steppers):
                trained, flop_ratio = steppers[name].trained / steppers[over].trained, flops[name] / flops[over]
                row = TimedRow.of(found, mode, name, over, trained_ratio=trained, flop_ratio=flop_ratio)
                step_over_flops = row.step.median / flop_ratio  # 1 where a method costs just its FLOPs
                row.figures["step_over_flops"] = step_over_flops
                rows.append(row)
        machine = describe_machine(config.device, bf16=config.bf16)
    about = describe_model(config, f"{config.setting}, fused AdamW included", machine)
    axis = "step time ratio"
    return BenchResult(config=config, rows=rows, about=about, axis=axis, times=times, flops=flops, machine=machine)


def bench_memory(config: TrainBenchConfig, *, progress: Callable[[str], object] = lambda line: None) -> BenchResult:
    """Measure one arm after the other; clock, rounds and warmup play no part.

    Raises:
        UserError: a method does not fit the model.
    """
    rows: dict[tuple[str, str | None], Row] = {}
    with cpu_threads(config.threads), many_compiled():
        for mode in config.modes:
            for arm in bench_arms(config.methods, config.ranks):
                progress(f"{mode}: {arm.name}")
                torch._dynamo.reset()
                stepper = make_stepper(config, mode, arm)
                state = [*stepper.model.parameters(), *stepper.model.buffers()]
                stepper.step()  # compiles, and makes the optimizer's state
                figures: dict[str, Any] = {
                    "trained": stepper.trained,
                    "weights_bytes": sum(each.nbytes for each in state),
                    "saved_bytes": saved_bytes(stepper.loss, parameters=state),
                    "peak_bytes": peak_bytes(stepper.step, config.device),
                }
                base = rows.get((mode, arm.over))
                if base is not None:
                    figures["saved_ratio"] = figures["saved_bytes"] / base.figures["saved_bytes"]
                    figures["peak_ratio"] = _total(figures) / _total(base.figures)
                over = None if base is None else base.arm
                rows[mode, arm.name] = Row(panel=mode, arm=arm.name, over=over, figures=figures)
                del stepper, state
                gc.collect()
        machine = describe_machine(config.device, bf16=config.bf16)
    about = describe_model(config, config.setting, machine, timed=False)
    axis = "MiB saved for backward"
    return BenchResult(config=config, rows=list(rows.values()), about=about, axis=axis, machine=machine)


def _total(figures: dict[str, Any]) -> int:
    return figures["weights_bytes"] + figures["peak_bytes"]


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
