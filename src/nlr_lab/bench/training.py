"""`nlr bench step` and `nlr bench memory`: one training step of each arm, repeated on one batch.

A step is forward, loss, backward, AdamW and zero_grad. Memory is deterministic: bytes saved for backward (activations
without parameters, see `analysis.saved`), and the peak of a step beyond the weights and the optimizer's state.
"""

import gc
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.ops.kernels import use_kernels
from nonlinear_lowrank.optim import param_groups

from .arms import BenchArm, bench_arms, make_model
from .result import BenchResult, Progress, Row, describe_model
from .settings import Mode, TrainBenchConfig
from .timing import in_mode


def _all_heads(q: Sequence[int], k: Sequence[int]) -> tuple[int, ...]:
    return (k[0], q[1], *k[2:])  # torch 2.11 refuses fewer heads of keys than of queries


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, _all_heads(q, k), _all_heads(q, v)))


def _attention_backward(dy: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(dy, q, _all_heads(q, k), _all_heads(q, v)))


UNKNOWN_TO_TORCH: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1],
    torch.ops.aten._grouped_mm: lambda rows, weights, *_, **__: 2 * rows[0] * rows[1] * weights[2],
}
"""FLOPs of operators unknown to torch's counter, by the shapes of their arguments; attention counts whole, as there."""
for _name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    UNKNOWN_TO_TORCH[getattr(torch.ops.aten, f"_scaled_dot_product_{_name}")] = _attention
    UNKNOWN_TO_TORCH[getattr(torch.ops.aten, f"_scaled_dot_product_{_name}_backward")] = _attention_backward


class Stepper:
    """One arm, ready to take steps; batches and seed are the same in all arms.

    Args:
        config: sizes, device and type.
        mode: as in the settings.
        arm: one of `bench_arms`.
        batch: gives the token ids (batch_size, sequence_length) of each step; None: the same random ids.
        lr: of AdamW. On one repeated batch, a learning rate that trains would end in subnormal numbers, whose
            arithmetic is slow.
    """

    def __init__(
        self,
        config: TrainBenchConfig,
        mode: Mode,
        arm: BenchArm,
        *,
        batch: Callable[[], torch.Tensor] | None = None,
        lr: float = 1e-6,
    ):
        self.config, self.mode = config, mode
        self.model = make_model(config, arm, config.sequence_length, frozen_dtype=config.frozen_dtype).train()
        groups = param_groups(self.model, lr, weight_decay=0.01, verbose=False)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.trained = sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        generator = torch.Generator().manual_seed(0)
        shape = (config.batch_size, config.sequence_length)
        ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(config.device)
        self.batch = batch or (lambda: ids)
        self.forward = in_mode(self.model, mode)

    def loss(self, *, eager: bool = False) -> torch.Tensor:
        """Return the loss of one batch, eager without torch.compile."""
        ids = self.batch()
        if self.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(torch.device(self.config.device).type, torch.bfloat16, enabled=self.config.bf16):
            return (self.model if eager else self.forward)(input_ids=ids, labels=ids).loss

    def step(self) -> torch.Tensor:
        """Train on one batch and return the loss, a tensor: reading it would wait for the device."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def flops(self) -> int:
        """Return the FLOPs of the matrix products of one forward and backward pass, counted as they are called.

        A product that a method computes again for backward counts again. Takes the time of an eager pass.
        """
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter, use_kernels(False):
            self.loss(eager=True).backward()
        self.optimizer.zero_grad()
        return counter.get_total_flops()


def bench_step(config: TrainBenchConfig, *, progress: Progress = lambda line: None) -> BenchResult:
    """Measure the steps of every arm, interleaved, beside the FLOPs of their matrix products in eager mode."""
    arms = bench_arms(config.methods, config.ranks)
    about = describe_model(config, f"{_setting(config)}, fused AdamW included")
    result = BenchResult(config=config, about=about, axis="step time ratio")
    with result.measuring():
        for mode in config.modes:
            torch._dynamo.reset()  # of other modes and models: their code is no longer needed
            steppers = {arm.name: Stepper(config, mode, arm) for arm in arms}
            flops = result.flops = result.flops or {name: stepper.flops() for name, stepper in steppers.items()}
            result.time(mode, {name: stepper.step for name, stepper in steppers.items()}, progress)
            calls = {name: launches(stepper.step, config.device) for name, stepper in steppers.items()}
            for name, over in ((arm.name, arm.over) for arm in arms if arm.over in steppers):
                trained, flop_ratio = steppers[name].trained / steppers[over].trained, flops[name] / flops[over]
                figures: dict[str, Any] = {"trained_ratio": trained, "flop_ratio": flop_ratio}
                figures |= {"launches": calls[name], "launches_of_over": calls[over]}
                step = result.add(mode, name, over, figures)
                figures["step_over_flops"] = step.median / flop_ratio  # 1: a method costs just its FLOPs
    return result


def bench_memory(config: TrainBenchConfig, *, progress: Progress = lambda line: None) -> BenchResult:
    """Measure one arm after the other; clock, rounds and warmup play no part."""
    about = describe_model(config, _setting(config))
    result = BenchResult(config=config, about=about, axis="MiB saved for backward")
    with result.measuring():
        for mode in config.modes:
            measured: dict[str | None, dict[str, Any]] = {}
            for arm in bench_arms(config.methods, config.ranks):
                progress(f"{mode}: {arm.name}")
                torch._dynamo.reset()
                stepper = Stepper(config, mode, arm)
                state = [*stepper.model.parameters(), *stepper.model.buffers()]
                stepper.step()  # compiles, and makes the optimizer's state
                figures = measured[arm.name] = {
                    "trained": stepper.trained,
                    "weights_bytes": sum(each.nbytes for each in state),
                    "saved_bytes": saved_bytes(stepper.loss, parameters=state),
                    "peak_bytes": peak_bytes(stepper.step, config.device),
                }
                over = arm.over if arm.over in measured else None
                if over is not None:
                    base = measured[over]
                    whole = base["weights_bytes"] + base["peak_bytes"]
                    figures["saved_ratio"] = figures["saved_bytes"] / base["saved_bytes"]
                    figures["peak_ratio"] = (figures["weights_bytes"] + figures["peak_bytes"]) / whole
                result.rows.append(Row(panel=mode, arm=arm.name, over=over, figures=figures))
                del stepper, state
                gc.collect()
    return result


def _setting(config: TrainBenchConfig) -> str:
    kind = "bfloat16 autocast" if config.bf16 else "float32"
    frozen = f", frozen weights {config.frozen_dtype}" if config.frozen_dtype != "float32" else ""
    return f"{config.batch_size} x {config.sequence_length} tokens a step, {kind}{frozen}"


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Return the most bytes that `function()` holds at any moment beyond those held when it begins.

    On a GPU it is the caching allocator's own account. On a CPU it is added up from the allocations and frees that
    torch's profiler reports; memory that a library takes by itself is not among them (scratch of matrix products).
    Call the function once before, so that compilation and lazily made state are not counted.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    events = [event for event in _events(function, profile_memory=True) if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes, initial=0))


def launches(function: Callable[[], object], device: str) -> int:
    """Return how many kernels and graphs `function()` launches on a GPU; on a CPU, how many operators run."""
    if torch.device(device).type != "cuda":
        return sum(event.name().startswith(("aten::", "nonlinear_lowrank")) for event in _events(function))
    events = _events(function, activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    return sum(re.match("cu(da)?(Graph)?Launch", event.name()) is not None for event in events)


def _events(function: Callable[[], object], **settings: Any) -> list[Any]:
    """Return what torch's profiler saw of a call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # says nothing on standard error
    with profile(**{"activities": [ProfilerActivity.CPU], **settings}) as profiler:
        function()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
