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
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import staged_folder

from .corpus import Corpus
from .token_files import PIECE, DocumentFile, TokenWriter, pieces
from .tokenizers import LEARNED, boundary_id

_TRAINING_BYTES = 20_000_000  # text that a tokenizer is trained on; more changes its merges little
_PIECES = 200  # that a single document is divided into before some are held out


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What is packed, and how."""

    source: Corpus
    valid_source: Corpus | None
    """Held-out text of its own; None: a part of the source."""
    valid_fraction: float
    learned: str
    """Kind of the vocabulary that is learned, where none is given: a name of `tokenizers.LEARNED`."""
    vocab_size: int
    """Of a vocabulary that is learned."""
    sequence_length: int
    """Both sides must have that many tokens."""

    def build(self, tokenizer: PreTrainedTokenizerBase | None, folder: Path, progress: bool) -> dict[str, Any]:
        """Fills a folder, which appears when it is whole.

        Args:
            tokenizer: None: one is learned from the training documents.
            folder: the place; its parent exists.
            progress: show a bar on stderr.

        Returns:
            What text.json holds.

        Raises:
            UserError: a source or the tokenizer cannot be used.
            OSError: the folder could not be written.
        """
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
        with (
            Progress(
                *columns,
                TimeElapsedColumn(),
                console=console,
                disable=not (progress and console.is_terminal),  # elsewhere it leaves an empty line
                transient=True,
            ) as bar,
            staged_folder(folder) as staged,
        ):
            facts = self._fill(staged, tokenizer, _Bar(bar))
            (staged / "text.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        return facts

    def _fill(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None, bar: "_Bar") -> dict[str, Any]:
        spool = DocumentFile(folder / "documents.zst") if self.source.streaming and not self.source.files() else None
        split = self._split(spool, bar)
        documents = spool.documents if spool else self.source.documents
        if tokenizer is None:
            sample = _sample((each for each, held_out in split.sides(documents()) if not held_out), split.size, bar)
            tokenizer = LEARNED[self.learned](sample, self.vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        dropped = 0
        with (
            TokenWriter(folder / "train.npy", tokenizer) as train,
            TokenWriter(folder / "valid.npy", tokenizer, folder / "valid_bytes.npy") as valid,
        ):
            for document, held_out in bar.over(split.sides(documents()), "tokenizing", split.size, _first):
                (valid if held_out else train).add(document)
            if self.valid_source is not None:
                for document in bar.over(self.valid_source.documents(), "tokenizing held-out text", None, len):
                    if split.knows(document):
                        dropped += 1
                    else:
                        valid.add(document)
        if spool:
            spool.path.unlink()
        facts = {
            "source": self.source.source,
            "valid_source": self.valid_source and self.valid_source.source,
            "divided_documents": split.divide is not None,
            "train": train.facts(),
            "valid": valid.facts(),
            "held_out_documents_dropped_as_also_in_train": dropped,
            "tokenizer_sha256": tokenizer_hash(tokenizer),
        }
        if dropped and not valid.documents:
            assert self.valid_source is not None
            raise UserError(
                f"all {dropped} documents of {self.valid_source.source} are also in {self.source.source}; "
                "give other held-out text"
            )
        check_lengths(facts, self.sequence_length)
        return facts

    def _split(self, spool: DocumentFile | None, bar: "_Bar") -> "_Split":
        """Reads the documents once and decides which are held out.

        By the hash of the content, so that equal documents land on one side, and by rank among the hashes,
        which gives the wanted number however few documents there are.
        """
        hashes, sizes = array("Q"), array("Q")
        documents = self.source.documents()
        for document in bar.over(spool.fill(documents) if spool else documents, "reading", None, len):
            hashes.append(_hash(document))
            sizes.append(len(document))
        size = sum(sizes)
        if not hashes:
            raise UserError(
                f"{self.source.source} holds no text: its documents, if any, are blank or null; give a source with text"
            )
        if self.valid_source is not None:
            return _Split(size=size, train=np.unique(np.array(hashes)))
        unique, first = np.unique(np.array(hashes), return_index=True)
        divide = None
        if len(unique) == 1:
            divide = max(1000, sizes[0] // _PIECES)
            document = next(spool.documents() if spool else self.source.documents())
            lengths = {_hash(piece): len(piece) for piece in pieces(document, divide)}
            unique = np.array(sorted(lengths), dtype=np.uint64)
            unique_sizes = np.array([lengths[int(each)] for each in unique])
        else:
            unique_sizes = np.array(sizes)[first]
        if len(unique) < 2:
            assert divide is not None
            copies = f"{len(hashes):,} copies of one document" if len(hashes) > 1 else "one document"
            why = "too few to hold some out" if sizes[0] <= 2 * divide else "the same lines again and again"
            raise UserError(
                f"{self.source.source} is {copies} of {sizes[0]:,} characters, {why}; give other text too, or a "
                "valid_source"
            )
        # A document that is most of the text is for training, whatever its hash.
        eligible = unique[unique_sizes <= unique_sizes.sum() / 2]
        count = max(1, math.ceil(self.valid_fraction * len(unique)))
        return _Split(size=size, divide=divide, held_out=frozenset(eligible[:count].tolist()))


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Which documents are held out."""

    size: int
    """Characters of the source."""
    divide: int | None = None
    """Size in characters of the pieces that a source's only document is cut into; None: documents stay whole."""
    held_out: frozenset[int] = frozenset()
    train: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """Hashes of all training documents, ascending; where the held-out text has a source of its own."""

    def sides(self, documents: Iterator[str]) -> Iterator[tuple[str, bool]]:
        """Every document (or piece of one) and whether it is held out."""
        for document in documents:
            for part in [document] if self.divide is None else pieces(document, self.divide):
                yield part, bool(self.held_out) and _hash(part) in self.held_out

    def knows(self, document: str) -> bool:
        """Whether it is a training document."""
        value = np.uint64(_hash(document))
        index = int(np.searchsorted(self.train, value))
        return index < len(self.train) and self.train[index] == value


def _hash(document: str) -> int:
    # What separates it from its neighbours in a file is no part of its content.
    return int.from_bytes(hashlib.sha256(document.strip().replace("\r\n", "\n").encode()).digest()[:8])


def _sample(documents: Iterator[str], total: int, bar: "_Bar") -> list[str]:
    """Up to _TRAINING_BYTES of text, from all over: every n-th piece of what was read."""
    kept: list[str] = []
    size, every, index = 0, 1, 0
    for document in bar.over(documents, "learning the vocabulary", total, len):
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
    """Equal for tokenizers that give equal tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}{boundary_id(tokenizer)}".encode()).hexdigest()


def check_lengths(facts: dict[str, Any], sequence_length: int) -> None:
    """Raises UserError where a side is shorter than one sequence."""
    own = facts["valid_source"] is not None
    for name, what, mend in (
        ("train", "training", "give more text or lower sequence_length"),
        ("valid", "held-out", f"{'' if own else 'raise valid_fraction, '}give more text or lower sequence_length"),
    ):
        tokens = facts[name]["tokens"]
        if tokens < sequence_length:
            raise UserError(
                f"the {what} text has {tokens} tokens, fewer than one sequence of {sequence_length}; {mend}"
            )


class _Bar:
    """Counts megabytes of text."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def over(self, items: Iterable[Any], what: str, total: int | None, size: Callable[[Any], int]) -> Iterator[Any]:
        """The items, counted as they are asked for; `size` gives the characters of one."""
        task = self._progress.add_task(what, total=total, size="")
        done = 0
        for item in items:
            yield item
            done += size(item)
            whole = "" if total is None else f" / {total / 1e6:.1f}"
            self._progress.update(task, completed=done, size=f"{done / 1e6:.1f}{whole} MB")
        self._progress.remove_task(task)


def _first(pair: tuple[str, bool]) -> int:
    return len(pair[0])
