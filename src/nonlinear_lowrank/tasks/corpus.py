"""Documents out of files, folders, the standard library and `datasets`, one string each.

Text files hold one document, or several with lines of a separator between them; JSON lines and parquet hold
one a row. Compressed files (.xz .gz .zst) are read as what they contain.
"""

import gzip
import hashlib
import io
import json
import lzma
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from ..errors import UserError

SEPARATOR = "<|endoftext|>"
_KINDS = (".txt", ".md", ".py", ".jsonl", ".parquet")
_COMPRESSED = (".xz", ".gz", ".zst")
_DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zstandard.ZstdError, EOFError)
# The standard library's own tests and bundled strangers are not library sources.
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
_DATASET = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.\[\]:%-]+))?")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from; may be iterated again and again, always in the same order."""

    source: str
    """"stdlib", a file, a folder, or a dataset's name: "owner/name", "owner/name:config", "...@split"."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text."""
    separator: str | None = None
    """Line that divides a text file into documents; None: '<|endoftext|>' where it occurs; "": no division."""
    streaming: bool = False
    """Read a dataset over the network as it is needed, not whole first."""
    max_bytes: int | None = None
    """Stop after so many bytes of text."""

    def files(self) -> list[Path]:
        """The files that a local source is made of, sorted; empty for a dataset.

        Raises:
            UserError: it does not exist, or holds no file of a known kind.
        """
        if self.source == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            found = (path for path in root.rglob("*.py") if not _NOT_SOURCES & set(path.relative_to(root).parts))
            return sorted(found)
        path = Path(self.source).expanduser()
        if path.is_file():
            if _kind(path) is None:
                raise UserError(f"{path}: unknown kind of file; use {' '.join(_KINDS)}, also with .xz .gz .zst")
            return [path]
        if path.is_dir() and not _is_saved_dataset(path) and not self.streaming:
            files = sorted(each for each in path.rglob("*") if each.is_file() and _kind(each) is not None)
            if not files:
                raise UserError(f"{path} holds no file of a known kind ({' '.join(_KINDS)}, also with .xz .gz .zst)")
            return files
        if not path.exists() and (_kind(path) is not None or not _DATASET.fullmatch(self.source)):
            raise UserError(f"there is no file or folder {self.source!r}; give a path, 'stdlib' or a dataset's name")
        return []

    def identity(self) -> str:
        """A hash of the source's content (of a dataset: its name and fingerprint) and of how it is read."""
        digest = hashlib.sha256(json.dumps([self.text_field, self.separator, self.max_bytes]).encode())
        files = self.files()
        for path in files:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}") from error
            digest.update(f"{path.name}\n{content}\n".encode())
        if not files:
            print_of = None if self.streaming else getattr(self._dataset(), "_fingerprint", None)
            digest.update(json.dumps([self.source, print_of]).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Every document that is not blank.

        Raises:
            UserError: a file is binary, damaged or lacks the text; the message names the place.
        """
        size = 0
        files = self.files()
        for document in self._rows(self._dataset()) if not files else self._of_files(files):
            if not document.strip():
                continue
            size += len(document.encode("utf-8", "surrogatepass"))
            if self.max_bytes is not None and size > self.max_bytes:
                return
            yield document

    def _of_files(self, files: list[Path]) -> Iterator[str]:
        for path in files:
            kind = _kind(path)
            try:
                if kind == ".parquet":
                    yield from self._parquet(path)
                elif kind == ".jsonl":
                    yield from self._json_lines(path)
                else:
                    yield from self._split(_decode(path, _read(path)))
            except _DAMAGED as error:
                raise UserError(f"{path} is damaged or cut off: {_one_line(error)}") from error
            except OSError as error:
                raise UserError(f"cannot read {path}: {_one_line(error)}") from error

    def _split(self, text: str) -> Iterator[str]:
        separator = SEPARATOR if self.separator is None else self.separator
        if not separator:
            yield text
            return
        # Only where it stands alone on a line: text may speak of the separator.
        yield from re.split(rf"^{re.escape(separator)}[ \t]*$\n?", text, flags=re.MULTILINE)

    def _json_lines(self, path: Path) -> Iterator[str]:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                text = _decode(path, line).strip()
                if not text:
                    continue
                try:
                    row = json.loads(text)
                except ValueError as error:
                    raise UserError(f"{path}:{number} is not JSON: {_one_line(error)}") from error
                yield self._field(row, f"{path}:{number}")

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(io.BytesIO(_read(path)) if _is_compressed(path) else path) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise UserError(
                        f"{path} has no column {self.text_field!r}; it has {', '.join(names)} (set text_field)"
                    )
                for batch in table.iter_batches(columns=[self.text_field]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is not a whole parquet file: {_one_line(error)}") from error

    def _field(self, row: Any, place: str) -> str:
        if not isinstance(row, dict) or not isinstance(row.get(self.text_field), str):
            raise UserError(f"{place} has no text in the field {self.text_field!r}; name another with text_field")
        return row[self.text_field]

    def _rows(self, dataset: Any) -> Iterator[str]:
        try:
            for index, row in enumerate(dataset):
                yield self._field(row, f"row {index} of {self.source}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"reading the dataset {self.source!r} failed: {_one_line(error)}") from error

    def _dataset(self) -> Any:
        import datasets

        path = Path(self.source).expanduser()
        if path.is_dir() and _is_saved_dataset(path):
            found = datasets.load_from_disk(str(path))
            return found["train"] if isinstance(found, datasets.DatasetDict) else found
        match = _DATASET.fullmatch(self.source)
        name, config, split = (
            (match["name"], match["config"], match["split"]) if match and not path.exists() else (str(path), None, None)
        )
        try:
            return datasets.load_dataset(name, config, split=split or "train", streaming=self.streaming)
        except Exception as error:  # the library raises many kinds, of its own and of its network stack
            raise UserError(
                f"there is no file or folder {self.source!r}, and no dataset of that name could be loaded "
                f"({type(error).__name__}: {_one_line(error)})"
            ) from error


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else None


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _COMPRESSED


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return lzma.open(path, "rb")
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BytesIO(_zstd(path.read_bytes()))
    return path.open("rb")


def _zstd(data: bytes) -> bytes:
    """All frames; the library's own reader takes a frame that is cut off for its end."""
    parts = []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(data))
        if not frame.eof:
            raise EOFError("the last frame is not whole")
        data = frame.unused_data
    return b"".join(parts)


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _decode(path: Path, data: bytes) -> str:
    nul = data.find(b"\0")
    if nul >= 0:
        raise UserError(f"{path} is binary (a zero byte at offset {nul}); give text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (offset {error.start}); convert it first") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
