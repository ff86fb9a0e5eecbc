"""The tables and figures of the references but nora.txt, run again: published numbers beside ours, at three scales.

`published/*.json` has what is printed; `noble`, `query` and `sine` say what is run for it; `run` runs it.
"""

from .table import SCALES, find_tables, tables

__all__ = ["SCALES", "find_tables", "tables"]
