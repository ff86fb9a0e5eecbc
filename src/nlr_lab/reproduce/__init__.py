"""The tables and figures of the references, run again: published numbers beside ours, at three scales.

`published/*.json` has what is printed; `noble`, `query`, `sine` and `nora` say what is run for it; `run` runs it.
"""

from .table import SCALES, find_tables, tables

__all__ = ["SCALES", "find_tables", "tables"]
