"""A picture of what `nlr bench` measured: one mark an arm with its interval, one panel a mode."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nlr_lab.runtime.canvas import COLOURS, save

from .result import BenchResult, Point


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture as a PNG; an old one is replaced."""
    panels: dict[str, list[Point]] = {}
    for point in (row.point() for row in result.rows):
        panels.setdefault(point.panel, []).append(point)
    heights = [1 + len(marks) for marks in panels.values()]
    figure = Figure(figsize=(8, 0.6 + sum(0.3 + 0.3 * height for height in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (panel, marks) in zip(grid[:, 0], panels.items(), strict=True):
        values, places = [mark.value for mark in marks], range(len(marks))
        intervals = [[mark.value - mark.low for mark in marks], [mark.high - mark.value for mark in marks]]
        axes.errorbar(values, places, xerr=intervals, fmt="o", capsize=3, color=COLOURS[0])
        axes.set_yticks(places, [mark.label for mark in marks])
        axes.set_ylim(len(marks) - 0.5, -0.5)
        axes.set_title(panel, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.5)
        if result.axis.endswith("ratio"):
            axes.axvline(1.0, color="black", linewidth=0.8)
    grid[-1, 0].set_xlabel(result.axis)
    save(figure, path)
