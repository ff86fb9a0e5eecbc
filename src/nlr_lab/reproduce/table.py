"""A table or figure of a reference: what is printed, and the trials that measure the same thing with this tool.

A trial fills cells of its table, by row and column. There are three kinds: `Compare` trains and compares arms,
`Measure` calls a function (counts, spectra, memory, times, settings), `Absent` says why there is no number.
"""

import difflib
import fnmatch
import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from nonlinear_lowrank.errors import UserError

SCALES = ("demo", "small", "paper")
EQUAL_TIME = " at equal time"
"""Ends the name of a column that is another's when the reference has finished (`measures.Arm.at_equal_time`)."""
REFERENCES = ("noble", "notes", "query", "sine", "nora")
_MODULES = ("noble", "query", "sine", "nora")

_T = TypeVar("_T")
Cells = dict[str, dict[str, dict[str, Any]]]
"""Row -> column -> value, with low, high and n where there are several; or why there is none."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """One comparison (`nlr_lab.compare`) of models or fields."""

    part: str
    """Its folder under the table's."""
    recipe: Any
    """A `Recipe` or `FieldRecipe`; its own arms are not used."""
    arms: Mapping[str, str]
    """Row -> short form of an arm. Rows that the table does not have are controls."""
    column: str = ""
    """Column of the score; further columns are filled by their names (`measures.MEASURES`)."""
    seeds: int = 1
    tune_lr: tuple[float, ...] = ()
    rounds: int = 0
    """Interleaved steps of each arm, for step times."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Column -> task of `nlr evaluate` that every trained model is scored on."""
    shots: int | None = None
    """Examples before each question of them; None: the task's own."""
    before: Callable[[Any, Path], Mapping[str, str]] | None = None
    """Called with this trial and the table's folder: arms in the place of those of their rows."""
    after: Callable[[Any, Any, Path], Cells] | None = None
    """Called with the comparison, this trial and the table's folder: more cells, and pictures."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A function that measures at once; its argument is the table's folder."""

    part: str
    function: Callable[[Path], Cells]
    note: str = ""
    """For the page, where the numbers are not measurements."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Cells that are not measured."""

    why: str
    rows: tuple[str, ...] = ()
    """Empty: all."""
    columns: tuple[str, ...] = ()
    """Empty: all."""


Trial = Compare | Measure | Absent


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table or figure."""

    name: str
    title: str
    section: str
    """Section that prints it."""
    columns: Sequence[str] = ()
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Label -> published values by column; None where none is printed."""
    note: str = ""
    """Remark on the published numbers."""
    diagram: bool = False
    """There is nothing to measure."""
    seen_in: Sequence[str] = ()
    """Tables that measure what a picture of several things shows."""
    studies: Sequence[str] = ()
    """Folders of the repository's studies/ that measure the same at a small scale."""
    home: str = ""
    """The table in whose folder the runs are: figures share those of a table."""
    trials: Callable[[str], list[Trial]] | None = None
    """Scale -> trials."""
    takes: Mapping[str, str] = field(default_factory=dict)
    """Scale -> time and hardware."""


def runs(*names: str, takes: tuple[str, str, str], home: str = "") -> Callable[[Callable[[str], list[Trial]]], Any]:
    """Register a function scale -> trials for a table, and for the figures that are drawn from the same runs, which are
    in the folder of `home`, by default the first."""

    def register(function: Callable[[str], list[Trial]]) -> Callable[[str], list[Trial]]:
        for name in names:
            assert name not in _REGISTERED, f"{name} is registered twice"
            _REGISTERED[name] = {"home": home or names[0], "trials": function}
            _REGISTERED[name]["takes"] = dict(zip(SCALES, takes, strict=True))
        return function

    return register


_REGISTERED: dict[str, dict[str, Any]] = {}


@functools.cache
def tables() -> dict[str, Table]:
    """Return all tables by name, in the order of the references."""
    for module in _MODULES:
        importlib.import_module(f".{module}", __package__)
    found = {}
    for reference in REFERENCES:
        text = files(__package__).joinpath("published", f"{reference}.json").read_text(encoding="utf-8")
        for name, printed in json.loads(text).items():
            found[name] = Table(name=name, **printed, **_REGISTERED.get(name, {}))
    assert found.keys() >= _REGISTERED.keys(), sorted(_REGISTERED.keys() - found.keys())
    return found


def slug(label: str) -> str:
    """Return a label as a name of folders and arms: "base, CosNet r=64" is base-CosNet-r-64."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label.replace("+", "p")).strip("-")


def at(scale: str, demo: _T, small: _T, paper: _T) -> _T:
    """Return the value of a scale."""
    return {"demo": demo, "small": small, "paper": paper}[scale]


def find_tables(pattern: str) -> list[Table]:
    """Return the tables of a name, or of a pattern such as noble/*; raise UserError where there is none."""
    names = list(tables())
    found = fnmatch.filter(names, pattern)
    if not found:
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "nlr reproduce --list names all"
        raise UserError(f"unknown table {pattern!r}; {hint}")
    return [tables()[name] for name in found]
