"""A picture of what `nlr bench` measured: one mark an arm with its interval, one panel a mode."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nlr_lab.runtime.canvas import COLOURS, save

from .model import BenchResult


def draw(result: BenchResult, path: Path) -> None:
    """Writes the picture as a PNG; an old one is replaced."""
    axis, points = result.points()
    panels = {point.panel: [each for each in points if each.panel == point.panel] for point in points}
    figure = Figure(figsize=(8, 0.6 + sum(0.6 + 0.3 * len(marks) for marks in panels.values())), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [1 + len(marks) for marks in panels.values()]
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (panel, marks) in zip(grid[:, 0], panels.items(), strict=True):
        places = list(range(len(marks)))
        values = [mark.value for mark in marks]
        intervals = [[mark.value - mark.low for mark in marks], [mark.high - mark.value for mark in marks]]
        axes.errorbar(values, places, xerr=intervals, fmt="o", capsize=3, color=COLOURS[0])
        axes.set_yticks(places, [mark.label for mark in marks])
        axes.set_ylim(len(marks) - 0.5, -0.5)
        axes.set_title(panel, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.5)
        if axis.endswith("ratio"):
            axes.axvline(1.0, color="black", linewidth=0.8)
    grid[-1, 0].set_xlabel(axis)
    save(figure, path)
