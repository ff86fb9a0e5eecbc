"""Image classification: a pretrained vision model with a new head, on labelled images from anywhere.

Pixels go to the model's own size (bilinear), its number of channels, and its mean and standard deviation.
Three sets, as for GLUE: what is trained on, a share held out of it for choices, and the test split.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.task import ACCURACY, AdapterSetup, Batch, Measure, Prepared, name_classes
from nonlinear_lowrank.validation import check_choice

from .pretrained import FinetuneTask, Pretrained

if TYPE_CHECKING:
    from nlr_lab.tasks.images.examples import Pixels

_PADDING = 8  # a crop is moved by up to 1 / 8 of the side, as 4 pixels of 32


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
    """Images and the vision model that is tuned on them."""

    images: ImageData
    """The data."""
    model: Pretrained
    """The vision model."""

    @property
    def measure(self) -> Measure:
        """Accuracy."""
        return ACCURACY

    @property
    def sequence_length(self) -> int:
        """Patches of an image, the class token included."""
        config = self.model.config()
        patch = getattr(config, "patch_size", None)
        return 1 if patch is None else (getattr(config, "image_size", 224) // patch) ** 2 + 1

    def prepare(self, progress: bool = True) -> Prepared:
        """Find and split the images; they are decoded when they are used.

        Raises:
            UserError: the source or the checkpoint cannot be used, or a class has no image.
        """
        from nlr_lab.tasks.images.examples import TrainingImages, prepare_classification

        found, augment = self.images.find(), self.images.augment
        vary = None if augment == "none" else functools.partial(vary_image, crop=augment == "crop-flip")
        train = TrainingImages(found.train.select(found.kept), self.pixels(), vary)
        return prepare_classification(found, train, augment)

    def pixels(self) -> "Pixels":
        """Return how the checkpoint wants its images."""
        from nlr_lab.tasks.images.examples import Pixels

        config = self.model.config()
        channels = getattr(config, "num_channels", 3)
        mean, std = self.images.normalisation(channels, _normalisation(self.model))
        size: Any = self.images.size or getattr(config, "image_size", 224)
        return Pixels(size=size, channels=channels, mean=mean, std=std)

    def build_model(self, prepared: Any, dense_init: Any = None, *, seed: int = 0) -> Any:
        """Return the pretrained model with a head drawn from the seed."""
        self.check_init(dense_init)
        model = self.model.image_classifier(len(prepared.classes), seed)
        name_classes(model, prepared.classes)
        return model

    def build_on_meta(self) -> Any:
        """Return the same on the meta device, with ten classes where the data are not known yet."""
        return self.model.on_meta("image", len(self.images.classes) or 10)

    def adapter_setup(self, model: Any) -> AdapterSetup:
        """Return what adapters need to know; peft has no task type for images."""
        return self.model.adapters(model, None)


def vary_image(picture: Any, pixels: "Pixels", generator: np.random.Generator, *, crop: bool) -> Batch:
    """Mirror an image by the toss of a coin; move it by up to an eighth where `crop` says so."""
    import torch

    numbers, size = pixels.numbers(pixels.fitted(picture)), pixels.size
    if generator.random() < 0.5:
        numbers = numbers[:, :, ::-1]
    if crop:
        edge = max(1, size // _PADDING)
        top, left = generator.integers(0, 2 * edge + 1, 2)
        padded = np.pad(numbers, ((0, 0), (edge, edge), (edge, edge)))
        numbers = padded[:, top : top + size, left : left + size]
    return {"pixel_values": torch.from_numpy(np.ascontiguousarray(numbers))}


def _normalisation(model: Pretrained) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the checkpoint's mean and standard deviation; None where it says nothing."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(model.where())
        return tuple(values["image_mean"]), tuple(values["image_std"])
    except (OSError, KeyError, TypeError, ValueError):
        return None
