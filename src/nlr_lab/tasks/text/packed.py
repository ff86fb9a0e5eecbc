"""Packed text: documents -> tokens with document boundaries -> sequences of one length, cached on disk.

A cache folder, <cache>/text/<key>, is what `packing` makes. The key is a hash of the sources' content and of
every setting that shapes the tokens.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nlr_lab.tasks.cache import are_whole, cache_folder, cached
from nlr_lab.tasks.task import Batch, Examples, Prepared

from .data import LEARNED, TextData
from .packing import check_lengths, pack, tokenizer_hash
from .tokenizers import byte_lengths, load_tokenizer, quiet_about_forks, vocabulary_size

_VERSION = 3  # of the cache's layout and of the split; part of the key


class TokenBlocks(Examples):
    """Sequences out of a file of tokens: item i is {"input_ids": (T,), "labels": (T,)}, int64.

    Labels equal the inputs: transformers' language models shift them. The file is mapped, not read; each
    data-loading worker maps it anew.

    Args:
        path: an .npy file of one axis.
        length: of a sequence, T.
        most: sequences at most; None: all that the file holds. A rest shorter than T is dropped.
    """

    def __init__(self, path: Path, length: int, most: int | None = None) -> None:
        self.path, self.length = path, length
        self._tokens: np.ndarray | None = np.load(path, mmap_mode="r")
        count = len(self._tokens) // length
        self.count = count if most is None else min(count, most)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if not -self.count <= index < self.count:
            raise IndexError(f"sequence {index} of {self.count}")
        row = torch.from_numpy(self.block(index % self.count).astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}

    def block(self, index: int) -> np.ndarray:
        """Return the tokens of a sequence, (T,), in the file's type."""
        if self._tokens is None:
            self._tokens = np.load(self.path, mmap_mode="r")
        return self._tokens[index * self.length : (index + 1) * self.length]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}


@dataclass(frozen=True, kw_only=True)
class PackedText(Prepared):
    """Text that is ready for training.

    `vocab_size` is the tokenizer's highest id + 1. `valid_bytes_per_token` is over positions 1 to T - 1 of the
    evaluated sequences (the first of each is given, not predicted). The end-of-text token is predicted too but is no
    text, so it counts 0 bytes. A byte-level token has the bytes that it decodes to; of other kinds a token has the
    bytes from the end of the token before to its own end, so that dropped white space is counted (and, after a
    document's last token, given to the end-of-text token). Bits per byte = loss / ln 2 / valid_bytes_per_token.
    """

    train: TokenBlocks
    valid: TokenBlocks

    def describe(self) -> dict[str, Any]:
        """Return what the text is, for the record: sources, documents, bytes, tokens, hashes."""
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
    """Tokenize and pack text, or find it in the cache. Safe to call from several processes at once.

    Raises:
        UserError: the text or the tokenizer cannot be used; the message says why and what to change.
    """
    quiet_about_forks()
    given = None if config.tokenizer in LEARNED else load_tokenizer(config.tokenizer)
    folder = cache_folder(config.cache_dir) / "text" / _key(config, given)[:32]
    facts = cached(folder, _read, lambda place: pack(config, given, place, progress=progress))
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


def _read(folder: Path) -> dict[str, Any] | None:
    """Return what the cache says of itself, or None where it is not whole."""
    facts = json.loads((folder / "text.json").read_text(encoding="utf-8"))
    whole = are_whole(folder, facts) and (folder / "tokenizer" / "tokenizer_config.json").is_file()
    return facts if whole else None


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
