"""Classification: a pretrained model with a new head, on a task of GLUE or on labelled images.

Three sets: what is trained on; a share held out of it, on which learning rates and steps are chosen; and the
benchmark's own development (or labelled test) split, which is only ever scored. With `held_out=0` there is no share
held out and choices fall on the scored split itself, as in most papers: say so when you report.

GLUE's files are tab-separated and never quoted. Every layout is known by its columns' names, whatever their order; the
official CoLA and the original STS benchmark have no header. Fields are split at tabs alone: csv's default quoting would
swallow the line ends after every unbalanced quotation mark, of which MRPC and QQP have hundreds.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.task import (
    ACCURACY,
    Batch,
    Measure,
    Prepared,
    choose,
    commonest_share,
    fingerprint,
    hold_out,
    name_classes,
    scores,
)
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_share, one_line

from .pretrained import FinetuneTask, Pretrained

if TYPE_CHECKING:
    from nlr_lab.tasks.images.examples import Pixels

    from .sequences import TokenExamples

_ENOUGH = 1000  # lines that tell by their labels whose file it is
_FILES = {
    "train": ("train.tsv", "msr_paraphrase_train.txt", "sts-train.csv"),
    "dev": ("dev_matched.tsv", "dev.tsv", "sts-dev.csv"),
    "test": ("test.tsv", "msr_paraphrase_test.txt", "sts-test.csv"),
}


@dataclass(frozen=True, kw_only=True)
class GlueInfo:
    """Facts of one task of GLUE."""

    folder: str
    """Its folder in GLUE's download."""
    texts: tuple[tuple[str, ...], ...]
    """Names that each text's column goes by."""
    label: tuple[str, ...] = ("label",)
    """The names that the label's column goes by."""
    classes: tuple[str, ...] | None = ("0", "1")
    """Names of the labels 0, 1, ... in files; None: a number from 0 to 5."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first is the one that choices are made by."""
    bare: tuple[str, ...] = ()
    """Columns of a layout without a header."""

    @property
    def labels(self) -> int:
        """Outputs of the head."""
        return 1 if self.classes is None else len(self.classes)

    def places(self, head: Sequence[str]) -> list[int] | None:
        """Return the places of the texts and the label in a header; None where one of them is not in it."""
        wanted = (*self.texts, self.label)
        found = [next((head.index(each) for each in names if each in head), -1) for names in wanted]
        return None if -1 in found else found

    def read_label(self, text: str, where: str) -> float:
        """Return a label as a number; raise UserError where it is none of the task's."""
        text = text.strip()
        if self.classes is None:
            with contextlib.suppress(ValueError):
                if 0 <= float(text) <= 5:
                    return float(text)
            raise UserError(f"{where}: the score {text!r} is no number from 0 to 5")
        numbers = [str(index) for index in range(len(self.classes))]
        if text in (*self.classes, *numbers):
            return (self.classes if text in self.classes else numbers).index(text)
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
_STS = ("genre", "filename", "year", "index", "score", "sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_THREE = ("entailment", "neutral", "contradiction")
_PAIRED, _QUESTIONS = (("sentence1", "premise"), ("sentence2", "hypothesis")), (("question1",), ("question2",))
_BOTH = ("accuracy", "f1")

GLUE: dict[str, GlueInfo] = {
    "cola": GlueInfo(
        folder="CoLA",
        texts=(("sentence",),),
        metrics=("matthews", "accuracy"),
        bare=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueInfo(folder="SST-2", texts=(("sentence",),)),
    "mrpc": GlueInfo(folder="MRPC", texts=_SENTENCES, label=("label", "Quality"), metrics=_BOTH),
    "stsb": GlueInfo(
        folder="STS-B",
        texts=_SENTENCES,
        label=("score", "label"),
        classes=None,
        metrics=("pearson", "spearman"),
        bare=_STS,
    ),
    "qqp": GlueInfo(folder="QQP", texts=_QUESTIONS, label=("is_duplicate", "label"), metrics=_BOTH),
    "mnli": GlueInfo(folder="MNLI", texts=_PAIRED, label=("gold_label", "label"), classes=_THREE),
    "qnli": GlueInfo(folder="QNLI", texts=(("question",), ("sentence",)), classes=_ENTAILMENT),
    "rte": GlueInfo(folder="RTE", texts=_SENTENCES, classes=_ENTAILMENT),
    "wnli": GlueInfo(folder="WNLI", texts=_SENTENCES),
}


@dataclass(frozen=True)
class Rows:
    """Labelled texts: `texts[i]` has one or two strings, `labels` are (N,) int64 or float32."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray


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
        """The task, a key of `GLUE`; raises UserError where it is "auto" and the source does not tell."""
        return find_task(self.source) if self.task == "auto" else self.task


@dataclass(frozen=True, kw_only=True)
class GlueTask(FinetuneTask):
    """A task of GLUE and the encoder that is tuned on it."""

    glue: GlueData
    """The data."""
    model: Pretrained
    """The encoder."""

    task_type = "SEQ_CLS"

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
            UserError: a file or the checkpoint cannot be used.
        """
        from .sequences import PadRight

        data, name = self.glue, self.glue.name
        info = GLUE[name]
        rows, scored = read_split(name, data.source, "train"), read_split(name, data.source, data.scored)
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

    def load_model(self, prepared: Any, seed: int) -> Any:
        """Return the pretrained encoder with a head drawn from the seed."""
        info = GLUE[self.glue.name]
        model = self.model.text_classifier(info.labels, seed)
        if info.classes is not None:
            name_classes(model, info.classes)
        return model

    def build_on_meta(self) -> Any:
        """Return the same on the meta device."""
        return self.model.on_meta("text", GLUE[self.glue.name].labels)


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
    found = sorted(name for each in path.iterdir() if each.is_dir() and (name := _plain(each)) in GLUE)
    if "cola" in found:
        return "cola"
    if there and not found:
        lines = _lines(there[0])[:_ENOUGH]
        for task in GLUE:
            with contextlib.suppress(UserError):
                _parse(there[0], lines, task)
                found.append(task)
        most = max((len(GLUE[task].texts) for task in found), default=0)  # the most of the file's texts
        found = [task for task in found if len(GLUE[task].texts) == most]
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
    own = [each for each in sorted(path.iterdir()) if each.is_dir() and _plain(each) == task]
    for file in (folder / name for folder in (*own, path) for name in _FILES[split]):
        if file.is_file():
            if (other := _plain(file.parent)) in GLUE and other != task:
                raise UserError(
                    f"{source} is {GLUE[other].folder}'s folder, and the task is {info.folder}: choose --glue.task "
                    f"{other}, or give {info.folder}'s folder"
                )
            return read_tsv(file, task)
    raise UserError(f"no {split} split of {info.folder} in {source}: it has no {' or '.join(_FILES[split])}")


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
        try:
            if places is None or len(head) != len(info.bare):
                raise info.wrong_columns(str(path), head)
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

    info, dev = GLUE[task], "validation_matched" if task == "mnli" else "validation"
    name = dev if split == "dev" else split
    try:
        data: Any = load_dataset(source, task, split=name)
    except Exception as error:  # the hub, the network and the builder each have errors of their own
        raise UserError(
            f"cannot read {task} from the dataset {source!r} ({one_line(error, 200)}); give a folder with GLUE's files "
            "(--source)"
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


@dataclass(frozen=True, kw_only=True)
class ImageData(ImageSource):
    """Settings of the images: source, split and random changes."""

    augment: Literal["none", "flip", "crop-flip"] = "none"
    """Mirror half of the training images; also move them by up to an eighth. The same in every arm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("augment", self.augment, ("none", "flip", "crop-flip"))


@dataclass(frozen=True, kw_only=True)
class ImageTask(FinetuneTask):
    """Images and the vision model that is tuned on them.

    Pixels go to the model's own size (bilinear), its number of channels, and its mean and standard deviation.
    """

    images: ImageData
    """The data."""
    model: Pretrained
    """The vision model."""

    @property
    def measure(self) -> Measure:
        """Accuracy."""
        return ACCURACY

    @property
    def sequence_length(self) -> int:
        """Patches of an image, the class token included."""
        config = self.model.config()
        patch = getattr(config, "patch_size", None)
        return 1 if patch is None else (getattr(config, "image_size", 224) // patch) ** 2 + 1

    def prepare(self, progress: bool = True) -> Prepared:
        """Find and split the images; they are decoded when they are used.

        Raises:
            UserError: the source or the checkpoint cannot be used, or a class has no image.
        """
        from nlr_lab.tasks.images.examples import TrainingImages, prepare_classification

        found, augment = self.images.find(), self.images.augment
        vary = None if augment == "none" else functools.partial(vary_image, crop=augment == "crop-flip")
        train = TrainingImages(found.train.select(found.kept), self.pixels(), vary)
        return prepare_classification(found, train, augment)

    def pixels(self) -> "Pixels":
        """Return how the checkpoint wants its images."""
        from transformers.image_processing_base import ImageProcessingMixin

        from nlr_lab.tasks.images.examples import Pixels

        config, default = self.model.config(), None
        channels = getattr(config, "num_channels", 3)
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):  # a checkpoint may say nothing
            values, _ = ImageProcessingMixin.get_image_processor_dict(self.model.where())
            default = tuple(values["image_mean"]), tuple(values["image_std"])
        mean, std = self.images.normalisation(channels, default)
        size: Any = self.images.size or getattr(config, "image_size", 224)
        return Pixels(size=size, channels=channels, mean=mean, std=std)

    def load_model(self, prepared: Any, seed: int) -> Any:
        """Return the pretrained model with a head drawn from the seed."""
        model = self.model.image_classifier(len(prepared.classes), seed)
        name_classes(model, prepared.classes)
        return model

    def build_on_meta(self) -> Any:
        """Return the same on the meta device, with ten classes where the data are not known yet."""
        return self.model.on_meta("image", len(self.images.classes) or 10)


def vary_image(picture: Any, pixels: "Pixels", generator: np.random.Generator, *, crop: bool) -> Batch:
    """Mirror an image by the toss of a coin; move it by up to an eighth (4 pixels of 32) where `crop` says so."""
    import torch

    numbers, size = pixels.numbers(pixels.fitted(picture)), pixels.size
    if generator.random() < 0.5:
        numbers = numbers[:, :, ::-1]
    if crop:
        edge = max(1, size // 8)
        top, left = generator.integers(0, 2 * edge + 1, 2)
        padded = np.pad(numbers, ((0, 0), (edge, edge), (edge, edge)))
        numbers = padded[:, top : top + size, left : left + size]
    return {"pixel_values": torch.from_numpy(np.ascontiguousarray(numbers))}
