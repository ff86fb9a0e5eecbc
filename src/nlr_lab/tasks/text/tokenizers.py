"""Tokenizers: a BPE or a WordPiece trained on the corpus, GPT-2's or BERT's from files, any other by path or name."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # looked for where a tokenizer names no end
_BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_BERT_FILE = "vocab.txt"
_GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def train_tokenizer(kind: str, documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on text.

    Args:
        kind: "bpe", byte-level as GPT-2's, with '<|endoftext|>' as its only special token; or "wordpiece" as BERT's:
            lower case, no accents, five special tokens, of which [SEP] ends a document. There characters that are too
            rare for an eighth of the vocabulary become [UNK].
        documents: the text.
        vocab_size: tokens.

    Raises:
        UserError: the text has too few different words for a vocabulary of that size.
    """
    make: Any
    settings: dict[str, Any]
    if kind == "bpe":
        backend, specials = _byte_level(models.BPE()), {"eos_token": END_OF_TEXT}
        make, settings = trainers.BpeTrainer, {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    else:
        backend, specials = _wordpiece(models.WordPiece(unk_token=_BERT["unk_token"])), _BERT
        # Each may stand at the start of a word and inside it; the rest is for pieces of words.
        make, settings = trainers.WordPieceTrainer, {"limit_alphabet": max(64, vocab_size // 8)}
    specials_first = list(specials.values())
    trainer = make(vocab_size=vocab_size, special_tokens=specials_first, show_progress=False, **settings)
    backend.train_from_iterator(documents, trainer)
    if backend.get_vocab_size() < vocab_size:
        raise UserError(
            f"the text is too small, or repeats itself too much, for a vocabulary of {vocab_size} (it gives "
            f"{backend.get_vocab_size()}); lower vocab_size"
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **specials)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load GPT-2's files, BERT's vocab.txt, a tokenizer.json, a folder of one of these, or a name on the hub.

    Raises:
        UserError: there is none, its files do not fit each other, or it has no end-of-text token.
    """
    path = Path(name).expanduser()
    vocabulary = path / _BERT_FILE if path.is_dir() else path
    own_files = [path / each for each in ("tokenizer.json", "tokenizer_config.json")]
    if vocabulary.is_file() and vocabulary.name == _BERT_FILE and not any(each.is_file() for each in own_files):
        tokenizer: PreTrainedTokenizerBase = _bert(vocabulary)
    elif path.is_dir() and not own_files[0].is_file() and not vocabulary.is_file():
        tokenizer = _gpt2(path)
    elif path.is_file():
        try:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise UserError(f"{path} is not a tokenizer.json: {one_line(error)}") from error
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.exists() else name, trust_remote_code=False)
        except Exception as error:
            why = one_line(error).split(". ")[0]
            raise UserError(
                f"no tokenizer {name!r} could be loaded ({why}); give a folder with GPT-2's or BERT's files or a "
                "tokenizer.json, a hub name, or 'bpe' to train one"
            ) from error
    if boundary_id(tokenizer) is None:
        known = tokenizer.get_vocab()
        end = next((token for token in _ENDS if token in known), None)
        if end is None:
            raise UserError(
                f"the tokenizer {name!r} has no end-of-text token; set eos_token in its tokenizer_config.json"
            )
        tokenizer.eos_token = end
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the rows that an embedding needs: the highest id + 1, more than the entries where ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def boundary_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that ends a document: end of text, or a separator where there is none (BERT)."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids without added specials; text that looks like a special token is encoded as text."""
    backend = backend_of(tokenizer)
    if backend is None:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    with _plain(backend):
        return [each.ids for each in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def encode_with_bytes(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
    """Do as `encode`, each text with the UTF-8 bytes from the end of the token before to the end of each token.

    So white space that a tokenizer drops belongs to the token after it; what follows the last token is in no
    count. Only for tokenizers with a Rust backend.
    """
    backend = backend_of(tokenizer)
    assert backend is not None
    with _plain(backend):
        encoded = backend.encode_batch(list(texts), add_special_tokens=False)
    found = []
    for text, each in zip(texts, encoded, strict=True):
        # Offsets count characters: bytes_before[i] is where character i starts.
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        bytes_before = np.concatenate([[0], np.cumsum(widths)])
        ends = np.maximum.accumulate(np.array([end for _, end in each.offsets], dtype=np.int64))
        found.append((each.ids, np.diff(bytes_before[ends], prepend=0)))
    return found


def byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Return the UTF-8 bytes of each token, (vocabulary,), 0 for specials; None where a tokenizer is not byte-level."""
    backend = backend_of(tokenizer)
    if backend is None or not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    lengths = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        # In this alphabet every character stands for one byte.
        lengths[index] = len(token)
    for index, added in backend.get_added_tokens_decoder().items():
        lengths[index] = 0 if added.special else len(added.content.encode())
    for index in tokenizer.all_special_ids:
        lengths[index] = 0
    return lengths


def backend_of(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer | None:
    """Return the Rust tokenizer; None where there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend if isinstance(backend, tokenizers.Tokenizer) else None


@contextmanager
def _plain(backend: tokenizers.Tokenizer) -> Iterator[None]:
    """Whole texts, unpadded, in which special tokens are text like any other."""
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        yield
    finally:
        backend.encode_special_tokens = before


def _gpt2(folder: Path) -> PreTrainedTokenizerFast:
    for vocabulary, merges in _GPT2_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            break
    else:
        raise UserError(
            f"{folder} holds no tokenizer: neither tokenizer.json, nor vocab.json with merges.txt, "
            "nor encoder.json with vocab.bpe, nor vocab.txt"
        )
    try:
        model = models.BPE.from_file(str(folder / vocabulary), str(folder / merges))
    except Exception as error:
        raise UserError(f"{vocabulary} and {merges} in {folder} do not fit: {one_line(error)}") from error
    if model.token_to_id(END_OF_TEXT) is None:
        raise UserError(f"{folder / vocabulary} has no {END_OF_TEXT!r}; these are not GPT-2's files")
    missing = sum(model.token_to_id(symbol) is None for symbol in pre_tokenizers.ByteLevel.alphabet())
    if missing:
        raise UserError(f"{folder / vocabulary} lacks {missing} of the 256 byte symbols; these are not GPT-2's files")
    return PreTrainedTokenizerFast(tokenizer_object=_byte_level(model), eos_token=END_OF_TEXT)


def _bert(file: Path) -> PreTrainedTokenizerFast:
    """Make BERT's uncased WordPiece out of its list of tokens, one a line."""
    try:
        vocabulary = models.WordPiece.read_file(str(file))
        # A byte-order mark is part of no token.
        vocabulary = {token.removeprefix("\ufeff"): index for token, index in vocabulary.items()}
        model = models.WordPiece(vocabulary, unk_token=_BERT["unk_token"])
    except Exception as error:
        raise UserError(f"{file} is no list of tokens: {one_line(error)}") from error
    missing = [token for token in _BERT.values() if model.token_to_id(token) is None]
    if missing:
        raise UserError(f"{file} has no {missing[0]!r}; this is not BERT's vocabulary")
    return PreTrainedTokenizerFast(tokenizer_object=_wordpiece(model), **_BERT)


def _wordpiece(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _byte_level(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def quiet_about_forks() -> None:
    """Silence the tokenizer library's warning of forks after it used threads; our data workers do not tokenize."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
