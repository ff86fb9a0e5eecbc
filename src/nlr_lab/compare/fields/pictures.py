"""Pictures of neural fields: score against size and frequency, and the fitted things side by side."""

from collections.abc import Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nlr_lab.runtime.canvas import COLOURS, GREYS, new_figure, save

PICTURES = ("rate.png", "omega.png", "strip.png")

_Cell = tuple[str, np.ndarray]

_SWEEP = 3  # frequencies that make a curve

_NAMES = {"bits_per_pixel": "bits per pixel (32 a parameter)", "parameters": "parameters"}
_METRICS = {"iou": "IoU", "psnr": "PSNR", "ssim": "SSIM"}
_STYLES = {"dense": (GREYS[0], "s"), "low-rank": (COLOURS[0], "o"), "sine": (COLOURS[1], "^")}


def metric_name(metric: str) -> str:
    """Return a metric's name in words: PSNR for psnr."""
    return _METRICS.get(metric, metric.replace("_", " "))


def score_label(results: Mapping[str, Any]) -> str:
    """The score's name and unit, as it stands at axes and over columns."""
    name, unit = metric_name(results["metric"]["name"]), results["metric"]["unit"]
    return f"{name} ({unit})" if unit else name


def _finish(path: Path, figure: Figure, axes: Axes, results: Mapping[str, Any], x_label: str) -> None:
    """Name the axes of a plot of the score over something, and write it."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(score_label(results))
    axes.set_title(f"{results['problem']}, n = {results['n']}", parse_math=False)
    if axes.containers:
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def _scores(arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means, and standard deviations over seeds as error bars."""
    return {"y": [arm["score"]["mean"] for arm in arms], "yerr": [arm["score"]["sd"] or 0.0 for arm in arms]}


def plot_sizes(path: Path, results: Mapping[str, Any]) -> None:
    """Draw score against size, a curve for each kind of linears (as in Figure 5b of sine_lowrank.txt).

    Arms that are not on their kind's curve (other omegas) are pale.
    """
    figure, axes = new_figure(7.0, 4.5)
    for kind, (colour, marker) in _STYLES.items():
        arms = [arm for arm in results["arms"] if arm["settings"]["kind"] == kind and arm["score"]["mean"] is not None]
        arms.sort(key=lambda arm: arm["size"])
        names = results["rate_distortion"].get(kind, [arm["name"] for arm in arms])
        for on_curve in (True, False):
            chosen = [arm for arm in arms if (arm["name"] in names) == on_curve]
            if not chosen:
                continue
            style: dict[str, Any] = {
                "linestyle": "-" if on_curve and kind != "dense" else "none",
                "alpha": 1.0 if on_curve else 0.35,
            }
            label = kind if on_curve else None
            sizes = [arm["size"] for arm in chosen]
            axes.errorbar(sizes, **_scores(chosen), color=colour, marker=marker, capsize=3, label=label, **style)
        beside = (5, 5) if kind == "sine" else (5, -11)  # above and below: the kinds often end near each other
        for arm in arms:
            if arm["name"] in names and arm["settings"]["rank"] is not None:
                place: dict[str, Any] = {"textcoords": "offset points", "xytext": beside, "fontsize": 8}
                point = (arm["size"], arm["score"]["mean"])
                axes.annotate(f"k={arm['settings']['rank']}", point, color=colour, **place)
    axes.set_xscale("log")
    _finish(path, figure, axes, results, _NAMES[results["size"]])


def omega_sweeps(results: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
    """The arms, by frequency, of each rank that has sines of three frequencies or more with a score."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for arm in results["arms"]:
        if arm["omega"] is not None and arm["score"]["mean"] is not None:
            by_rank.setdefault(arm["settings"]["rank"], []).append(arm)
    return {
        rank: sorted(arms, key=lambda arm: arm["omega"])
        for rank, arms in sorted(by_rank.items())
        if len({arm["omega"] for arm in arms}) >= _SWEEP
    }


def plot_omegas(path: Path, results: Mapping[str, Any]) -> None:
    """Draw score against the sine's frequency, a curve for each rank (the sine paper, Figures 7, 9).

    Plain low rank is dashed, with a band of its standard deviation. Where no rank has such a sweep, a picture that was
    there goes.
    """
    sweeps = omega_sweeps(results)
    if not sweeps:
        path.unlink(missing_ok=True)
        return
    figure, axes = new_figure(7.0, 4.5)
    for (rank, arms), colour in zip(sweeps.items(), cycle(COLOURS)):
        omegas = [arm["omega"] for arm in arms]
        axes.errorbar(omegas, **_scores(arms), color=colour, marker="^", capsize=3, label=f"sine, k={rank}")
        for arm in results["arms"]:
            score, of_arm = arm["score"], (arm["settings"]["kind"], arm["settings"]["rank"])
            if of_arm == ("low-rank", rank) and score["mean"] is not None:
                axes.axhline(score["mean"], color=colour, linestyle="--", label=f"low-rank, k={rank}")
                low, high = (score["mean"] + sign * (score["sd"] or 0.0) for sign in (-1, 1))
                axes.axhspan(low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    ticks = sorted({arm["omega"] for arms in sweeps.values() for arm in arms})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    _finish(path, figure, axes, results, "omega")


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
    unit = results["metric"]["unit"] and f" {results['metric']['unit']}"
    columns: list[list[_Cell | None]] = [[("ground truth", truth), None]]
    by_rank: dict[int | None, tuple[list[_Cell], list[_Cell]]] = {}
    for record, value, picture in shown:
        method = record["settings"]
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
