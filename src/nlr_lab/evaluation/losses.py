"""Losses of texts, and of the held-out data of a task; each batch is checked to fit memory before it is run.

Bits per byte compare models with different tokenizers; perplexity does not. Both follow from the same mean
loss L in nats a token: perplexity = exp(L), bits per byte = L / ln 2 * tokens / bytes, bytes counted in UTF-8.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nlr_lab.runtime.bounds import RESERVE, free_memory
from nlr_lab.tasks.task import Batch, scores_of_examples, stack
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.hub.loading import check_weights, is_adapter, put_adapter


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Perplexity and bits per byte of a text."""

    loss: float
    """Mean loss in nats over the predicted tokens."""
    tokens: int
    """Predicted tokens."""
    bytes_per_token: float | None
    """UTF-8 bytes of text that a token stands for, on average; None: the tokens are not text."""

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
        text = f"loss {self.loss:.4f} nats a token over {self.tokens:,} tokens"
        if self.bytes_per_token is not None:
            text = f"bits per byte {self.bits_per_byte:.4f}   {text} ({self.bytes_per_token:.2f} bytes each)"
        return f"perplexity {self.perplexity:.3f}   {text}"


@torch.no_grad()
def score_sequences(
    model: PreTrainedModel, sequences: Dataset[Any], *, bytes_per_token: float | None, batch_size: int = 16
) -> TextScore:
    """Score packed sequences, items with "input_ids" and "labels" (T,), each on its own: the first token of each is
    context and not predicted, nor is a label of -100. `bytes_per_token` is of the same text; None: of image tokens. The
    result does not depend on the batch size. Raise UserError where a batch takes more memory than is free, no token is
    predicted, or the loss is not finite."""
    items = [sequences[index] for index in range(len(sequences))]  # type: ignore[arg-type]
    loss, count = _score_tokens(model, items, batch_size)
    return TextScore(loss=loss, tokens=count, bytes_per_token=bytes_per_token)


@torch.no_grad()
def score_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    *,
    sequence_length: int,
    separator: str | None = None,
    batch_size: int = 16,
) -> TextScore:
    """Score whole texts, joined in this order: every token but the very first is predicted exactly once.

    Windows of `sequence_length` tokens overlap by one, so that the last token of one is the context of the next. The
    separator, put after each document as in training, is predicted as any token; it has no bytes. The result does not
    depend on the batch size. Raise UserError where the texts come to fewer than two tokens, or hold a token that the
    model has no embedding for, a batch takes more memory than is free, or the loss is not finite."""
    ids: list[int] = []
    size = 0
    end = [] if separator is None else tokenizer(separator, add_special_tokens=False)["input_ids"]
    for document in documents:
        # As in training, what looks like a special token is text.
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        ids += tokenizer(document, **options)["input_ids"] + end
        size += len(document.encode("utf-8"))
    if len(ids) < 2 or size == 0:
        raise UserError(f"the text comes to {len(ids)} tokens; give one of at least 2")
    embeddings: Any = model.get_input_embeddings()
    if max(ids) >= embeddings.num_embeddings:
        raise UserError(
            f"the tokenizer gives token {max(ids)}, the model has {embeddings.num_embeddings} embeddings; "
            "they do not fit"
        )
    tokens = torch.tensor(ids)
    windows = [tokens[start : start + sequence_length] for start in range(0, len(ids) - 1, sequence_length - 1)]
    loss, count = _score_tokens(model, [{"input_ids": each, "labels": each} for each in windows], batch_size)
    return TextScore(loss=loss, tokens=count, bytes_per_token=size / count)


def _score_tokens(model: Any, items: Sequence[Batch], batch_size: int) -> tuple[float, int]:
    check_batch(model.eval(), min(batch_size, len(items)), len(items[0]["input_ids"]))
    # The last window of a text is shorter, and a batch of its own.
    alike = [list(group) for _, group in itertools.groupby(items, key=lambda item: len(item["input_ids"]))]
    batches = (stack(group[at : at + batch_size]) for group in alike for at in range(0, len(group), batch_size))
    return _mean_loss(_outputs(model, batches, use_cache=False), shifted=True)


def _outputs(model: Any, batches: Iterable[Batch], **options: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits in float32 and labels: bfloat16 has three digits, and a text has millions of tokens."""
    for batch in batches:
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        labels = inputs.pop("labels")
        yield model(**inputs, **options).logits.float(), labels


def _mean_loss(outputs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, shifted: bool) -> tuple[float, int]:
    """Return the mean loss in nats, and the number of predicted tokens; `shifted` where a label is the next token."""
    total, count = 0.0, 0
    for logits, labels in outputs:
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    if count == 0:
        raise UserError("there is no token to predict in the text")
    return _finite(total) / count, count


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise UserError("the loss is not a finite number: the model is broken; nlr verify checks its weights")
    return loss


def score_saved(
    task: Any,
    folder: Path,
    *,
    base: str | None = None,
    split: str | None = None,
    fingerprint: str | None = None,
    device: str = "cpu",
    batch_size: int = 16,
) -> dict[str, float]:
    """Loss and scores of a saved model or adapter on the held-out data of the task, a recipe's, that it was made for.

    An adapter goes on the pretrained model that the task names, or on `base`, with its new head. `split` is "dev" or
    "test" of GLUE's tasks; None: what the run was scored on, whose `fingerprint` is checked. Raise UserError where data
    or model cannot be used."""
    adapter = is_adapter(folder)
    if adapter:
        check_weights(folder)
    if base is not None:
        if not adapter:
            raise UserError(f"--base is for adapters; {folder} holds a whole model")
        task = replace(task, model=replace(task.model, checkpoint=base))
    if split is not None:
        task = task.on_split(split)
    prepared = task.prepare()
    if split is None:
        check_data(prepared, fingerprint)
    return score_held_out(open_saved(task, prepared, folder).to(device), prepared, batch_size=batch_size)


def check_data(prepared: Any, fingerprint: str | None, others: str = "") -> None:
    """Raise UserError where data are not those of the run with this fingerprint (None: not known); `others` names
    alternatives to restoring them."""
    if fingerprint not in (None, prepared.fingerprint):
        raise UserError(f"the data are no longer those that the run was trained on; restore the former ones{others}")


def open_saved(task: Any, prepared: Any, folder: Path) -> Any:
    """Load a saved model, or an adapter onto the pretrained model of the task, a recipe's, that it was made for."""
    if is_adapter(folder):
        return put_adapter(task.build_model(prepared), folder, base=task.model.checkpoint)
    return load_model(folder)


@torch.no_grad()
def score_held_out(model: Any, prepared: Any, *, batch_size: int = 16) -> dict[str, float]:
    """Loss and scores on the examples that the runs of a task are judged by (`prepared`, see `tasks.task`). They do not
    depend on the batch size, except for rounding. Raise UserError where the loss is not finite, or a batch takes more
    memory than is free."""
    examples = prepared.test or prepared.valid
    places = range(len(examples))
    check_batch(model.eval(), min(batch_size, len(examples)), _tokens(model, examples))
    parts = (places[start : start + batch_size] for start in places[::batch_size])
    outputs = _outputs(model, (prepared.collate([examples[index] for index in part]) for part in parts))
    if prepared.score is None:
        numbers = {"loss": _mean_loss(outputs, shifted=prepared.predicts_next)[0]}
    else:
        logits, labels = (torch.cat(each).cpu() for each in zip(*outputs, strict=True))
        numbers = scores_of_examples(logits, labels, prepared.score)
    _finite(numbers["loss"])
    return numbers


def _tokens(model: Any, examples: Any) -> int:
    """Tokens of the longest example, or patches of an image where the model's layers see all of them."""
    if examples.lengths is not None:
        return int(max(examples.lengths))
    if "input_ids" in (first := examples[0]):
        return len(first["input_ids"])
    patch = getattr(model.config, "patch_size", None)
    if not isinstance(patch, int) or not hasattr(model.config, "num_attention_heads"):
        return 0
    return int(first["pixel_values"].shape[-1] // patch) ** 2


def check_batch(model: Any, rows: int, tokens: int, *, beams: int = 0) -> None:
    """Raise UserError where a batch takes more memory than is free; a single row is never refused.

    Counted is the least that `rows` of `tokens` (patches of an image) take: the widest activation twice, before and
    after what follows it (of a language model, logits and their softmax). Where text is generated by `beams` of each
    row, logits are those of the last token alone, and the keys and values of all layers are counted."""
    head = model.get_output_embeddings() if beams else None
    numbers = 2 * max((_width(module) for module in model.modules() if module is not head), default=0)
    if beams:
        numbers += _cached(model.config.get_text_config())
    each, free, device = tokens * max(1, beams) * numbers * model.dtype.itemsize, free_memory() - RESERVE, model.device
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused - RESERVE
    if rows > 1 and rows * each > free:
        raise UserError(
            f"a batch of {rows:,} rows of {tokens:,} tokens takes at least {rows * each / 1e9:,.1f} GB of memory, of "
            f"which {max(0, free) / 1e9:,.1f} GB are free; lower the batch size (--batch-size) to at most "
            f"{max(1, free // each):,}"
        )


def _width(module: Any) -> int:
    """Outputs of a linear, also of a quantized one; 0 of any other module."""
    width = getattr(module, "out_features", getattr(module, "nf", 0))  # GPT-2's Conv1D has nf
    return width if isinstance(width, int) else 0


def _cached(config: Any) -> int:
    """Numbers that generation keeps of a token, where the model's attention is of the usual kind."""
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        return 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * width)
