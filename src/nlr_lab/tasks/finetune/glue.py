"""GLUE: a pretrained encoder and a new head on one of its tasks, scored as the benchmark scores it.

Three sets: what is trained on; a share held out of it, on which rates and steps are chosen; and the
benchmark's own development (or labelled test) split, which is only ever scored. With `held_out=0` there is
no share held out and choices fall on the scored split itself, as in most papers: say so when you report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import nn

from nlr_lab.tasks.metrics import scores
from nlr_lab.tasks.task import AdapterSetup, Collate, Measure, Score, fingerprint, hold_out
from nonlinear_lowrank.errors import UserError

from .glue_files import GLUE, Rows, find_task, read_split
from .pretrained import Pretrained
from .sequences import PadRight, TokenExamples


@dataclass(frozen=True, kw_only=True)
class GlueData:
    """Which task, from where, and how it is split."""

    task: str
    """cola, mrpc, rte, stsb, sst2, qnli, qqp, mnli or wnli; auto: the one whose folder the source is, by its name or
    columns, and CoLA in a source that holds several."""
    source: str = "nyu-mll/glue"
    """A folder with GLUE's .tsv files (the task's own, or the one above), or a dataset's name."""
    max_length: int = 128
    """Tokens of an example; longer ones are cut at the end of the longer text."""
    held_out: float = 0.1
    """Share of the training rows that choices are made on; 0: choices are made on the scored split itself."""
    scored: Literal["dev", "test"] = "dev"
    """The split of the final score; test needs a file with labels (MRPC and STS-B have one)."""
    train_rows: int | None = None
    """Use so many of the training rows, a random choice that is always the same; None: all."""
    pad: Literal["longest", "max_length"] = "longest"
    """Length of a batch: its longest example's, or one length for all, which torch.compile wants."""

    def __post_init__(self) -> None:
        if self.task not in (*GLUE, "auto"):
            raise UserError(f"unknown GLUE task {self.task!r}; choose one of {', '.join((*GLUE, 'auto'))}")
        if not isinstance(self.max_length, int) or self.max_length < 4:
            raise UserError(f"max_length must be an integer of at least 4, got {self.max_length!r}")
        if not 0 <= self.held_out < 0.9:
            raise UserError(f"held_out must be at least 0 and below 0.9, got {self.held_out!r}")
        if self.train_rows is not None and self.train_rows < 2:
            raise UserError(f"train_rows must be at least 2, got {self.train_rows!r}")
        for name, choices in (("scored", ("dev", "test")), ("pad", ("longest", "max_length"))):
            if getattr(self, name) not in choices:
                raise UserError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")

    @property
    def name(self) -> str:
        """The task: a key of `GLUE`.

        Raises:
            UserError: it is "auto", and the source does not tell.
        """
        return find_task(self.source) if self.task == "auto" else self.task


@dataclass(frozen=True)
class PreparedGlue:
    """Tokenized splits."""

    train: TokenExamples
    valid: TokenExamples
    """Choices are made on it."""
    test: TokenExamples | None
    """Scored only; None: valid is the scored split."""
    tokenizer: Any
    collate: Collate
    score: Score
    fingerprint: str
    facts: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What the data are, for the record."""
        return {**self.facts, "fingerprint": self.fingerprint}


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """A task of GLUE and the encoder that is tuned on it."""

    glue: GlueData
    """The data."""
    model: Pretrained
    """The encoder."""

    @property
    def measure(self) -> Measure:
        """The task's first metric."""
        return Measure(name=GLUE[self.glue.name].metrics[0], higher_is_better=True, unit="")

    @property
    def sequence_length(self) -> int:
        """Tokens of an example, at most."""
        return self.glue.max_length

    def with_data_known(self) -> "GlueTask":
        """The task by its name, where it is "auto"."""
        return replace(self, glue=replace(self.glue, task=self.glue.name))

    def on_split(self, name: Literal["dev", "test"]) -> "GlueTask":
        """The task with its final score on another labelled split, "dev" or "test"."""
        return replace(self, glue=replace(self.glue, scored=name))

    def prepare(self, progress: bool = True) -> PreparedGlue:
        """Reads, splits and tokenizes; nothing is cached.

        Raises:
            UserError: a file or the tokenizer cannot be used.
        """
        data, name = self.glue, self.glue.name
        info = GLUE[name]
        rows = read_split(name, data.source, "train")
        scored = read_split(name, data.source, data.scored)
        tokenizer = self.model.tokenizer()
        if data.train_rows is not None and data.train_rows < len(rows.texts):
            chosen = np.random.default_rng(1).permutation(len(rows.texts))[: data.train_rows]
            rows = Rows([rows.texts[index] for index in sorted(chosen)], rows.labels[np.sort(chosen)])
        kept, held = hold_out(len(rows.texts), data.held_out)
        if not kept:
            raise UserError(f"{info.folder} has {len(rows.texts)} training rows, too few to hold some out")
        whole = _tokenize(tokenizer, rows, data.max_length)
        test = _tokenize(tokenizer, scored, data.max_length).by_length()
        cut = sum(len(ids) == data.max_length for ids in (*whole.ids, *test.ids))
        return PreparedGlue(
            train=whole.select(kept),
            valid=whole.select(held).by_length() if held else test,
            test=test if held else None,
            tokenizer=tokenizer,
            collate=PadRight(
                pad_id=tokenizer.pad_token_id, length=data.max_length if data.pad == "max_length" else None
            ),
            score=scores(info.metrics),
            fingerprint=fingerprint(*whole.ids, rows.labels, *test.ids, scored.labels, kept, data.max_length),
            facts={
                "task": info.folder,
                "rows": {"train": len(kept), "held out": len(held), data.scored: len(test)},
                "longest_rows_cut": cut,
                **_guess(info.classes, scored.labels),
            },
        )

    def build_model(self, prepared: Any, dense_init: str | None = None, *, seed: int = 0) -> nn.Module:
        """The pretrained encoder with a head drawn from the seed."""
        if dense_init is not None:
            raise UserError("init= is for models that are trained from scratch; this recipe tunes a pretrained one")
        info = GLUE[self.glue.name]
        model = self.model.text_classifier(info.labels, seed)
        if info.classes is not None:
            model.config.id2label = dict(enumerate(info.classes))
            model.config.label2id = {name: index for index, name in enumerate(info.classes)}
        return model

    def build_on_meta(self) -> nn.Module:
        """The same on the meta device."""
        return self.model.on_meta("text", GLUE[self.glue.name].labels)

    def adapter_setup(self, model: nn.Module) -> AdapterSetup:
        """What adapters need to know."""
        return self.model.adapters(model, "SEQ_CLS")


def _tokenize(tokenizer: Any, rows: Rows, max_length: int) -> TokenExamples:
    columns: Sequence[list[str]] = [list(column) for column in zip(*rows.texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length)
    types = encoded.get("token_type_ids") if len(columns) > 1 else None
    return TokenExamples(
        [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]],
        rows.labels,
        None if types is None else [np.array(each, dtype=np.int8) for each in types],
    )


def _guess(classes: Sequence[str] | None, labels: np.ndarray) -> dict[str, Any]:
    """What guessing the commonest class would score; of no use for a correlation."""
    if classes is None:
        return {}
    return {"commonest_class_share": round(float(np.bincount(labels).max() / len(labels)), 4)}
