"""Result of every benchmark: rows that print as a table, with the machine's speed beside, saved as JSON or drawn."""

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch.utils.benchmark import Timer

from nlr_lab.runtime.tables import number_table, readable_bytes, render_table

from .settings import BenchConfig, ModelBenchConfig
from .timing import Ratio, paired_ratio


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm beside the one it is measured against."""

    panel: str
    """Mode, and the operator or batch size where there are several."""
    arm: str
    over: str | None = None
    """The arm that it is measured against."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures that do not depend on the clock; names that end in `bytes` are bytes."""

    def cells(self) -> dict[str, str]:
        """Return the texts by column."""
        figures = {name.replace("_", " "): _figure(name, value) for name, value in self.figures.items()}
        return {"mode": self.panel, "arm": self.arm, "over": self.over or "", **figures}

    def mark(self) -> tuple[float, float, float]:
        """Return what a picture shows, with its interval: MiB saved for backward."""
        return (self.figures["saved_bytes"] / 2**20,) * 3


def _figure(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return readable_bytes(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """One arm over another."""

    step: Ratio
    """Ratio of step times."""
    over_seconds: float
    """Median step of `over`."""

    @classmethod
    def of(cls, times: Mapping[str, Sequence[float]], panel: str, arm: str, over: str, **figures: float) -> Self:
        """Return the row of an arm from the interleaved step times of all."""
        seconds = statistics.median_high(times[over])
        step = paired_ratio(times[arm], times[over])
        return cls(panel=panel, arm=arm, over=over, step=step, over_seconds=seconds, figures=figures)

    def cells(self) -> dict[str, str]:
        """Return the texts by column."""
        return {
            **super().cells(),
            "time x [95 %]": str(self.step),
            "quartiles": f"{self.step.lower_quartile:.3f} to {self.step.upper_quartile:.3f}",
            "over, ms": f"{1000 * self.over_seconds:.4g}",
        }

    def mark(self) -> tuple[float, float, float]:
        """Return the median with its interval."""
        return self.step.median, self.step.low, self.step.high


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Rows and conditions of a benchmark; `print(result)` gives its table."""

    config: Any
    rows: Sequence[Any]
    """Each a `Row`, or a `KernelReport`."""
    about: str
    """Sizes and conditions, shown below the table."""
    axis: str = ""
    """Name of the axis of a picture."""
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Mode, operator or batch size -> arm -> seconds of its steps."""
    flops: dict[str, int] = field(default_factory=dict)
    """Arm -> FLOPs of the matrix products of one forward and backward pass."""
    machine: dict[str, Any]

    def __str__(self) -> str:
        lines = [row.cells() for row in self.rows]
        columns = max(lines, key=len)
        table = number_table(*columns)
        for cells in lines:
            table.add_row(*(cells.get(name, "") for name in columns))
        return f"{render_table(table, 160)}\n{self.about}"

    def to_json(self) -> str:
        """Return everything as text."""
        return json.dumps(asdict(self), indent=2)


def draw(result: BenchResult, path: Path) -> None:
    """Write a PNG: one mark an arm with its interval, one panel a mode; an old one is replaced."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from nlr_lab.runtime.tables import COLOURS, save

    panels: dict[str, list[Row]] = {}
    for row in result.rows:
        panels.setdefault(row.panel, []).append(row)
    heights = [1 + len(rows) for rows in panels.values()]
    figure = Figure(figsize=(8, 0.6 + sum(0.3 + 0.3 * height for height in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (panel, rows) in zip(grid[:, 0], panels.items(), strict=True):
        values, low, high = np.transpose([row.mark() for row in rows])
        axes.errorbar(
            values, range(len(rows)), xerr=[values - low, high - values], fmt="o", capsize=3, color=COLOURS[0]
        )
        axes.set_yticks(range(len(rows)), [row.arm if row.over is None else f"{row.arm} / {row.over}" for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(panel, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.5)
        if result.axis.endswith("ratio"):
            axes.axvline(1.0, color="black", linewidth=0.8)
    grid[-1, 0].set_xlabel(result.axis)
    save(figure, path)


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
