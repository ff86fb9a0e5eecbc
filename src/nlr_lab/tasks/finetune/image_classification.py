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

from nlr_lab.tasks.images.data import ImageExamples, ImageSource, Pixels, unreadable
from nlr_lab.tasks.images.files import Images
from nlr_lab.tasks.metrics import scores
from nlr_lab.tasks.task import AdapterSetup, Batch, Measure, Score, fingerprint
from nonlinear_lowrank.errors import UserError

from .pretrained import Pretrained

_PADDING = 8  # a crop is moved by up to 1 / 8 of the side, as 4 pixels of 32


@dataclass(frozen=True, kw_only=True)
class ImageData(ImageSource):
    """Which images, how they are split, and how they are varied."""

    augment: Literal["none", "flip", "crop-flip"] = "none"
    """Mirror half of the training images; also move them by up to an eighth. The same in every arm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment not in ("none", "flip", "crop-flip"):
            raise UserError(f"unknown augment {self.augment!r}; choose one of none, flip, crop-flip")


class TrainingExamples(ImageExamples):
    """Item i is {"pixel_values": (C, H, W) uint8, "labels": ()}.

    With augmentation the index also tells the pass over the data, i + N * pass, and so a run that is resumed
    sees what it would have seen.

    Args:
        images: labelled images.
        pixels: how they become numbers.
        augment: as in ImageData.
    """

    def __init__(self, images: Images, pixels: Pixels, augment: str = "none") -> None:
        super().__init__(images, pixels)
        self.augment = augment

    @property
    def counts_passes(self) -> bool:
        """Whether an index tells the pass too."""
        return self.augment != "none"

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture, label = self.readable(index % len(self.images))
        pixels = self.pixels.numbers(self.pixels.fitted(picture))
        if self.counts_passes:
            pixels = self._augmented(pixels, np.random.default_rng(index))
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.tensor(label)}

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

    train: TrainingExamples
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
        return {**self.facts, "fingerprint": self.fingerprint, **unreadable(self.train, self.valid, self.test)}


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
        found, pixels = data.find(), self.pixels()
        scored = ImageExamples(found.test, pixels)
        return PreparedImages(
            train=TrainingExamples(found.train.select(found.kept), pixels, data.augment),
            valid=ImageExamples(found.train.select(found.held), pixels) if found.held else scored,
            test=scored if found.held else None,
            tokenizer=pixels,
            classes=found.classes,
            score=scores(("accuracy",)),
            fingerprint=fingerprint(*found.identity(pixels), pixels, data.augment),
            facts=found.facts(pixels),
        )

    def pixels(self) -> Pixels:
        """How the checkpoint wants its images."""
        data, config = self.images, self.model.config()
        channels = getattr(config, "num_channels", 3)
        mean, std = data.normalisation(channels, _normalisation(self.model))
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


def _normalisation(model: Pretrained) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The checkpoint's mean and standard deviation; None where it says nothing."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(model.where())
        return tuple(values["image_mean"]), tuple(values["image_std"])
    except (OSError, KeyError, TypeError, ValueError):
        return None
