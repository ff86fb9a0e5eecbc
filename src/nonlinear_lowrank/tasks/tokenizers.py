"""Tokenizers: a byte-level BPE trained on the corpus, GPT-2's from files, any other by path or name."""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError

END_OF_TEXT = "<|endoftext|>"
_ALPHABET = 256
_GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError where a byte-level BPE cannot be that small."""
    if not isinstance(vocab_size, int) or vocab_size < _ALPHABET + 1:
        raise UserError(f"vocab_size must be a whole number of at least {_ALPHABET + 1}, not {vocab_size!r}")


def train_bpe(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of GPT-2's kind, with '<|endoftext|>' as its only special token.

    Raises:
        UserError: the text has too few different words for a vocabulary of that size.
    """
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    if backend.get_vocab_size() < vocab_size:
        raise UserError(
            f"the text is too small for a vocabulary of {vocab_size} (it gives {backend.get_vocab_size()}); "
            "lower vocab_size"
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """GPT-2's files, a tokenizer.json, a folder of either, or a name on the hub.

    Raises:
        UserError: there is none, its files do not fit each other, or it has no end-of-text token.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        tokenizer: PreTrainedTokenizerBase = _gpt2(path)
    elif path.is_file():
        try:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise UserError(f"{path} is not a tokenizer.json: {_one_line(error)}") from error
        if tokenizer.eos_token is None and END_OF_TEXT in tokenizer.get_vocab():
            tokenizer.eos_token = END_OF_TEXT
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.exists() else name)
        except Exception as error:
            raise UserError(
                f"no tokenizer {name!r} could be loaded ({_one_line(error)}); give a folder with GPT-2's files or a "
                "tokenizer.json, a hub name, or 'bpe' to train one"
            ) from error
    if boundary_id(tokenizer) is None:
        raise UserError(f"the tokenizer {name!r} has no end-of-text token; set eos_token in its tokenizer_config.json")
    return tokenizer


def boundary_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends a document: end of text, or a separator where there is none (BERT)."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids without added specials; text that looks like a special token is encoded as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        return [each.ids for each in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    finally:
        backend.encode_special_tokens = before


def byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """UTF-8 bytes of each token of a byte-level tokenizer, (vocabulary,); 0 for specials; None for other kinds."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer) or not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    lengths = np.zeros(len(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        # In this alphabet every character stands for one byte.
        lengths[index] = len(token)
    for index in tokenizer.all_special_ids:
        lengths[index] = 0
    return lengths


def _gpt2(folder: Path) -> PreTrainedTokenizerFast:
    for vocabulary, merges in _GPT2_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            break
    else:
        raise UserError(
            f"{folder} holds no tokenizer: neither tokenizer.json, nor vocab.json with merges.txt, "
            "nor encoder.json with vocab.bpe"
        )
    try:
        model = models.BPE.from_file(str(folder / vocabulary), str(folder / merges))
    except Exception as error:
        raise UserError(f"{vocabulary} and {merges} in {folder} do not fit: {_one_line(error)}") from error
    if model.token_to_id(END_OF_TEXT) is None:
        raise UserError(f"{folder / vocabulary} has no {END_OF_TEXT!r}; these are not GPT-2's files")
    backend = _byte_level(model)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)


def _byte_level(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def quiet_about_forks() -> None:
    """The tokenizer library warns when data workers fork after it used threads; ours never tokenize."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
