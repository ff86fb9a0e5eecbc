"""Conditions of a measured time: versions, and how fast this machine copies and multiplies meanwhile."""

import platform
from importlib.metadata import version
from typing import Any

import torch
from torch.utils.benchmark import Timer

from .settings import BenchConfig, ModelBenchConfig

# Bytes copied, and rows of the square matrices multiplied: well beyond caches, short on one CPU core.
_COPY = {"cpu": 1 << 26, "cuda": 1 << 30}
_ROWS = {"cpu": 768, "cuda": 8192}


def describe_machine(device: str, *, bf16: bool = False) -> dict[str, Any]:
    """Measure and describe the machine, in about a tenth of a second.

    Args:
        device: as in torch.
        bf16: multiply bfloat16 matrices; on a CPU they are float32 in any case.
    """
    kind = torch.device(device).type
    source = torch.ones(_COPY[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rows = _ROWS[kind]
    matrix = torch.randn(rows, rows, device=device).to(torch.bfloat16 if bf16 and kind == "cuda" else torch.float32)
    return {
        "torch": torch.__version__,
        "package": version("nonlinear-lowrank"),
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "copy_bytes_per_second": 2 * source.numel() / _seconds("a.copy_(b)", a=target, b=source),
        "product_flops_per_second": 2 * rows**3 / _seconds("a @ a", a=matrix),
        "product_dtype": str(matrix.dtype).removeprefix("torch."),
    }


def _seconds(statement: str, **names: torch.Tensor) -> float:
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.05).median


def conditions(config: BenchConfig, machine: dict[str, Any], *, timed: bool = True) -> str:
    """Return device and threads, and, for times, how they were taken and how fast the machine was."""
    place = f"{config.device}, {machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    if not timed:
        return place
    return (
        f"{place}\nmedian of {config.rounds} paired ratios, arms interleaved, clock: {config.clock}; control: copies "
        f"{machine['copy_bytes_per_second'] / 1e9:,.1f} GB/s, multiplies "
        f"{machine['product_flops_per_second'] / 1e9:,.0f} GFLOP/s ({machine['product_dtype']})"
    )


def describe_model(config: ModelBenchConfig, what: str, machine: dict[str, Any], *, timed: bool = True) -> str:
    """Return the model, what was measured on it, and the conditions."""
    name = {"glm": "GLM", "llama": "Llama"}[config.family]
    place = conditions(config, machine, timed=timed)
    return f"{name} blocks: d {config.width}, {config.layers} layers, {what}, {place}"
