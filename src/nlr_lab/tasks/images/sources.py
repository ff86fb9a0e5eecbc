"""Labelled images out of scikit-learn, .npz files, folders and `datasets`; none of it needs torchvision.

| source                     | form                                                                              |
|----------------------------|-----------------------------------------------------------------------------------|
| "digits"                   | scikit-learn's 1,797 digits, 8 x 8, embedded                                      |
| a .npz file, also .npz.xz  | x_train, y_train, x_test, y_test; or the same as encoded files: train_blob,       |
|                            | train_off, train_y, test_...; or images, labels                                   |
| a folder                   | train/<class>/*.png and test/, val/, valid/ or dev/ beside it; or <class>/*.png   |
| a dataset's name           | any with an image and a label column                                              |

A source without a test split gives a fifth of its images, always the same ones.
"""

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nlr_lab.runtime.bounds import eight_bits, open_image, read_arrays
from nlr_lab.tasks.task import choose, hold_out
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_share, one_line

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_HELD_OUT = ("test", "val", "validation", "valid", "dev")  # folders beside train; the first of them that is there
_MOST_CLASSES = 1_000_000  # a label above is an identity or a time, and every number below it would be a class


@dataclass(frozen=True)
class Images:
    """Labelled images that are read one at a time."""

    labels: np.ndarray
    """(N,) int64."""
    read: Callable[[int], Any]
    """Index -> a PIL image of 8 bits a channel, or an array (H, W) or (H, W, C) uint8."""

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Images":
        """Return some of the images."""
        places = np.asarray(chosen, dtype=np.int64)
        return Images(self.labels[places], lambda index: self.read(int(places[index])))

    def of_classes(self, classes: tuple[int, ...]) -> "Images":
        """Return the images of some classes, renumbered in that order."""
        chosen = self.select(np.flatnonzero(np.isin(self.labels, classes)))
        return Images(np.array([classes.index(label) for label in chosen.labels], dtype=np.int64), chosen.read)

    def first_readable(self) -> Any:
        """Return the first image that can be read, of 8 bits a channel; None where there is no image. Raise UserError
        where none can be read."""
        reasons = []
        for index in range(len(self)):
            try:
                return eight_bits(self.read(index))
            except UserError as error:
                reasons.append(error)
        if reasons:
            raise UserError(f"none of the {len(self)} images can be read ({reasons[0]})")
        return None


class ImageSplits(NamedTuple):
    """The images of a source; `kept` and `held` are the indices of `train` to train on and to choose on."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    kept: Sequence[int] = ()
    held: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Settings of labelled images: source and split."""

    source: str = "digits"
    """"digits" (scikit-learn's), a .npz file (also .npz.xz), a folder of classes, or a dataset's name."""
    classes: tuple[int, ...] = ()
    """Only these classes, renumbered from 0; empty: all."""
    held_out: float = 0.1
    """Share of the training images that choices are made on; 0: choices are made on the test split itself."""
    train_rows: int | None = None
    """Use this many of the training images, a fixed random choice; None: all."""
    test_rows: int | None = None
    """Score on this many test images, chosen likewise; None: all."""
    size: int | None = None
    """Pixels of a side; None: the model's."""
    mean: tuple[float, ...] = ()
    """Mean of the pixels (0 to 1), by channel; empty: the checkpoint's, else 0.5."""
    std: tuple[float, ...] = ()
    """Likewise."""

    def __post_init__(self) -> None:
        for name in ("classes", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_share("held_out", self.held_out, below=0.9)
        for name, least in (("train_rows", 2), ("test_rows", 1), ("size", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=least)
        if len(self.classes) == 1 or len(set(self.classes)) < len(self.classes) or min(self.classes, default=0) < 0:
            raise UserError("classes must be at least two different numbers, from 0")
        fits = len(self.mean) == len(self.std) and all(map(math.isfinite, (*self.mean, *self.std)))
        if not fits or min(self.std, default=1) <= 0:
            raise UserError(
                f"mean and std need one finite number each for every channel, std above 0, got {self.mean}, {self.std}"
            )

    def normalisation(self, channels: int, default: tuple[tuple[float, ...], tuple[float, ...]] | None = None) -> Any:
        """Return mean and standard deviation, one number for each channel; raise UserError where there are neither as
        many nor one for all."""
        mean, std = (self.mean, self.std) if self.mean else default or ((0.5,), (0.5,))
        if len(mean) == 1:
            mean, std = mean * channels, std * channels
        if len(mean) != channels:
            raise UserError(f"mean and std have {len(mean)} numbers, and the model takes {channels} channels")
        return mean, std

    def find(self) -> ImageSplits:
        """Return the images, split; they are decoded when they are used. Raise UserError where there is no such source
        or class, or a split has too few images or none that can be read."""
        train, test, classes, *_ = read_images(self.source)
        if len(classes) < 2:
            raise UserError(f"{self.source} has one class, {classes[0]!r}; give images of at least two")
        if self.classes:
            fix = f"--classes chooses among its {len(classes)}, without a value all"
            if max(self.classes) >= len(classes):
                raise UserError(f"there is no class {max(self.classes)} in {self.source}; {fix}")
            if len(self.classes) < len(classes) and self.source != "digits":  # a recipe's choice is of its own source
                warnings.warn(f"{len(self.classes)} classes of {self.source} are used; {fix}", stacklevel=2)
            train, test = train.of_classes(self.classes), test.of_classes(self.classes)
            classes = tuple(classes[number] for number in self.classes)
        train = train.select(choose(len(train), self.train_rows, 1))
        test = test.select(choose(len(test), self.test_rows, 2))
        kept, held = hold_out(len(train), self.held_out)
        if len(train) < 2 or not kept or not len(test):
            raise UserError(f"{self.source} has {len(train)} images to train on and {len(test)} to score: too few")
        for images in (train.select(kept), train.select(held), test):
            images.first_readable()
        return ImageSplits(train, test, classes, kept, held)


def read_images(source: str) -> ImageSplits:
    """Return the images of a source; raise UserError where it has no labelled images in a form of this file's table."""
    path = Path(source).expanduser()
    if source == "digits":
        images, labels = read_digits()
        return _split(Images(labels, lambda index: images[index]), tuple(map(str, range(10))))
    if path.is_file():
        return _read_npz(path)
    if path.is_dir():
        return _read_folder(path)
    if path.suffix in (".npz", ".xz") or source.startswith((".", "/", "~")):
        raise UserError(f"there is no file or folder {source!r}; give a .npz file, a folder, or a dataset's name")
    return _read_dataset(source)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (N, 8, 8, 1) uint8 of 0 to 255, labels (N,) int64."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None], bunch.target.astype(np.int64)


def _split(images: Images, classes: tuple[str, ...]) -> ImageSplits:
    train, test = hold_out(len(images), 0.2)
    return ImageSplits(images.select(train), images.select(test), classes)


def _read_npz(path: Path) -> ImageSplits:
    arrays = read_arrays(path)
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        train, test = (_of_array(path, arrays, f"x_{side}", f"y_{side}") for side in ("train", "test"))
    elif {f"{side}_{part}" for side in ("train", "test") for part in ("blob", "off", "y")} <= arrays.keys():
        train, test = (_of_blob(path, arrays, side) for side in ("train", "test"))
    elif {"images", "labels"} <= arrays.keys():
        one = _of_array(path, arrays, "images", "labels")
        return _split(one, _numbers(one))
    else:
        raise UserError(
            f"{path} needs the arrays x_train, y_train, x_test, y_test (or images, labels); it has {', '.join(arrays)}"
        )
    return ImageSplits(train, test, _numbers(train, test))


def _of_array(path: Path, arrays: Mapping[str, np.ndarray], name: str, labelled: str) -> Images:
    images, labels = arrays[name], _check_labels(arrays[labelled], f"{path}: {labelled}")
    channels = {3: 1, 4: images.shape[-1]}.get(images.ndim) if images.size else None
    if images.dtype != np.uint8 or channels not in (1, 3, 4) or len(images) != len(labels):
        raise UserError(
            f"{path}: {name} must be (N, H, W) or (N, H, W, C) uint8 of 1, 3 or 4 channels with N labels, got "
            f"{images.shape} {images.dtype} with {len(labels)} labels"
        )
    return Images(labels, lambda index: images[index])


def _of_blob(path: Path, arrays: Mapping[str, np.ndarray], side: str) -> Images:
    """Encoded files one after the other; image i is blob[off[i] : off[i + 1]]."""
    blob, offsets, labels = arrays[f"{side}_blob"], arrays[f"{side}_off"], arrays[f"{side}_y"]
    labels = _check_labels(labels, f"{path}: {side}_y")
    rising = offsets.shape == (len(labels) + 1,) and offsets.dtype.kind in "iu" and (offsets[:-1] <= offsets[1:]).all()
    if not rising or offsets[0] < 0 or offsets[-1] > len(blob) or blob.dtype != np.uint8 or blob.ndim != 1:
        raise UserError(
            f"{path}: {side}_off must be {len(labels) + 1} integers that rise from 0 to the length of {side}_blob, "
            "(bytes,) uint8"
        )

    def read(index: int) -> Any:
        return _open(io.BytesIO(blob[offsets[index] : offsets[index + 1]].tobytes()), f"{path}, image {index}")

    return Images(labels, read)


def _check_labels(labels: np.ndarray, what: str) -> np.ndarray:
    """Return labels (N,) or (N, 1) as (N,) int64; raise UserError where there are none, or one is invalid."""
    values = labels.reshape(-1).tolist() if labels.shape[1:] in ((), (1,)) else labels.tolist()
    if not values:
        raise UserError(f"{what} holds no labels; give at least one image")
    for each in values:
        if not isinstance(each, int | float) or not 0 <= each < _MOST_CLASSES or each != int(each):
            raise UserError(
                f"{what} must be integers from 0 to {_MOST_CLASSES - 1:,}, got {repr(each)[:40]}; number the classes "
                "0, 1, 2, ..., and of one-hot rows give the argmax"
            )
    return np.array(values, dtype=np.int64)


def _read_folder(path: Path) -> ImageSplits:
    inner = path / "train"
    test = next((path / name for name in _HELD_OUT if (path / name).is_dir()), None)
    if test is None and _folders(path) == ["train"] and _folders(inner):
        raise UserError(f"{path} holds train alone; put test or val beside it, or give {inner} to hold out a fifth")
    if not inner.is_dir() or test is None:
        return _split(*_of_classes(path))
    train, classes = _of_classes(inner)
    return ImageSplits(train, _of_classes(test, classes)[0], classes)


def _folders(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def _of_classes(path: Path, known: tuple[str, ...] = ()) -> tuple[Images, tuple[str, ...]]:
    """Return the images in the folders of `path` and their classes, those of the training images where these are known;
    UserError for another class, and for one without a training image."""
    found = _folders(path)
    training, known = not known, known or tuple(found)
    if unknown := [name for name in found if name not in known]:
        raise UserError(f"{path} has a class {unknown[0]!r} that the training images do not have")
    files = [(file, known.index(name)) for name in found for file in sorted((path / name).rglob("*"))]
    files = [(file, label) for file, label in files if file.suffix.lower() in _SUFFIXES]
    if not files:
        raise UserError(f"{path} holds no folders of images, one for each class")
    if training and (empty := set(range(len(known))) - {label for _, label in files}):
        raise UserError(f"{path / known[min(empty)]} holds no image; delete it, or put images there")
    return Images(np.array([label for _, label in files]), lambda index: _open(files[index][0])), known


def _read_dataset(source: str) -> ImageSplits:
    from datasets import Image, load_dataset

    try:
        data: Any = load_dataset(source)
    except Exception as error:  # the hub, the network and the builder each have errors of their own
        why = f"cannot read the dataset {source!r} ({one_line(error, 200)})"
        raise UserError(f"{why}; give a .npz file or a folder (--source)") from error
    if "train" not in data:
        raise UserError(f"the dataset {source!r} needs a split train; it has {', '.join(map(str, data))}")
    features = data["train"].features
    image = next((name for name, kind in features.items() if isinstance(kind, Image)), None)
    label = next((name for name in ("label", "labels", "fine_label", "class") if name in features), None)
    if image is None or label is None:
        raise UserError(f"the dataset {source!r} needs an image and a label column; it has {', '.join(features)}")

    def side(name: str) -> Images:
        rows = data[name]

        def read(index: int) -> Any:
            try:
                return eight_bits(rows[index][image])
            except Exception as error:  # whatever the decoder raises
                raise UserError(f"cannot read the image {name}/{index} of {source}: {one_line(error)}") from error

        labels = np.array(list(rows[label]), dtype=object)
        return Images(_check_labels(labels, f"the column {label!r} of {source} ({name})"), read)

    def scorable(name: str) -> bool:  # the labels of ImageNet's test split are -1
        labels = list(data[name][label]) if name in data and {image, label} <= set(data[name].features) else []
        return bool(labels) and None not in labels and -1 not in labels

    others = [name for name in ("test", "validation", "valid") if scorable(name)]
    sides = [side(name) for name in ("train", *others[:1])]
    names, numbers = getattr(features[label], "names", None), _numbers(*sides)
    if names and len(numbers) > len(names):
        raise UserError(f"the dataset {source!r} has the label {numbers[-1]}, and names {len(names)} classes")
    classes = tuple(names) if names else numbers
    return ImageSplits(sides[0], sides[1], classes) if others else _split(sides[0], classes)


def _open(file: Any, where: str = "") -> Any:
    from PIL import Image

    try:
        with open_image(file) as image:
            image.load()
        return eight_bits(image)
    # DecompressionBombError: its header claims more pixels than any picture has.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:  # among them UserError
        raise UserError(f"cannot read the image {where or file}: {one_line(error)}") from error


def _numbers(*sides: Images) -> tuple[str, ...]:
    return tuple(map(str, range(1 + max(int(side.labels.max()) for side in sides))))
