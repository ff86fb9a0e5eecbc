"""Examples of tokens of different lengths, and their batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from .task import Batch

_IGNORED = -100


class TokenExamples(Dataset[dict[str, torch.Tensor]]):
    """Tokenized examples: item i is {"input_ids": (T_i,), "labels": () or (T_i,)}, and where there are two
    kinds of text {"token_type_ids": (T_i,)}.

    Args:
        ids: tokens of each example.
        labels: one for each example, or for each of its tokens (-100: not predicted).
        types: of each token, for encoders that tell a first text from a second; None: not told.
    """

    def __init__(
        self,
        ids: Sequence[np.ndarray],
        labels: Sequence[np.ndarray] | np.ndarray,
        types: Sequence[np.ndarray] | None = None,
    ) -> None:
        assert len(ids) == len(labels), "a label for each example"
        self.ids, self.labels, self.types = ids, labels, types

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        return [len(each) for each in self.ids]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = {"input_ids": torch.from_numpy(self.ids[index].astype(np.int64))}
        label = np.asarray(self.labels[index])
        item["labels"] = torch.from_numpy(label.astype(np.float32 if label.dtype.kind == "f" else np.int64))
        if self.types is not None:
            item["token_type_ids"] = torch.from_numpy(self.types[index].astype(np.int64))
        return item

    def select(self, chosen: Sequence[int]) -> "TokenExamples":
        """Some of the examples."""
        return TokenExamples(
            [self.ids[index] for index in chosen],
            [self.labels[index] for index in chosen],
            None if self.types is None else [self.types[index] for index in chosen],
        )

    def by_length(self) -> "TokenExamples":
        """The same examples, longest first: batches of equal lengths need little padding."""
        return self.select(sorted(range(len(self)), key=lambda index: -len(self.ids[index])))


@dataclass(frozen=True, kw_only=True)
class PadRight:
    """Items of TokenExamples -> a batch (B, T) with an attention mask; what is lacking is filled on the right."""

    pad_id: int
    length: int | None = None
    """T; None: that of the longest item."""
    multiple: int = 1
    """T is rounded up to a multiple of it."""

    def __call__(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        longest = self.length or max(len(item["input_ids"]) for item in items)
        width = -(-longest // self.multiple) * self.multiple
        filled = {"input_ids": self.pad_id, "token_type_ids": 0, "labels": _IGNORED}
        batch: Batch = {}
        for name in items[0]:
            values = [item[name] for item in items]
            if values[0].ndim == 0:
                batch[name] = torch.stack(values)
                continue
            batch[name] = torch.full((len(values), width), filled[name], dtype=torch.int64)
            for row, value in zip(batch[name], values, strict=True):
                row[: len(value)] = value
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch
