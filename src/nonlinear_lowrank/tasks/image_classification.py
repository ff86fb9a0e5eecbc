"""Image classification: a pretrained vision model with a new head, on labelled images from anywhere.

Pixels go to the model's own size (bilinear), its number of channels, and its mean and standard deviation.
Three sets, as for GLUE: what is trained on, a share held out of it for choices, and the test split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from ..errors import UserError
from .image_files import Images, read_images
from .metrics import scores
from .pretrained import Pretrained
from .task import AdapterSetup, Batch, Measure, Score, fingerprint, hold_out

_PADDING = 8  # a crop is moved by up to 1 / 8 of the side, as 4 pixels of 32


@dataclass(frozen=True, kw_only=True)
class ImageData:
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
    augment: Literal["none", "flip", "crop-flip"] = "none"
    """Mirror half of the training images; also move them by up to an eighth. The same in every arm."""
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
            raise UserError(f"held_out must be at least 0 and below 0.9, not {self.held_out!r}")
        for name, least in (("train_rows", 2), ("test_rows", 1), ("size", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.augment not in ("none", "flip", "crop-flip"):
            raise UserError(f"unknown augment {self.augment!r}; choose one of none, flip, crop-flip")
        if len(self.classes) == 1 or len(set(self.classes)) < len(self.classes):
            raise UserError("classes must be at least two different numbers")
        if len(self.mean) != len(self.std):
            raise UserError("mean and std need one number each for every channel")


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How an image becomes numbers."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def array(self, image: Any) -> np.ndarray:
        """A PIL image or an array (H, W[, C]) -> (C, size, size) uint8."""
        from PIL import Image

        if isinstance(image, np.ndarray):
            image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
        image = image.convert("L" if self.channels == 1 else "RGB")
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.array(image, dtype=np.uint8)
        return pixels[None] if self.channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

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
        processor(
            size={"height": self.size, "width": self.size},
            image_mean=list(self.mean),
            image_std=list(self.std),
            do_convert_rgb=self.channels == 3,
        ).save_pretrained(folder)


class ImageExamples(Dataset[dict[str, torch.Tensor]]):
    """Item i is {"pixel_values": (C, H, W) uint8, "labels": ()}.

    With augmentation the index also tells the pass over the data, i + N * pass, and so a run that is resumed
    sees what it would have seen.

    Args:
        images: labelled images.
        pixels: how they become numbers.
        augment: as in ImageData.
    """

    def __init__(self, images: Images, pixels: Pixels, augment: str = "none") -> None:
        self.images, self.pixels, self.augment = images, pixels, augment

    @property
    def counts_passes(self) -> bool:
        """Whether an index tells the pass too."""
        return self.augment != "none"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = index % len(self.images)
        pixels = self.pixels.array(self.images.read(place))
        if self.counts_passes:
            pixels = self._augmented(pixels, np.random.default_rng(index))
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.tensor(int(self.images.labels[place]))}

    def _augmented(self, pixels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        if generator.random() < 0.5:
            pixels = pixels[:, :, ::-1]
        if self.augment == "crop-flip":
            edge = max(1, self.pixels.size // _PADDING)
            top, left = generator.integers(0, 2 * edge + 1, 2)
            padded = np.pad(pixels, ((0, 0), (edge, edge), (edge, edge)))
            pixels = padded[:, top : top + self.pixels.size, left : left + self.pixels.size]
        return np.ascontiguousarray(pixels)


@dataclass(frozen=True)
class PreparedImages:
    """Splits that are ready for training; `tokenizer` is what is saved beside the model."""

    train: ImageExamples
    valid: ImageExamples
    test: ImageExamples | None
    tokenizer: Pixels
    classes: tuple[str, ...]
    score: Score
    fingerprint: str
    facts: dict[str, Any] = field(default_factory=dict)

    def collate(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """Items -> a batch."""
        return self.tokenizer.collate(items)

    def describe(self) -> dict[str, Any]:
        """What the data are, for the record."""
        return {**self.facts, "fingerprint": self.fingerprint}


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """Images and the vision model that is tuned on them."""

    images: ImageData
    """The data."""
    model: Pretrained
    """The vision model."""

    @property
    def measure(self) -> Measure:
        """Accuracy."""
        return Measure(name="accuracy", higher_is_better=True, unit="")

    @property
    def sequence_length(self) -> int:
        """Patches of an image, the class token included."""
        config = self.model.config()
        patch = getattr(config, "patch_size", None)
        return 1 if patch is None else (getattr(config, "image_size", 224) // patch) ** 2 + 1

    def prepare(self, progress: bool = True) -> PreparedImages:
        """Finds and splits the images; they are decoded when they are used.

        Raises:
            UserError: the source or the checkpoint cannot be used, or a class has no image.
        """
        data = self.images
        splits = read_images(data.source)
        train, test, classes = splits.train, splits.test, splits.classes
        if data.classes:
            if max(data.classes) >= len(classes):
                raise UserError(f"there is no class {max(data.classes)} in {data.source}; it has {len(classes)}")
            train, test = (_of_classes(side, data.classes) for side in (train, test))
            classes = tuple(classes[number] for number in data.classes)
        train, test = _some(train, data.train_rows, 1), _some(test, data.test_rows, 2)
        if len(train) < 2 or len(test) < 1:
            raise UserError(f"{data.source} has {len(train)} images to train on and {len(test)} to score: too few")
        pixels = self.pixels()
        kept, held = hold_out(len(train), data.held_out)
        if not kept:
            raise UserError(f"{len(train)} training images are too few to hold some out")
        scored = ImageExamples(test, pixels)
        seen = [np.asarray(pixels.array(side.read(0))) for side in (train, test)]
        return PreparedImages(
            train=ImageExamples(train.select(kept), pixels, data.augment),
            valid=ImageExamples(train.select(held), pixels) if held else scored,
            test=scored if held else None,
            tokenizer=pixels,
            classes=classes,
            score=scores(("accuracy",)),
            fingerprint=fingerprint(train.labels, test.labels, *seen, kept, pixels, data.augment),
            facts={
                "classes": len(classes),
                "images": {"train": len(kept), "held out": len(held), "test": len(test)},
                "size": pixels.size,
                "channels": pixels.channels,
                "commonest_class_share": round(float(np.bincount(test.labels).max() / len(test)), 4),
            },
        )

    def pixels(self) -> Pixels:
        """How the checkpoint wants its images."""
        data, config = self.images, self.model.config()
        channels = getattr(config, "num_channels", 3)
        mean, std = data.mean, data.std
        if not mean:
            mean, std = _normalisation(self.model) or ((0.5,) * channels, (0.5,) * channels)
        if len(mean) == 1:
            mean, std = tuple(mean) * channels, tuple(std) * channels
        if len(mean) != channels:
            raise UserError(f"mean and std have {len(mean)} numbers, and the model takes {channels} channels")
        size: Any = data.size or getattr(config, "image_size", 224)
        return Pixels(size=size, channels=channels, mean=mean, std=std)

    def build_model(self, prepared: Any, dense_init: str | None = None, *, seed: int = 0) -> nn.Module:
        """The pretrained model with a head drawn from the seed."""
        if dense_init is not None:
            raise UserError("init= is for language models that are trained from scratch")
        model = self.model.image_classifier(len(prepared.classes), seed)
        model.config.id2label = dict(enumerate(prepared.classes))
        model.config.label2id = {name: index for index, name in enumerate(prepared.classes)}
        return model

    def build_on_meta(self) -> nn.Module:
        """The same on the meta device, with ten classes where the data are not known yet."""
        return self.model.on_meta("image", len(self.images.classes) or 10)

    def adapter_setup(self, model: nn.Module) -> AdapterSetup:
        """What adapters need to know; peft has no task type for images."""
        return self.model.adapters(model, None)


def _of_classes(images: Images, classes: tuple[int, ...]) -> Images:
    chosen = images.select(np.flatnonzero(np.isin(images.labels, classes)))
    renumbered = np.array([classes.index(int(label)) for label in chosen.labels], dtype=np.int64)
    return Images(renumbered, chosen.read)


def _some(images: Images, rows: int | None, seed: int) -> Images:
    if rows is None or rows >= len(images):
        return images
    return images.select(np.sort(np.random.default_rng(seed).permutation(len(images))[:rows]))


def _normalisation(model: Pretrained) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The checkpoint's mean and standard deviation; None where it says nothing."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(model.where())
        return tuple(values["image_mean"]), tuple(values["image_std"])
    except (OSError, KeyError, TypeError, ValueError):
        return None
