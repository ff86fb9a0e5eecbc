"""Bars of an ablation: every arm's delta from one reference (Table 5 of noble.txt as a picture)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlr_lab.runtime.canvas import COLOURS, new_figure, save


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: a delta and its interval (None without one), in its group (such as a depth)."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    group: str = ""


def ablation_bars(
    results: Mapping[str, Any], reference: str, labels: Mapping[str, tuple[str, str]] | None = None
) -> list[Bar]:
    """Return the bars of a comparison's record, in the record's order.

    Args:
        results: what `results.json` holds.
        reference: the recorded reference or one of the controls.
        labels: arm -> (label, group); arms that are not named are left out. None: all, by their names.
    """
    bars = []
    for name, pair in results["against"][reference].items():
        label, group = (name, "") if labels is None else labels.get(name, ("", ""))
        if label:
            interval = {key: pair["delta"][key] for key in ("value", "low", "high")}
            bars.append(Bar(label=label, group=group, **interval))
    return bars


def plot_ablation(
    path: Path,
    bars: Sequence[Bar],
    *,
    title: str = "",
    x_label: str = "delta of the final loss (nats per token; left is better)",
) -> None:
    """Draw horizontal bars of deltas with their intervals.

    Args:
        path: the PNG to write.
        bars: from top to bottom; bars of one `group` share a colour. A bar whose value is None is written
            out in words.
        title: heading of the picture.
        x_label: with the unit of the delta.
    """
    figure, axes = new_figure(7.5, 1.2 + 0.38 * len(bars))
    groups = list(dict.fromkeys(bar.group for bar in bars))
    named: set[str] = set()
    for row, bar in enumerate(bars):
        if bar.value is None:
            axes.text(0, row, " no number", va="center", fontsize=8, color="#666666")
            continue
        colour = COLOURS[groups.index(bar.group) % len(COLOURS)]
        label = bar.group if bar.group and bar.group not in named else None
        named.add(bar.group)
        axes.barh(row, bar.value, height=0.65, color=colour, alpha=0.75, label=label)
        if bar.low is not None and bar.high is not None:
            reach = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar(bar.value, row, xerr=reach, color="#222222", capsize=3, linewidth=1.0)
    axes.axvline(0.0, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel(x_label)
    axes.set_title(title, parse_math=False)
    if named - {""}:
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)
