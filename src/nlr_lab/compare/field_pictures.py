"""Pictures of a comparison of fields: score against size, and the fitted things side by side."""

from collections.abc import Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nlr_lab.runtime.canvas import COLOURS, GREYS, new_figure, save

_Cell = tuple[str, np.ndarray]

_SWEEP = 3  # frequencies that make a curve

_NAMES = {"bits_per_pixel": "bits per pixel (32 a parameter)", "parameters": "parameters"}
_METRICS = {"iou": "IoU", "psnr": "PSNR", "ssim": "SSIM"}
_STYLES = {"dense": (GREYS[0], "s"), "low-rank": (COLOURS[0], "o"), "sine": (COLOURS[1], "^")}


def metric_name(metric: str) -> str:
    """As it is written in words: PSNR for psnr."""
    return _METRICS.get(metric, metric.replace("_", " "))


def score_label(results: Mapping[str, Any]) -> str:
    """The score's name and unit, as it stands at axes and over columns."""
    name = metric_name(results["score"])
    return f"{name} ({results['unit']})" if results["unit"] else name


def plot_rates(path: Path, results: Mapping[str, Any]) -> None:
    """Score against size, a curve for each kind of linears (as in Figure 5b of sine_lowrank.txt).

    Args:
        path: the PNG to write.
        results: what `results.json` holds. Error bars are standard deviations over seeds; arms that are not on their
            kind's curve (other omegas) are drawn pale.
    """
    figure, axes = new_figure(7.0, 4.5)
    for kind, (colour, marker) in _STYLES.items():
        arms = [arm for arm in results["arms"] if arm["method"]["kind"] == kind and arm["mean"] is not None]
        names = results["rate_distortion"].get(kind, [arm["name"] for arm in arms])
        for on_curve in (True, False):
            chosen = [arm for arm in arms if (arm["name"] in names) == on_curve]
            if not chosen:
                continue
            chosen.sort(key=lambda arm: arm["rate"])
            rates, means = [arm["rate"] for arm in chosen], [arm["mean"] for arm in chosen]
            axes.errorbar(
                rates,
                means,
                yerr=[arm["sd"] or 0.0 for arm in chosen],
                color=colour,
                marker=marker,
                linestyle="-" if on_curve and kind != "dense" else "none",
                alpha=1.0 if on_curve else 0.35,
                capsize=3,
                label=kind if on_curve else None,
            )
            if on_curve:
                beside = (5, 5) if kind == "sine" else (5, -11)  # above and below: the kinds often end near each other
                for arm in chosen:
                    text = "" if arm["method"]["rank"] is None else f"k={arm['method']['rank']}"
                    place: dict[str, Any] = {"textcoords": "offset points", "xytext": beside, "fontsize": 8}
                    axes.annotate(text, (arm["rate"], arm["mean"]), color=colour, **place)
    axes.set_xscale("log")
    axes.set_xlabel(_NAMES[results["rate"]])
    axes.set_ylabel(score_label(results))
    axes.set_title(f"{results['problem']}, n = {results['n']}", parse_math=False)
    if any(arm["mean"] is not None for arm in results["arms"]):
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def omega_sweeps(results: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
    """Of each rank that has sines of three frequencies or more with a score: those arms, by frequency."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for arm in results["arms"]:
        if arm["omega"] is not None and arm["mean"] is not None:
            by_rank.setdefault(arm["method"]["rank"], []).append(arm)
    return {
        rank: sorted(arms, key=lambda arm: arm["omega"])
        for rank, arms in sorted(by_rank.items())
        if len({arm["omega"] for arm in arms}) >= _SWEEP
    }


def plot_omegas(path: Path, results: Mapping[str, Any]) -> None:
    """Score against the sine's frequency, a curve for each rank, plain low rank dashed (the sine paper, Figures 7, 9).

    Args:
        path: the PNG to write; where no rank has such a sweep, one that was there goes.
        results: what `results.json` holds. Error bars are standard deviations over seeds, as is the band about the
            plain low-rank score.
    """
    sweeps = omega_sweeps(results)
    if not sweeps:
        path.unlink(missing_ok=True)
        return
    figure, axes = new_figure(7.0, 4.5)
    for (rank, arms), colour in zip(sweeps.items(), cycle(COLOURS)):
        omegas, means = [arm["omega"] for arm in arms], [arm["mean"] for arm in arms]
        deviations = [arm["sd"] or 0.0 for arm in arms]
        axes.errorbar(omegas, means, yerr=deviations, color=colour, marker="^", capsize=3, label=f"sine, k={rank}")
        for arm in results["arms"]:
            if arm["method"]["kind"] == "low-rank" and arm["method"]["rank"] == rank and arm["mean"] is not None:
                mean, deviation = arm["mean"], arm["sd"] or 0.0
                axes.axhline(mean, color=colour, linestyle="--", label=f"low-rank, k={rank}")
                axes.axhspan(mean - deviation, mean + deviation, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    ticks = sorted({arm["omega"] for arms in sweeps.values() for arm in arms})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("omega")
    axes.set_ylabel(score_label(results))
    axes.set_title(f"{results['problem']}, n = {results['n']}", parse_math=False)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_strip(
    path: Path,
    results: Mapping[str, Any],
    truth: np.ndarray,
    shown: Sequence[tuple[Mapping[str, Any], float, np.ndarray]],
) -> None:
    """Ground truth above the dense fit, then low-rank above sine, rank by rank (Figures 6 and 8 of sine_lowrank.txt).

    Args:
        path: the PNG to write.
        results: what `results.json` holds.
        truth: (height, width, 3) uint8.
        shown: for each arm its record, the score of the fit that is shown, and its picture, of truth's size.
    """
    unit = results["unit"] and f" {results['unit']}"
    columns: list[list[_Cell | None]] = [[("ground truth", truth), None]]
    by_rank: dict[int | None, tuple[list[_Cell], list[_Cell]]] = {}
    for record, value, picture in shown:
        method = record["method"]
        cell = (f"{record['name']}\n{value:.4g}{unit}, {record['percent']:.3g} %", picture)
        if method["kind"] == "dense" and columns[0][1] is None:
            columns[0][1] = cell
        else:
            by_rank.setdefault(method["rank"], ([], []))[method["kind"] == "sine"].append(cell)
    for low, sine in by_rank.values():
        columns += [list(pair) for pair in zip_longest(low, sine)]
    rows = [row for row in zip(*columns, strict=True) if any(row)]
    height, width = truth.shape[:2]
    size = 2.2
    figure = Figure(figsize=(size * len(columns), len(rows) * (size * height / width + 0.45)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            if cell is not None:
                grid[row, column].set_title(cell[0], fontsize=8, parse_math=False)
                grid[row, column].imshow(cell[1], interpolation="nearest")
    save(figure, path)
