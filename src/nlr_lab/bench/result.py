"""Result of every benchmark: rows that print as a table, with the machine's speed beside, saved as JSON or drawn."""

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from nlr_lab.runtime.environment import cpu_threads, machine, many_compiled, versions
from nlr_lab.runtime.tables import COLOURS, new_figure, number_table, readable_bytes, render_table, save

from .settings import ModelBenchConfig
from .timing import Ratio, interleaved_step_times, keep_freed_memory, paired_ratio

Progress = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm, and the one that it is measured against."""

    panel: str
    """Mode, and the operator or batch size where there are several."""
    arm: str
    over: str | None = None
    """The arm that it is measured against."""
    figures: dict[str, Any]
    """Figures that do not depend on the clock; names that end in `bytes` are bytes."""
    step: Ratio | None = None
    """Ratio of step times."""
    seconds: float | None = None
    """Median step."""
    over_seconds: float | None = None
    """Median step of `over`."""

    def cells(self) -> dict[str, str]:
        """Return the texts by column."""
        cells = {"mode": self.panel, "arm": self.arm, "over": self.over or ""}
        for name, value in self.figures.items():
            text = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            cells[name.replace("_", " ")] = readable_bytes(value) if name.endswith("bytes") else text
        if self.step is not None and self.seconds is not None and self.over_seconds is not None:
            cells["time x [95 %]"] = str(self.step)
            cells["quartiles"] = f"{self.step.lower_quartile:.3f} to {self.step.upper_quartile:.3f}"
            cells["ms"] = f"{1000 * self.seconds:.4g}"
            cells["over, ms"] = f"{1000 * self.over_seconds:.4g}"
        return cells


@dataclass(kw_only=True)
class BenchResult:
    """Rows and conditions of a benchmark; `print(result)` gives its table."""

    config: Any
    about: str
    """Sizes and conditions, shown below the table."""
    axis: str = ""
    """Name of the axis of a picture."""
    rows: list[Row] = field(default_factory=list)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Mode, operator or batch size -> arm -> seconds of its steps."""
    flops: dict[str, int] = field(default_factory=dict)
    """Arm -> FLOPs of the matrix products of one forward and backward pass."""
    machine: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Use the config's threads and compile every form inside it; then measure the machine."""
        keep_freed_memory()
        with cpu_threads(self.config.threads), many_compiled():
            yield
            self.machine = describe_machine(self.config.device)
        self.about += f", {self.config.device}, CPU threads: {self.machine['threads']}"

    def time(self, panel: str, steps: dict[str, Callable[[], object]], progress: Progress, calls: int = 1) -> None:
        """Time the steps of all arms, interleaved; a time is the mean of so many calls in a row."""
        config = self.config
        progress(f"{panel}: {len(steps)} arms, {config.warmup} warm-up and {config.rounds} timed steps each")
        many = {name: partial(_repeat, step, calls) for name, step in steps.items()} if calls > 1 else steps
        times = interleaved_step_times(many, config.rounds, config.warmup, config.clock)
        self.times[panel] = {name: [each / calls for each in own] for name, own in times.items()}

    def add(self, panel: str, arm: str, over: str, figures: dict[str, Any]) -> Ratio:
        """Add the row of an arm that was timed in a panel; return its ratio."""
        times = self.times[panel]
        step = paired_ratio(times[arm], times[over])
        own, base = (statistics.median_high(times[name]) for name in (arm, over))
        row = Row(panel=panel, arm=arm, over=over, figures=figures, step=step, seconds=own, over_seconds=base)
        self.rows.append(row)
        return step

    def __str__(self) -> str:
        lines = [row.cells() for row in self.rows]
        columns = [name for name in max(lines, key=len) if any(cells.get(name) for cells in lines)]
        table = number_table(*columns)
        for cells in lines:
            table.add_row(*(cells.get(name, "") for name in columns))
        text = f"{render_table(table, 200)}\n{self.about}"
        if self.times:
            text += (
                f"\nmedian of {self.config.rounds} paired ratios, arms interleaved, clock: {self.config.clock}; "
                f"control: copies {self.machine['copy_bytes_per_second'] / 1e9:,.1f} GB/s, multiplies "
                f"{self.machine['product_flops_per_second'] / 1e9:,.0f} GFLOP/s ({self.machine['product_dtype']})"
            )
        return text

    def to_json(self) -> str:
        """Return everything as text."""
        return json.dumps(asdict(self), indent=2)

    def draw(self, path: Path) -> None:
        """Write a PNG: one mark an arm, its time ratio with the interval, or MiB saved for backward."""
        figure, axes = new_figure(8, 1 + 0.3 * len(self.rows))
        for place, row in enumerate(self.rows):
            step = row.step
            if step is None:
                axes.plot(row.figures["saved_bytes"] / 2**20, place, "o", color=COLOURS[0])
            else:
                ends = [[step.median - step.low], [step.high - step.median]]
                axes.errorbar(step.median, place, xerr=ends, fmt="o", capsize=3, color=COLOURS[0])
        names = [f"{row.panel}: {row.arm}" + (f" / {row.over}" if row.over else "") for row in self.rows]
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        if self.times:
            axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(self.axis)
        save(figure, path)


def _repeat(step: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        step()


def describe_machine(device: str) -> dict[str, Any]:
    """Describe the machine and measure its speed, in about a tenth of a second; products on a GPU are in bfloat16."""
    cuda = torch.device(device).type == "cuda"
    # Well beyond caches, short on one CPU core.
    source = torch.ones(1 << (30 if cuda else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rows = 8192 if cuda else 768
    matrix = torch.randn(rows, rows, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    return {
        **machine(on_cpu=not cuda),
        "versions": versions(),
        "copy_bytes_per_second": 2 * source.numel() / _seconds("a.copy_(b)", a=target, b=source),
        "product_flops_per_second": 2 * rows**3 / _seconds("a @ a", a=matrix),
        "product_dtype": str(matrix.dtype).removeprefix("torch."),
    }


def _seconds(statement: str, **names: torch.Tensor) -> float:
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.05).median


def describe_model(config: ModelBenchConfig, what: str) -> str:
    """Return the model's sizes, and what is measured on it."""
    name = {"glm": "GLM", "llama": "Llama"}[config.family]
    return f"{name} blocks: d {config.width}, {config.layers} layers, {what}"
