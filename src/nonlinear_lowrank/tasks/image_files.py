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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..bounds import read_arrays
from ..errors import UserError
from . import digits_vit
from .task import hold_out

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Images:
    """Labelled images that are read one at a time."""

    labels: np.ndarray
    """(N,) int64."""
    read: Callable[[int], Any]
    """Index -> a PIL image, or an array (H, W) or (H, W, C) uint8."""

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Images":
        """Some of the images."""
        places = np.asarray(chosen, dtype=np.int64)
        return Images(self.labels[places], lambda index: self.read(int(places[index])))


@dataclass(frozen=True)
class ImageSplits:
    """What a source holds."""

    train: Images
    test: Images
    classes: tuple[str, ...]


def read_images(source: str) -> ImageSplits:
    """The images of a source; see the table of this file.

    Raises:
        UserError: there is no such source, or it holds no labelled images in one of the forms.
    """
    path = Path(source).expanduser()
    if source == "digits":
        images, labels = digits_vit.digits()
        return _split(Images(labels, lambda index: images[index]), tuple(map(str, range(10))))
    if path.is_file():
        return _of_npz(path)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in (".npz", ".xz") or source.startswith((".", "/", "~")):
        raise UserError(f"there is no file or folder {source!r}; give a .npz file, a folder, or a dataset's name")
    return _of_dataset(source)


def _split(images: Images, classes: tuple[str, ...]) -> ImageSplits:
    train, test = hold_out(len(images), _TEST_SHARE)
    return ImageSplits(images.select(train), images.select(test), classes)


def _of_npz(path: Path) -> ImageSplits:
    arrays = read_arrays(path)
    forms = (("x_train", "y_train", "x_test", "y_test"), ("train_blob", "train_off", "train_y", "test_blob"))
    if set(forms[0]) <= set(arrays):
        sides = [_of_array(path, arrays[f"x_{side}"], arrays[f"y_{side}"]) for side in ("train", "test")]
    elif set(forms[1]) <= set(arrays):
        names = ("blob", "off", "y")
        sides = [_of_blob(path, *(arrays[f"{side}_{name}"] for name in names)) for side in ("train", "test")]
    elif {"images", "labels"} <= set(arrays):
        one = _of_array(path, arrays["images"], arrays["labels"])
        return _split(one, _numbers(one.labels))
    else:
        raise UserError(
            f"{path} needs the arrays x_train, y_train, x_test, y_test (or images, labels); it has {', '.join(arrays)}"
        )
    return ImageSplits(sides[0], sides[1], _numbers(np.concatenate([side.labels for side in sides])))


def _of_array(path: Path, images: np.ndarray, labels: np.ndarray) -> Images:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
        raise UserError(
            f"{path}: images must be (N, H, W) or (N, H, W, C) uint8 with N labels, not "
            f"{images.shape} {images.dtype} with {len(labels)} labels"
        )
    return Images(labels.astype(np.int64).reshape(-1), lambda index: images[index])


def _of_blob(path: Path, blob: np.ndarray, offsets: np.ndarray, labels: np.ndarray) -> Images:
    if len(offsets) != len(labels) + 1:
        raise UserError(f"{path}: {len(offsets)} offsets for {len(labels)} labels; there must be one more")

    def read(index: int) -> Any:
        return _open(io.BytesIO(blob[offsets[index] : offsets[index + 1]].tobytes()), f"{path}, image {index}")

    return Images(labels.astype(np.int64).reshape(-1), read)


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
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot read the dataset {source!r} ({text}); give a .npz file or a folder (--source)"
        ) from error
    train = data["train"]
    image = next((name for name, kind in train.features.items() if isinstance(kind, Image)), None)
    label = next((name for name in ("label", "labels", "fine_label", "class") if name in train.features), None)
    if image is None or label is None:
        raise UserError(f"the dataset {source!r} needs an image and a label column; it has {', '.join(train.features)}")

    def side(rows: Any, name: str) -> Images:
        def read(index: int) -> Any:
            try:
                return rows[index][image]
            except Exception as error:  # whatever the decoder raises
                raise UserError(
                    f"cannot read the image {name}/{index} of {source}: {' '.join(str(error).split())}"
                ) from error

        return Images(np.array(rows[label], dtype=np.int64), read)

    # ImageNet's test split has no labels: there the number is -1.
    others = [name for name in ("test", "validation", "valid") if name in data and min(data[name][label]) >= 0]
    names = getattr(train.features[label], "names", None)
    classes = tuple(names) if names else _numbers(np.array(train[label]))
    if not others:
        return _split(side(train, "train"), classes)
    return ImageSplits(side(train, "train"), side(data[others[0]], others[0]), classes)


def _open(file: Any, where: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            image.load()
    except (
        *(UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError),
        Image.DecompressionBombError,  # its header claims more pixels than any picture has
    ) as error:
        raise UserError(f"cannot read the image {where or file}: {' '.join(str(error).split())}") from error
    return image


def _numbers(labels: np.ndarray) -> tuple[str, ...]:
    return tuple(str(number) for number in range(int(labels.max()) + 1))
