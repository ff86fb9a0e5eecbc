"""What training and comparing need to know of a task and of its prepared data.

A task is a frozen dataclass with

    prepare(progress) -> prepared          data that are ready for training
    build_model(prepared, dense_init, seed=0) -> nn.Module      float32 or as its checkpoint says, on the CPU
    build_on_meta() -> nn.Module           shapes and counts, no memory

and prepared data have `train` and `valid` (indexable, items are dicts of tensors), `fingerprint`,
`describe()` and `tokenizer` (anything with `save_pretrained`, or None). Whatever else they may have is read
through the functions of this file, whose defaults are those of a language model on packed text.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nonlinear_lowrank.errors import UserError

Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Mapping[str, torch.Tensor]]], Batch]
Score = Callable[[np.ndarray, np.ndarray], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What the runs of a task are judged by."""

    name: str = "loss"
    """Of the number, as its scores have it."""
    higher_is_better: bool = False
    unit: str = "nats per token"
    """Printed behind the number; empty for shares and correlations."""

    @property
    def is_loss(self) -> bool:
        """Whether it is the evaluation loss, so that curves can be read for speed."""
        return self.name == "loss"

    def better(self, left: float, right: float) -> bool:
        """Whether the left number is the better one."""
        return left > right if self.higher_is_better else left < right

    def best(self, values: Sequence[float]) -> float:
        """The best of several."""
        return max(values) if self.higher_is_better else min(values)


LOSS = Measure()


@dataclass(frozen=True, kw_only=True)
class AdapterSetup:
    """What a task knows of its pretrained model that a way of tuning it needs."""

    head: tuple[str, ...] = ()
    """Modules that the checkpoint does not have: drawn anew, trained in every arm, saved with the adapter."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the modules that adapters go on unless the arm names its own; empty: peft's choice
    for the architecture."""
    task_type: str | None = None
    """peft's: "SEQ_CLS", "CAUSAL_LM", or None."""


def adapter_setup(task: Any, model: Any) -> AdapterSetup | None:
    """What adapters need to know; None for a model that is trained from scratch."""
    known = getattr(task, "adapter_setup", None)
    return None if known is None else known(model)


def measure_of(task: Any) -> Measure:
    """What the task's runs are judged by; the loss where it says nothing."""
    return getattr(task, "measure", LOSS)


def score_of(prepared: Any) -> Score | None:
    """(logits (N, C), labels (N,)) -> scores by name; None where the evaluation is a mean over tokens."""
    return getattr(prepared, "score", None)


def scored_split(prepared: Any) -> Any:
    """The examples of the final score, apart from those that choices are made on; None where they are the same."""
    return getattr(prepared, "test", None)


def on_split(task: Any, name: str) -> Any:
    """The task, to be scored on another of its labelled splits.

    Raises:
        UserError: it has one alone, or none of that name.
    """
    other = getattr(task, "on_split", None)
    if other is None:
        raise UserError("only a task of GLUE has more than one labelled split; leave --split away")
    return other(name)


def with_data_known(task: Any) -> Any:
    """Return the task with the settings written out that it reads off its data, as records have them.

    Raises:
        UserError: the data do not tell.
    """
    known = getattr(task, "with_data_known", None)
    return task if known is None else known()


def training_split(prepared: Any, seed: int) -> Any:
    """The training examples; where they draw (masks, augmentation), with the draws of a run's seed."""
    seeded = getattr(prepared.train, "seeded", None)
    return prepared.train if seeded is None else seeded(seed)


def predicts_next(prepared: Any) -> bool:
    """Whether a token's label is the token after it, so that a sequence's first one is not predicted."""
    return getattr(prepared, "predicts_next", True)


def lengths_vary(prepared: Any) -> bool:
    """Whether training meets batches of different lengths: examples that are not cut or padded to one."""
    return hasattr(prepared.train, "lengths") and getattr(training_collate_of(prepared), "length", None) is None


def collate_of(prepared: Any) -> Collate:
    """Items -> a batch; items of one shape are stacked."""
    return getattr(prepared, "collate", None) or stack


def training_collate_of(prepared: Any) -> Collate:
    """The same for training, which may vary a batch where evaluation does not."""
    return getattr(prepared, "collate_training", None) or collate_of(prepared)


def check_batch(prepared: Any, size: int) -> None:
    """Raises UserError where a process cannot train on so many examples at once."""
    check = getattr(prepared, "check_batch", None)
    if check is not None:
        check(size)


def plain_split(prepared: Any) -> Any:
    """Training examples without their augmentation, whose loss is reported too; None where there are none."""
    return getattr(prepared, "plain", None)


def stack(items: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
    """Items of equal shapes -> (B, ...) each."""
    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


def tokens_per_example(task: Any) -> int:
    """Tokens (or patches) of an example, at most; the length of packed text."""
    own = getattr(task, "sequence_length", None)
    return task.text.sequence_length if own is None else own


def hold_out(count: int, share: float) -> tuple[list[int], list[int]]:
    """Splits `count` examples into (kept, held out); the same ones in every run, at least one held out.

    Args:
        count: examples.
        share: of them that is held out; 0 holds out none.
    """
    if not share:
        return list(range(count)), []
    order = np.random.default_rng(0).permutation(count).tolist()
    held = max(1, round(share * count))
    return sorted(order[held:]), sorted(order[:held])


def fingerprint(*parts: Any) -> str:
    """A hash of what training sees; arrays by their content, all else by its text."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]
