"""Packed text: documents -> tokens with document boundaries -> sequences of one length, cached on disk.

A cache folder, <cache>/text/<key>, is what `packing` makes. The key is a hash of the sources' content and of
every setting that shapes the tokens. The cache lies in $NLR_CACHE, else in the user's cache folder.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .corpus import Corpus
from .packing import Packing, check_lengths, tokenizer_hash
from .tokenizers import LEARNED, byte_lengths, check_vocab_size, load_tokenizer, quiet_about_forks, vocabulary_size

_VERSION = 3  # of the cache's layout and of the split; part of the key


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Which text, how it is tokenized, and how it is cut."""

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
    """Of "bpe" and "wordpiece"."""
    sequence_length: int = 256
    """Tokens a sequence, T; the model predicts T - 1 of them."""
    eval_sequences: int = 256
    """Held-out sequences that are evaluated, the first ones; fewer where there are fewer."""
    cache_dir: str | None = None
    """Where tokens are cached; None: $NLR_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        check_integer("sequence_length", self.sequence_length, minimum=2)
        check_integer("eval_sequences", self.eval_sequences, minimum=1)
        if self.max_bytes is not None:
            check_integer("max_bytes", self.max_bytes, minimum=1)
        fraction = self.valid_fraction
        if not isinstance(fraction, int | float) or not 0 < fraction < 0.5:
            raise UserError(f"valid_fraction must be above 0 and below 0.5, got {fraction!r}")
        if not self.source:
            raise UserError("source is empty; give 'stdlib', a file, a folder or a dataset's name")
        if self.valid_source == "":
            raise UserError("valid_source is empty; give a file, a folder or a dataset's name, or leave it out")
        if not self.tokenizer:
            raise UserError("tokenizer is empty; give 'bpe', a folder, a tokenizer.json or a hub name")
        if self.tokenizer in LEARNED:
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

    Labels equal the inputs: transformers' language models shift them. The file is mapped, not read; each
    data-loading worker maps it anew.

    Args:
        path: an .npy file of one axis.
        length: of a sequence, T.
        most: sequences at most; None: all that the file holds. A rest shorter than T is left out.
    """

    def __init__(self, path: Path, length: int, most: int | None = None) -> None:
        self.path, self.length = path, length
        self._tokens: np.ndarray | None = np.load(path, mmap_mode="r")
        count = len(self._tokens) // length
        self.count = count if most is None else min(count, most)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -self.count <= index < self.count:
            raise IndexError(f"sequence {index} of {self.count}")
        row = torch.from_numpy(self.block(index % self.count).astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}

    def block(self, index: int) -> np.ndarray:
        """Tokens of a sequence, (T,), in the file's type."""
        if self._tokens is None:
            self._tokens = np.load(self.path, mmap_mode="r")
        return self._tokens[index * self.length : (index + 1) * self.length]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}


@dataclass(frozen=True)
class PackedText:
    """Text that is ready for training."""

    train: TokenBlocks
    valid: TokenBlocks
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    """Rows of the embedding: the tokenizer's highest id + 1, special tokens included."""
    valid_bytes_per_token: float
    """UTF-8 bytes of held-out text per predicted token, over positions 1 to T - 1 of the evaluated sequences (the
    first of each is given, not predicted). The end-of-text token is predicted too but is no text, so it counts 0
    bytes. A byte-level token has the bytes that it decodes to; of other kinds a token has the bytes from the end of
    the token before to its own end, so that dropped white space is counted (and, after a document's last token,
    given to the end-of-text token). Bits per byte = loss / ln 2 / valid_bytes_per_token."""
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
    given = load_tokenizer(config.tokenizer) if config.tokenizer not in LEARNED else None
    key = _key(config, given)
    folder = cache_folder(config.cache_dir) / "text" / key[:32]
    facts = _read(folder)
    if facts is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                facts = _read(folder)
                if facts is None:
                    facts = _packing(config).build(given, folder, progress)
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
    if tokenizer is not None:
        parts.append(tokenizer_hash(tokenizer))
    else:
        parts += [config.vocab_size, *([] if config.tokenizer == "bpe" else [config.tokenizer])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _packing(config: TextData) -> Packing:
    return Packing(
        source=config.corpus(config.source),
        valid_source=None if config.valid_source is None else config.corpus(config.valid_source),
        valid_fraction=config.valid_fraction,
        learned=config.tokenizer,
        vocab_size=config.vocab_size,
        sequence_length=config.sequence_length,
    )


def _read(folder: Path) -> dict[str, Any] | None:
    """What the cache says of itself, or None where it is absent or not whole."""
    try:
        facts = json.loads((folder / "text.json").read_text(encoding="utf-8"))
        # A file that is shorter than its header says cannot be mapped.
        whole = all(
            len(np.load(folder / f"{name}.npy", mmap_mode="r")) == facts[name]["tokens"] for name in ("train", "valid")
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return facts if whole and (folder / "tokenizer" / "tokenizer_config.json").is_file() else None


def _open(config: TextData, folder: Path, facts: dict[str, Any]) -> PackedText:
    check_lengths(facts, config.sequence_length)
    train = TokenBlocks(folder / "train.npy", config.sequence_length)
    valid = TokenBlocks(folder / "valid.npy", config.sequence_length, config.eval_sequences)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    hashes = [facts["train"]["sha256"], facts["valid"]["sha256"], facts["tokenizer_sha256"]]
    made_of = json.dumps([*hashes, train.length, len(valid)])
    return PackedText(
        train=train,
        valid=valid,
        tokenizer=tokenizer,
        vocab_size=vocabulary_size(tokenizer),
        valid_bytes_per_token=_bytes_per_token(valid, tokenizer, folder / "valid_bytes.npy"),
        fingerprint=hashlib.sha256(made_of.encode()).hexdigest()[:32],
        facts=facts,
    )


def _bytes_per_token(blocks: TokenBlocks, tokenizer: PreTrainedTokenizerBase, bytes_file: Path) -> float:
    lengths = byte_lengths(tokenizer)
    sizes = TokenBlocks(bytes_file, blocks.length, len(blocks)) if bytes_file.exists() else None
    total = 0
    for index in range(len(blocks)):
        predicted = blocks.block(index)[1:]
        if lengths is not None:
            total += int(lengths[predicted].sum())
        elif sizes is not None:
            total += int(sizes.block(index)[1:].sum())
        else:  # a tokenizer in Python tells neither
            total += len(str(tokenizer.decode(predicted.tolist(), skip_special_tokens=True)).encode())
    return total / (len(blocks) * (blocks.length - 1))
