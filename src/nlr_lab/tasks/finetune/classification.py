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
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from nlr_lab.tasks.images.sources import ImageSource
from nlr_lab.tasks.task import (
    ACCURACY,
    Batch,
    Measure,
    Prepared,
    choose,
    commonest_share,
    fingerprint,
    hold_out,
    scores,
)
from nlr_lab.tasks.text.data import lines, load_rows
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_share

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


class GlueInfo(NamedTuple):
    """Facts of one task of GLUE."""

    folder: str
    """Its folder in GLUE's download."""
    texts: tuple[tuple[str, ...], ...]
    """Possible names of each text's column."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first is the one that choices are made by."""
    label: tuple[str, ...] = ("label",)
    """Possible names of the label's column."""
    classes: tuple[str, ...] | None = ("0", "1")
    """Names of the labels 0, 1, ... in files; None: a number from 0 to 5."""
    bare: tuple[str, ...] = ()
    """Columns of a layout without a header."""


_PAIR = (("sentence1", "#1 String", "premise"), ("sentence2", "#2 String", "hypothesis"))
_ENTAILMENT = ("entailment", "not_entailment")
_STS = ("genre", "filename", "year", "index", "score", "sentence1", "sentence2")

GLUE: dict[str, GlueInfo] = {
    "cola": GlueInfo("CoLA", (("sentence",),), ("matthews", "accuracy"), bare=("source", "label", "mark", "sentence")),
    "sst2": GlueInfo("SST-2", (("sentence",),)),
    "mrpc": GlueInfo("MRPC", _PAIR, ("accuracy", "f1"), ("label", "Quality")),
    "stsb": GlueInfo("STS-B", _PAIR, ("pearson", "spearman"), ("score", "label"), None, _STS),
    "qqp": GlueInfo("QQP", (("question1",), ("question2",)), ("accuracy", "f1"), ("is_duplicate", "label")),
    "mnli": GlueInfo("MNLI", _PAIR, label=("gold_label", "label"), classes=("entailment", "neutral", "contradiction")),
    "qnli": GlueInfo("QNLI", (("question",), ("sentence",)), classes=_ENTAILMENT),
    "rte": GlueInfo("RTE", _PAIR, classes=_ENTAILMENT),
    "wnli": GlueInfo("WNLI", _PAIR),
}


class Rows(NamedTuple):
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
    """Use this many of the training rows, a fixed random choice; None: all."""
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

    kind = "text"

    @property
    def meta_labels(self) -> int:
        return len(GLUE[self.glue.name].classes or (0,))

    @property
    def measure(self) -> Measure:
        return Measure(name=GLUE[self.glue.name].metrics[0], higher_is_better=True, unit="")

    @property
    def sequence_length(self) -> int:
        return self.glue.max_length

    def with_data_known(self) -> "GlueTask":
        return replace(self, glue=replace(self.glue, task=self.glue.name))

    def on_split(self, name: Any) -> "GlueTask":
        return replace(self, glue=replace(self.glue, scored=name))

    def prepare(self, progress: bool = True) -> Prepared:
        """Read, split and tokenize; nothing is cached. Raise UserError where files or the checkpoint cannot be used."""
        from .sequences import PadRight

        data, name, info = self.glue, self.glue.name, GLUE[self.glue.name]
        rows, scored = read_split(name, data.source, "train"), read_split(name, data.source, data.scored)
        tokenizer = self.model.tokenizer()
        used = choose(len(rows.texts), data.train_rows, 1)
        rows = Rows([rows.texts[index] for index in used], rows.labels[used])
        kept, held = hold_out(len(rows.texts), data.held_out)
        if not kept:
            raise UserError(f"{info.folder} has {len(rows.texts)} training rows, too few to hold some out")
        whole, test = (_tokenize(tokenizer, each, data.max_length) for each in (rows, scored))
        test, one_length = test.by_length(), data.max_length if data.pad == "max_length" else None
        # What guessing the commonest class would score; of no use for a correlation.
        guess = {} if info.classes is None else {"commonest_class_share": commonest_share(scored.labels)}
        return Prepared(
            train=whole.select(kept),
            valid=whole.select(held).by_length() if held else test,
            test=test if held else None,
            tokenizer=tokenizer,
            classes=info.classes or (),
            lengths_vary=one_length is None,
            collate=PadRight(pad_id=tokenizer.pad_token_id, length=one_length),
            score=scores(info.metrics),
            fingerprint=fingerprint(*whole.ids, rows.labels, *test.ids, scored.labels, kept, data.max_length),
            facts={
                "task": info.folder,
                "rows": {"train": len(kept), "held out": len(held), data.scored: len(test)},
                "rows_of_max_length": sum(len(ids) == data.max_length for ids in (*whole.ids, *test.ids)),
                **guess,
            },
        )


def _tokenize(tokenizer: Any, rows: Rows, max_length: int) -> "TokenExamples":
    from .sequences import TokenExamples

    columns = [list(column) for column in zip(*rows.texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length)
    names = ["input_ids", *(["token_type_ids"] if len(columns) > 1 and "token_type_ids" in encoded else [])]
    ids, *types = ([np.array(each, dtype=np.int32) for each in encoded[name]] for name in names)
    return TokenExamples(ids, rows.labels, **({"token_type_ids": types[0]} if types else {}))


def find_task(source: str) -> str:
    """Return the task whose data lie in a source: a key of `GLUE`; raise UserError where the source does not tell.

    A folder is known by its name, else by the columns and labels of its training file; of a folder that holds the
    folders of several tasks, and of a dataset, which has all, it is CoLA.
    """
    if (path := _folder(source)) is None:
        return "cola"
    file = next((each for each in (path / name for name in _FILES["train"]) if each.is_file()), None)
    found = sorted(GLUE.keys() & {_plain(each) for each in path.iterdir() if each.is_dir()})
    if file is not None and _plain(path) in GLUE:
        found = [_plain(path)]
    elif "cola" in found:
        found = ["cola"]
    elif file is not None and not found:
        for task in GLUE:
            with contextlib.suppress(UserError):
                read_tsv(file, task, _ENOUGH)
                found.append(task)
        most = max((len(GLUE[task].texts) for task in found), default=0)  # the most of the file's texts
        found = [task for task in found if len(GLUE[task].texts) == most]
    if len(found) != 1:
        what = f"may be {' or '.join(found)}" if found else "holds no task of GLUE with a known name or columns"
        raise UserError(f"{source} {what}; name the task, e.g. --glue.task {(*found, 'cola')[0]}")
    return found[0]


def read_split(task: str, source: str, split: str) -> Rows:
    """Read one split, "train", "dev" or "test", of a task of GLUE out of its folder, the folder above, or a dataset;
    raise UserError where there is none, or columns or a row (with its line) do not fit."""
    info = GLUE[task]
    if (path := _folder(source)) is None:
        name = ("validation_matched" if task == "mnli" else "validation") if split == "dev" else split
        where, columns = f"{source}/{task} {name}", load_rows(source, task, split=name).to_dict()
        rows = [(where, [str(each) for each in row]) for row in zip(*columns.values(), strict=True)]
        return _rows(info, where, list(columns), rows)
    own = [each for each in sorted(path.iterdir()) if each.is_dir() and _plain(each) == task]
    if not own and (other := _plain(path)) in GLUE.keys() - {task}:
        what = f"{source} is {GLUE[other].folder}'s folder, and the task is {info.folder}"
        raise UserError(f"{what}: choose --glue.task {other}, or give {info.folder}'s folder")
    for file in (folder / name for folder in (*own, path) for name in _FILES[split]):
        if file.is_file():
            return read_tsv(file, task)
    raise UserError(f"no {split} split of {info.folder} in {source}: it has no {' or '.join(_FILES[split])}")


def read_tsv(path: Path, task: str, most: int | None = None) -> Rows:
    """Read a file, or its first lines, in any of the task's layouts; raise UserError where it does not fit."""
    numbered = itertools.islice(lines(path), most)
    rows = [(f"{path}, line {n}", line.rstrip("\r\n").split("\t")) for n, line in numbered if line.strip()]
    if not rows:
        raise UserError(f"{path} is empty")
    info, head = GLUE[task], [name.strip() for name in rows[0][1]]
    if info.bare is _STS and len(head) >= len(_STS) and _places(info, head) is None:
        # Licences may follow the sentences, in some rows alone.
        return _rows(info, str(path), list(_STS), [(place, fields[: len(_STS)]) for place, fields in rows])
    if len(head) == len(info.bare) and _places(info, head) is None:
        return _rows(info, str(path), list(info.bare), rows)
    return _rows(info, str(path), head, rows[1:])


def _rows(info: GlueInfo, where: str, head: list[str], rows: list[tuple[str, list[str]]]) -> Rows:
    if (places := _places(info, head)) is None:
        wanted = ", ".join("/".join(names) for names in (*info.texts, info.label))
        raise UserError(f"{where}: {info.folder} needs the columns {wanted}; line 1 has {', '.join(head)[:200]}")
    known = {name: number for number, name in enumerate(info.classes or ())}
    known |= {str(number): number for number in known.values()}
    texts, labels = [], []
    for place, fields in rows:
        if len(fields) != len(head):
            raise UserError(f"{place}: {len(fields)} fields where the file has {len(head)} columns")
        *sentences, text = (fields[each] for each in places)
        label: float = -1
        with contextlib.suppress(ValueError):
            label = float(text) if info.classes is None else known.get(text.strip(), -1)
        if not 0 <= label <= 5:
            has = "numbers from 0 to 5" if info.classes is None else ", ".join(info.classes)
            raise UserError(f"{place}: unknown label {text!r}; {info.folder} has {has} (a split without labels has -1)")
        texts.append(tuple(sentences))
        labels.append(label)
    if not texts:
        raise UserError(f"{where} has a header and no rows")
    return Rows(texts, np.array(labels, dtype=np.float32 if info.classes is None else np.int64))


def _places(info: GlueInfo, head: list[str]) -> list[int] | None:
    """Return the places of the texts and the label in a header; None where one of them is not in it."""
    found = [next((head.index(each) for each in names if each in head), -1) for names in (*info.texts, info.label)]
    return None if -1 in found else found


def _folder(source: str) -> Path | None:
    """Return a source's folder, or None where it is a dataset's name; raise UserError where it can be neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or source.startswith((".", "/", "~")):
        raise UserError(f"{source} is not a folder; give the folder of GLUE's files, or a dataset's name")
    return None


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

    kind = "image"
    measure = ACCURACY

    @property
    def meta_labels(self) -> int:
        return len(self.images.classes) or 10

    @property
    def sequence_length(self) -> int:
        config = self.model.config()
        patch = getattr(config, "patch_size", None)
        return 1 if patch is None else (getattr(config, "image_size", 224) // patch) ** 2 + 1

    def prepare(self, progress: bool = True) -> Prepared:
        """Find and split the images, which are decoded when they are used; raise UserError where source or checkpoint
        cannot be used, or a class has no image."""
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


def vary_image(picture: Any, pixels: "Pixels", generator: np.random.Generator, *, crop: bool) -> Batch:
    """Mirror an image by the toss of a coin; move it by up to an eighth (4 pixels of 32) where `crop` says so."""
    import torch

    numbers, size = pixels.tensor(pixels.fitted(picture)).numpy(), pixels.size
    if generator.random() < 0.5:
        numbers = numbers[:, :, ::-1]
    if crop:
        edge = max(1, size // 8)
        top, left = generator.integers(0, 2 * edge + 1, 2)
        numbers = np.pad(numbers, ((0, 0), (edge, edge), (edge, edge)))[:, top : top + size, left : left + size]
    return {"pixel_values": torch.from_numpy(np.ascontiguousarray(numbers))}
