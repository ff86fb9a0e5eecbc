"""Settings of a text, and its documents: out of files, folders, the standard library and `datasets`, one string each.

Text files hold one document, or several with lines of a separator between them; JSON lines and parquet hold one a row.
Compressed files (.xz .gz .zst) are read as what they contain, line by line; only a compressed parquet file is held in
memory whole.
"""

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nlr_lab.runtime.bounds import bounded, check_held, half_of_free
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, one_line

SEPARATOR = "<|endoftext|>"
LEARNED = ("bpe", "wordpiece")
"""Tokenizers that are trained on the text itself."""

_KINDS = (".txt", ".md", ".py", ".jsonl", ".parquet")
_COMPRESSED = (".xz", ".gz", ".zst")
_KNOWN = f"{' '.join(_KINDS)}, also with {' '.join(_COMPRESSED)}"
# The standard library's own tests and bundled strangers are not library sources.
_NOT_SOURCES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__")
_DATASET = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.\[\]:%-]+))?")


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Settings of a text: source, tokenizer, and sequences."""

    source: str = "stdlib"
    """"stdlib" (the running Python's own library sources), a file or folder (.txt .md .py .jsonl .parquet, also
    .xz .gz .zst), or a dataset's name: "owner/name", "owner/name:config", either with "@split"."""
    valid_source: str | None = None
    """Held-out text of its own, less the documents that are also in the source; None: a part of the source's
    documents, chosen by the hash of their content. Of a single document pieces are held out."""
    valid_fraction: float = 0.02
    """Part of the documents held out when there is no valid_source; at least one is."""
    max_bytes: int | None = None
    """Stop before the document that would exceed so many bytes of text, in each source."""
    streaming: bool = False
    """Read datasets over the network as needed, not whole first. The tokens are cached all the same, so that
    training can shuffle and resume. A streamed dataset is known to the cache by its name."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text."""
    document_separator: str | None = None
    """Line that divides text files into documents; None: '<|endoftext|>' where it occurs; "": no division."""
    tokenizer: str = "bpe"
    """"bpe" (a byte-level BPE trained on the training documents), "wordpiece" (of BERT's kind, likewise), a folder
    with GPT-2's files or BERT's vocab.txt, a tokenizer.json, or a hub name."""
    vocab_size: int = 2048
    """Entries of the vocabulary that "bpe" and "wordpiece" learn."""
    sequence_length: int = 256
    """Tokens a sequence, T; the model predicts T - 1 of them."""
    eval_sequences: int = 256
    """Held-out sequences that are evaluated, the first ones; fewer where there are fewer."""
    cache_dir: str | None = None
    """Folder of cached tokens; None: $NLR_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        check_integer("sequence_length", self.sequence_length, minimum=2)
        check_integer("eval_sequences", self.eval_sequences, minimum=1)
        if self.max_bytes is not None:
            check_integer("max_bytes", self.max_bytes, minimum=1)
        if not isinstance(self.valid_fraction, int | float) or not 0 < self.valid_fraction < 0.5:
            raise UserError(f"valid_fraction must be above 0 and below 0.5, got {self.valid_fraction!r}")
        for name in ("source", "valid_source", "tokenizer"):
            if getattr(self, name) == "":
                raise UserError(f"{name} is empty; give a file, a folder or a name, or omit it")
        if self.tokenizer in LEARNED:
            check_integer("vocab_size", self.vocab_size, minimum=257)  # every byte, and the end of text

    def corpus(self, source: str) -> "Corpus":
        """Return the documents of one of the sources."""
        reading: Any = {"streaming": self.streaming, "max_bytes": self.max_bytes}
        return Corpus(source=source, text_field=self.text_field, separator=self.document_separator, **reading)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A source of documents; may be iterated again and again, always in the same order."""

    source: str
    """See `TextData`, as for the other settings."""
    text_field: str = "text"
    separator: str | None = None
    streaming: bool = False
    max_bytes: int | None = None
    """A first document that is longer is cut."""

    def files(self) -> list[Path]:
        """Return the files that a local source is made of, sorted, but hidden ones; none for a dataset. Raise UserError
        where there are none of a known kind."""
        if self.source == "stdlib":
            return library_sources()
        path = Path(self.source).expanduser()
        if path.is_file() or (path.is_dir() and not _is_saved_dataset(path) and not self.streaming):
            files = [each for each in ([path] if path.is_file() else _visible_files(path)) if _kind(each) is not None]
            if not files:
                raise UserError(f"{path} is or holds no file of a known kind; use {_KNOWN}")
            return files
        if not path.exists() and (_kind(path) is not None or not _DATASET.fullmatch(self.source)):
            raise UserError(f"there is no file or folder {self.source!r}; give a path, 'stdlib' or a dataset's name")
        return []

    def identity(self) -> str:
        """Return a hash of the source's content and of how it is read. A dataset is known by its name and fingerprint,
        a streamed one by its name alone."""
        files = self.files()
        # A folder that `datasets` reads may give other documents than its files do.
        reading = [self.text_field, self.separator, self.max_bytes, "files" if files else "dataset"]
        digest = hashlib.sha256(json.dumps(reading).encode())
        name, *parts = self._name()
        if not files and not Path(name).is_dir():
            fingerprint = None if self.streaming else getattr(self._dataset(), "_fingerprint", None)
            digest.update(json.dumps([self.source, fingerprint]).encode())
            return digest.hexdigest()
        digest.update(json.dumps(parts).encode())
        for path in files or _visible_files(Path(name)):
            try:
                with path.open("rb") as file:
                    digest.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}") from error
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank; raise UserError where a file is binary, damaged or lacks the text."""
        size, files = 0, self.files()
        for document in self._of_files(files) if files else self._rows():
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
        readers = {".parquet": self._parquet, ".jsonl": self._json_lines}
        for path in files:
            try:
                yield from readers.get(_kind(path) or "", self._text)(path)
            except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
                failed = isinstance(error, OSError) and error.errno is not None  # decompressors give no number
                fault = f"cannot read {path}" if failed else f"{path} is damaged or cut off"
                raise UserError(f"{fault}: {one_line(error)}") from error

    def _text(self, path: Path) -> Iterator[str]:
        separator = SEPARATOR if self.separator is None else self.separator
        parts: list[str] = []
        held, most = 0, half_of_free()
        for _, line in _lines(path):
            # Only where it stands alone on a line: text may speak of the separator.
            if separator and line.startswith(separator) and not line[len(separator) :].strip(" \t\r\n"):
                yield "".join(parts)
                parts, held = [], 0
            else:
                parts.append(line)
                held += len(line)
                check_held(held, most, f"a document of {path}")
        yield "".join(parts)

    def _json_lines(self, path: Path) -> Iterator[str]:
        for number, line in _lines(path):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number} is not JSON: {one_line(error)}") from error
            document = self._field(row, f"{path}:{number}")
            # The one way to write half of a surrogate pair, which no tokenizer takes.
            if "\\u" in line and (half := re.search("[\ud800-\udfff]", document)):
                raise UserError(f"{path}:{number} holds half a character (\\u{ord(half[0]):04x}); fix or drop it")
            yield document

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow.parquet

        whole: Any = path
        if path.suffix.lower() in _COMPRESSED:
            with _open(path) as file:
                whole = io.BytesIO(b"".join(bounded(file, str(path))))
        try:
            with pyarrow.parquet.ParquetFile(whole) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    has = ", ".join(names)
                    raise UserError(f"{path} has no column {self.text_field!r}; it has {has} (set text_field)")
                row = 0
                for batch in table.iter_batches(columns=[self.text_field], batch_size=1024):
                    for text in batch.column(0).to_pylist():
                        yield "" if text is None else self._field({self.text_field: text}, f"row {row} of {path}")
                        row += 1
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is not a whole parquet file: {one_line(error)}") from error

    def _rows(self) -> Iterator[str]:
        try:
            for index, row in enumerate(self._dataset()):
                yield self._field(row, f"row {index} of {self.source}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"reading the dataset {self.source!r} failed: {one_line(error)}") from error

    def _field(self, row: Any, place: str) -> str:
        if not isinstance(row, dict) or self.text_field not in row:
            has = f"; it has {', '.join(map(str, row))[:100]}" if isinstance(row, dict) and row else ""
            raise UserError(f"{place} has no text in the field {self.text_field!r}{has} (set text_field)")
        text = row[self.text_field]
        if text is None:
            raise UserError(f"the field {self.text_field!r} of {place} is null; drop such rows, or set text_field")
        if not isinstance(text, str):
            raise UserError(f"the field {self.text_field!r} of {place} must be text, got {type(text).__name__}")
        return text

    def _name(self) -> tuple[str, str | None, str | None]:
        """Return a dataset's name or folder, configuration, and split."""
        path = Path(self.source).expanduser()
        match = None if path.exists() else _DATASET.fullmatch(self.source)
        return (match["name"], match["config"], match["split"]) if match else (str(path), None, None)

    def _dataset(self) -> Any:
        import datasets

        name, config, split = self._name()
        folder = Path(name).is_dir()
        try:
            if not _is_saved_dataset(Path(name)):
                # Of a folder, `datasets` would go on giving what it cached when the folder has changed.
                streaming = self.streaming or folder
                return datasets.load_dataset(name, config, split=split or "train", streaming=streaming)
            found = datasets.load_from_disk(name)
        except Exception as error:  # the library raises many kinds, of its own and of its network stack
            what = f"the folder {name!r} could not be read as a dataset"
            if not folder:
                what = f"there is no file or folder {self.source!r}, and no dataset of that name could be loaded"
            raise UserError(f"{what} ({type(error).__name__}: {one_line(error)})") from error
        if not isinstance(found, datasets.DatasetDict):
            return found
        if "train" not in found:
            raise UserError(f"{name} has no split 'train'; give the folder of one of {', '.join(found)}")
        return found["train"]


def library_sources() -> list[Path]:
    """Return the source files of the running Python's own library, sorted; raise UserError where there are none."""
    files = _visible_files(Path(sysconfig.get_paths()["stdlib"]), _NOT_SOURCES)
    if not (found := [path for path in files if path.suffix == ".py"]):
        raise UserError("this Python has no library sources on disk; give a file, a folder or a dataset's name")
    return found


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else None


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _visible_files(folder: Path, without: tuple[str, ...] = ("__pycache__",)) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(suffix, Path.open)
    return opener(path, "rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every line with its number, from one."""
    offset, most = 0, half_of_free()
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
            check_held(len(line), most, f"line {number} of {path}")
            if (nul := line.find(b"\0")) >= 0:
                raise UserError(f"{path} is binary (a zero byte at offset {offset + nul}); give text")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                at = offset + error.start
                raise UserError(f"{path} is not UTF-8 text (offset {at}); convert it first") from error
            yield number, text if offset else text.removeprefix("\ufeff")  # a byte-order mark is no text
            offset += len(line)
