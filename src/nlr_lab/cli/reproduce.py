"""`nlr reproduce TABLE`: a table or figure of the references, published numbers beside ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nlr_lab.reproduce import find_tables
from nlr_lab.runtime.processes import let_threads_sleep, rank
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .options import parse


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Run a published table or figure at a scale; print what is published beside what was found.

    The same command continues where it stopped. nlr reproduce --list names the tables.
    """

    table: Positional[str] = "*"
    """A table's name, as in noble/table1, or a pattern, as in 'sine/*'."""
    scale: Literal["demo", "small", "paper"] = "demo"
    """demo: minutes of two cores, embedded data. small: hours of a small GPU. paper: the source's models and data."""
    out: str = "reproduced"
    """Folder of all results: OUT/TABLE/SCALE."""
    seeds: int | None = None
    """Seeds of every comparison; none: the scale's."""
    source: tuple[str, ...] = ()
    """NAME=PATH: a file or folder in the place of a data set or checkpoint of that name, as in
    uoft-cs/cifar10=cifar10.npz. commonsense=FOLDER and mmlu=FOLDER hold the tests' rows."""
    list: FlagCreatePairsOff[bool] = False
    """List the tables: what they measure, what each scale takes, and what has been run in --out."""


def run_reproduce(arguments: list[str]) -> None:
    """Run tables, or list them."""
    if not {"-h", "--help", "--list"} & set(arguments):
        let_threads_sleep()
    options = parse(ReproduceOptions, arguments, command="reproduce")
    found, out = find_tables(options.table), Path(options.out)
    if options.seeds is not None:
        check_integer("--seeds", options.seeds, minimum=1)
    pairs = [each.partition("=") for each in options.source]
    if wrong := next((name for name, equals, path in pairs if not (name and equals and path)), None):
        raise UserError(f"--source {wrong} must be NAME=PATH, as in uoft-cs/cifar10=cifar10.npz")

    from nlr_lab.reproduce.run import check_options, overview, page, run_table

    if options.list:
        overview(found, out)
        return
    if options.table == "*":
        raise UserError("name a table: nlr reproduce noble/table1; nlr reproduce --list names all")
    if len(found) > 1:
        found = [table for table in found if table.trials is not None]
    sources = {name: path for name, _, path in pairs}
    check_options(found, options.scale, [*sources], options.seeds)
    for table in found:
        record = run_table(table, options.scale, out, sources=sources, seeds=options.seeds)
        if rank() == 0:
            print(page(record))
