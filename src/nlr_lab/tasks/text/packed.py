"""Packed text: documents -> tokens with document boundaries -> sequences of one length, cached on disk.

A cache folder, <cache>/text/<key>, where the key hashes the sources' content and every setting that shapes the tokens:

    train.npy, valid.npy   tokens of all documents in order, each document ended by the end-of-text token;
                           one axis, uint16 or uint32
    valid_bytes.npy        bytes of text of each held-out token
    hashes.npz             hashes of the documents (of the pieces, where one was divided) of either side
    tokenizer/, text.json  what they were made with and what they contain
    manifest.json          sizes and hashes of these
"""

import hashlib
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from nlr_lab.runtime.storage import is_whole
from nlr_lab.tasks.task import MOST_HASHED, Batch, Examples, Prepared, cache_folder, cached
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import staged_folder

from .data import LEARNED, Corpus, Document, TextData
from .shards import Shard, TokenFiles, check_ids
from .tokenizers import (
    boundary_id,
    byte_lengths,
    encode,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)

if TYPE_CHECKING:
    from .language_model import Masking

_VERSION = 6  # of the cache's layout and of the split; part of the key
_TRAINING_BYTES = 20_000_000  # text that a tokenizer is trained on; more changes its merges little
_PIECES = 200  # that a single document is divided into before some are held out
_PIECE = 65_536  # characters encoded at a time, so that one novel uses all cores
_BATCH = 4_000_000  # characters that are gathered before they are encoded
_UNFIT = 0.01  # part of a text that a fitting tokenizer may lose


class Blocks(Examples):
    """Sequences of T tokens: item i is {"input_ids": (T,), "labels": (T,)}, int64. Labels equal the inputs:
    transformers' language models shift them."""

    def block(self, index: int) -> np.ndarray:
        """Return the tokens of a sequence, (T,), in the file's type; an index beyond the last starts over."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        if not self.counts_passes and not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        row = torch.from_numpy(self.block(index).astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}


class TokenBlocks(Blocks):
    """Sequences of an .npy file of one axis or of token files, from `start` to before `stop`, at most so many; a rest
    shorter than T is dropped."""

    def __init__(
        self, files: Path | TokenFiles, length: int, most: int | None = None, *, start: int = 0, stop: int | None = None
    ) -> None:
        self.files = TokenFiles([Shard.of_npy(files)]) if isinstance(files, Path) else files
        self.length, self.start = length, start
        count = ((len(self.files) if stop is None else stop) - start) // length
        self.count = count if most is None else min(count, most)

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files.shards[0].path

    def __len__(self) -> int:
        return self.count

    def block(self, index: int) -> np.ndarray:
        place = self.start + index % self.count * self.length
        return self.files.read(place, place + self.length)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedBlocks(Examples):
    """Sequences with hidden tokens: item i is {"input_ids": (T,), "labels": (T,)}, int64; labels are -100 but where a
    token is predicted.
    """

    blocks: Any
    """`Blocks`."""
    masking: "Masking"
    mask: int
    """Token that stands for a hidden one."""
    special: Sequence[int]
    """Tokens that are never hidden."""
    vocab_size: int
    """V: random tokens are drawn from 0 to V - 1."""
    seed: int | None
    """Seed of training's draws, an index beyond the sequences being a later pass; None: one draw for all passes."""

    def seeded(self, seed: int) -> "MaskedBlocks":
        """Return the same sequences with the draws of a run."""
        return replace(self, seed=seed, blocks=self.blocks.seeded(seed))

    @property
    def counts_passes(self) -> bool:  # type: ignore[override]
        """Return whether an index tells the pass too."""
        return self.seed is not None

    def drawn(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return what these indices draw from each source of a mixture."""
        return self.blocks.drawn(indices)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Batch:
        tokens = self.blocks.block(index).astype(np.int64)
        # The first word of the entropy keeps the draws of evaluation and training apart.
        generator = np.random.default_rng([1, index] if self.seed is None else [0, self.seed, index])
        # As many numbers are drawn for every sequence, whatever becomes of them.
        chance, kind = generator.random(len(tokens)), generator.random(len(tokens))
        others = generator.integers(0, self.vocab_size, len(tokens))
        ordinary = ~np.isin(tokens, self.special)
        chosen = ordinary & (chance < self.masking.probability)
        if not chosen.any():
            chosen = ordinary & (chance == chance.min(where=ordinary, initial=1.0))
        hidden, changed = self.masking.mask_share, self.masking.mask_share + self.masking.random_share
        shown = np.where(chosen & (kind < hidden), self.mask, tokens)
        shown = np.where(chosen & (kind >= hidden) & (kind < changed), others, shown)
        return {"input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(np.where(chosen, tokens, -100))}


def prepare_text(config: TextData, *, without: frozenset[int] = frozenset(), progress: bool = True) -> Prepared:
    """Tokenize and pack text, or find it in the cache. Safe to call from several processes at once.

    `vocab_size` is the tokenizer's highest id + 1. `valid_bytes_per_token` is over positions 1 to T - 1 of the
    evaluated sequences. The end-of-text token is predicted too but is not text: 0 bytes. A byte-level token has the
    bytes that it decodes to; of other kinds, those from the end of the token before to its own end, so that dropped
    white space is counted (after a document's last token, by the end-of-text token).
    Bits per byte = loss / ln 2 / valid_bytes_per_token. Documents whose hashes are in `without` are not trained on.

    Raises:
        UserError: the text or the tokenizer cannot be used; the message says why and what to change.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # no warning of forks: our data workers do not tokenize
    given = None if config.tokenizer in LEARNED else load_tokenizer(config.tokenizer)
    valid = config.valid_source
    held_out = config.valid_fraction if valid is None else replace(config, source=valid).identity()
    made = [config.vocab_size, config.tokenizer] if given is None else [tokenizer_hash(given)]
    apart = [sorted(without)] if without else []
    key = hashlib.sha256(json.dumps([_VERSION, config.identity(), held_out, *made, *apart]).encode()).hexdigest()[:32]
    folder = cache_folder(config.cache_dir) / "text" / key
    facts = cached(folder, _read, lambda place: _pack(config, given, place, without, progress))
    length = config.sequence_length
    train = TokenBlocks(folder / "train.npy", length)
    evaluated = TokenBlocks(folder / "valid.npy", length, config.eval_sequences)
    for side, blocks in (("train", train), ("valid", evaluated)):
        if not len(blocks):
            hint = "raise valid_fraction, " if side == "valid" and config.valid_source is None else ""
            fault = f"the {side} text has {facts[side]['tokens']} tokens, fewer than one sequence of {length}"
            raise UserError(f"{fault}; {hint}give more text or lower sequence_length")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    hashes = [facts["train"]["sha256"], facts["valid"]["sha256"], facts["tokenizer_sha256"]]
    made_of = json.dumps([*hashes, length, len(evaluated)])
    counts = {"train_sequences": len(train), "evaluated_sequences": len(evaluated)}
    shape: dict[str, Any] = {"vocab_size": vocabulary_size(tokenizer)}
    if facts["valid"]["bytes"] is not None:
        sizes = TokenBlocks(folder / "valid_bytes.npy", length)
        total = sum(int(sizes.block(row)[1:].sum()) for row in range(len(evaluated)))
        shape["valid_bytes_per_token"] = total / (len(evaluated) * (length - 1))
    return Prepared(
        train=train,
        valid=evaluated,
        tokenizer=tokenizer,
        fingerprint=hashlib.sha256(made_of.encode()).hexdigest()[:32],
        facts={**facts, "sequence_length": length, **counts, **shape},
        **shape,
    )


def hashes_of(text: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the documents that a packed text trains on, and of those that it holds out."""
    with np.load(text.train.path.with_name("hashes.npz")) as found:  # type: ignore[attr-defined]
        return found["train"], found["valid"]


def _read(folder: Path) -> dict[str, Any] | None:
    """Return what the cache says of itself, or None where it is not whole."""
    facts = json.loads((folder / "text.json").read_text(encoding="utf-8"))
    return facts if is_whole(folder, MOST_HASHED) else None


def _pack(config: TextData, tokenizer: Any, place: Path, without: frozenset[int], progress: bool) -> None:
    """Fill a folder, which appears when it is whole; without a tokenizer, one is learned from the training text."""
    count: int | None = None

    # Ids need the tokenizer that made them.
    read: Callable[[Corpus], Iterator[Document]] = Corpus.documents if tokenizer is None else Corpus.contents

    def shown(documents: Iterable[Document], what: str) -> Iterator[Document]:
        yield from tqdm(documents, what, count, leave=False, unit=" documents", disable=None if progress else True)

    with staged_folder(place, {}) as folder:
        spools = [folder / f"{side}.jsonl.zst" for side in ("source", "valid_source")]
        source = valid = _on_disk(config, spools[0], read)
        if config.valid_source is not None:
            valid = _on_disk(replace(config, source=config.valid_source), spools[1], read)
        split = _split(config, shown(read(source), "reading"), lambda: read(source), lambda: read(valid))
        split = split._replace(without=without)
        count = split.documents
        if tokenizer is None:
            sample = _sample(split.side(shown(read(source), "learning the vocabulary"), held_out=False))
            tokenizer = train_tokenizer(config.tokenizer, sample, config.vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        chosen = np.array(sorted(split.held_out), dtype=np.uint64)
        unused = np.array(sorted(split.held_out | without), dtype=np.uint64)
        np.savez(folder / "hashes.npz", train=np.setdiff1d(split.hashes, unused), valid=chosen)
        kept = split.side(shown(read(source), "tokenizing"), held_out=False)
        held_out = split.side(shown(read(valid), "tokenizing"), held_out=True)
        facts = {
            "source": config.source,
            "valid_source": config.valid_source,
            "divided_documents": split.divide is not None,
            "train": _write_tokens(kept, tokenizer, folder / "train.npy"),
            "valid": _write_tokens(held_out, tokenizer, folder / "valid.npy", folder / "valid_bytes.npy"),
            "held_out_documents_dropped_as_also_in_train": split.dropped,
            "tokenizer_sha256": tokenizer_hash(tokenizer),
        }
        for spool in spools:
            spool.unlink(missing_ok=True)
        (folder / "text.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _on_disk(corpus: Corpus, spool: Path, read: Callable[[Corpus], Iterator[Document]]) -> Corpus:
    """Return a corpus that can be read again and again: what comes over the network is written to a file."""
    if not corpus.streaming or corpus.files():
        return corpus
    with pyarrow.CompressedOutputStream(str(spool), "zstd") as file:
        for document in read(corpus):
            row = {"text": document} if isinstance(document, str) else {"input_ids": document.tolist()}
            file.write(json.dumps(row).encode() + b"\n")
    return Corpus(source=str(spool))


class _Split(NamedTuple):
    """Choice of the documents that are held out: of pieces of `divide` characters, where the source is one document."""

    documents: int
    """Number of documents in the source."""
    hashes: np.ndarray
    """Hashes of the documents (or pieces of one) in the source, each once."""
    held_out: frozenset[int]
    """Hashes."""
    divide: int | None = None
    dropped: int = 0
    """Documents of a held-out text of its own that are also in the source."""
    without: frozenset[int] = frozenset()
    """Hashes of documents that are on neither side."""

    def side(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Any]:
        """Yield the documents (or pieces of one) of a side."""
        for document in documents:
            for part in [document] if self.divide is None else pieces(document, self.divide):
                known = _hash(part)
                if (known in self.held_out) == held_out and known not in self.without:
                    yield part


def _split(
    config: TextData,
    documents: Iterable[Document],
    source: Callable[[], Iterator[Document]],
    valid: Callable[[], Iterator[Document]],
) -> _Split:
    """Read the documents once and decide which are held out; `source` gives them again. By the hash of the content, so
    that equal documents land on one side, and by rank among the hashes, which gives the wanted number."""
    hashes, sizes = array("Q"), array("Q")
    for document in documents:
        hashes.append(_hash(document))
        sizes.append(len(document))
    if not hashes:
        raise UserError(f"{config.source} holds no text, or only blank and null documents; give a source with text")
    unique, first = np.unique(np.array(hashes), return_index=True)
    if config.valid_source is not None:
        theirs = np.array([_hash(document) for document in valid()], dtype=np.uint64)
        known = np.isin(theirs, unique)
        if len(known) and known.all():
            what = f"all {len(known)} documents of {config.valid_source}"
            raise UserError(f"{what} are also in {config.source}; give other held-out text")
        return _Split(len(hashes), unique, frozenset(theirs[~known].tolist()), dropped=int(known.sum()))
    unique_sizes, divide = np.array(sizes)[first], None
    if len(unique) == 1:
        divide = max(1000, sizes[0] // _PIECES)
        lengths = {_hash(piece): len(piece) for piece in pieces(next(source()), divide)}
        unique = np.array(sorted(lengths), dtype=np.uint64)
        unique_sizes = np.array([lengths[int(each)] for each in unique])
        if len(unique) == 1:
            what = f"{config.source} is one document of {sizes[0]:,} characters, or copies of one"
            raise UserError(f"{what}: too few to hold some out; give other text too, or a valid_source")
    # A document that is most of the text is for training, whatever its hash.
    eligible = unique[unique_sizes <= unique_sizes.sum() / 2]
    held_out = eligible[: max(1, math.ceil(config.valid_fraction * len(unique)))]
    return _Split(len(hashes), unique, frozenset(held_out.tolist()), divide)


def _hash(document: Document) -> int:
    # What separates it from its neighbours in a file is not part of its content.
    text = isinstance(document, str)
    content = document.strip().replace("\r\n", "\n").encode() if text else document.tobytes()  # type: ignore[union-attr]
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def _sample(documents: Iterable[str]) -> list[str]:
    """Return up to _TRAINING_BYTES of text, from all over: every n-th piece of what was read."""
    kept: list[str] = []
    size, every = 0, 1
    for index, piece in enumerate(piece for document in documents for piece in pieces(document, _PIECE)):
        if index % every == 0:
            kept.append(piece)
            size += len(piece)
        while size > _TRAINING_BYTES and len(kept) > 1:
            kept, every = kept[::2], 2 * every
            size = sum(map(len, kept))
    return kept


def pieces(document: Any, size: int) -> Iterator[Any]:
    """Cut text at ends of lines (of words, in a line that is too long), so that tokens rarely straddle a cut, and ids
    anywhere."""
    start = 0
    while start < len(document):
        end = start + size
        if end < len(document) and isinstance(document, str):
            cut = document.find("\n", end, end + size) + 1 or document.find(" ", end, end + size)
            end = cut if cut > 0 else end + size
        yield document[start:end]
        start = end


def _write_tokens(
    documents: Iterable[Document], tokenizer: Any, path: Path, bytes_path: Path | None = None
) -> dict[str, Any]:
    """Write the tokens of documents, each followed by the boundary (of ids, unless they end in it), as one array, and
    the bytes of each token as another; return what was written."""
    boundary, unknown, lengths = boundary_id(tokenizer), tokenizer.unk_token_id, byte_lengths(tokenizer)
    # A normalizer changes the text, so that its bytes need not come back.
    complete = lengths is not None and tokenizer.backend_tokenizer.normalizer is None
    values, known = vocabulary_size(tokenizer), True
    count = size = lost = rest = 0
    # The bytes of training text are not needed.
    with NpyWriter(path, values) as tokens, NpyWriter(bytes_path or os.devnull, 2**32) as nbytes:
        for batch in _batches(documents):
            texts = [piece for piece, _ in batch if isinstance(piece, str)]
            encoded = encode(tokenizer, texts, lengths, offsets=bytes_path is not None)
            for piece, is_last in batch:
                if isinstance(piece, str):
                    ids, sizes = next(encoded)
                    whole, covered = len(piece.encode()), int(sizes.sum())
                    if complete:
                        lost += max(0, whole - covered)
                    elif unknown is not None and unknown != boundary:
                        lost += int((ids == unknown).sum())
                else:
                    ids, known = piece, known and lengths is not None
                    check_ids("a document", int(ids.min()), int(ids.max()), values)
                    sizes = np.zeros_like(ids) if lengths is None else lengths[ids]
                    whole = covered = int(sizes.sum())
                tokens.append(ids)
                nbytes.append(sizes)
                size, rest = size + whole, rest + whole - covered
                if is_last and (isinstance(piece, str) or ids[-1] != boundary):
                    tokens.append(np.array([boundary]))
                    nbytes.append(np.array([rest if lengths is None else 0]))
                    rest = 0
                count += is_last
            if lost > _UNFIT * (size if complete else tokens.count):
                share = 100 * lost / (size if complete else tokens.count)
                what = f"{share:.1f} % of its {'bytes are lost' if complete else 'tokens are unknown'}"
                hint = "choose another tokenizer, or 'bpe' to train one"
                raise UserError(f"the tokenizer does not fit the text: {what}; {hint}")
    return {
        "documents": count,
        "bytes": size if known else None,
        "tokens": tokens.count,
        "sha256": tokens.digest.hexdigest(),
    }


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[Any, bool]]]:
    """Yield pieces of documents, and whether each is the last of its document."""
    batch: list[tuple[Any, bool]] = []
    waiting = 0
    for document in documents:
        *parts, last = pieces(document, _PIECE)
        batch += [*((part, False) for part in parts), (last, True)]
        waiting += len(document)
        if waiting > _BATCH:
            yield batch
            batch, waiting = [], 0
    yield batch


class NpyWriter:
    """An .npy file of one axis that grows; its values are 0 to values - 1: uint16 up to 2^16 of them, else uint32."""

    def __init__(self, path: Path | str, values: int) -> None:
        self.dtype = np.dtype("<u2" if values <= 2**16 else "<u4")
        self.count, self.digest = 0, hashlib.sha256()
        self._file = Path(path).open("wb")  # noqa: SIM115
        self._write_header()

    def _write_header(self) -> None:
        self._file.seek(0)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._write_header()  # again, now that the count is known: numpy pads it to one length
        self._file.close()

    def append(self, values: np.ndarray) -> None:
        """Append values."""
        data = values.astype(self.dtype, copy=False).tobytes()
        self._file.write(data)
        self.digest.update(data)
        self.count += len(values)
