"""Documents out of files, folders, the standard library and `datasets`, one string each.

Text files hold one document, or several with lines of a separator between them; JSON lines and parquet hold
one a row. Compressed files (.xz .gz .zst) are read as what they contain. Only a parquet file that was
compressed once more is held in memory whole.
"""

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nlr_lab.runtime.bounds import bounded, check_held, half_of_free
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

SEPARATOR = "<|endoftext|>"
_KINDS = (".txt", ".md", ".py", ".jsonl", ".parquet")
_COMPRESSED = (".xz", ".gz", ".zst")
# The standard library's own tests and bundled strangers are not library sources.
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
_DATASET = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.\[\]:%-]+))?")
_BLOCK = 8 << 20  # bytes read at a time


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A source of documents; may be iterated again and again, always in the same order."""

    source: str
    """"stdlib", a file, a folder, or a dataset's name: "owner/name", "owner/name:config", "...@split"."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text."""
    separator: str | None = None
    """Line that divides a text file into documents; None: '<|endoftext|>' where it occurs; "": no division."""
    streaming: bool = False
    """Read a dataset over the network as it is needed, not whole first."""
    max_bytes: int | None = None
    """Stop before the document that would exceed so many bytes of text; a first document that is longer is cut."""

    def files(self) -> list[Path]:
        """Return the files that a local source is made of, sorted; none for a dataset. Hidden ones are skipped.

        Raises:
            UserError: it does not exist, or holds no file of a known kind.
        """
        if self.source == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            found = [path for path in _visible_files(root, _NOT_SOURCES) if path.suffix == ".py"]
            if not found:
                raise UserError("this Python has no library sources on disk; give a file, a folder or a dataset's name")
            return found
        path = Path(self.source).expanduser()
        if path.is_file():
            if _kind(path) is None:
                raise UserError(f"{path}: unknown kind of file; use {' '.join(_KINDS)}, also with .xz .gz .zst")
            return [path]
        if path.is_dir() and not _is_saved_dataset(path) and not self.streaming:
            files = [each for each in _visible_files(path) if _kind(each) is not None]
            if not files:
                raise UserError(f"{path} holds no file of a known kind ({' '.join(_KINDS)}, also with .xz .gz .zst)")
            return files
        if not path.exists() and (_kind(path) is not None or not _DATASET.fullmatch(self.source)):
            raise UserError(f"there is no file or folder {self.source!r}; give a path, 'stdlib' or a dataset's name")
        return []

    def identity(self) -> str:
        """Return a hash of the source's content and of how it is read.

        A dataset is known by its name and its fingerprint; a streamed one, of which nothing is here to be
        hashed, by its name alone.
        """
        files = self.files()
        # A folder that `datasets` reads may give other documents than its files do.
        reading = [self.text_field, self.separator, self.max_bytes, "files" if files else "dataset"]
        digest = hashlib.sha256(json.dumps(reading).encode())
        name, *parts = self._name()
        if files or Path(name).is_dir():
            digest.update(json.dumps(parts).encode())
            for path in files or _visible_files(Path(name)):
                try:
                    with path.open("rb") as file:
                        content = hashlib.file_digest(file, "sha256").hexdigest()
                except OSError as error:
                    raise UserError(f"cannot read {path}: {error.strerror}") from error
                digest.update(f"{path.name}\n{content}\n".encode())
        else:
            fingerprint = None if self.streaming else getattr(self._dataset(), "_fingerprint", None)
            digest.update(json.dumps([self.source, fingerprint]).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank.

        Raises:
            UserError: a file is binary, damaged or lacks the text; the message names the place.
        """
        size = 0
        files = self.files()
        for document in self._of_files(files) if files else self._rows(self._dataset()):
            if not document.strip():
                continue
            if self.max_bytes is not None:
                data = document.encode()
                if size + len(data) > self.max_bytes:
                    cut = "" if size else data[: self.max_bytes].decode(errors="ignore")
                    if cut.strip():
                        yield cut
                    return
                size += len(data)
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
                    yield from self._text(path)
            except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
                failed = isinstance(error, OSError) and error.errno is not None  # decompressors give no number
                fault = f"cannot read {path}" if failed else f"{path} is damaged or cut off"
                raise UserError(f"{fault}: {one_line(error)}") from error

    def _text(self, path: Path) -> Iterator[str]:
        separator = SEPARATOR if self.separator is None else self.separator
        # Only where it stands alone on a line: text may speak of the separator.
        pattern = re.compile(rf"^{re.escape(separator)}[ \t]*\r?$\n?", re.MULTILINE)
        parts: list[str] = []
        held, most = 0, half_of_free()
        for block in _line_blocks(path):
            first, *others = pattern.split(block) if separator else [block]
            parts.append(first)
            held += len(first)
            check_held(held, most, f"a document of {path}")
            for other in others:
                yield "".join(parts)
                parts, held = [other], len(other)
        yield "".join(parts)

    def _json_lines(self, path: Path) -> Iterator[str]:
        offset = 0
        for number, line in _lines(path):
            text = _decode(path, line, offset)
            offset += len(line)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number} is not JSON: {one_line(error)}") from error
            if isinstance(row, dict) and row.get(self.text_field, "") is None:
                raise UserError(self._count_nulls(path))
            document = self._field(row, f"{path}:{number}")
            if "\\u" in text:  # the one way to write half of a surrogate pair, which no tokenizer takes
                try:
                    document.encode()
                except UnicodeEncodeError as error:
                    half = f"\\u{ord(document[error.start]):04x}"
                    raise UserError(
                        f"{path}:{number} holds half a character ({half} without its other half); fix or drop it"
                    ) from error
            yield document

    def _count_nulls(self, path: Path) -> str:
        """Say how many lines have null for a text."""
        total, nulls = 0, []
        for number, line in _lines(path):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                total += 1
                if isinstance(row, dict) and row.get(self.text_field, "") is None:
                    nulls.append(number)
        return (
            f"{len(nulls):,} of {total:,} lines of {path} have null in the field {self.text_field!r}, the first is "
            f"line {nulls[0]:,}; drop these lines, or name another field (text_field)"
        )

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(_unpacked(path) if path.suffix.lower() in _COMPRESSED else path) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise UserError(
                        f"{path} has no column {self.text_field!r}; it has {', '.join(names)} (set text_field)"
                    )
                row = 0
                for batch in table.iter_batches(columns=[self.text_field], batch_size=1024):
                    for text in batch.column(0).to_pylist():
                        yield "" if text is None else self._field({self.text_field: text}, f"row {row} of {path}")
                        row += 1
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is not a whole parquet file: {one_line(error)}") from error

    def _field(self, row: Any, place: str) -> str:
        if not isinstance(row, dict) or self.text_field not in row:
            has = f"; it has {', '.join(map(str, row))[:100]}" if isinstance(row, dict) and row else ""
            raise UserError(f"{place} has no text in the field {self.text_field!r}{has} (set text_field)")
        text = row[self.text_field]
        if text is None:
            raise UserError(f"the field {self.text_field!r} of {place} is null; drop such rows, or set text_field")
        if not isinstance(text, str):
            raise UserError(f"the field {self.text_field!r} of {place} is no text but {type(text).__name__}")
        return text

    def _rows(self, dataset: Any) -> Iterator[str]:
        try:
            for index, row in enumerate(dataset):
                yield self._field(row, f"row {index} of {self.source}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"reading the dataset {self.source!r} failed: {one_line(error)}") from error

    def _name(self) -> tuple[str, str | None, str | None]:
        """Return a dataset's name or folder, configuration, and split."""
        path = Path(self.source).expanduser()
        match = None if path.exists() else _DATASET.fullmatch(self.source)
        return (match["name"], match["config"], match["split"]) if match else (str(path), None, None)

    def _dataset(self) -> Any:
        import datasets

        path = Path(self.source).expanduser()
        if _is_saved_dataset(path):
            try:
                found = datasets.load_from_disk(str(path))
            except Exception as error:
                raise UserError(f"{path} is not a whole saved dataset: {one_line(error)}") from error
            if not isinstance(found, datasets.DatasetDict):
                return found
            if "train" not in found:
                raise UserError(f"{path} has no split 'train'; give the folder of one of {', '.join(found)}")
            return found["train"]
        name, config, split = self._name()
        # Of a folder, `datasets` would go on giving what it cached when the folder has changed.
        streaming = self.streaming or Path(name).is_dir()
        try:
            return datasets.load_dataset(name, config, split=split or "train", streaming=streaming)
        except Exception as error:  # the library raises many kinds, of its own and of its network stack
            what = f"the folder {name!r} could not be read as a dataset"
            if not Path(name).is_dir():
                what = f"there is no file or folder {self.source!r}, and no dataset of that name could be loaded"
            raise UserError(f"{what} ({type(error).__name__}: {one_line(error)})") from error


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else None


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _visible_files(folder: Path, without: Set[str] = frozenset(("__pycache__",))) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return lzma.open(path, "rb")
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    return path.open("rb")


def _unpacked(path: Path) -> IO[bytes]:
    with _open(path) as file:
        return io.BytesIO(b"".join(bounded(file, str(path))))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield every line with its number, from one."""
    most = half_of_free()
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
            check_held(len(line), most, f"line {number} of {path}")
            yield number, line


def _line_blocks(path: Path) -> Iterator[str]:
    """Yield the text in blocks of whole lines."""
    offset, most = 0, half_of_free()
    held: list[bytes] = []  # a line that has not ended yet
    with _open(path) as file:
        while data := file.read(_BLOCK):
            cut = data.rfind(b"\n") + 1
            if not cut:
                held.append(data)
                check_held(len(held) * _BLOCK, most, f"a line of {path}")
                continue
            whole = b"".join([*held, data[:cut]])
            yield _decode(path, whole, offset)
            offset += len(whole)
            held = [data[cut:]]
    yield _decode(path, b"".join(held), offset)


def _decode(path: Path, data: bytes, offset: int) -> str:
    nul = data.find(b"\0")
    if nul >= 0:
        raise UserError(f"{path} is binary (a zero byte at offset {offset + nul}); give text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (offset {offset + error.start}); convert it first") from error
    return text if offset else text.removeprefix("\ufeff")  # a byte-order mark is no text
