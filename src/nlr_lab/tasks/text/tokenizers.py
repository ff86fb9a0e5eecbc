"""Tokenizers: a BPE or a WordPiece trained on the corpus, GPT-2's or BERT's from files, any other by path or name."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .data import END_OF_TEXT

_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # looked for where a tokenizer names no end
_BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def train_tokenizer(kind: str, documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on text; raise UserError where it has too few different words for a vocabulary of that size.

    `kind` is "bpe", byte-level as GPT-2's, with '<|endoftext|>' as its only special token; or "wordpiece" as BERT's:
    lower case, no accents, five special tokens, of which [SEP] ends a document; there characters that are too rare for
    an eighth of the vocabulary become [UNK].
    """
    make: Any = trainers.BpeTrainer if kind == "bpe" else trainers.WordPieceTrainer
    if kind == "bpe":
        backend, specials = _byte_level(models.BPE()), {"eos_token": END_OF_TEXT}
        settings: dict[str, Any] = {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    else:
        backend, specials = _wordpiece(models.WordPiece(unk_token=_BERT["unk_token"])), _BERT
        # Each may stand at the start of a word and inside it; the rest is for pieces of words.
        settings = {"limit_alphabet": max(64, vocab_size // 8)}
    settings |= {"vocab_size": vocab_size, "special_tokens": list(specials.values()), "show_progress": False}
    backend.train_from_iterator(documents, make(**settings))
    if (size := backend.get_vocab_size()) < vocab_size:
        what = f"the text is too small, or repeats itself too much, for a vocabulary of {vocab_size} (it gives {size})"
        raise UserError(f"{what}; try --vocab-size {size}")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **specials)


def load_tokenizer(name: str) -> Any:
    """Load GPT-2's files, BERT's vocab.txt, a tokenizer.json, a folder of one of these or of a run, or a name on the
    hub; raise UserError where there is none, its files do not fit each other, or it has no end-of-text token."""
    path = Path(name).expanduser()
    if (path / "recipe.json").is_file():
        path /= "model"
    try:
        tokenizer = _read_tokenizer(path, name)
    except UserError:
        raise
    except Exception as error:  # the Rust side raises plain Exception
        why = one_line(error).split(". ")[0]
        hint = "give a folder with GPT-2's or BERT's files or a tokenizer.json, a hub name, or 'bpe' to train one"
        raise UserError(f"no tokenizer {name!r} could be loaded ({why}); {hint}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise UserError(f"the tokenizer {name!r} is written in Python; give one with a tokenizer.json")
    if boundary_id(tokenizer) is None:
        known = tokenizer.get_vocab()
        tokenizer.eos_token = next((token for token in _ENDS if token in known), None)
        if tokenizer.eos_token is None:
            what = f"the tokenizer {name!r} has no end-of-text token"
            raise UserError(f"{what}; set eos_token in its tokenizer_config.json")
    return tokenizer


def _read_tokenizer(path: Path, name: str) -> Any:
    vocabulary = path / "vocab.txt" if path.is_dir() else path
    whole, config = path / "tokenizer.json", path / "tokenizer_config.json"
    if vocabulary.is_file() and vocabulary.name == "vocab.txt" and not whole.is_file() and not config.is_file():
        # A byte-order mark is part of no token.
        words = {word.removeprefix("\ufeff"): i for word, i in models.WordPiece.read_file(str(vocabulary)).items()}
        _check_known(vocabulary, words, _BERT.values(), "BERT's vocabulary")
        return PreTrainedTokenizerFast(
            tokenizer_object=_wordpiece(models.WordPiece(words, unk_token=_BERT["unk_token"])), **_BERT
        )
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        file, merges = (path / each for each in names)
        if file.is_file() and merges.is_file() and not whole.is_file():
            backend = _byte_level(models.BPE.from_file(str(file), str(merges)))
            needed = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
            _check_known(file, backend.get_vocab(), needed, "GPT-2's vocabulary")
            return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    return AutoTokenizer.from_pretrained(str(path) if path.exists() else name, trust_remote_code=False)


def _check_known(file: Path, vocabulary: Mapping[str, int], needed: Iterable[str], what: str) -> None:
    if missing := [token for token in needed if token not in vocabulary]:
        raise UserError(f"{file} has no {' '.join(missing[:3])}; this is not {what}")


def _byte_level(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _wordpiece(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def vocabulary_size(tokenizer: Any) -> int:
    """Return the rows that an embedding needs: the highest id + 1, more than the entries where ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def boundary_id(tokenizer: Any) -> int | None:
    """Return the token that ends a document: end of text, or a separator where there is none (BERT)."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def byte_lengths(tokenizer: Any) -> np.ndarray | None:
    """Return the UTF-8 bytes of each token, (vocabulary,), 0 for specials; None where a tokenizer is not byte-level."""
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    lengths = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token)  # in this alphabet every character stands for one byte
    for index, added in backend.get_added_tokens_decoder().items():
        lengths[index] = 0 if added.special else len(added.content.encode())
    lengths[tokenizer.all_special_ids] = 0
    return lengths


def encode(
    tokenizer: Any, texts: list[str], lengths: np.ndarray | None, *, offsets: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of each text without added specials, and the bytes of each token: by `lengths`, else by offsets
    if asked for, else 0. Text that looks like a special token is encoded as text."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        make = backend.encode_batch if offsets and lengths is None else backend.encode_batch_fast
        encoded = make(texts, add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    for text, each in zip(texts, encoded, strict=True):
        ids = np.array(each.ids, dtype=np.int64)
        if lengths is not None:
            yield ids, lengths[ids]
        else:
            yield ids, _bytes_to_ends(text, each.offsets) if offsets else np.zeros_like(ids)


def _bytes_to_ends(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the UTF-8 bytes from the end of the token before to the end of each token, whose offsets are characters.

    So white space that a tokenizer drops belongs to the token after it; what follows the last token is not counted.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])  # of character i at place i
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
    return np.diff(bytes_before[ends], prepend=0)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash that is equal for tokenizers that give equal tokens."""
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}{boundary_id(tokenizer)}".encode()).hexdigest()
