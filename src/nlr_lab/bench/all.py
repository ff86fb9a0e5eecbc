"""`nlr bench all`: the times that docs/performance.md states, each beside the least it could be, in one JSON.

`PARTS` are runs of the other benchmarks. Within a panel all arms take turns, NOBLE's rivals (`rivals`) among them. The
least is a ratio like the time's: of the FLOPs of a training step, of the bytes that a token at batch 1 reads, 1 for an
activation that reads and writes what GELU does, and for a tiny call the official layer's time.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nlr_lab.runtime.tables import COLOURS, new_figure, number_table, render_table, save

from .decode import bench_decode
from .op import bench_op
from .result import BenchResult, Progress, Row
from .settings import RIVALS, AllBenchConfig, DecodeBenchConfig, OpBenchConfig, TimedConfig, TrainBenchConfig
from .timing import Ratio, paired_ratio
from .training import bench_step


@dataclass(frozen=True, kw_only=True)
class Part:
    """One run."""

    about: str
    bench: Callable[..., BenchResult]
    config: Callable[..., Any]
    sizes: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)
    """Other sizes in tests."""
    least: str | float | None = None
    """The figure of a row that is the least ratio, or that ratio; None: the time of the official layer."""


_NOBLE: dict[str, Any] = {"methods": ("noble", *RIVALS)}
_SMALL: dict[str, Any] = {"width": 16, "hidden": 24, "ranks": (4,)}
_MODEL: dict[str, Any] = {**_SMALL, "heads": 2, "layers": 1, "vocab_size": 11}
_STEP: dict[str, Any] = {**_MODEL, "sequence_length": 4, "batch_size": 1}
_FLOPS: dict[str, Any] = {"bench": bench_step, "config": TrainBenchConfig, "tiny": _STEP, "least": "flop_ratio"}
_TINY_CALL: dict[str, Any] = {"operators": ("noble",), "modes": ("eager",), "calls": 50}
_CALL: dict[str, Any] = {"bench": bench_op, "config": OpBenchConfig, "tiny": _SMALL | {"tokens": 2, "calls": 2}}
_ADAPTERS: dict[str, Any] = {"family": "llama", "methods": ("sine-lora", "sine-dora", "dora"), "ranks": (16,)}

PARTS: dict[str, Part] = {
    # First: a token waits for memory, and weights that lie in memory freed by another part are, in any arm, up to
    # 6 % slower than in a process that has just loaded a model.
    "decode-512": Part(
        about="one token over the baseline, eager, GLM, d 512, r 32, after 128",
        bench=bench_decode,
        config=DecodeBenchConfig,
        sizes={"methods": ("noble", "noble-official"), "ranks": (32,), "context": 128},
        tiny={**_MODEL, "context": 2, "batch_sizes": (1, 2)},
        least="parameter_ratio",
    ),
    "step-512": Part(
        about="compiled step over the baseline, GLM, d 512, r 64",
        sizes={**_NOBLE, "ranks": (64,), "modes": ("compiled",)},
        **_FLOPS,
    ),
    "step-256": Part(
        about="eager step over the baseline, Llama, d 256, r 32",
        sizes={
            **_NOBLE, "family": "llama", "width": 256, "hidden": 688, "sequence_length": 64, "ranks": (32,),
            "modes": ("eager",),
        },
        **_FLOPS,
    ),
    "step-128": Part(
        about="eager step over the baseline, GLM, d 128, r 16",
        sizes={**_NOBLE, "width": 128, "hidden": 344, "sequence_length": 64, "ranks": (16,), "modes": ("eager",)},
        **_FLOPS,
    ),
    "call-64": Part(
        about="forward and backward of a layer 64 -> 64, r 8, 4 tokens",
        sizes={**_TINY_CALL, "width": 64, "hidden": 64, "ranks": (8,), "tokens": 4},
        **_CALL,
    ),
    "call-256": Part(
        about="forward and backward of a layer 256 -> 256, r 32, 8 tokens",
        sizes={**_TINY_CALL, "width": 256, "hidden": 256, "ranks": (32,), "tokens": 8},
        **_CALL,
    ),
    "rational": Part(
        about="rational over GELU, SwiGLU, forward and backward, 1024 x 2048",
        bench=bench_op,
        config=OpBenchConfig,
        sizes={"operators": ("rational", "gated"), "modes": ("eager", "compiled"), "calls": 5},
        tiny={**_SMALL, "tokens": 2, "modes": ("eager",), "calls": 1},
        least=1.0,
    ),
    "adapters-512": Part(
        about="step over LoRA, Llama, d 512, r 16",
        sizes={**_ADAPTERS, "modes": ("compiled", "eager")},
        **{**_FLOPS, "tiny": {**_STEP, "modes": ("eager",)}},
    ),
}  # fmt: skip


_WIDEST = 2.0  # ratio in the picture; what is above it is a number


@dataclass(kw_only=True)
class Summary:
    """Rows of every part; `print(summary)` gives them as a table."""

    config: AllBenchConfig
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """part/panel/arm -> figures."""

    def __str__(self) -> str:
        table = number_table("part/panel/arm", "over", "microseconds", "time x [95 %]", "least", "time / least")
        for name, row in self.rows.items():
            least, over = (f"{row[each]:.3f}" for each in ("least", "over_least"))
            time = str(Ratio(**row["time"]))
            table.add_row(name, row["over"], f"{row['microseconds']:.1f}", time, least, over)
        return "\n".join([render_table(table, 200), *(f"{each}: {PARTS[each].about}" for each in self.config.parts)])

    def to_json(self) -> str:
        """Return everything as text, a line for each row."""
        about = {"config": asdict(self.config), "machine": self.machine}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in self.rows.items())
        return json.dumps(about, indent=1)[:-2] + f',\n "rows": {{\n{lines}\n }}\n}}'

    def draw(self, path: Path) -> None:
        """Write a PNG: one mark a row, its time over the least."""
        figure, axes = new_figure(8, 1 + 0.22 * len(self.rows))
        for place, (name, row) in enumerate(self.rows.items()):
            middle, low, high = (row["time"][each] / row["least"] for each in ("median", "low", "high"))
            colour = COLOURS[_is_rival(name.rpartition("/")[2])]
            if middle > _WIDEST:
                axes.plot(_WIDEST, place, ">", color=colour)
                axes.annotate(
                    f"{middle:.1f}", (_WIDEST, place), (-8, 0), textcoords="offset points", ha="right", va="center"
                )
                continue
            axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", capsize=3, color=colour)
        axes.set_yticks(range(len(self.rows)), list(self.rows))
        axes.invert_yaxis()
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlim(0.6, _WIDEST + 0.03)
        axes.set_xlabel("time over the least (blue: ours, orange: what it is compared with)")
        save(figure, path)


def bench_all(config: AllBenchConfig, *, progress: Progress = lambda line: None) -> Summary:
    """Measure the parts one after the other."""
    summary = Summary(config=config)
    timed = {each.name: getattr(config, each.name) for each in fields(TimedConfig)}
    for name in config.parts:
        part = PARTS[name]
        progress(f"{name}: {part.about}")
        sizes = {**part.sizes, **(part.tiny if config.tiny else {}), **timed}
        result = part.bench(part.config(**sizes), progress=progress)
        summary.machine = result.machine
        for row in result.rows:
            summary.rows["/".join((name, _plain(row.panel), _plain(row.arm)))] = _figures(part, result, row)
    return summary


def _figures(part: Part, result: BenchResult, row: Row) -> dict[str, Any]:
    times = result.times[row.panel]
    assert row.step is not None
    assert row.seconds is not None
    assert row.over is not None
    others = [name for name in times if _is_rival(name)] if not _is_rival(row.arm) else []
    if isinstance(part.least, str):
        least = row.figures[part.least]
    elif part.least is not None:
        least = part.least
    else:
        official = next(name for name in times if "official" in name)
        least = paired_ratio(times[official], times[row.over]).median
    found = {
        "over": row.over,
        "microseconds": 1e6 * row.seconds,
        "time": asdict(row.step),
        "least": least,
        "over_least": row.step.median / least,
        "against": {_plain(name): asdict(paired_ratio(times[row.arm], times[name])) for name in others},
    }
    return _rounded(found)


def _is_rival(arm: str) -> bool:
    return _plain(arm).startswith((*RIVALS, "plain-formula", "official-layer", "dora", "KAT"))


def _plain(name: str) -> str:
    """Return a name as a key of a path: `noble-r64`."""
    return re.sub(r"[^\w.+-]+", "-", name.replace("=", "").replace("'", "")).strip("-")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
