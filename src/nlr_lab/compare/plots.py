"""Pictures of a comparison: curves, learning-rate sweeps, ablation bars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from nlr_lab.runtime.canvas import COLOURS, GREYS, new_figure, save

_MARKERS = "osD^vP"


@dataclass(frozen=True, kw_only=True)
class ArmCurves:
    """The evaluation curves of one arm, one for each seed; `dashed` for baselines."""

    name: str
    dashed: bool
    curves: tuple[tuple[tuple[float, float], ...], ...]
    """For each seed the points (step, evaluation loss)."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of an ablation: a delta and its interval (None without one), in its group (such as a depth)."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    group: str = ""


def ablation_bars(
    results: Mapping[str, Any], reference: str, labels: Mapping[str, tuple[str, str]] | None = None
) -> list[Bar]:
    """Bars of a comparison's record: every arm's delta from one reference, in the record's order.

    Args:
        results: what `results.json` holds.
        reference: the recorded reference or one of the controls.
        labels: arm -> (label, group); arms that are not named are left out. None: all, by their names.
    """
    bars = []
    for name, pair in results["against"][reference].items():
        if labels is None or name in labels:
            label, group = (name, "") if labels is None else labels[name]
            delta = pair["delta"]
            bars.append(Bar(label=label, value=delta["value"], low=delta["low"], high=delta["high"], group=group))
    return bars


def mean_curve(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest loss over seeds on the union of their steps.

    Only the range of steps that every seed covers is kept; within it each curve is interpolated linearly.
    Non-finite losses (a run that diverged) cut that seed's range short.

    Returns:
        steps, mean, lowest, highest; four arrays of one length, empty when the seeds share no step.
    """
    kept = []
    for curve in curves:
        points = []
        for point in curve:
            if not math.isfinite(point[1]):
                break
            points.append(point)
        kept.append(np.array(points, dtype=np.float64).reshape(-1, 2))
    if not kept or any(len(points) == 0 for points in kept):
        empty = np.empty(0)
        return empty, empty, empty, empty
    first, last = max(points[0, 0] for points in kept), min(points[-1, 0] for points in kept)
    steps = np.unique(np.concatenate([points[:, 0] for points in kept]))
    steps = steps[(steps >= first) & (steps <= last)]
    losses = np.stack([np.interp(steps, points[:, 0], points[:, 1]) for points in kept])
    return steps, losses.mean(0), losses.min(0), losses.max(0)


def plot_curves(
    path: Path,
    arms: Sequence[ArmCurves],
    *,
    target: float | None = None,
    skip: float = 0.2,
    title: str = "",
    y_label: str = "evaluation loss (nats per token)",
) -> None:
    """Evaluation curves as in Figures 1 and 3 of noble.txt.

    Args:
        path: the PNG to write.
        arms: drawn in this order; baselines dashed, other arms solid; line = mean over seeds, band = lowest
            to highest seed.
        target: the reference's final loss (mean over seeds), a dotted horizontal line.
        skip: share of the steps that is left out at the beginning (the paper truncates 20 %).
        title: heading of the picture.
        y_label: with the unit of the loss.
    """
    figure, axes = new_figure(8.0, 5.0)
    last = max((point[0] for arm in arms for curve in arm.curves for point in curve), default=0.0)
    greys = colours = 0
    drawn = False
    for arm in arms:
        if arm.dashed:
            colour, greys = GREYS[greys % len(GREYS)], greys + 1
        else:
            colour, colours = COLOURS[colours % len(COLOURS)], colours + 1
        steps, mean, low, high = mean_curve(arm.curves)
        shown = steps >= skip * last
        if not shown.any():
            continue
        # Several baselines are all dashed; the dash pattern tells them apart in print.
        style = (0, (5, 1 + 1.5 * (greys - 1))) if arm.dashed else "-"
        axes.plot(steps[shown], mean[shown], color=colour, linestyle=style, linewidth=1.8, label=arm.name)
        if len(arm.curves) > 1:
            axes.fill_between(steps[shown], low[shown], high[shown], color=colour, alpha=0.15, linewidth=0)
        drawn = True
    if target is not None and math.isfinite(target):
        axes.axhline(target, color="#444444", linestyle=":", linewidth=1.0)
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "color": "#444444"}
        axes.text(0.005, target, "final loss of the reference", ha="left", va="bottom", **place)
    axes.set_xlabel(f"step (first {skip:.0%} not shown)" if skip else "step")
    axes.set_ylabel(y_label)
    axes.set_title(title, parse_math=False)
    if drawn:
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_rate_sweep(
    path: Path,
    sweeps: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    chosen: Mapping[str, float] | None = None,
    dashed: Sequence[str] = (),
    title: str = "",
    y_label: str = "evaluation loss (nats per token)",
) -> None:
    """Final loss against learning rate, one line for each arm.

    Args:
        path: the PNG to write.
        sweeps: arm -> (rate, final loss), the loss None where the run diverged (a cross at the top edge).
        chosen: arm -> the rate it goes on with, ringed.
        dashed: the arms that are baselines.
        title: heading of the picture.
        y_label: with the unit of the loss.
    """
    figure, axes = new_figure(7.0, 4.5)
    greys = colours = 0
    rates: set[float] = set()
    for index, (name, sweep) in enumerate(sweeps.items()):
        if name in dashed:
            colour, greys = GREYS[greys % len(GREYS)], greys + 1
        else:
            colour, colours = COLOURS[colours % len(COLOURS)], colours + 1
        points = sorted(sweep)
        rates.update(rate for rate, _ in points)
        finite = [(rate, loss) for rate, loss in points if loss is not None]
        axes.plot(
            [rate for rate, _ in finite],
            [loss for _, loss in finite],
            color=colour,
            linestyle="--" if name in dashed else "-",
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            label=name,
        )
        lost = [rate for rate, loss in points if loss is None]
        # At 0.98 of the axes' height whatever the losses are; nudged by arm so that crosses do not overlap.
        axes.plot(
            lost,
            [0.98 - 0.025 * index] * len(lost),
            "x",
            color=colour,
            markersize=6,
            transform=axes.get_xaxis_transform(),
        )
        ring = (chosen or {}).get(name)
        for rate, loss in finite:
            if ring is not None and math.isclose(rate, ring, rel_tol=1e-9):
                axes.plot([rate], [loss], "o", markersize=11, markerfacecolor="none", color=colour)
    axes.set_xscale("log")
    axes.set_xticks(sorted(rates))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate (ring: chosen, cross: diverged)")
    axes.set_ylabel(y_label)
    axes.set_title(title, parse_math=False)
    if sweeps:
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_ablation(
    path: Path,
    bars: Sequence[Bar],
    *,
    title: str = "",
    x_label: str = "delta of the final loss (nats per token; left is better)",
) -> None:
    """Horizontal bars of deltas from the baseline with their intervals (Table 5 of noble.txt as a picture).

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
