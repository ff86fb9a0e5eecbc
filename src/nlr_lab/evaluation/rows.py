"""Rows of JSON out of a user's file, each with the line to name when it is wrong."""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

_ENDINGS = ("jsonl", "jsonl.xz", "jsonl.gz", "json", "json.xz", "json.gz")
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
_DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """What a result says of a file that it was made from."""

    name: str
    bytes: int
    sha256: str
    """Of the file as it lies there, compressed or not."""
    rows: int

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One object of a file."""

    place: str
    """"FILE line 3" or, in a JSON array, "FILE row 3"; counted from one."""
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """The string in a field; UserError when there is none."""
        value = self.values.get(field)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            found = "is missing" if field not in self.values else f"is {kind}, not a string"
            raise UserError(f"{self.place}: field {field!r} {found}")
        return value


def find_file(folders: Iterable[Path], stems: Sequence[str]) -> Path | None:
    """The first of `<folder>/<stem>.jsonl`, also .json, also with .xz or .gz, that is there."""
    for folder in folders:
        for stem in stems:
            for ending in _ENDINGS:
                path = folder / f"{stem}.{ending}"
                if path.is_file():
                    return path
    return None


def read_rows(path: Path) -> tuple[list[Row], DataFile]:
    """All objects of JSON lines, or of a JSON array.

    Raises:
        UserError: the file cannot be read, is empty, or a line is no JSON object; the message names the line.
    """
    try:
        raw = path.read_bytes()
        data = _OPENERS[path.suffix](path).read() if path.suffix in _OPENERS else raw
        text = data.decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except _DAMAGED as error:
        raise UserError(f"{path} is damaged or not whole: {error}") from error
    parse = _array if text.lstrip().startswith("[") else _lines
    rows = [Row(place=place, values=_object(place, value)) for place, value in parse(path, text)]
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows, DataFile(name=path.name, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest(), rows=len(rows))


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines(): a JSON string may hold U+2028, which is no end of a line here.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path} line {number}"
            try:
                yield place, json.loads(line)
            except ValueError as error:
                raise UserError(f"{place}: not JSON ({error})") from error


def _array(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    for number, value in enumerate(values, start=1):
        yield f"{path} row {number}", value


def _object(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place}: a JSON object was expected, not {type(value).__name__}")
    return value
