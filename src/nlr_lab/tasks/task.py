"""Interface of a task and of its data for training and comparing; splits, scores, caches and records of data.

A task is a frozen dataclass of settings. Importing it needs no torch: that waits until it prepares or builds.
"""

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from nonlinear_lowrank.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Batch = dict[str, "torch.Tensor"]
Items = Sequence[Mapping[str, "torch.Tensor"]]
Score = Callable[[np.ndarray, np.ndarray], dict[str, float]]
"""(logits (N, C), labels (N,)) -> scores by name."""

_NAMING = ("source", "valid_source", "tokenizer", "checkpoint", "init_from")  # ends of the settings that may name files
_OURS = ("digits", "digits-vit", "minilm", "smollm2", "bpe", "wordpiece", "none", "patches")
_MOST_BYTES = 64 << 30  # of a source that is hashed; reading more would delay the first step by minutes


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

    def best(self, values: Sequence[float]) -> float:
        """Return the best of several."""
        return max(values) if self.higher_is_better else min(values)


LOSS = Measure()
ACCURACY = Measure(name="accuracy", higher_is_better=True, unit="")


@dataclass(frozen=True, kw_only=True)
class AdapterSetup:
    """Facts of the task's pretrained model that adapters need."""

    head: tuple[str, ...] = ()
    """Modules that the checkpoint lacks: newly drawn, trained in every arm, saved with the adapter."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the modules that adapters go on unless the arm names its own; empty: peft's choice."""
    task_type: str | None = None
    """peft's: "SEQ_CLS", "CAUSAL_LM", or None."""
    frozen: bool = False
    """The weights are in a type that has no gradient: adapters and the head beside them are all that trains."""


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

    def drawn(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return what these indices draw from each source of a mixture; of one source alone nothing is counted."""
        return []


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
    """UTF-8 bytes of held-out text per predicted token; None: the data are not text."""
    predicts_next: bool = True
    """True where a token's label is the token after it, so that a sequence's first one is not predicted."""
    lengths_vary: bool = False
    """True where training meets batches of different lengths."""
    score: Score | None = None
    """None: the evaluation is a mean over tokens."""
    collate: Callable[[Items], Batch] = stack
    """Items -> a batch for evaluation."""
    collate_training: Callable[[Items], Batch] = None  # type: ignore[assignment]
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


class Task:
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
        """Return data that are ready for training; raise UserError where they cannot be used."""
        raise NotImplementedError

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        """Return the model without the arm's change, on the CPU: float32, or as its checkpoint says. Every draw is from
        the seed; all except dense linears is the same for every dense_init, which overrides the backbone's."""
        raise NotImplementedError

    def build_on_meta(self) -> Any:
        """Return the same on the meta device: shapes and counts, no memory."""
        raise NotImplementedError

    def adapter_setup(self, model: Any) -> AdapterSetup | None:
        """Return what adapters need to know; None for a model that is trained from scratch."""
        return None

    def on_split(self, name: str) -> Self:
        """Return the task with its final score on another labelled split; raise UserError where it has one alone."""
        raise UserError("only a task of GLUE has more than one labelled split; omit --split")

    def with_data_known(self) -> Self:
        """Return the task with the settings written out that it reads off its data, or raise UserError."""
        return self


def choose(count: int, most: int | None, seed: int) -> list[int]:
    """Choose at most so many of `count` examples at random, always the same ones; their places, ascending."""
    if most is None or most >= count:
        return list(range(count))
    return np.sort(np.random.default_rng(seed).permutation(count)[:most]).tolist()


def hold_out(count: int, share: float) -> tuple[list[int], list[int]]:
    """Split `count` examples into (kept, held out), always the same; one is held out at least unless the share is 0."""
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


def scores(names: Sequence[str]) -> Score:
    """Return a function (logits (N, C), labels (N,)) -> {name: score}; higher is better in all.

    Names are accuracy, f1 (class 1 against the rest) and matthews, of the largest logit by scikit-learn; pearson and
    spearman, of the only logit by scipy. Where a number is not defined, because every prediction is the same, it is 0.
    """
    from scipy import stats
    from sklearn import metrics

    kinds: dict[str, Any] = {
        "accuracy": metrics.accuracy_score,
        "f1": functools.partial(metrics.f1_score, zero_division=0.0),
        "matthews": metrics.matthews_corrcoef,
    }

    def score(name: str, logits: np.ndarray, labels: np.ndarray) -> float:
        if name in kinds:
            return float(kinds[name](labels, logits.argmax(-1)))
        predicted, correlation = logits[:, 0].astype(np.float64), getattr(stats, f"{name}r")
        if np.ptp(predicted) == 0 or np.ptp(labels) == 0:
            return 0.0
        return float(np.nan_to_num(correlation(predicted, labels.astype(np.float64)).statistic))

    return lambda logits, labels: {name: score(name, logits, labels) for name in names}


def scores_of_examples(logits: "torch.Tensor", labels: "torch.Tensor", score: Score) -> dict[str, float]:
    """Return the mean loss, in float64, and the scores of logits (N, C); the loss alone, not a number, where one is not
    finite. Labels (N,) are floating for a regression; -100 marks an example that cannot be read, which is skipped.

    Raises:
        UserError: no example can be read.
    """
    import torch.nn.functional as F

    predicted, regression = logits.double(), labels.is_floating_point()
    if not regression:
        kept = labels != -100
        if not bool(kept.any()):
            raise UserError(f"none of the {len(labels)} images can be read any more; are their files still there?")
        predicted, labels = predicted[kept], labels[kept]
    if not bool(predicted.isfinite().all()):
        return {"loss": math.nan}
    loss = F.mse_loss(predicted.squeeze(-1), labels.double()) if regression else F.cross_entropy(predicted, labels)
    return {"loss": float(loss), **score(predicted.numpy().astype(np.float32), labels.numpy())}


def cache_folder(given: str | None = None) -> Path:
    """Return the folder of all caches: the given one, $NLR_CACHE, or the user's cache folder."""
    if given or os.environ.get("NLR_CACHE"):
        return Path(given or os.environ["NLR_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nonlinear-lowrank"


MOST_HASHED = 1 << 30
"""Bytes: a longer file of a cache is known by its size alone, since every start would wait for its hash."""


def cached(folder: Path, read: Callable[[Path], T | None], build: Callable[[Path], object]) -> T:
    """Return what `read` finds in a folder, built first if it is absent or not whole (`read` gives None, or raises what
    damaged files raise); several processes build it once. Raise UserError where the cache cannot be written."""
    from filelock import FileLock

    def found() -> T | None:
        try:
            return read(folder)
        except (OSError, ValueError, KeyError, TypeError, EOFError):  # among them UserError
            return None

    if (ready := found()) is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if (ready := found()) is None:
                    build(folder)
                    ready = read(folder)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write the cache {folder.parent} ({reason}); set cache_dir or NLR_CACHE") from error
    assert ready is not None
    return ready


def data_record(task: Any, fingerprint: str) -> dict[str, Any]:
    """Return what each of a task's settings names, file by file with sizes and hashes.

        {"fingerprint": ...,                                       of the data as trained on
         "sources": {"text.source": {"name": "corpus", "bytes": ..., "sha256": ...,
                                     "files": {"a.txt": {"bytes": ..., "sha256": ...}}},
                     "text.tokenizer": {"name": "bpe"}}}           embedded, learned, or by its name on the hub

    Paths are relative to what the setting names. The sha256 of a source is that of its files' names and hashes. The
    sources of a mixture have entries of their own: "text.source.0".
    """
    from nlr_lab.tasks.text.shards import mixture_of

    parts = {part: fields for part, fields in dataclasses.asdict(task).items() if isinstance(fields, dict)}
    named = {f"{part}.{name}": fields[name] for part, fields in parts.items() for name in _NAMING if fields.get(name)}
    if mixed := mixture_of(named.get("text.source", "")):
        del named["text.source"]
        named |= {f"text.source.{number}": name for number, (name, _) in enumerate(mixed)}
    sources = {name: _describe(name, each, fingerprint) for name, each in named.items()}
    return {"fingerprint": fingerprint, "sources": sources}


def changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each source and file that is not the same in two records of one task."""
    lines = []
    for name, former in before["sources"].items():
        present, source = now["sources"].get(name, {}), f"{name}: {former['name']}"
        old, new = former.get("files", {}), present.get("files", {})
        differing = [file for file in sorted(old.keys() | new.keys()) if old.get(file) != new.get(file)]
        for file in differing[:3]:
            how = "is new" if file not in old else "is missing" if file not in new else "has changed"
            lines.append(f"{source}, {file} {how}")
        if len(differing) > 3:
            lines.append(f"{source}, {len(differing) - 3:,} more files differ")
        if not differing and former != present:
            lines.append(f"{source} has changed")
    return lines


def _describe(setting: str, value: str, fingerprint: str) -> dict[str, Any]:
    from nlr_lab.tasks.text.data import Corpus, library_sources, visible_files
    from nlr_lab.tasks.text.shards import token_files

    path, library = Path(value).expanduser(), Path(os.__file__).parent
    if value == "stdlib":
        about = _hashed({os.path.relpath(file, library): file for file in library_sources()})
        del about["files"]
        return {"name": value, **about}
    if setting.startswith(("text.source", "text.valid_source")) and (tokens := token_files(value)) is not None:
        files = [*tokens, *(each for each in (file.with_suffix(".idx") for file in tokens) if each.is_file())]
        folder = os.path.commonpath([file.parent for file in files])
        return {"name": path.name, **_hashed({os.path.relpath(file, folder): file for file in files})}
    if value in _OURS or not path.exists():
        return {"name": value, **({} if value in _OURS else {"fingerprint": fingerprint})}
    if path.is_file():
        return {"name": path.name, **_hashed({path.name: path})}
    if (path / "recipe.json").is_file() and (path / "model").is_dir():
        path = path / "model"  # the part of a run folder that is read
    read = Corpus(source=value).files() if setting.startswith(("text.source", "text.valid_source")) else []
    return {"name": path.name, **_hashed({str(file.relative_to(path)): file for file in read or visible_files(path)})}


def _hashed(files: Mapping[str, Path]) -> dict[str, Any]:
    try:
        about = {name: file.stat() for name, file in files.items()}
        total = sum(each.st_size for each in about.values())
        hashes = {name: _sha256(files[name], each.st_mtime_ns) for name, each in about.items() if total <= _MOST_BYTES}
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    entries = {name: {"bytes": each.st_size, "sha256": hashes.get(name)} for name, each in about.items()}
    whole = hashlib.sha256("".join(f"{name}\n{content}\n" for name, content in hashes.items()).encode()).hexdigest()
    return {"bytes": total, "sha256": whole if hashes else None, "files": entries}


@functools.lru_cache(maxsize=1 << 16)
def _sha256(file: Path, modified: int) -> str:
    """Return the hash of a file's content; the runs of a comparison share one reading."""
    from nonlinear_lowrank.hub.storage import hash_file

    return hash_file(file)
