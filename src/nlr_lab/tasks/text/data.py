"""Settings of a text: source, tokenizer, and sequences."""

from dataclasses import dataclass

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .corpus import Corpus

LEARNED = ("bpe", "wordpiece")
"""Tokenizers that are trained on the text itself."""


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Settings of a text: source, tokenizer, and sequences."""

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
    """Entries of the vocabulary that "bpe" and "wordpiece" learn."""
    sequence_length: int = 256
    """Tokens a sequence, T; the model predicts T - 1 of them."""
    eval_sequences: int = 256
    """Held-out sequences that are evaluated, the first ones; fewer where there are fewer."""
    cache_dir: str | None = None
    """Folder of cached tokens; None: $NLR_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        check_integer("sequence_length", self.sequence_length, minimum=2)
        check_integer("eval_sequences", self.eval_sequences, minimum=1)
        if self.max_bytes is not None:
            check_integer("max_bytes", self.max_bytes, minimum=1)
        if not isinstance(self.valid_fraction, int | float) or not 0 < self.valid_fraction < 0.5:
            raise UserError(f"valid_fraction must be above 0 and below 0.5, got {self.valid_fraction!r}")
        for name, hint in (
            ("source", "'stdlib', a file, a folder or a dataset's name"),
            ("valid_source", "a file, a folder or a dataset's name, or omit it"),
            ("tokenizer", "'bpe', a folder, a tokenizer.json or a hub name"),
        ):
            if getattr(self, name) == "":
                raise UserError(f"{name} is empty; give {hint}")
        if self.tokenizer in LEARNED:
            check_integer("vocab_size", self.vocab_size, minimum=257)  # every byte, and the end of text

    def corpus(self, source: str) -> Corpus:
        """Return the documents of one of the sources."""
        return Corpus(
            source=source,
            text_field=self.text_field,
            separator=self.document_separator,
            streaming=self.streaming,
            max_bytes=self.max_bytes,
        )
