"""`nlr bench decode`: time of generating one token over the plain model's (noble_notes_zh.md, section 6.3).

Every sequence of a batch has the same context in its cache of keys and values; a step is the forward pass of one more
token each, and the choice of the next. The cache is cut back after each step, so that all steps are equal. For CUDA
graphs it is transformers' static one, since a graph's results are overwritten by its next run.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from nonlinear_lowrank.inference import can_be_optimized, optimize_for_inference

from .arms import BASELINE, BenchArm, bench_arms, make_model
from .result import BenchResult, Progress, describe_model
from .settings import RIVALS, DecodeBenchConfig, Mode
from .timing import in_mode


def bench_decode(config: DecodeBenchConfig, *, progress: Progress = lambda line: None) -> BenchResult:
    """Measure the tokens of every arm, interleaved."""
    arms = {arm.name: arm for arm in (BenchArm(), *bench_arms(config.methods, config.ranks))}
    about = describe_model(config, f"one token after {config.context}, {config.dtype}")
    result = BenchResult(config=config, about=about, axis="token time ratio")
    with result.measuring():
        models = {name: _model(config, arm) for name, arm in arms.items()}
        if config.optimized:
            ours = {name: arm for name, arm in arms.items() if arm.method not in RIVALS}
            able = {f"{name}, optimized": arm for name, arm in ours.items() if can_be_optimized(models[name])}
            models |= {name: optimize_for_inference(_model(config, arm)) for name, arm in able.items()}
        # An optimized model has its weights in buffers.
        sizes = {
            name: sum(each.numel() for each in (*model.parameters(), *model.buffers()))
            for name, model in models.items()
        }
        for mode in config.modes:
            for size in config.batch_sizes:
                torch._dynamo.reset()  # of other modes and models: their code is no longer needed
                panel = f"{mode}, batch {size}"
                result.time(panel, {name: make_decoder(config, mode, models[name], size) for name in models}, progress)
                for name in models:
                    if name != BASELINE:
                        ratio = sizes[name] / sizes[BASELINE]  # of the numbers that a step at batch 1 reads
                        result.add(panel, name, BASELINE, {"parameter_ratio": ratio})
    return result


def _model(config: DecodeBenchConfig, arm: BenchArm) -> Any:
    model = make_model(config, arm, config.context + 2, cache=True)
    return model.to(getattr(torch, config.dtype)).eval()


def make_decoder(config: DecodeBenchConfig, mode: Mode, model: Any, size: int) -> Callable[[], torch.Tensor]:
    """Return a function that generates the tokens after the context, (size, 1), and leaves the cache as it was."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (size, config.context), generator=generator).to(config.device)
    forward = in_mode(model, mode)
    with torch.inference_mode():
        cache: Any = DynamicCache(config=model.config)
        if mode == "graphs":
            cache = StaticCache(config=model.config, max_cache_len=config.context + 1)
        # The fourth argument is the cache, whose name changed in transformers 5.24.
        token = model(ids, None, None, cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        logits = forward(token, None, None, cache, use_cache=True).logits
        if mode == "graphs":
            for layer in cache.layers:
                layer.cumulative_length.fill_(config.context)
        else:
            cache.crop(-1)
        return logits.argmax(-1)

    return step
