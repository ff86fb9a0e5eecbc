"""Perplexity and bits per byte of a text.

Bits per byte compare models with different tokenizers; perplexity does not. Both follow from the same mean
loss L in nats a token: perplexity = exp(L), bits per byte = L / ln 2 * tokens / bytes, bytes counted in UTF-8.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nonlinear_lowrank.errors import UserError

from .batches import check_batch


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Perplexity and bits per byte of a text."""

    loss: float
    """Mean loss in nats over the predicted tokens."""
    tokens: int
    """Predicted tokens."""
    bytes_per_token: float | None
    """UTF-8 bytes of text that a token stands for, on average; None: the tokens are no text."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """loss / ln 2 / bytes_per_token."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token

    def to_json(self) -> dict[str, float | None]:
        """Everything, the derived numbers included."""
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}

    def __str__(self) -> str:
        if self.bytes_per_token is None:
            return f"perplexity {self.perplexity:.3f}   loss {self.loss:.4f} nats a token over {self.tokens:,} tokens"
        return (
            f"perplexity {self.perplexity:.3f}   bits per byte {self.bits_per_byte:.4f}   "
            f"loss {self.loss:.4f} nats a token over {self.tokens:,} tokens ({self.bytes_per_token:.2f} bytes each)"
        )


def score_sequences(
    model: PreTrainedModel, sequences: Dataset[Any], *, bytes_per_token: float | None, batch_size: int = 16
) -> TextScore:
    """Score packed sequences, each on its own: the first token of each is context and not predicted.

    Args:
        model: a causal language model; left in evaluation mode.
        sequences: items with "input_ids" and "labels" (T,), as `nlr_lab.tasks.text` packs them; a label of -100 is
            not counted.
        bytes_per_token: of the same text; None: of image tokens.
        batch_size: sequences per forward pass; the result does not depend on it.

    Raises:
        UserError: a batch takes more memory than is free, or no token is predicted.
    """
    items = [sequences[index] for index in range(len(sequences))]  # type: ignore[arg-type]
    loss, count = _mean_loss(model, [(item["input_ids"], item["labels"]) for item in items], batch_size)
    return TextScore(loss=loss, tokens=count, bytes_per_token=bytes_per_token)


def score_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    *,
    sequence_length: int,
    separator: str | None = None,
    batch_size: int = 16,
) -> TextScore:
    """Score whole texts: every token but the very first is predicted exactly once.

    Windows of `sequence_length` tokens overlap by one, so that the last token of one is the context of the
    next. The separator after a document is predicted as any token; it has no bytes.

    Args:
        model: a causal language model; left in evaluation mode.
        tokenizer: the one it was trained with.
        documents: texts, joined in this order.
        sequence_length: T, tokens per window; the model's training length.
        separator: token text put after each document, as in training.
        batch_size: windows per forward pass; the result does not depend on it.

    Raises:
        UserError: the texts come to fewer than two tokens, or hold a token that the model has no embedding for, or a
            batch takes more memory than is free.
    """
    ids: list[int] = []
    size = 0
    end = [] if separator is None else tokenizer(separator, add_special_tokens=False)["input_ids"]
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"] + end
        size += len(document.encode("utf-8"))
    if len(ids) < 2 or size == 0:
        raise UserError(f"the text comes to {len(ids)} tokens; at least 2 are needed")
    embeddings: Any = model.get_input_embeddings()
    if max(ids) >= embeddings.num_embeddings:
        raise UserError(
            f"the tokenizer gives token {max(ids)}, the model has {embeddings.num_embeddings} embeddings; "
            "they do not fit"
        )
    tokens = torch.tensor(ids)
    windows = [tokens[start : start + sequence_length] for start in range(0, len(ids) - 1, sequence_length - 1)]
    loss, count = _mean_loss(model, [(window, window) for window in windows], batch_size)
    return TextScore(loss=loss, tokens=count, bytes_per_token=size / count)


def _mean_loss(
    model: PreTrainedModel, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], batch_size: int
) -> tuple[float, int]:
    """Mean loss in nats and number of predicted tokens, over rows of (input_ids, labels) (T,)."""
    if rows:
        check_batch(model, min(batch_size, len(rows)), len(rows[0][0]))
    model.eval()
    total, count = 0.0, 0
    for batch in _batches(rows, batch_size):
        input_ids = torch.stack([row[0] for row in batch]).to(model.device)
        labels_BT = torch.stack([row[1] for row in batch])[:, 1:].to(model.device)
        with torch.inference_mode():
            logits_BTV = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
            # Summed in float32: bfloat16 has three digits, and a text has millions of tokens.
            loss = F.cross_entropy(
                logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=-100, reduction="sum"
            )
        total += float(loss)
        count += int((labels_BT != -100).sum())
    if count == 0:
        raise UserError("there is no token to predict in the text")
    return total / count, count


def _batches(rows: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yield rows of equal length together, in order: the last window of a text is shorter."""
    for _, equal in itertools.groupby(rows, key=lambda row: len(row[0])):
        alike = list(equal)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))
