"""Interface of a task and of its data for training and comparing.

A task is a frozen dataclass of settings that derives from `Task`. Importing it needs no torch: what it prepares and
builds is imported when it is asked for.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from nonlinear_lowrank.errors import UserError

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]
Items = Sequence[Mapping[str, "torch.Tensor"]]
Collate = Callable[[Items], Batch]
Score = Callable[[np.ndarray, np.ndarray], dict[str, float]]
"""(logits (N, C), labels (N,)) -> scores by name."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The number by which the runs of a task are judged."""

    name: str = "loss"
    """The name that the number has among the scores."""
    higher_is_better: bool = False
    unit: str = "nats per token"
    """Printed behind the number; empty for shares and correlations."""

    @property
    def is_loss(self) -> bool:
        """Return whether it is the evaluation loss, so that curves can be read for speed."""
        return self.name == "loss"

    def better(self, left: float, right: float) -> bool:
        """Return whether the left number is the better one."""
        return left > right if self.higher_is_better else left < right

    def best(self, values: Sequence[float]) -> float:
        """Return the best of several."""
        return max(values) if self.higher_is_better else min(values)


LOSS = Measure()
ACCURACY = Measure(name="accuracy", higher_is_better=True, unit="")


@dataclass(frozen=True, kw_only=True)
class AdapterSetup:
    """Facts of the task's pretrained model that adapters need."""

    head: tuple[str, ...] = ()
    """Modules that the checkpoint does not have: drawn anew, trained in every arm, saved with the adapter."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the modules that adapters go on unless the arm names its own; empty: peft's choice
    for the architecture."""
    task_type: str | None = None
    """peft's: "SEQ_CLS", "CAUSAL_LM", or None."""


class Examples:
    """Examples by index, each a dict of tensors; the defaults are those of examples of one shape that draw nothing."""

    counts_passes: bool = False
    """True where an index also tells the pass over the data: i + N * pass."""
    lengths: Sequence[int] | None = None
    """Tokens of each example, where they differ."""
    unreadable: int = 0
    """Examples that could not be read so far."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        raise NotImplementedError

    def seeded(self, seed: int) -> Self:
        """Return the same examples with the draws (masks, augmentation) of a run's seed."""
        return self


def stack(items: Items) -> Batch:
    """Stack items of equal shapes: (B, ...) each."""
    import torch

    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data that are ready for training; the defaults are those of a language model on packed text."""

    train: Examples
    valid: Examples
    """Held-out examples; choices are made on them."""
    test: Examples | None = None
    """Examples of the final score; None: `valid`."""
    plain: Examples | None = None
    """Training examples without augmentation, whose loss is reported too."""
    tokenizer: Any = None
    """Saved beside the model: anything with `save_pretrained`, or None."""
    fingerprint: str
    """Hash of what training sees."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Written to result.json."""
    vocab_size: int = 0
    """Rows of the embedding."""
    classes: tuple[str, ...] = ()
    """Names of the classes, by number."""
    valid_bytes_per_token: float | None = None
    """UTF-8 bytes of held-out text per predicted token; None: the data are no text."""
    predicts_next: bool = True
    """True where a token's label is the token after it, so that a sequence's first one is not predicted."""
    lengths_vary: bool = False
    """True where training meets batches of different lengths."""
    score: Score | None = None
    """None: the evaluation is a mean over tokens."""
    collate: Collate = stack
    """Items -> a batch for evaluation."""
    collate_training: Collate = None  # type: ignore[assignment]
    """Items -> a batch for training; None: as for evaluation."""
    check_batch: Callable[[int], None] = lambda size: None
    """Raises UserError where a process cannot train on so many examples at once."""

    def __post_init__(self) -> None:
        if self.collate_training is None:
            object.__setattr__(self, "collate_training", self.collate)

    def describe(self) -> dict[str, Any]:
        """Return what the data are, for the record; images that could not be read so far are counted."""
        splits = (self.train, self.valid, self.test)  # the plain ones count among those of training
        lost = sum(each.unreadable for each in dict.fromkeys(splits) if each is not None)
        return {**self.facts, "fingerprint": self.fingerprint, **({"unreadable_images": lost} if lost else {})}


class Task(Protocol):
    """A model and the data it is trained on."""

    pretrained: ClassVar[bool] = False
    """True where a checkpoint is tuned, false where a model is trained from scratch."""

    @property
    def measure(self) -> Measure:
        """The number by which runs are judged."""
        return LOSS

    @property
    def sequence_length(self) -> int:
        """Tokens (or patches) of an example, at most."""
        raise NotImplementedError

    def prepare(self, progress: bool = True) -> Prepared:
        """Return data that are ready for training.

        Raises:
            UserError: the data cannot be used; the message says why and what to change.
        """
        raise NotImplementedError

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        """Return the model without the arm's change, on the CPU: float32, or as its checkpoint says.

        Args:
            prepared: gives vocabulary, special tokens and classes.
            dense_init: overrides the backbone's; for models that are trained from scratch.
            seed: of every draw. What is no dense linear is the same for every dense_init.
        """
        raise NotImplementedError

    def build_on_meta(self) -> Any:
        """Return the same on the meta device: shapes and counts, no memory."""
        raise NotImplementedError

    def adapter_setup(self, model: Any) -> AdapterSetup | None:
        """Return what adapters need to know; None for a model that is trained from scratch."""
        return None

    def on_split(self, name: str) -> Self:
        """Return the task with its final score on another labelled split.

        Raises:
            UserError: it has one alone.
        """
        raise UserError("only a task of GLUE has more than one labelled split; omit --split")

    def with_data_known(self) -> Self:
        """Return the task with the settings written out that it reads off its data, as records have them.

        Raises:
            UserError: the data do not tell.
        """
        return self


def choose(count: int, most: int | None, seed: int) -> list[int]:
    """Choose at most so many of `count` examples at random, always the same ones; their places, ascending."""
    if most is None or most >= count:
        return list(range(count))
    return np.sort(np.random.default_rng(seed).permutation(count)[:most]).tolist()


def hold_out(count: int, share: float) -> tuple[list[int], list[int]]:
    """Split `count` examples into (kept, held out); the same ones in every run, at least one held out unless the
    share is 0."""
    if not share:
        return list(range(count)), []
    order = np.random.default_rng(0).permutation(count).tolist()
    held = max(1, round(share * count))
    return sorted(order[held:]), sorted(order[:held])


def fingerprint(*parts: Any) -> str:
    """Hash what training sees; arrays by their content, all else by its text."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def commonest_share(labels: np.ndarray) -> float:
    """Return the share of examples that guessing the commonest class would get right."""
    return round(float(np.bincount(labels).max() / len(labels)), 4)


def name_classes(model: Any, classes: Sequence[str]) -> None:
    """Write the names of the classes into a model's config."""
    model.config.id2label = dict(enumerate(classes))
    model.config.label2id = {name: index for index, name in enumerate(classes)}
