"""Examples of tokens of different lengths, and their batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nlr_lab.tasks.task import Batch, Examples, Items
from nonlinear_lowrank.errors import UserError


class TokenExamples(Examples):
    """Tokenized examples: item i is {"input_ids": (T_i,), "labels": () or (T_i,)} and what else a token has.

    Args:
        ids: tokens of each example.
        labels: one for each example, or for each of its tokens (-100: not predicted).
        **more: likewise (T_i,): "token_type_ids", for encoders that tell a first text from a second, or "position_ids".
    """

    def __init__(self, ids: Sequence[Any], labels: Any, **more: Sequence[Any]) -> None:
        self.ids, self.labels, self.more = ids, labels, more
        self.lengths = [len(each) for each in ids]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Batch:
        label = np.asarray(self.labels[index])
        item = {"input_ids": self.ids[index].astype(np.int64)}
        item["labels"] = label.astype(np.float32 if label.dtype.kind == "f" else np.int64)
        item |= {name: column[index].astype(np.int64) for name, column in self.more.items()}
        return {name: torch.from_numpy(np.asarray(value)) for name, value in item.items()}

    def select(self, chosen: Sequence[int]) -> "TokenExamples":
        """Return some of the examples."""
        ids, labels = ([column[i] for i in chosen] for column in (self.ids, self.labels))
        return TokenExamples(ids, labels, **{name: [column[i] for i in chosen] for name, column in self.more.items()})

    def by_length(self) -> "TokenExamples":
        """Return the same examples, longest first: batches of equal lengths need little padding."""
        return self.select(sorted(range(len(self)), key=lambda index: -len(self.ids[index])))


def pack_examples(examples: TokenExamples, length: int, pack: Callable[..., Any]) -> TokenExamples:
    """Put several examples into a row of at most `length` tokens, end to end; no example is longer. Positions begin at
    0 with each example, by which transformers keeps them apart. `pack` is as trl's `pack_dataset`."""
    import datasets

    table = datasets.Dataset.from_dict({"input_ids": list(examples.ids), "labels": list(examples.labels)})
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = pack(table, length, strategy="bfd").with_format("numpy")
    finally:
        if shown:
            datasets.enable_progress_bars()
    ids, labels, positions = [], [], []
    for row in rows:
        ids.append(row["input_ids"])
        positions.append(np.concatenate([np.arange(each) for each in row["seq_lengths"]]))
        # An example's first token would be predicted from the one before.
        labels.append(np.where(positions[-1] == 0, -100, row["labels"]))
    return TokenExamples(ids, labels, position_ids=positions)


def check_packing(model: Any) -> None:
    """Raise UserError where a causal language model's logits of a packed example depend on the one before it."""
    device, training = next(model.parameters()).device, model.training
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, model.config.vocab_size, (1, n), generator=generator).to(device) for n in (5, 7))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
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
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        width = -(-(self.length or int(lengths.max())) // self.multiple) * self.multiple
        filling = {"input_ids": self.pad_id, "labels": -100}
        batch: Batch = {}
        for name in items[0]:
            rows = [item[name] for item in items]
            if rows[0].ndim:
                rows = [F.pad(row, (0, width - len(row)), value=filling.get(name, 0)) for row in rows]
            batch[name] = torch.stack(rows)
        if "position_ids" not in batch:
            batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch
