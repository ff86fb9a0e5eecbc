"""Labelled images on their way to a model: how they become numbers, and what becomes of those that cannot be read.

An image that cannot be read is named in a warning and counted in the record of the run. In training the next one
stands in for it; in an evaluation it is skipped (its label is -100), in every arm alike.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from nlr_lab.runtime.bounds import eight_bits
from nlr_lab.tasks.task import Batch, Examples, Items, Prepared, commonest_share, fingerprint, scores
from nonlinear_lowrank.errors import UserError

from .augmentation import mix_pairs
from .sources import Images, ImageSplits


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Settings by which an image becomes numbers."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shorter: int | None = None
    """Pixels that the shorter side is brought to before the middle is cut out; None: the image is squeezed whole."""

    @property
    def mode(self) -> str:
        """PIL's name of these channels."""
        return "L" if self.channels == 1 else "RGB"

    def fitted(self, picture: Any) -> Any:
        """Bring a PIL image to this size."""
        whole = (self.size, self.size)
        if self.shorter is None:
            return picture if picture.size == whole else picture.resize(whole, Image.Resampling.BILINEAR)
        short = min(picture.size)
        sides = tuple(self.shorter if side == short else int(self.shorter * side / short) for side in picture.size)
        left, top = ((side - self.size) // 2 for side in sides)
        picture = picture.resize(sides, Image.Resampling.BILINEAR)
        return picture.crop((left, top, left + self.size, top + self.size))

    def tensor(self, picture: Any) -> torch.Tensor:
        """Return a PIL image of this size as (C, size, size) uint8."""
        pixels = np.array(picture, dtype=np.uint8)
        return torch.from_numpy(pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1).copy())

    def array(self, image: Any) -> np.ndarray:
        """Return a PIL image or an array (H, W[, C]) as (C, size, size) uint8."""
        return self.tensor(self.fitted(eight_bits(image).convert(self.mode))).numpy()

    def collate(self, items: Items) -> Batch:
        """Items -> pixel_values (B, C, H, W) float32 and labels (B,)."""
        pixels = torch.stack([item["pixel_values"] for item in items]).float()
        mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (self.mean, self.std))
        pixels.div_(255).sub_(mean).div_(std)  # in place: the copies took most of the time
        return {"pixel_values": pixels, "labels": torch.stack([item["labels"] for item in items])}

    def collate_mixed(self, items: Items, classes: int) -> Batch:
        """Items -> a batch for training, mixed in pairs; labels (B, classes) are probabilities."""
        return mix_pairs(self.collate(items), torch.stack([item["mixing"] for item in items]), classes)

    def save_pretrained(self, folder: Any) -> None:
        """Write what AutoImageProcessor needs to do the same."""
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        processor: Any = ViTImageProcessorPil  # its keywords are typed too narrowly
        size: dict[str, Any] = {"size": {"height": self.size, "width": self.size}}
        if self.shorter is not None:
            size = {"size": {"shortest_edge": self.shorter}, "do_center_crop": True, "crop_size": size["size"]}
        means = {"image_mean": list(self.mean), "image_std": list(self.std)}
        processor(**size, **means, do_convert_rgb=self.channels == 3).save_pretrained(folder)


class ImageExamples(Examples):
    """Item i is {"pixel_values": (C, H, W) uint8, "labels": ()}, as the image is; for evaluation."""

    def __init__(self, images: Images, pixels: Pixels) -> None:
        self.images, self.pixels = images, pixels
        # Shared with data-loading processes, so that images they cannot read are counted here.
        self._unreadable = torch.zeros(len(images), dtype=torch.bool).share_memory_()
        self._places: Sequence[int] = range(len(images))

    def part(self, places: Sequence[int]) -> "ImageExamples":
        """Return some of the images for evaluation. What of them cannot be read is named and counted once."""
        found = ImageExamples(self.images.select(places), self.pixels)
        found._unreadable, found._places = self._unreadable, [self._places[each] for each in places]
        return found

    @property
    def unreadable(self) -> int:  # type: ignore[override]
        """Images that could not be read so far, here or where these are a part."""
        return int(self._unreadable.sum())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        picture, pixels = self.read(index), self.pixels
        if picture is None:
            nothing = torch.zeros(pixels.channels, pixels.size, pixels.size, dtype=torch.uint8)
            return {"pixel_values": nothing, "labels": torch.tensor(-100)}
        label = torch.tensor(int(self.images.labels[index]))
        return {"pixel_values": pixels.tensor(pixels.fitted(picture)), "labels": label}

    def read(self, place: int) -> Any:
        """Return the PIL image of a place, of the right channels and in its own size; None if it cannot be read."""
        try:
            return eight_bits(self.images.read(place)).convert(self.pixels.mode)
        except UserError as error:
            if not self._unreadable[self._places[place]]:
                self._unreadable[self._places[place]] = True
                warnings.warn(f"{error}; skipped ({self.unreadable} so far)", stacklevel=2)
            return None


class TrainingImages(ImageExamples):
    """Item i has what `vary` gives of an image, a PIL image, pixels and a generator, and its label; for training.

    `vary` None leaves the images as they are, else the index tells the pass over the data too. `seed` is of the run;
    None: the draws are the same in all runs.
    """

    def __init__(
        self,
        images: Images,
        pixels: Pixels,
        vary: Callable[[Any, Pixels, np.random.Generator], Batch] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(images, pixels)
        self.vary, self.seed, self.counts_passes = vary, seed, vary is not None

    def seeded(self, seed: int) -> "TrainingImages":
        """Return the same images with the draws of a run."""
        found = copy.copy(self)
        found.seed = None if self.seed is None else seed
        return found

    def __getitem__(self, index: int) -> Batch:
        count = len(self.images)
        for place in range(index, index + count):
            if (picture := self.read(place % count)) is not None:
                break
        else:
            raise UserError(f"none of the {count} images can be read")
        if self.vary is None:
            item = {"pixel_values": self.pixels.tensor(self.pixels.fitted(picture))}
        else:
            draw = index if self.seed is None else [self.seed, index]
            item = self.vary(picture, self.pixels, np.random.default_rng(draw))
        return {**item, "labels": torch.tensor(int(self.images.labels[place % count]))}


def prepare_classification(
    found: ImageSplits, train: TrainingImages, *extra: Any, kind: tuple[str, ...] = (), **fields: Any
) -> Prepared:
    """Put the splits of a classification together. The fingerprint begins with `kind` and ends with `extra`, what else
    training sees; `fields` are of `Prepared`."""
    pixels, scored = train.pixels, ImageExamples(found.test, train.pixels)
    # Labels, the split, and an image of each side that can be read tell these images from others.
    some = [pixels.array(each.first_readable()) for each in (found.train, found.test)]
    identity = [found.train.labels, found.test.labels, *some, found.kept]
    return Prepared(
        train=train,
        valid=ImageExamples(found.train.select(found.held), pixels) if found.held else scored,
        test=scored if found.held else None,
        tokenizer=pixels,
        classes=found.classes,
        score=scores(("accuracy",)),
        collate=pixels.collate,
        fingerprint=fingerprint(*kind, *identity, pixels, *extra),
        facts={
            "classes": len(found.classes),
            "images": {"train": len(found.kept), "held out": len(found.held), "test": len(scored)},
            "size": pixels.size,
            "channels": pixels.channels,
            "commonest_class_share": commonest_share(found.test.labels),
        },
        **fields,
    )
