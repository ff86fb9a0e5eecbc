"""Settings of a text, and its documents: out of files, folders, the standard library and `datasets`.

Compressed files (.xz .gz .zst) are read as what they contain, line by line; only a compressed parquet file is held in
memory whole.
"""

import codecs
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from nlr_lab.runtime.bounds import bounded, check_held, half_of_free
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file
from nonlinear_lowrank.validation import check_integer, one_line

END_OF_TEXT = "<|endoftext|>"
LEARNED = ("bpe", "wordpiece")
"""Tokenizers that are trained on the text itself."""
NO_TOKENIZER = "none"

Document = str | np.ndarray
"""Text, or token ids (T,)."""

_KINDS = (".txt", ".md", ".py", ".jsonl", ".parquet")
_COMPRESSED = (".xz", ".gz", ".zst")
# The standard library's own tests and bundled third-party code are not library sources.
_NOT_SOURCES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__")
_DATASET = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.\[\]:%-]+))?")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A source of documents; may be iterated again and again, always in the same order."""

    source: str = "stdlib"
    """"stdlib" (the running Python's own library sources), a file or folder (.txt .md .py .jsonl .parquet, also
    .xz .gz .zst), or a dataset's name: "owner/name", "owner/name:config", either with "@split". For training also token
    files (.bin, a folder or pattern of them, Megatron's prefix), and mixtures: "a.bin:0.7,b.bin:0.3"."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text, or for training lists of token ids ("input_ids"
    where there is no field "text"). A row whose text is null or blank is no document."""
    document_separator: str | None = None
    """Line that divides text files into documents; None: '<|endoftext|>' where it occurs; "": no division."""
    max_bytes: int | None = None
    """Stop before the document that would exceed this many bytes of text, in each source; a first one is cut."""
    streaming: bool = False
    """Read datasets over the network as needed, not whole first. The tokens are cached all the same, so that
    training can shuffle and resume. A streamed dataset is known to the cache by its name."""

    def files(self) -> list[Path]:
        """Return the files that a local source is made of, sorted, but hidden ones; none for a dataset. Raise UserError
        where there are none of a known kind."""
        if self.source == "stdlib":
            return library_sources()
        path = Path(self.source).expanduser()
        if path.is_file() or (path.is_dir() and not _is_saved_dataset(path) and not self.streaming):
            files = [each for each in ([path] if path.is_file() else visible_files(path)) if _kind(each)]
            if not files:
                known = f"{' '.join(_KINDS)}, also with {' '.join(_COMPRESSED)}"
                raise UserError(f"{path} is or holds no file of a known kind; use {known}")
            return files
        if not path.exists() and (_kind(path) or not _DATASET.fullmatch(self.source)):
            raise UserError(f"there is no file or folder {self.source!r}; give a path, 'stdlib' or a dataset's name")
        return []

    def identity(self) -> str:
        """Return a hash of the source's content and of how it is read. A dataset is known by its name and fingerprint,
        a streamed one by its name alone."""
        files, (name, *parts) = self.files(), dataset_name(self.source)
        # A folder that `datasets` reads may give other documents than its files do.
        reading = [self.text_field, self.document_separator, self.max_bytes, "files" if files else "dataset"]
        digest = hashlib.sha256(json.dumps(reading).encode())
        if files or Path(name).is_dir():
            digest.update(json.dumps(parts).encode())
            for path in files or visible_files(Path(name)):
                digest.update(f"{path.name}\n{hash_file(path)}\n".encode())
        else:
            fingerprint = None if self.streaming else getattr(self._dataset(), "_fingerprint", None)
            digest.update(json.dumps([self.source, fingerprint]).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield every document but blank ones; raise UserError where a file is binary, damaged or lacks the text."""
        for document in self.contents():
            if not isinstance(document, str):
                what = f"{self.source} holds token ids"
                raise UserError(f"{what}; to train on them name their --tokenizer, elsewhere give text")
            yield document

    def contents(self) -> Iterator[Document]:
        """Yield the documents, those that are token ids as arrays (T,)."""
        size, readers = 0, {".parquet": self._parquet, ".jsonl": self._json_lines}
        parts = [readers.get(_kind(path), self._text)(path) for path in self.files()] or [self._rows()]
        for document in itertools.chain.from_iterable(parts):
            if not isinstance(document, str):
                if self.max_bytes is not None:
                    raise UserError(f"max_bytes counts text, and {self.source} holds token ids; set it to None")
                if len(document):
                    yield document
                continue
            if not document.strip():
                continue
            if self.max_bytes is not None:
                data = document.encode()
                size += len(data)
                if size > self.max_bytes:
                    first = data[: self.max_bytes].decode(errors="ignore") if size == len(data) else ""
                    yield from [first] if first.strip() else []
                    return
            yield document

    def _text(self, path: Path) -> Iterator[str]:
        separator = END_OF_TEXT if self.document_separator is None else self.document_separator
        parts: list[str] = []
        held, most = 0, half_of_free()
        for _, line in lines(path):
            # Only where it stands alone on a line: text may mention the separator.
            if separator and line.startswith(separator) and not line[len(separator) :].strip(" \t\r\n"):
                yield "".join(parts)
                parts, held = [], 0
            else:
                parts.append(line)
                held += len(line)
                if held > most:
                    check_held(held, most, f"a document of {path}")
        yield "".join(parts)

    def _json_lines(self, path: Path) -> Iterator[Document]:
        for place, row in json_lines(path):
            yield self._field(row, place)

    def _parquet(self, path: Path) -> Iterator[Document]:
        import pyarrow.parquet

        with _reading(path, pyarrow.ArrowException), _open(path) as file:
            packed = path.suffix.lower() in _COMPRESSED
            table = pyarrow.parquet.ParquetFile(io.BytesIO(b"".join(bounded(file, str(path)))) if packed else file)
            # Without the column, the error shows the others.
            field = self._field_of(table.schema_arrow.names)
            columns = [field] if field in table.schema_arrow.names else None
            batches = table.iter_batches(columns=columns, batch_size=1024)
            for number, row in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches)):
                yield self._field(row, f"row {number} of {path}")

    def _rows(self) -> Iterator[Document]:
        try:
            for number, row in enumerate(self._dataset()):
                yield self._field(row, f"row {number} of {self.source}")
        except UserError:
            raise
        except Exception as error:  # the library raises many kinds, of its own and of its network stack
            raise UserError(f"reading the dataset {self.source!r} failed: {one_line(error)}") from error

    def _field_of(self, names: Collection[str]) -> str:
        """Return the field that is read."""
        return "input_ids" if self.text_field == "text" not in names and "input_ids" in names else self.text_field

    def _field(self, row: Any, place: str) -> Document:
        value = row.get(self._field_of(row), ()) if isinstance(row, dict) else ()
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, list) and all(type(each) is int for each in value):
            return np.array(value, dtype=np.int64)
        what = f"{place} has no text in the field {self.text_field!r}: {str(row)[:100]}"
        raise UserError(f"{what}; drop such rows, or set text_field")

    def _dataset(self) -> Any:
        name, config, split = dataset_name(self.source)
        # For a changed folder, `datasets` would keep returning what it cached.
        streaming = self.streaming or Path(name).is_dir()
        return load_rows(name, config, split=split or "train", **({"streaming": True} if streaming else {}))


@dataclass(frozen=True, kw_only=True)
class TextData(Corpus):
    """Settings of a text: source, tokenizer, and sequences."""

    valid_source: str | None = None
    """Held-out text of its own, less the documents that are also in the source; None: a part of the source's
    documents, chosen by the hash of their content. From a single document pieces are held out."""
    valid_fraction: float = 0.02
    """Part of the documents held out when there is no valid_source; at least one is."""
    tokenizer: str = "bpe"
    """"bpe" (a byte-level BPE trained on the training documents), "wordpiece" (of BERT's kind, likewise), a folder
    with GPT-2's files or BERT's vocab.txt, a tokenizer.json, or a hub name. Token files can do with "none"."""
    vocab_size: int = 2048
    """Entries of the vocabulary that "bpe" and "wordpiece" learn, or that ids without a tokenizer have; those of a
    tokenizer on the hub where a model is counted before the text is read."""
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
        if self.tokenizer == NO_TOKENIZER:
            check_integer("vocab_size", self.vocab_size, minimum=2)

    def known_vocab_size(self) -> int:
        """Return the entries of the vocabulary, before any text is read; of a tokenizer on the hub `vocab_size`."""
        if self.tokenizer in (*LEARNED, NO_TOKENIZER) or not Path(self.tokenizer).exists():
            return self.vocab_size
        return _size_of_tokenizer(self.tokenizer)


@functools.cache
def _size_of_tokenizer(path: str) -> int:
    from .tokenizers import load_tokenizer, vocabulary_size

    return vocabulary_size(load_tokenizer(path))


def dataset_name(source: str) -> tuple[str, str | None, str | None]:
    """Return a dataset's name or folder, configuration, and split."""
    path, (folder, _, split) = Path(source).expanduser(), source.rpartition("@")
    if folder and not path.exists() and Path(folder).expanduser().is_dir():
        return str(Path(folder).expanduser()), None, split
    match = None if path.exists() else _DATASET.fullmatch(source)
    return (match["name"], match["config"], match["split"]) if match else (str(path), None, None)


def load_rows(name: str, config: str | None = None, *, split: str, **options: Any) -> Any:
    """Return a split of a dataset, by its name or its folder; raise UserError where it cannot be loaded."""
    import datasets

    try:
        if not _is_saved_dataset(Path(name)):
            return datasets.load_dataset(name, config, split=split, **options)
        found = datasets.load_from_disk(name)
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    except Exception as error:  # the library raises many kinds, of its own and of its network stack
        name = options.get("data_files", name)
        absent = "" if Path(name).exists() else ", which is not a file or folder here"
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        fix = "give a file or folder, or another name"
        raise UserError(f"cannot load the dataset {name!r}{absent} ({why}); {fix}") from error


def library_sources() -> list[Path]:
    """Return the source files of the running Python's own library, sorted; raise UserError where there are none."""
    files = visible_files(Path(sysconfig.get_paths()["stdlib"]), _NOT_SOURCES)
    if not (found := [path for path in files if path.suffix == ".py"]):
        raise UserError("this Python has no library sources on disk; give a file, a folder or a dataset's name")
    return found


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every line of a file, unpacked, with its number from one; raise UserError where it is not whole text."""
    most = half_of_free()
    with _reading(path), _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
            if len(line) > most:
                check_held(len(line), most, f"line {number} of {path}")
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{path} is UTF-16; convert it to UTF-8 first")
            if b"\0" in line:
                raise UserError(f"{path}, line {number} is binary (it has a zero byte); give text")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # a byte-order mark is not text
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number} is not UTF-8 text; convert it first") from error
            yield number, text


def read_text(path: Path) -> str:
    """Return the whole of a file, unpacked; raise UserError where it is not text, or takes too much memory."""
    with _reading(path, UnicodeDecodeError), _open(path) as file:
        return b"".join(bounded(file, str(path))).decode("utf-8-sig")  # a byte-order mark is not text


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of JSON lines with their places; raise UserError for any other line."""
    for number, line in lines(path):
        if line.strip():
            yield f"{path}, line {number}", parse_json(line, f"{path}, line {number}")


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON array, or else of JSON lines, with their places; raise UserError for anything else."""
    first = next((line for _, line in lines(path) if line.strip()), "")
    if not first.lstrip().startswith("["):
        yield from json_lines(path)
        return
    for number, value in enumerate(parse_json(read_text(path), str(path)), 1):
        yield f"{path}, record {number}", value


def parse_json(text: str, place: str) -> Any:
    """Return the value of JSON; raise UserError where it is invalid, or holds half a character."""
    try:
        value = json.loads(text)
        if "\\u" in text:  # the one way to write half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {one_line(error)}; correct or remove it") from error
    return value


def _kind(path: Path) -> str:
    """Return the suffix that tells how a file is read, without that of its compression; "" for an unknown kind."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else ""


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


_RUNS = (("recipe.json", {"log.jsonl", "checkpoints", "model"}), ("compare.json", {"runs", "log.jsonl"}))


def visible_files(folder: Path, without: tuple[str, ...] = ("__pycache__",)) -> list[Path]:
    """Return the files of a folder and of its subfolders that are not hidden, nor of our own runs in them, sorted."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        if Path(parent) != folder and any(marker in names and beside & {*names, *folders} for marker, beside in _RUNS):
            folders[:] = []
            continue
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


@contextlib.contextmanager
def _reading(path: Path, *also: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (lzma.LZMAError, zlib.error, EOFError, OSError, *also) as error:  # type: ignore[misc]
        refused = isinstance(error, OSError) and error.errno is not None
        hint = "" if refused else "; it is damaged or of another kind: fetch or write it again"
        raise UserError(f"cannot read {path}: {one_line(error)}{hint}") from error
