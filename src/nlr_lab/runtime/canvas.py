"""The shared parts of all pictures: colours, and a file that is whole or absent.

Figures are plain `Figure` objects on the Agg canvas, so nothing here touches pyplot or the user's backend.
"""

import io
import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nonlinear_lowrank.hub.storage import TEMPORARY

# Okabe and Ito's palette: told apart by colour-blind readers. Greys are kept for the baselines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#44AA99")
GREYS = ("#222222", "#777777", "#A0A0A0", "#BBBBBB")


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return one plot of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write a PNG at once: readers see the old one or the new one."""
    buffer = io.BytesIO()
    # No "Software" entry: the same numbers give the same bytes whatever matplotlib drew them.
    figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{TEMPORARY}{path.name}")
    staged.write_bytes(buffer.getvalue())
    os.replace(staged, path)
