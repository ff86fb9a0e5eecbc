"""Tables, amounts and times as plain text, and what all pictures share: colours, and a file that is whole or absent.

Figures are plain `Figure` objects, which write a PNG by Agg, so nothing here touches pyplot or the user's backend.
"""

import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from nonlinear_lowrank.hub.storage import TEMPORARY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers. Greys are kept for the baselines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#44AA99")
GREYS = ("#222222", "#777777", "#A0A0A0", "#BBBBBB")


def number_table(*columns: str) -> Table:
    """Return an empty table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    return table


def render_table(table: Table, width: int) -> str:
    """Return a rich table as plain text of so many columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def readable_bytes(nbytes: float) -> str:
    """Return bytes in the unit that leaves 1 to 3 digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def duration(seconds: float, *, up: bool = False) -> str:
    """Return words of one unit: 40 s, 3 min, 2.5 h."""
    whole = math.ceil if up else round
    if seconds < 90:
        return f"{whole(seconds)} s"
    if seconds < 5400:
        return f"{whole(seconds / 60)} min"
    return f"{whole(seconds / 360) / 10:g} h"


def fold_numbers(name: str) -> str:
    """Return a module's name with * for layer numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Return one plot of so many inches."""
    figure, (axes,) = new_panels(width, height, 1)
    return figure, axes


def new_panels(
    width: float, height: float, count: int, *, rows: int = 1, share: bool = True
) -> "tuple[Figure, list[Axes]]":
    """Return plots side by side (in so many rows), each of so many inches; they share what is up if `share`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, count, sharey=share, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure, panels


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG atomically: readers see the old one or the new one."""
    buffer = io.BytesIO()
    # No "Software" entry: the same numbers give the same bytes whatever matplotlib drew them.
    figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{TEMPORARY}{path.name}")
    staged.write_bytes(buffer.getvalue())
    staged.replace(path)
