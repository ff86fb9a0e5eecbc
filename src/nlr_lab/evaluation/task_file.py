"""Tasks over rows of a user's files: lm-eval's task file, and the questions with the line to name when one is wrong."""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

_ENDINGS = ("jsonl", "jsonl.xz", "jsonl.gz", "json", "json.xz", "json.gz")
_DECOMPRESS: dict[str, Any] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Record of a file that a result was made from."""

    name: str
    bytes: int
    sha256: str
    """Hash of the file as it lies there, compressed or not."""
    rows: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One object of a file."""

    place: str
    """"FILE line 3" or, in a JSON array, "FILE row 3"; counted from one."""
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """Return the string in a field; raise UserError when there is none."""
        value = self.values.get(field)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            found = f"is {kind}, not a string" if field in self.values else "is missing"
            raise UserError(f"{self.place}: field {field!r} {found}")
        return value


def find_file(folders: Sequence[Path], stems: Sequence[str]) -> Path | None:
    """Return the first of `<folder>/<stem>.jsonl`, also .json, also with .xz or .gz, that is there."""
    paths = (folder / f"{stem}.{ending}" for folder in folders for stem in stems for ending in _ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def read_rows(path: Path) -> tuple[list[Row], DataFile]:
    """Read all objects of JSON lines, or of a JSON array.

    Raises:
        UserError: the file cannot be read, is empty, or a line is no JSON object; the message names the line.
    """
    try:
        raw = path.read_bytes()
        text = _DECOMPRESS.get(path.suffix, bytes)(raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except _DAMAGED as error:
        raise UserError(f"{path} is damaged or not whole: {one_line(error)}") from error
    if text.lstrip().startswith("["):
        values = [(f"{path} row {number}", value) for number, value in enumerate(_json(str(path), text), start=1)]
    else:
        # Not splitlines(): a JSON string may hold U+2028, which is no end of a line here.
        lines = [(f"{path} line {number}", line) for number, line in enumerate(text.split("\n"), start=1)]
        values = [(place, _json(place, line)) for place, line in lines if line.strip()]
    for place, value in values:
        if not isinstance(value, dict):
            raise UserError(f"{place}: must be a JSON object, got {type(value).__name__}")
    if not values:
        raise UserError(f"{path} has no rows")
    rows = [Row(place=place, values=value) for place, value in values]
    return rows, DataFile(name=path.name, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest(), rows=len(rows))


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{place}: not JSON ({error})") from error


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of lm-eval whose questions lie here."""

    name: str
    config: dict[str, Any]
    """A task file of lm-eval, but for `task` and what names its data."""
    docs: Sequence[dict[str, Any]]
    """The questions, in the file's order, with the fields that `config` reads; all of the same fields."""
    shots: Sequence[dict[str, Any]] = ()
    """Answered examples to put in front, in this order."""
    published: int
    """Questions of the published test; with another number, a score is not comparable with published ones."""
    files: Sequence[DataFile]
    """Files of the questions and examples."""


@dataclass(frozen=True, kw_only=True)
class LocalGroup:
    """Tasks that are reported together."""

    name: str
    members: Sequence[str]
    """Names of tasks, or of groups that come before this one."""
    pooled: bool
    """Report the share of right answers over all questions, not the mean of the members' shares."""
    published: int
    """Questions of the published tests, also of members that have none here."""
    metric: str = "acc"
    """The name under which it is reported."""


@dataclass(frozen=True, kw_only=True)
class LocalTasks:
    """All that was asked for."""

    tasks: Sequence[LocalTask] = ()
    groups: Sequence[LocalGroup] = ()

    @property
    def files(self) -> list[DataFile]:
        """Every file once, in the order of the tasks."""
        return list(dict.fromkeys(file for task in self.tasks for file in task.files))

    @property
    def hidden(self) -> set[str]:
        """Tasks that a table need not show, being many and part of a group; results have them."""
        pooled = {member for group in self.groups if group.pooled for member in group.members}
        return pooled & {task.name for task in self.tasks}

    def split(self, names: Collection[str]) -> tuple["LocalTasks", "LocalTasks"]:
        """Return the tasks and groups of these names, and the others."""
        inside, outside = (
            LocalTasks(
                tasks=[task for task in self.tasks if (task.name in names) == wanted],
                groups=[group for group in self.groups if (group.name in names) == wanted],
            )
            for wanted in (True, False)
        )
        return inside, outside


@cache
def read_task_file(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found
