"""GLUE's files: tab-separated, never quoted, in the layouts they are handed round in.

Every layout is known by its columns' names, whatever their order; the official CoLA and the original STS
benchmark have no header. Fields are split at tabs alone: csv's default quoting would swallow the line ends
after every unbalanced quotation mark, of which MRPC and QQP have hundreds.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line


@dataclass(frozen=True, kw_only=True)
class GlueInfo:
    """Facts of one task."""

    folder: str
    """Its folder in GLUE's download."""
    texts: tuple[tuple[str, ...], ...]
    """Names of each text's column."""
    label: tuple[str, ...] = ("label",)
    """The names that the label's column goes by."""
    classes: tuple[str, ...] | None = ("0", "1")
    """Names of the labels 0, 1, ... in files; None: a number from 0 to 5."""
    metrics: tuple[str, ...]
    """The first is the one that choices are made by."""
    bare: tuple[str, ...] = ()
    """Columns of a layout without a header."""
    dev: tuple[str, ...] = ("dev.tsv",)
    """File names of the development split."""

    @property
    def labels(self) -> int:
        """Outputs of the head."""
        return 1 if self.classes is None else len(self.classes)

    def places(self, head: Sequence[str]) -> list[int] | None:
        """Return the places of the texts and the label in a header; None where one of them is not in it."""
        found = [
            next((head.index(each) for each in names if each in head), None) for names in (*self.texts, self.label)
        ]
        return None if None in found else found  # type: ignore[return-value]

    def read_label(self, text: str, where: str) -> float:
        """Return a label as a number.

        Raises:
            UserError: it is none of the task's.
        """
        text = text.strip()
        if self.classes is None:
            try:
                score = float(text)
            except ValueError:
                score = -1.0
            if not 0 <= score <= 5:
                raise UserError(f"{where}: the score {text!r} is no number from 0 to 5")
            return score
        if text in self.classes:
            return self.classes.index(text)
        if text in map(str, range(len(self.classes))):
            return int(text)
        unlabelled = " (the split has no labels)" if text in ("-1", "") else ""
        raise UserError(f"{where}: unknown label {text!r}{unlabelled}; {self.folder} has {', '.join(self.classes)}")

    def rows(self, texts: list[tuple[str, ...]], labels: list[float]) -> "Rows":
        """Put texts and labels together."""
        return Rows(texts, np.array(labels, dtype=np.float32 if self.classes is None else np.int64))

    def wrong_columns(self, where: str, head: Sequence[str]) -> UserError:
        """Return the error of a file or dataset that has other columns."""
        wanted = ", ".join("/".join(names) for names in (*self.texts, self.label))
        bare = f" (or, without a header, {len(self.bare)} columns: {' '.join(self.bare)})" if self.bare else ""
        found = ", ".join(name[:30] for name in head[:8]) + (", ..." if len(head) > 8 else "")
        return UserError(f"{where}: {self.folder} needs the columns {wanted}{bare}; line 1 has {found}")


_SENTENCES = (("sentence1", "#1 String"), ("sentence2", "#2 String"))
_ENTAILMENT = ("entailment", "not_entailment")

GLUE: dict[str, GlueInfo] = {
    "cola": GlueInfo(
        folder="CoLA",
        texts=(("sentence",),),
        metrics=("matthews", "accuracy"),
        bare=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueInfo(folder="SST-2", texts=(("sentence",),), metrics=("accuracy",)),
    "mrpc": GlueInfo(folder="MRPC", texts=_SENTENCES, label=("label", "Quality"), metrics=("accuracy", "f1")),
    "stsb": GlueInfo(
        folder="STS-B",
        texts=_SENTENCES,
        label=("score", "label"),
        classes=None,
        metrics=("pearson", "spearman"),
        bare=("genre", "filename", "year", "index", "score", "sentence1", "sentence2"),
    ),
    "qqp": GlueInfo(
        folder="QQP",
        texts=(("question1",), ("question2",)),
        label=("is_duplicate", "label"),
        metrics=("accuracy", "f1"),
    ),
    "mnli": GlueInfo(
        folder="MNLI",
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        classes=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        dev=("dev_matched.tsv", "dev.tsv"),
    ),
    "qnli": GlueInfo(folder="QNLI", texts=(("question",), ("sentence",)), classes=_ENTAILMENT, metrics=("accuracy",)),
    "rte": GlueInfo(folder="RTE", texts=_SENTENCES, classes=_ENTAILMENT, metrics=("accuracy",)),
    "wnli": GlueInfo(folder="WNLI", texts=_SENTENCES, metrics=("accuracy",)),
}

_ENOUGH = 1000  # lines that tell by their labels whose file it is

_FILES = {
    "train": ("train.tsv", "msr_paraphrase_train.txt", "sts-train.csv"),
    "dev": ("sts-dev.csv",),
    "test": ("test.tsv", "msr_paraphrase_test.txt", "sts-test.csv"),
}


@dataclass(frozen=True)
class Rows:
    """Labelled texts: `texts[i]` has one or two strings, `labels` are (N,) int64 or float32."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray


def find_task(source: str) -> str:
    """Return the task whose data lie in a source: a key of `GLUE`.

    A folder is known by its name, else by the columns and labels of its training file; of a folder that holds the
    folders of several tasks, and of a dataset, which has all, it is CoLA.

    Raises:
        UserError: there is no such folder, or it does not tell the task, or is of none.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        _check_dataset(source)
        return "cola"
    there = [each for each in (path / name for name in _FILES["train"]) if each.is_file()]
    if there and (named := _plain(path)) in GLUE:
        return named
    inside = sorted(name for each in path.iterdir() if each.is_dir() and (name := _plain(each)) in GLUE)
    if "cola" in inside:
        return "cola"
    found = inside or (_fitting(there[0]) if there else [])
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{source} may be {' or '.join(found)}; choose one, e.g. --glue.task {found[0]}")
    raise UserError(
        f"{source} holds no task of GLUE that is known by its name or columns; known are {', '.join(GLUE)}: give the "
        "folder of one, or name it (--glue.task)"
    )


def read_split(task: str, source: str, split: str) -> Rows:
    """Read one split of a task.

    Args:
        task: a key of `GLUE`.
        source: a folder (the task's own, or the one that all tasks' folders lie in), or a dataset's name.
        split: "train", "dev" or "test".

    Raises:
        UserError: no such file or dataset, the folder of another task, other columns than the task's, a row that
            does not fit (with its line), or a split without labels.
    """
    info, path = GLUE[task], Path(source).expanduser()
    if not path.is_dir():
        _check_dataset(source)
        return _from_hub(task, source, split)
    names = (*(info.dev if split == "dev" else ()), *_FILES[split])
    own = [each for each in sorted(path.iterdir()) if each.is_dir() and _plain(each) == task]
    for file in (folder / name for folder in (*own, path) for name in names):
        if file.is_file():
            if (other := _plain(file.parent)) in GLUE and other != task:
                raise UserError(
                    f"{source} is {GLUE[other].folder}'s folder, and the task is {info.folder}: choose --glue.task "
                    f"{other}, or give {info.folder}'s folder"
                )
            return read_tsv(file, task)
    raise UserError(f"no {split} split of {info.folder} in {source}: it has no {' or '.join(names)}")


def read_tsv(path: Path, task: str) -> Rows:
    """Read a file in any of the task's layouts.

    Raises:
        UserError: it is not UTF-8, empty, or has other columns or rows than the task.
    """
    return _parse(path, _lines(path), task)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: some texts hold other breaks
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _fitting(path: Path) -> list[str]:
    """Return the tasks that a file's columns and first labels fit; of these, those that read the most of its texts."""
    lines = _lines(path)[:_ENOUGH]
    fits = []
    for task in GLUE:
        with contextlib.suppress(UserError):
            _parse(path, lines, task)
            fits.append(task)
    most = max((len(GLUE[task].texts) for task in fits), default=0)
    return [task for task in fits if len(GLUE[task].texts) == most]


def _parse(path: Path, lines: Sequence[str], task: str) -> Rows:
    info = GLUE[task]
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} is empty")
    head = [name.strip() for name in rows[0][1]]
    places = info.places(head)
    if places is not None:
        rows = rows[1:]
    else:  # perhaps a layout without a header
        places = info.places(info.bare)
        if places is None or len(head) != len(info.bare):
            raise info.wrong_columns(str(path), head)
        try:
            info.read_label(head[places[-1]], "")
        except UserError:
            raise info.wrong_columns(str(path), head) from None
    texts, labels = [], []
    for number, fields in rows:
        if len(fields) != len(head):
            raise UserError(f"{path}, line {number}: {len(fields)} fields where the file has {len(head)} columns")
        *found, label = (fields[place] for place in places)
        texts.append(tuple(found))
        labels.append(info.read_label(label, f"{path}, line {number}"))
    if not texts:
        raise UserError(f"{path} has a header and no rows")
    return info.rows(texts, labels)


def _check_dataset(source: str) -> None:
    """Raise UserError where a source that is no folder cannot be a dataset's name."""
    if Path(source).expanduser().exists() or source.startswith((".", "/", "~")):
        raise UserError(f"{source} is no folder; give the folder of GLUE's files, or a dataset's name")


def _from_hub(task: str, source: str, split: str) -> Rows:
    from datasets import load_dataset

    info = GLUE[task]
    name = {"train": "train", "test": "test", "dev": "validation_matched" if task == "mnli" else "validation"}[split]
    try:
        data: Any = load_dataset(source, task, split=name)
    except Exception as error:  # the hub, the network and the builder each have errors of their own
        why = one_line(error, 200)
        raise UserError(
            f"cannot read {task} from the dataset {source!r} ({why}); give a folder with GLUE's files (--source)"
        ) from error
    places = info.places(list(data.column_names))
    if places is None:
        raise info.wrong_columns(f"{source}/{task}", list(data.column_names))
    *columns, labels = (data[data.column_names[place]] for place in places)
    texts = [tuple(map(str, row)) for row in zip(*columns, strict=True)]
    return info.rows(texts, [info.read_label(str(label), f"{source}/{task} {name}") for label in labels])


def _plain(folder: Path) -> str:
    """Return a folder's name as the keys of `GLUE` are written."""
    return folder.resolve().name.lower().replace("-", "").replace("_", "")
