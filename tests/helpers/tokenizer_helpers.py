"""A tokenizer of whole words."""

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(words: Iterable[str], unk_token: str, **special: str) -> PreTrainedTokenizerFast:
    """A token a word, numbered in their order."""
    level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unk_token))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, unk_token=unk_token, **special)
