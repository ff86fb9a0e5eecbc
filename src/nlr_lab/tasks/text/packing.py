"""Documents -> a folder of token files: who is held out, what the vocabulary learns from, what is written.

train.npy, valid.npy   tokens of all documents in order, each document ended by the end-of-text token;
                       one axis, uint16 or uint32
valid_bytes.npy        bytes of text of each held-out token, where the token does not say so itself
tokenizer/, text.json  what they were made with and what they contain
"""

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import staged_folder

from .corpus import Corpus
from .data import TextData
from .token_files import PIECE, TokenWriter, pieces
from .tokenizers import boundary_id, train_tokenizer

_TRAINING_BYTES = 20_000_000  # text that a tokenizer is trained on; more changes its merges little
_PIECES = 200  # that a single document is divided into before some are held out

Counted = Callable[..., Iterator[str]]
"""(documents, what is done, characters in all) -> the documents, with a bar of those that were asked for."""


def pack(config: TextData, tokenizer: PreTrainedTokenizerBase | None, folder: Path, *, progress: bool) -> None:
    """Fill a folder, which appears when it is whole.

    Args:
        config: which text.
        tokenizer: None: one is learned from the training documents.
        folder: the place; its parent exists.
        progress: show a bar on stderr.

    Raises:
        UserError: a source or the tokenizer cannot be used.
        OSError: the folder could not be written.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    shown = progress and console.is_terminal  # elsewhere a bar leaves an empty line
    with (
        Progress(*columns, console=console, disable=not shown, transient=True) as bar,
        staged_folder(folder) as staged,
    ):

        def counted(documents: Iterable[str], what: str, total: int | None = None) -> Iterator[str]:
            task = bar.add_task(what, total=total)
            for document in documents:
                yield document
                bar.advance(task, len(document))
            bar.remove_task(task)

        facts = _fill(config, tokenizer, staged, counted)
        (staged / "text.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _fill(
    config: TextData, tokenizer: PreTrainedTokenizerBase | None, folder: Path, counted: Counted
) -> dict[str, Any]:
    source, spool = config.corpus(config.source), folder / "documents.jsonl.zst"
    documents: Iterable[str] = counted(source.documents(), "reading")
    if source.streaming and not source.files():  # it is read over the network once
        documents = _spooled(documents, spool)
        source = Corpus(source=str(spool))
    split = _split(config, documents, source)

    def sides(what: str) -> Iterator[tuple[str, bool]]:
        return split.sides(counted(source.documents(), what, split.size))

    if tokenizer is None:
        sample = _sample(each for each, held_out in sides("learning the vocabulary") if not held_out)
        tokenizer = train_tokenizer(config.tokenizer, sample, config.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    dropped = 0
    with (
        TokenWriter(folder / "train.npy", tokenizer) as train,
        TokenWriter(folder / "valid.npy", tokenizer, folder / "valid_bytes.npy") as valid,
    ):
        for document, held_out in sides("tokenizing"):
            (valid if held_out else train).add(document)
        if config.valid_source is not None:
            for document in counted(config.corpus(config.valid_source).documents(), "tokenizing held-out text"):
                if split.knows(document):
                    dropped += 1
                else:
                    valid.add(document)
    spool.unlink(missing_ok=True)
    if dropped and not valid.documents:
        raise UserError(
            f"all {dropped} documents of {config.valid_source} are also in {config.source}; give other held-out text"
        )
    facts = {
        "source": config.source,
        "valid_source": config.valid_source,
        "divided_documents": split.divide is not None,
        "train": train.facts(),
        "valid": valid.facts(),
        "held_out_documents_dropped_as_also_in_train": dropped,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
    }
    check_lengths(facts, config.sequence_length)
    return facts


def _spooled(documents: Iterable[str], path: Path) -> Iterator[str]:
    """Pass the documents on, and keep them in a file that a Corpus reads."""
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        for document in documents:
            file.write(json.dumps({"text": document}).encode() + b"\n")
            yield document


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Choice of the documents that are held out."""

    size: int
    """Characters of the source."""
    divide: int | None = None
    """Size in characters of the pieces that a source's only document is cut into; None: documents stay whole."""
    held_out: frozenset[int] = frozenset()
    train: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """Hashes of all training documents, ascending; where the held-out text has a source of its own."""

    def sides(self, documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
        """Yield every document (or piece of one) and whether it is held out."""
        for document in documents:
            for part in [document] if self.divide is None else pieces(document, self.divide):
                yield part, bool(self.held_out) and _hash(part) in self.held_out

    def knows(self, document: str) -> bool:
        """Return whether it is a training document."""
        value = np.uint64(_hash(document))
        index = int(np.searchsorted(self.train, value))
        return index < len(self.train) and self.train[index] == value


def _split(config: TextData, documents: Iterable[str], source: Corpus) -> _Split:
    """Read the documents once and decide which are held out.

    By the hash of the content, so that equal documents land on one side, and by rank among the hashes,
    which gives the wanted number however few documents there are.

    Args:
        config: how many.
        documents: of the source, as they are read.
        source: gives them again.
    """
    hashes, sizes = array("Q"), array("Q")
    for document in documents:
        hashes.append(_hash(document))
        sizes.append(len(document))
    size = sum(sizes)
    if not hashes:
        raise UserError(
            f"{config.source} holds no text: its documents, if any, are blank or null; give a source with text"
        )
    unique, first = np.unique(np.array(hashes), return_index=True)
    if config.valid_source is not None:
        return _Split(size=size, train=unique)
    unique_sizes, divide = np.array(sizes)[first], None
    if len(unique) == 1:
        divide = max(1000, sizes[0] // _PIECES)
        lengths = {_hash(piece): len(piece) for piece in pieces(next(source.documents()), divide)}
        unique = np.array(sorted(lengths), dtype=np.uint64)
        unique_sizes = np.array([lengths[int(each)] for each in unique])
        if len(unique) == 1:
            copies = f"{len(hashes):,} copies of one document" if len(hashes) > 1 else "one document"
            why = "too few to hold some out" if sizes[0] <= 2 * divide else "the same lines again and again"
            raise UserError(
                f"{config.source} is {copies} of {sizes[0]:,} characters, {why}; give other text too, or a valid_source"
            )
    # A document that is most of the text is for training, whatever its hash.
    eligible = unique[unique_sizes <= unique_sizes.sum() / 2]
    count = max(1, math.ceil(config.valid_fraction * len(unique)))
    return _Split(size=size, divide=divide, held_out=frozenset(eligible[:count].tolist()))


def _hash(document: str) -> int:
    # What separates it from its neighbours in a file is no part of its content.
    return int.from_bytes(hashlib.sha256(document.strip().replace("\r\n", "\n").encode()).digest()[:8])


def _sample(documents: Iterable[str]) -> list[str]:
    """Return up to _TRAINING_BYTES of text, from all over: every n-th piece of what was read."""
    kept: list[str] = []
    size, every, index = 0, 1, 0
    for document in documents:
        for piece in pieces(document, PIECE):
            if index % every == 0:
                kept.append(piece)
                size += len(piece)
            index += 1
            if size > 2 * _TRAINING_BYTES:
                kept, every = kept[::2], 2 * every
                size = sum(map(len, kept))
    while size > _TRAINING_BYTES and len(kept) > 1:
        kept = kept[::2]
        size = sum(map(len, kept))
    return kept


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that is equal for tokenizers that give equal tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}{boundary_id(tokenizer)}".encode()).hexdigest()


def check_lengths(facts: dict[str, Any], sequence_length: int) -> None:
    """Raise UserError where a side is shorter than one sequence."""
    raising = "raise valid_fraction, " if facts["valid_source"] is None else ""
    for name, what, hint in (("train", "training", ""), ("valid", "held-out", raising)):
        if (tokens := facts[name]["tokens"]) < sequence_length:
            raise UserError(
                f"the {what} text has {tokens} tokens, fewer than one sequence of {sequence_length}; {hint}"
                "give more text or lower sequence_length"
            )
