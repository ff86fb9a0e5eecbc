"""GLUE: a pretrained encoder and a new head on one of its tasks, scored as the benchmark scores it.

Three sets: what is trained on; a share held out of it, on which learning rates and steps are chosen; and the
benchmark's own development (or labelled test) split, which is only ever scored. With `held_out=0` there is
no share held out and choices fall on the scored split itself, as in most papers: say so when you report.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nlr_lab.tasks.task import (
    AdapterSetup,
    Measure,
    Prepared,
    choose,
    commonest_share,
    fingerprint,
    hold_out,
    name_classes,
)
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_share

from .glue_files import GLUE, Rows, find_task, read_split
from .pretrained import FinetuneTask, Pretrained

if TYPE_CHECKING:
    from .sequences import TokenExamples


@dataclass(frozen=True, kw_only=True)
class GlueData:
    """Settings of a GLUE task: name, source and split."""

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
        check_choice("GLUE task", self.task, (*GLUE, "auto"))
        check_integer("max_length", self.max_length, minimum=4)
        check_share("held_out", self.held_out, below=0.9)
        if self.train_rows is not None:
            check_integer("train_rows", self.train_rows, minimum=2)
        check_choice("scored", self.scored, ("dev", "test"))
        check_choice("pad", self.pad, ("longest", "max_length"))

    @property
    def name(self) -> str:
        """The task: a key of `GLUE`.

        Raises:
            UserError: it is "auto", and the source does not tell.
        """
        return find_task(self.source) if self.task == "auto" else self.task


@dataclass(frozen=True, kw_only=True)
class GlueTask(FinetuneTask):
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
        """Return the task by its name, where it is "auto"."""
        return replace(self, glue=replace(self.glue, task=self.glue.name))

    def on_split(self, name: Any) -> "GlueTask":
        """Return the task with its final score on another labelled split, "dev" or "test"."""
        return replace(self, glue=replace(self.glue, scored=name))

    def prepare(self, progress: bool = True) -> Prepared:
        """Read, split and tokenize; nothing is cached.

        Raises:
            UserError: a file or the tokenizer cannot be used.
        """
        from nlr_lab.tasks.metrics import scores

        from .sequences import PadRight

        data, name = self.glue, self.glue.name
        info = GLUE[name]
        rows = read_split(name, data.source, "train")
        scored = read_split(name, data.source, data.scored)
        tokenizer = self.model.tokenizer()
        used = choose(len(rows.texts), data.train_rows, 1)
        rows = Rows([rows.texts[index] for index in used], rows.labels[used])
        kept, held = hold_out(len(rows.texts), data.held_out)
        if not kept:
            raise UserError(f"{info.folder} has {len(rows.texts)} training rows, too few to hold some out")
        whole = _tokenize(tokenizer, rows, data.max_length)
        test = _tokenize(tokenizer, scored, data.max_length).by_length()
        one_length = data.max_length if data.pad == "max_length" else None
        # What guessing the commonest class would score; of no use for a correlation.
        guess = {} if info.classes is None else {"commonest_class_share": commonest_share(scored.labels)}
        return Prepared(
            train=whole.select(kept),
            valid=whole.select(held).by_length() if held else test,
            test=test if held else None,
            tokenizer=tokenizer,
            lengths_vary=one_length is None,
            collate=PadRight(pad_id=tokenizer.pad_token_id, length=one_length),
            score=scores(info.metrics),
            fingerprint=fingerprint(*whole.ids, rows.labels, *test.ids, scored.labels, kept, data.max_length),
            facts={
                "task": info.folder,
                "rows": {"train": len(kept), "held out": len(held), data.scored: len(test)},
                "longest_rows_cut": sum(len(ids) == data.max_length for ids in (*whole.ids, *test.ids)),
                **guess,
            },
        )

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        """Return the pretrained encoder with a head drawn from the seed."""
        self.check_init(dense_init)
        info = GLUE[self.glue.name]
        model = self.model.text_classifier(info.labels, seed)
        if info.classes is not None:
            name_classes(model, info.classes)
        return model

    def build_on_meta(self) -> Any:
        """Return the same on the meta device."""
        return self.model.on_meta("text", GLUE[self.glue.name].labels)

    def adapter_setup(self, model: Any) -> AdapterSetup:
        """Return what adapters need to know."""
        return self.model.adapters(model, "SEQ_CLS")


def _tokenize(tokenizer: Any, rows: Rows, max_length: int) -> "TokenExamples":
    from .sequences import TokenExamples

    columns = [list(column) for column in zip(*rows.texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length)
    types = encoded.get("token_type_ids") if len(columns) > 1 else None
    return TokenExamples(
        [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]],
        rows.labels,
        None if types is None else [np.array(each, dtype=np.int8) for each in types],
    )
