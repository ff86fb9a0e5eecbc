"""Tables as plain text."""

import io
import re

from rich.console import Console
from rich.table import Table


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


def fold_numbers(name: str) -> str:
    """Return a module's name with * for layer numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
