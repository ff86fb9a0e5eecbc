"""Labelled images out of scikit-learn, .npz files, folders and `datasets`; none of it needs torchvision.

| source                     | form                                                                              |
|----------------------------|-----------------------------------------------------------------------------------|
| "digits"                   | scikit-learn's 1,797 digits, 8 x 8, embedded                                      |
| a .npz file, also .npz.xz  | x_train, y_train, x_test, y_test; or the same as encoded files: train_blob,       |
|                            | train_off, train_y, test_...; or images, labels                                   |
| a folder                   | train/<class>/*.png and test/ or val/ beside it; or <class>/*.png alone           |
| a dataset's name           | any with an image and a label column                                              |

A source without a test split gives a fifth of its images, always the same ones.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlr_lab.runtime.bounds import read_arrays
from nlr_lab.runtime.pictures import eight_bits
from nlr_lab.tasks.task import hold_out
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_TEST_SHARE = 0.2
_CHANNELS = (1, 3, 4)
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
        return Images(np.array([classes.index(int(label)) for label in chosen.labels], dtype=np.int64), chosen.read)


@dataclass(frozen=True)
class ImageSplits:
    """Content of a source."""

    train: Images
    test: Images
    classes: tuple[str, ...]


def read_images(source: str) -> ImageSplits:
    """Return the images of a source; see the table of this file.

    Raises:
        UserError: there is no such source, or it holds no labelled images in one of the forms.
    """
    path = Path(source).expanduser()
    if source == "digits":
        images, labels = read_digits()
        return _split(Images(labels, lambda index: images[index]), tuple(map(str, range(10))))
    if path.is_file():
        return _of_npz(path)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in (".npz", ".xz") or source.startswith((".", "/", "~")):
        raise UserError(f"there is no file or folder {source!r}; give a .npz file, a folder, or a dataset's name")
    return _of_dataset(source)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (N, 8, 8, 1) uint8 of 0 to 255, labels (N,) int64."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None], bunch.target.astype(np.int64)


def _split(images: Images, classes: tuple[str, ...]) -> ImageSplits:
    train, test = hold_out(len(images), _TEST_SHARE)
    return ImageSplits(images.select(train), images.select(test), classes)


def _of_npz(path: Path) -> ImageSplits:
    arrays = read_arrays(path)
    names = ("blob", "off", "y")
    if {"x_train", "y_train", "x_test", "y_test"} <= set(arrays):
        sides = [_of_array(path, arrays, f"x_{side}", f"y_{side}") for side in ("train", "test")]
    elif {f"{side}_{name}" for side in ("train", "test") for name in names} <= set(arrays):
        sides = [_of_blob(path, arrays, *(f"{side}_{name}" for name in names)) for side in ("train", "test")]
    elif {"images", "labels"} <= set(arrays):
        one = _of_array(path, arrays, "images", "labels")
        return _split(one, _numbers(one.labels))
    else:
        raise UserError(
            f"{path} needs the arrays x_train, y_train, x_test, y_test (or images, labels); it has {', '.join(arrays)}"
        )
    return ImageSplits(sides[0], sides[1], _numbers(np.concatenate([side.labels for side in sides])))


def _of_array(path: Path, arrays: Mapping[str, np.ndarray], name: str, labelled: str) -> Images:
    images, labels = arrays[name], check_labels(arrays[labelled], f"{path}: {labelled}")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
        raise UserError(
            f"{path}: {name} must be (N, H, W) or (N, H, W, C) uint8 with N labels, got "
            f"{images.shape} {images.dtype} with {len(labels)} labels"
        )
    if 0 in images.shape or (images.ndim == 4 and images.shape[-1] not in _CHANNELS):
        raise UserError(f"{path}: {name} must have pixels, of 1, 3 or 4 channels, got {images.shape}")
    return Images(labels, lambda index: images[index])


def _of_blob(path: Path, arrays: Mapping[str, np.ndarray], name: str, cuts: str, labelled: str) -> Images:
    blob, labels = arrays[name], check_labels(arrays[labelled], f"{path}: {labelled}")
    if arrays[cuts].shape != (len(labels) + 1,):
        raise UserError(f"{path}: {arrays[cuts].shape} offsets for {len(labels)} labels; there must be one more")
    offsets = arrays[cuts].astype(np.int64) if arrays[cuts].dtype.kind in "iu" else np.array([-1])
    rising = offsets[0] >= 0 and not (np.diff(offsets) < 0).any()
    if blob.dtype != np.uint8 or blob.ndim != 1 or not rising or offsets[-1] > len(blob):
        raise UserError(f"{path}: {cuts} must be integers that rise from 0 to the length of {name}, (bytes,) uint8")

    def read(index: int) -> Any:
        return _open(io.BytesIO(blob[offsets[index] : offsets[index + 1]].tobytes()), f"{path}, image {index}")

    return Images(labels, read)


def check_labels(labels: np.ndarray, what: str) -> np.ndarray:
    """Return numbers of classes as (N,) int64.

    Args:
        labels: (N,) or (N, 1).
        what: they are, for the message.

    Raises:
        UserError: there are none, or one is no integer from 0.
    """
    if labels.ndim not in (1, 2) or labels.shape[1:] not in ((), (1,)):
        raise UserError(f"{what} must be (N,) numbers of classes, got {labels.shape}; of one-hot rows give the argmax")
    labels = labels.reshape(-1)
    if not len(labels):
        raise UserError(f"{what} holds no labels; give at least one image")
    rule = "number the classes 0, 1, 2, ..."
    if labels.dtype.kind not in "biuf":
        raise UserError(f"{what} must be integers from 0, got {str(labels[0])[:40]!r}; {rule}")
    whole = np.isfinite(labels) & (labels >= 0) & (labels < _MOST_CLASSES) & (labels == np.floor(labels))
    if not whole.all():
        raise UserError(f"{what} must be integers from 0 to {_MOST_CLASSES - 1:,}, got {labels[~whole][0]}; {rule}")
    return labels.astype(np.int64)


def _of_folder(path: Path) -> ImageSplits:
    test = next((path / name for name in ("test", "val", "validation") if (path / name).is_dir()), None)
    if not (path / "train").is_dir() or test is None:
        images, classes = _of_classes(path, None)
        return _split(images, classes)
    train, classes = _of_classes(path / "train", None)
    return ImageSplits(train, _of_classes(test, classes)[0], classes)


def _of_classes(path: Path, classes: tuple[str, ...] | None) -> tuple[Images, tuple[str, ...]]:
    found = tuple(sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")))
    unknown = set(found) - set(classes or found)
    if unknown:
        raise UserError(f"{path} has a class {sorted(unknown)[0]!r} that the training images do not have")
    known = classes or found
    files = [
        (file, known.index(name))
        for name in found
        for file in sorted((path / name).rglob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise UserError(f"{path} holds no folders of images, one for each class")
    return Images(np.array([label for _, label in files]), lambda index: _open(files[index][0], "")), known


def _of_dataset(source: str) -> ImageSplits:
    from datasets import Image, load_dataset

    try:
        data: Any = load_dataset(source)
    except Exception as error:  # the hub, the network and the builder each have errors of their own
        why = one_line(error, 200)
        raise UserError(
            f"cannot read the dataset {source!r} ({why}); give a .npz file or a folder (--source)"
        ) from error
    if "train" not in data:
        raise UserError(f"the dataset {source!r} needs a split train; it has {', '.join(map(str, data))}")
    train = data["train"]
    image = next((name for name, kind in train.features.items() if isinstance(kind, Image)), None)
    label = next((name for name in ("label", "labels", "fine_label", "class") if name in train.features), None)
    if image is None or label is None:
        raise UserError(f"the dataset {source!r} needs an image and a label column; it has {', '.join(train.features)}")

    def side(name: str) -> Images:
        rows = data[name]

        def read(index: int) -> Any:
            where = f"{name}/{index} of {source}"
            try:
                return eight_bits(rows[index][image])
            except Exception as error:  # whatever the decoder raises
                raise UserError(f"cannot read the image {where}: {one_line(error)}") from error

        return Images(check_labels(_array(rows[label]), f"the column {label!r} of {source} ({name})"), read)

    others = [name for name in ("test", "validation", "valid") if name in data and _labelled(data[name], image, label)]
    sides = [side(name) for name in ("train", *others[:1])]
    names = getattr(train.features[label], "names", None)
    numbers = _numbers(np.concatenate([each.labels for each in sides]))
    if names and len(numbers) > len(names):
        raise UserError(f"the dataset {source!r} has the label {numbers[-1]}, and names {len(names)} classes")
    classes = tuple(names) if names else numbers
    return ImageSplits(sides[0], sides[1], classes) if others else _split(sides[0], classes)


def _labelled(rows: Any, image: str, label: str) -> bool:
    """Return whether a split can be scored; the test split of ImageNet has -1 for a label."""
    if not len(rows) or not {image, label} <= set(rows.features):
        return False
    labels = _array(rows[label])
    return bool((labels >= 0).all()) if labels.dtype.kind in "if" else None not in labels.tolist()


def _array(column: Any) -> np.ndarray:
    """Return a column as an array; of texts, of lists or with gaps it is one of objects."""
    values = list(column)
    if all(isinstance(each, int | float) for each in values):
        return np.array(values)
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _open(file: Any, where: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            image.load()
        return eight_bits(image)
    except (
        *(UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError),  # among them UserError
        Image.DecompressionBombError,  # its header claims more pixels than any picture has
    ) as error:
        raise UserError(f"cannot read the image {where or file}: {one_line(error)}") from error


def _numbers(labels: np.ndarray) -> tuple[str, ...]:
    return tuple(str(number) for number in range(int(labels.max()) + 1))
