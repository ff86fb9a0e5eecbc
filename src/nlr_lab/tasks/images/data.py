"""Labelled images on their way to a model: which are used, how they become numbers, and what of those that
cannot be read.

An image that cannot be read is named in a warning and counted in the record of the run. In training the next one
stands in for it; in an evaluation it is left out (its label is -100), in every arm alike.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nlr_lab.runtime.pictures import eight_bits
from nlr_lab.tasks.task import Batch, hold_out
from nonlinear_lowrank.errors import UserError

from .files import Images, read_images

UNREADABLE = -100
"""The label of an image that an evaluation leaves out."""


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Which images, and how they are split."""

    source: str = "digits"
    """"digits" (scikit-learn's), a .npz file (also .npz.xz), a folder of classes, or a dataset's name."""
    classes: tuple[int, ...] = ()
    """Only these classes, renumbered from 0; empty: all."""
    held_out: float = 0.1
    """Share of the training images that choices are made on; 0: choices are made on the test split itself."""
    train_rows: int | None = None
    """Use so many of the training images, a random choice that is always the same; None: all."""
    test_rows: int | None = None
    """Score on so many test images, chosen likewise; None: all."""
    size: int | None = None
    """Pixels of a side; None: the model's."""
    mean: tuple[float, ...] = ()
    """Of the pixels (0 to 1), by channel; empty: the checkpoint's, else 0.5."""
    std: tuple[float, ...] = ()
    """Likewise."""

    def __post_init__(self) -> None:
        for name in ("classes", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not 0 <= self.held_out < 0.9:
            raise UserError(f"held_out must be at least 0 and below 0.9, got {self.held_out!r}")
        for name, least in (("train_rows", 2), ("test_rows", 1), ("size", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"{name} must be an integer of at least {least}, got {value!r}")
        if len(self.classes) == 1 or len(set(self.classes)) < len(self.classes) or min(self.classes, default=0) < 0:
            raise UserError("classes must be at least two different numbers, from 0")
        if len(self.mean) != len(self.std):
            raise UserError("mean and std need one number each for every channel")
        if not all(map(math.isfinite, self.mean)):
            raise UserError(f"mean must be finite numbers, got {' '.join(map(str, self.mean))}")
        if not all(0 < each < math.inf for each in self.std):
            raise UserError(f"std must be finite numbers above 0, got {' '.join(map(str, self.std))}")

    def normalisation(self, channels: int, default: tuple[tuple[float, ...], tuple[float, ...]] | None = None) -> Any:
        """Mean and standard deviation, one number for each channel.

        Raises:
            UserError: there are neither as many as channels, nor one for all.
        """
        mean, std = (self.mean, self.std) if self.mean else (default or ((0.5,) * channels, (0.5,) * channels))
        if len(mean) == 1:
            mean, std = tuple(mean) * channels, tuple(std) * channels
        if len(mean) != channels:
            raise UserError(f"mean and std have {len(mean)} numbers, and the model takes {channels} channels")
        return mean, std

    def find(self) -> "FoundImages":
        """The images, split; they are decoded when they are used.

        Raises:
            UserError: there is no such source, it has too few images or none that can be read, or there is no class
                of a chosen number.
        """
        splits = read_images(self.source)
        train, test, classes = splits.train, splits.test, splits.classes
        if self.classes:
            if max(self.classes) >= len(classes):
                raise UserError(f"there is no class {max(self.classes)} in {self.source}; it has {len(classes)}")
            train, test = (of_classes(side, self.classes) for side in (train, test))
            classes = tuple(classes[number] for number in self.classes)
        train, test = _some(train, self.train_rows, 1), _some(test, self.test_rows, 2)
        if len(train) < 2 or len(test) < 1:
            raise UserError(f"{self.source} has {len(train)} images to train on and {len(test)} to score: too few")
        kept, held = hold_out(len(train), self.held_out)
        if not kept:
            raise UserError(f"{len(train)} training images are too few to hold some out")
        for what, images in (("train on", train.select(kept)), ("choose on", train.select(held)), ("score", test)):
            check_readable(images, f"{self.source} has no image to {what}")
        return FoundImages(train=train, kept=kept, held=held, test=test, classes=classes)


@dataclass(frozen=True, kw_only=True)
class FoundImages:
    """The images of a source, split."""

    train: Images
    kept: Sequence[int]
    """Of `train`, those that are trained on."""
    held: Sequence[int]
    """Those held out of them."""
    test: Images
    classes: tuple[str, ...]

    def facts(self, pixels: "Pixels") -> dict[str, Any]:
        """For the record."""
        return {
            "classes": len(self.classes),
            "images": {"train": len(self.kept), "held out": len(self.held), "test": len(self.test)},
            "size": pixels.size,
            "channels": pixels.channels,
            "commonest_class_share": round(float(np.bincount(self.test.labels).max() / len(self.test)), 4),
        }

    def identity(self, pixels: "Pixels") -> list[Any]:
        """What tells these images from others: labels, the split, and an image of each side that can be read."""
        return [
            self.train.labels,
            self.test.labels,
            *(_sample(each, pixels) for each in (self.train, self.test)),
            self.kept,
        ]


def _sample(images: Images, pixels: "Pixels") -> Any:
    for place in range(min(len(images), 100)):
        try:
            return pixels.array(images.read(place))
        except UserError:
            continue
    return None


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How an image becomes numbers."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shorter: int | None = None
    """Pixels that the shorter side is brought to before the middle is cut out; None: the image is squeezed whole."""

    def picture(self, image: Any) -> Any:
        """A PIL image or an array (H, W[, C]) -> a PIL image of these channels, in its own size.

        Raises:
            UserError: it cannot be shown in 8 bits.
        """
        return eight_bits(image).convert("L" if self.channels == 1 else "RGB")

    def fitted(self, picture: Any) -> Any:
        """A PIL image -> one of this size."""
        from PIL import Image

        if self.shorter is not None:
            short = min(picture.size)
            resized = tuple(
                self.shorter if side == short else int(self.shorter * side / short) for side in picture.size
            )
            picture = picture.resize(tuple(resized), Image.Resampling.BILINEAR)
            left, top = ((side - self.size) // 2 for side in resized)
            return picture.crop((left, top, left + self.size, top + self.size))
        if picture.size != (self.size, self.size):
            picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return picture

    def numbers(self, picture: Any) -> np.ndarray:
        """A PIL image of this size -> (C, size, size) uint8."""
        pixels = np.array(picture, dtype=np.uint8)
        return pixels[None] if self.channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def array(self, image: Any) -> np.ndarray:
        """A PIL image or an array (H, W[, C]) -> (C, size, size) uint8."""
        return self.numbers(self.fitted(self.picture(image)))

    def collate(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """Items -> pixel_values (B, C, H, W) float32 and labels (B,)."""
        stacked = torch.stack([item["pixel_values"] for item in items]).float() / 255
        shape = (1, self.channels, 1, 1)
        mean, std = torch.tensor(self.mean).view(shape), torch.tensor(self.std).view(shape)
        return {"pixel_values": (stacked - mean) / std, "labels": torch.stack([item["labels"] for item in items])}

    def save_pretrained(self, folder: Any) -> None:
        """What AutoImageProcessor needs to do the same."""
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        processor: Any = ViTImageProcessorPil  # its keywords are typed too narrowly
        whole = {"height": self.size, "width": self.size}
        cut = {"do_center_crop": True, "crop_size": whole}
        processor(
            size=whole if self.shorter is None else {"shortest_edge": self.shorter},
            **({} if self.shorter is None else cut),
            image_mean=list(self.mean),
            image_std=list(self.std),
            do_convert_rgb=self.channels == 3,
        ).save_pretrained(folder)


class ImageExamples(Dataset[dict[str, torch.Tensor]]):
    """Item i is {"pixel_values": (C, H, W) uint8, "labels": ()}, as the image is; for evaluation.

    Args:
        images: labelled images.
        pixels: how they become numbers.
    """

    def __init__(self, images: Images, pixels: Pixels) -> None:
        self.images, self.pixels = images, pixels
        # Shared with processes that read data ahead, so that what they cannot read is counted here.
        self._unreadable = torch.zeros(len(images), dtype=torch.bool).share_memory_()
        self._places: Sequence[int] = range(len(images))

    def part(self, places: Sequence[int]) -> "ImageExamples":
        """Some of the images, as they are for evaluation. What of them cannot be read is named and counted once."""
        found = ImageExamples(self.images.select(places), self.pixels)
        found._unreadable, found._places = self._unreadable, [self._places[each] for each in places]
        return found

    @property
    def unreadable(self) -> int:
        """How many images could not be read so far, here or where these are a part."""
        return int(self._unreadable.sum())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture = self.read(index)
        if picture is None:
            nothing = torch.zeros(self.pixels.channels, self.pixels.size, self.pixels.size, dtype=torch.uint8)
            return {"pixel_values": nothing, "labels": torch.tensor(UNREADABLE)}
        numbers = torch.from_numpy(self.pixels.numbers(self.pixels.fitted(picture)))
        return {"pixel_values": numbers, "labels": torch.tensor(int(self.images.labels[index]))}

    def read(self, place: int) -> Any:
        """The PIL image of a place, of the right channels and in its own size; None if it cannot be read."""
        try:
            return self.pixels.picture(self.images.read(place))
        except UserError as error:
            if not self._unreadable[self._places[place]]:
                self._unreadable[self._places[place]] = True
                warnings.warn(f"{error}; left out ({self.unreadable} so far)", stacklevel=2)
            return None

    def readable(self, place: int) -> tuple[Any, int]:
        """The first image that can be read, from a place on, and its label.

        Raises:
            UserError: none of them can.
        """
        count = len(self.images)
        for each in range(place, place + count):
            picture = self.read(each % count)
            if picture is not None:
                return picture, int(self.images.labels[each % count])
        raise UserError(f"none of the {count} images can be read")


def check_readable(images: Images, what: str) -> None:
    """Raises UserError where there are images, and none of them can be read.

    Args:
        images: of which the first that can be read is looked for.
        what: is missing then, for the message.
    """
    first = ""
    for place in range(len(images)):
        try:
            eight_bits(images.read(place))
            return
        except UserError as error:
            first = first or str(error)
    if first:
        raise UserError(f"{what}: none of the {len(images)} images can be read ({first})")


def unreadable(*splits: ImageExamples | None) -> dict[str, int]:
    """For the record: how many images of all splits, none a part of another, could not be read; nothing where there
    are none."""
    count = sum(each.unreadable for each in dict.fromkeys(splits) if each is not None)
    return {"unreadable_images": count} if count else {}


def of_classes(images: Images, classes: tuple[int, ...]) -> Images:
    """The images of some classes, renumbered in that order."""
    chosen = images.select(np.flatnonzero(np.isin(images.labels, classes)))
    renumbered = np.array([classes.index(int(label)) for label in chosen.labels], dtype=np.int64)
    return Images(renumbered, chosen.read)


def _some(images: Images, rows: int | None, seed: int) -> Images:
    if rows is None or rows >= len(images):
        return images
    return images.select(np.sort(np.random.default_rng(seed).permutation(len(images))[:rows]))
