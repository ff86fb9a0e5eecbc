"""Rows of JSON out of a user's file, each with the line to name when it is wrong."""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
