"""Settings of labelled images: source and split."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nlr_lab.runtime.pictures import eight_bits
from nlr_lab.tasks.task import choose, hold_out
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_share

from .files import Images, read_images


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
    """Use so many of the training images, a random choice that is always the same; None: all."""
    test_rows: int | None = None
    """Score on so many test images, chosen likewise; None: all."""
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
        if len(self.mean) != len(self.std):
            raise UserError("mean and std need one number each for every channel")
        if not all(map(math.isfinite, self.mean)):
            raise UserError(f"mean must be finite numbers, got {' '.join(map(str, self.mean))}")
        if not all(0 < each < math.inf for each in self.std):
            raise UserError(f"std must be finite numbers above 0, got {' '.join(map(str, self.std))}")

    def normalisation(self, channels: int, default: tuple[tuple[float, ...], tuple[float, ...]] | None = None) -> Any:
        """Return mean and standard deviation, one number for each channel.

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
        """Return the images, split; they are decoded when they are used.

        Raises:
            UserError: there is no such source, it has too few images or none that can be read, or there is no class
                of a chosen number.
        """
        splits = read_images(self.source)
        train, test, classes = splits.train, splits.test, splits.classes
        if self.classes:
            if max(self.classes) >= len(classes):
                raise UserError(f"there is no class {max(self.classes)} in {self.source}; it has {len(classes)}")
            train, test = (side.of_classes(self.classes) for side in (train, test))
            classes = tuple(classes[number] for number in self.classes)
        train = train.select(choose(len(train), self.train_rows, 1))
        test = test.select(choose(len(test), self.test_rows, 2))
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
    """Indices of `train` that are trained on."""
    held: Sequence[int]
    """Those held out of them."""
    test: Images
    classes: tuple[str, ...]


def check_readable(images: Images, what: str) -> None:
    """Raise UserError where there are images, and none of them can be read.

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
