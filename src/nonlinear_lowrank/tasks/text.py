"""Packed text: documents -> tokens with document boundaries -> sequences of one length, cached on disk.

    <cache>/text/<key>/train.bin, valid.bin    tokens of all documents in order, each document ended by the
                                               end-of-text token; uint16 or uint32, little-endian
    <cache>/text/<key>/tokenizer/, text.json   what they were made with and what they contain

The key is a hash of the sources' content and of every setting that shapes the tokens. The cache lies in
$NLR_CACHE, else in the user's cache folder.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..errors import UserError
from ..storage import staged_folder
from .corpus import Corpus
from .tokenizers import (
    boundary_id,
    byte_lengths,
    check_vocab_size,
    encode,
    load_tokenizer,
    quiet_about_forks,
    train_bpe,
)

_VERSION = 1  # of the cache's layout; part of the key
_TRAINING_BYTES = 20_000_000  # text that a tokenizer is trained on; more changes its merges little
_BATCH_BYTES = 4_000_000
_PIECE = 65_536  # characters encoded at a time, so that one novel uses all cores
_FEW_DOCUMENTS = 20  # fewer than this are divided before some are held out
_PIECES = 200


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Which text, how it is tokenized, and how it is cut."""

    source: str = "stdlib"
    """"stdlib" (the running Python's own library sources), a file or folder (.txt .md .py .jsonl .parquet, also
    .xz .gz .zst), or a dataset's name: "owner/name", "owner/name:config", either with "@split"."""
    valid_source: str | None = None
    """Held-out text of its own; None: a part of the documents, chosen by the hash of their content."""
    valid_fraction: float = 0.02
    """Part of the documents held out when there is no valid_source."""
    max_bytes: int | None = None
    """Stop reading a source after so many bytes of text."""
    streaming: bool = False
    """Read datasets over the network as needed. The tokens are cached all the same, so that training can
    shuffle and resume."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text."""
    document_separator: str | None = None
    """Line that divides text files into documents; None: '<|endoftext|>' where it occurs; "": no division."""
    tokenizer: str = "bpe"
    """"bpe" (a byte-level BPE trained on the training documents), a folder with GPT-2's files, a tokenizer.json,
    or a hub name."""
    vocab_size: int = 2048
    """Of "bpe"."""
    sequence_length: int = 256
    """Tokens a sequence, T; the model predicts T - 1 of them."""
    eval_sequences: int = 256
    """Held-out sequences that are evaluated, the first ones; fewer where there are fewer."""
    cache_dir: str | None = None
    """Where tokens are cached; None: $NLR_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "eval_sequences"):
            least = 2 if name == "sequence_length" else 1
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if not 0 < self.valid_fraction < 0.5:
            raise UserError(f"valid_fraction must be above 0 and below 0.5, not {self.valid_fraction!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"max_bytes must be at least 1, not {self.max_bytes!r}")
        if not self.source:
            raise UserError("source is empty; give 'stdlib', a file, a folder or a dataset's name")
        if self.tokenizer == "bpe":
            check_vocab_size(self.vocab_size)

    def corpus(self, source: str) -> Corpus:
        """The documents of one of the sources."""
        return Corpus(
            source=source,
            text_field=self.text_field,
            separator=self.document_separator,
            streaming=self.streaming,
            max_bytes=self.max_bytes,
        )


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Sequences out of a file of tokens: item i is {"input_ids": (T,), "labels": (T,)}, int64.

    Labels equal the inputs: transformers' language models shift them. The file is mapped, not read.
    """

    def __init__(self, path: Path, dtype: str, length: int, count: int) -> None:
        self.path, self.dtype, self.length, self.count = path, dtype, length, count
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -self.count <= index < self.count:
            raise IndexError(index)
        row = torch.from_numpy(self.block(index % self.count).astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}

    def block(self, index: int) -> np.ndarray:
        """Tokens of a sequence, (T,), in the file's type."""
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=self.dtype, mode="r")
        return self._tokens[index * self.length : (index + 1) * self.length]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}  # a worker maps the file itself


@dataclass(frozen=True)
class PackedText:
    """Text that is ready for training."""

    train: TokenBlocks
    valid: TokenBlocks
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    """Entries of the tokenizer, special tokens included."""
    valid_bytes_per_token: float
    """Bytes of held-out text for each predicted token: positions 1 to T - 1 of the evaluated sequences. The
    end-of-text token is predicted too but is no text, so it counts 0 bytes. Bits per byte =
    loss / ln 2 / valid_bytes_per_token."""
    fingerprint: str
    """Hash of tokens, tokenizer and sequence length: equal where training sees the same numbers."""
    facts: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """What the text is, for the record: sources, documents, bytes, tokens, hashes."""
        return {
            **self.facts,
            "sequence_length": self.train.length,
            "train_sequences": len(self.train),
            "evaluated_sequences": len(self.valid),
            "vocab_size": self.vocab_size,
            "valid_bytes_per_token": self.valid_bytes_per_token,
            "fingerprint": self.fingerprint,
        }


def prepare_text(config: TextData, *, progress: bool = True) -> PackedText:
    """Tokenizes and packs text, or finds it in the cache. Safe to call from several processes at once.

    Args:
        config: which text and how.
        progress: show a bar while tokenizing.

    Raises:
        UserError: the text or the tokenizer cannot be used; the message says why and what to change.
    """
    quiet_about_forks()
    given = load_tokenizer(config.tokenizer) if config.tokenizer != "bpe" else None
    key = _key(config, given)
    folder = cache_folder(config.cache_dir) / "text" / key[:32]
    facts = _read(folder)
    if facts is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                facts = _read(folder)
                if facts is None:
                    facts = _build(config, given, folder, progress)
        except OSError as error:
            raise UserError(
                f"cannot write the text cache {folder.parent} ({error.strerror or error}); set cache_dir or NLR_CACHE"
            ) from error
    return _open(config, folder, facts)


def cache_folder(given: str | None = None) -> Path:
    """The folder of all caches: the given one, $NLR_CACHE, or the user's cache folder."""
    if given or os.environ.get("NLR_CACHE"):
        return Path(given or os.environ["NLR_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nonlinear-lowrank"


def _key(config: TextData, tokenizer: PreTrainedTokenizerBase | None) -> str:
    parts: list[Any] = [_VERSION, config.corpus(config.source).identity()]
    if config.valid_source is None:
        parts.append(config.valid_fraction)
    else:
        parts.append(config.corpus(config.valid_source).identity())
    parts.append(config.vocab_size if tokenizer is None else _tokenizer_hash(tokenizer))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}{boundary_id(tokenizer)}".encode()).hexdigest()


# --- building ------------------------------------------------------------------------------------------------


@dataclass
class _Split:
    """Which documents are held out."""

    cutoff: int
    """Documents whose hash is below it."""
    divide: int | None
    """Size in characters of the pieces that long documents are cut into first; None: they stay whole."""
    documents: int
    train_hashes: set[int]


def _build(config: TextData, given: PreTrainedTokenizerBase | None, folder: Path, progress: bool) -> dict[str, Any]:
    source = config.corpus(config.source)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f} MB"),
        TimeElapsedColumn(),
        disable=not progress,
        transient=True,
    ) as bar:
        split = _plan_split(config, source, bar)
        if given is None:
            sample = _sample(_side(source, split, held_out=False), bar)
            tokenizer: PreTrainedTokenizerBase = train_bpe(sample, config.vocab_size)
        else:
            tokenizer = given
        dtype = "<u2" if len(tokenizer) <= 2**16 else "<u4"
        dropped = 0
        with staged_folder(folder) as staged:
            tokenizer.save_pretrained(staged / "tokenizer")
            facts: dict[str, Any] = {
                "source": config.source,
                "valid_source": config.valid_source,
                "divided_documents": split.divide is not None,
                "dtype": dtype,
            }
            facts["train"] = _write(
                staged / "train.bin", _side(source, split, held_out=False), tokenizer, dtype, bar, "train"
            )
            if config.valid_source is None:
                held_out: Iterable[str] = _side(source, split, held_out=True)
            else:
                documents = list(config.corpus(config.valid_source).documents())
                held_out = [each for each in documents if _hash(each) not in split.train_hashes]
                dropped = len(documents) - len(held_out)
            facts["valid"] = _write(staged / "valid.bin", held_out, tokenizer, dtype, bar, "held-out")
            facts["held_out_documents_dropped_as_also_in_train"] = dropped
            facts["tokenizer_sha256"] = _tokenizer_hash(tokenizer)
            (staged / "text.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
            for name, what in (("train", "training"), ("valid", "held-out")):
                _check_length(facts[name]["tokens"], config.sequence_length, what)
    return facts


def _plan_split(config: TextData, source: Corpus, bar: Progress) -> _Split:
    """Reads the documents once and decides which are held out.

    By the hash of the content, so that equal documents land on one side. The lowest hashes are held out, which
    gives the wanted number however few documents there are; a streamed dataset, read once, is cut at a fixed
    value instead.
    """
    if config.valid_source is None and config.streaming and not source.files():
        return _Split(int(config.valid_fraction * 2**64), None, 0, set())
    task = bar.add_task("reading", total=None)
    hashes, size = [], 0
    for document in source.documents():
        hashes.append(_hash(document))
        size += len(document)
        bar.update(task, completed=size / 1e6)
    bar.remove_task(task)
    if not hashes:
        raise UserError(f"{config.source} holds no text; give a source with at least one document")
    if config.valid_source is not None:
        return _Split(0, None, len(hashes), set(hashes))
    divide = None
    if len(set(hashes)) < _FEW_DOCUMENTS:
        divide = max(1000, size // _PIECES)
        hashes = [_hash(piece) for document in source.documents() for piece in _pieces(document, divide)]
    unique = sorted(set(hashes))
    count = max(1, math.ceil(config.valid_fraction * len(unique)))
    if count >= len(unique):
        raise UserError(
            f"{config.source} has {size:,} characters, too few to hold some out; give more text or a valid_source"
        )
    return _Split(unique[count], divide, len(hashes), set())


def _side(source: Corpus, split: _Split, *, held_out: bool) -> Iterator[str]:
    for document in source.documents():
        for piece in [document] if split.divide is None else _pieces(document, split.divide):
            if (_hash(piece) < split.cutoff) == held_out:
                yield piece


def _hash(document: str) -> int:
    return int.from_bytes(hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()[:8])


def _pieces(document: str, size: int) -> Iterator[str]:
    """Cuts at ends of lines (of words, in a line that is too long), so that tokens rarely straddle a cut."""
    start = 0
    while start < len(document):
        end = start + size
        if end < len(document):
            cut = document.find("\n", end, end + size) + 1 or document.find(" ", end, end + size)
            end = cut if cut > 0 else end + size
        yield document[start:end]
        start = end


def _sample(documents: Iterator[str], bar: Progress) -> list[str]:
    """Up to _TRAINING_BYTES of text, from all over: every n-th piece of what was read."""
    task = bar.add_task("learning the vocabulary", total=None)
    kept: list[str] = []
    size, every, index, read = 0, 1, 0, 0
    for document in documents:
        for piece in _pieces(document, _PIECE):
            read += len(piece)
            if index % every == 0:
                kept.append(piece)
                size += len(piece)
            index += 1
            if size > 2 * _TRAINING_BYTES:
                kept, every = kept[::2], 2 * every
                size = sum(map(len, kept))
        bar.update(task, completed=read / 1e6)
    while size > _TRAINING_BYTES and len(kept) > 1:
        kept = kept[::2]
        size = sum(map(len, kept))
    bar.remove_task(task)
    return kept


def _write(
    path: Path,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    bar: Progress,
    what: str,
) -> dict[str, Any]:
    """Tokens of all documents, each followed by the boundary. Returns the counts."""
    task = bar.add_task(f"tokenizing {what} text", total=None)
    boundary = boundary_id(tokenizer)
    count = {"documents": 0, "bytes": 0, "tokens": 0}
    digest = hashlib.sha256()
    unknown = 0
    with path.open("wb") as file:
        for batch in _batches(documents):
            texts = [piece for document in batch for piece in _pieces(document, _PIECE)]
            encoded = iter(encode(tokenizer, texts))
            rows: list[np.ndarray] = []
            for document in batch:
                for _ in _pieces(document, _PIECE):
                    rows.append(np.array(next(encoded), dtype=dtype))
                rows.append(np.array([boundary], dtype=dtype))
                count["documents"] += 1
                count["bytes"] += len(document.encode("utf-8", "surrogatepass"))
            tokens = np.concatenate(rows)
            if tokenizer.unk_token_id not in (None, boundary):
                unknown += int((tokens == tokenizer.unk_token_id).sum())
            count["tokens"] += len(tokens)
            if unknown > 0.01 * count["tokens"]:
                raise UserError(
                    f"the tokenizer does not fit the text: {100 * unknown / count['tokens']:.1f} % of its tokens are "
                    "unknown; choose another tokenizer, or 'bpe' to train one"
                )
            file.write(tokens.tobytes())
            digest.update(tokens.tobytes())
            bar.update(task, completed=count["bytes"] / 1e6)
    bar.remove_task(task)
    return {**count, "sha256": digest.hexdigest()}


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- opening -------------------------------------------------------------------------------------------------


def _read(folder: Path) -> dict[str, Any] | None:
    """What the cache says of itself, or None where it is absent or not whole."""
    try:
        facts = json.loads((folder / "text.json").read_text(encoding="utf-8"))
        width = np.dtype(facts["dtype"]).itemsize
        whole = all(
            (folder / f"{name}.bin").stat().st_size == width * facts[name]["tokens"] for name in ("train", "valid")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if whole and (folder / "tokenizer" / "tokenizer.json").is_file() else None


def _open(config: TextData, folder: Path, facts: dict[str, Any]) -> PackedText:
    length = config.sequence_length
    for name, what in (("train", "training"), ("valid", "held-out")):
        _check_length(facts[name]["tokens"], length, what)
    train = TokenBlocks(folder / "train.bin", facts["dtype"], length, facts["train"]["tokens"] // length)
    evaluated = min(config.eval_sequences, facts["valid"]["tokens"] // length)
    valid = TokenBlocks(folder / "valid.bin", facts["dtype"], length, evaluated)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    made_of = [facts["train"]["sha256"], facts["valid"]["sha256"], facts["tokenizer_sha256"], length, evaluated]
    return PackedText(
        train=train,
        valid=valid,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        valid_bytes_per_token=_bytes_per_token(valid, tokenizer),
        fingerprint=hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32],
        facts=facts,
    )


def _bytes_per_token(blocks: TokenBlocks, tokenizer: PreTrainedTokenizerBase) -> float:
    lengths = byte_lengths(tokenizer)
    total = 0
    for index in range(len(blocks)):
        predicted = blocks.block(index)[1:]
        if lengths is not None:
            total += int(lengths[predicted].sum())
        else:  # other kinds of tokens have no bytes of their own: count those of the decoded text
            total += len(str(tokenizer.decode(predicted.tolist(), skip_special_tokens=True)).encode())
    return total / (len(blocks) * (blocks.length - 1))


def _check_length(tokens: int, length: int, what: str) -> None:
    if tokens < length:
        raise UserError(
            f"the {what} text has {tokens} tokens, fewer than one sequence of {length}; "
            "give more text or lower sequence_length"
        )
