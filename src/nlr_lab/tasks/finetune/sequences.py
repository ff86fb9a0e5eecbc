"""Examples of tokens of different lengths, and their batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nlr_lab.tasks.task import Batch, Examples, Items
from nonlinear_lowrank.errors import UserError

_IGNORED = -100


class TokenExamples(Examples):
    """Tokenized examples: item i is {"input_ids": (T_i,), "labels": () or (T_i,)}, and where there are two
    kinds of text {"token_type_ids": (T_i,)}.

    Args:
        ids: tokens of each example.
        labels: one for each example, or for each of its tokens (-100: not predicted).
        types: of each token, for encoders that tell a first text from a second; None: not told.
    """

    def __init__(
        self, ids: Sequence[Any], labels: Sequence[Any] | np.ndarray, types: Sequence[Any] | None = None
    ) -> None:
        self.ids, self.labels, self.types = ids, labels, types

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """Tokens of each example."""
        return [len(each) for each in self.ids]

    def __getitem__(self, index: int) -> Batch:
        item = {"input_ids": torch.from_numpy(self.ids[index].astype(np.int64))}
        label = np.asarray(self.labels[index])
        item["labels"] = torch.from_numpy(label.astype(np.float32 if label.dtype.kind == "f" else np.int64))
        if self.types is not None:
            item["token_type_ids"] = torch.from_numpy(self.types[index].astype(np.int64))
        return item

    def select(self, chosen: Sequence[int]) -> "TokenExamples":
        """Return some of the examples."""
        types = None if self.types is None else [self.types[index] for index in chosen]
        return TokenExamples([self.ids[index] for index in chosen], [self.labels[index] for index in chosen], types)

    def by_length(self) -> "TokenExamples":
        """Return the same examples, longest first: batches of equal lengths need little padding."""
        return self.select(sorted(range(len(self)), key=lambda index: -len(self.ids[index])))


def check_packing(model: Any) -> None:
    """Raise UserError where a causal language model's logits of a packed example depend on the one before it."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, model.config.vocab_size, (1, n), generator=generator).to(device) for n in (5, 7))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = model(input_ids=second, use_cache=False).logits
            packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    except TypeError as error:
        raise UserError(f"{type(model).__name__} takes no positions; omit packing") from error
    finally:
        model.train(training)
    rounding = 0.05 if alone.dtype.itemsize == 2 else 1e-3
    if float((packed[:, 5:] - alone).float().abs().max()) > rounding * float(alone.float().std()):
        raise UserError(f"{type(model).__name__} does not keep packed examples apart by their positions; omit packing")


class PackedExamples(Examples):
    """Several examples a row, end to end: item i is {"input_ids", "labels", "position_ids"}, each (T_i,). Positions
    begin at 0 with each example, by which transformers keeps them apart.

    Args:
        examples: with a label for each token.
        length: tokens of a row, at most; no example is longer.
        pack: as trl's `pack_dataset`, which decides what goes together.
    """

    def __init__(self, examples: TokenExamples, length: int, pack: Callable[..., Any]) -> None:
        import datasets

        table = datasets.Dataset.from_dict({"input_ids": list(examples.ids), "labels": list(examples.labels)})
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            self._rows = pack(table, length, strategy="bfd").with_format("numpy")
        finally:
            if shown:
                datasets.enable_progress_bars()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """Tokens of each row."""
        return [int(np.sum(each)) for each in self._rows["seq_lengths"]]

    def __getitem__(self, index: int) -> Batch:
        row = self._rows[int(index)]
        ends = np.cumsum(row["seq_lengths"])
        labels = row["labels"].astype(np.int64)
        labels[[0, *ends[:-1]]] = _IGNORED  # an example's first token would be predicted from the one before
        positions = np.concatenate([np.arange(each) for each in row["seq_lengths"]])
        return {
            "input_ids": torch.from_numpy(row["input_ids"].astype(np.int64)),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }


@dataclass(frozen=True, kw_only=True)
class PadRight:
    """Items of TokenExamples -> a batch (B, T) with an attention mask; what is lacking is filled on the right. Packed
    rows have positions instead of the mask, 0 for each token of the filling: it sees itself alone."""

    pad_id: int
    length: int | None = None
    """T; None: that of the longest item."""
    multiple: int = 1
    """T is rounded up to a multiple of it."""

    def __call__(self, items: Items) -> Batch:
        longest = self.length or max(len(item["input_ids"]) for item in items)
        width = -(-longest // self.multiple) * self.multiple
        filled = {"input_ids": self.pad_id, "token_type_ids": 0, "position_ids": 0, "labels": _IGNORED}
        batch: Batch = {}
        for name in items[0]:
            values = [item[name] for item in items]
            if values[0].ndim == 0:
                batch[name] = torch.stack(values)
                continue
            batch[name] = torch.full((len(values), width), filled[name], dtype=torch.int64)
            for row, value in zip(batch[name], values, strict=True):
                row[: len(value)] = value
        if "position_ids" in batch:
            return batch
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch
