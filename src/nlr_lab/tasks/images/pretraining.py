"""Image classification from scratch: a vision transformer (noble.txt, section 4.2.1) or a ConvNeXt (sine_lowrank.txt,
appendix A.2.3) on labelled images. The models, and the init of every tensor, are in `image_backbones`.

Every draw of the augmentation follows from the run's seed, the image and the pass over the data: all arms see the
same pictures, whatever the micro-batches and processes, and so does a run that is resumed.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from nlr_lab.tasks.metrics import scores
from nlr_lab.tasks.task import Batch, Measure, Score, fingerprint
from nlr_lab.tasks.text.language_model import DenseInit, draw_linears
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .augmentation import Augmentation, check_pairs, mix_pairs
from .backbones import ImageBackbone
from .data import ImageExamples, ImageSource, Pixels, check_readable, unreadable
from .files import Images

_SIZE = 224  # pixels of a side where none is given


class VariedExamples(ImageExamples):
    """Training images, varied: item i is {"pixel_values": (C, H, W) uint8, "labels": (), "mixing": (4,)}.

    The index also tells the pass over the data, i + N * pass.

    Args:
        images: labelled images.
        pixels: how they become numbers.
        augmentation: what they go through.
        seed: of the run.
    """

    counts_passes = True

    def __init__(self, images: Images, pixels: Pixels, augmentation: Augmentation, seed: int = 0) -> None:
        super().__init__(images, pixels)
        self.augmentation, self.seed = augmentation, seed

    def seeded(self, seed: int) -> "VariedExamples":
        """The same images with the draws of a run."""
        found = copy.copy(self)
        found.seed = seed
        return found

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture, label = self.readable(index % len(self.images))
        generator = np.random.default_rng([self.seed, index])
        mixing = self.augmentation.draw_mixing(generator)
        picture = self.augmentation.picture(picture, self.pixels.size, self.pixels.fitted, generator)
        numbers = torch.from_numpy(self.pixels.numbers(picture))
        return {"pixel_values": numbers, "labels": torch.tensor(label), "mixing": mixing}


@dataclass(frozen=True)
class PreparedPretraining:
    """Splits that are ready for training; `tokenizer` is what is saved beside the model."""

    train: VariedExamples
    valid: ImageExamples
    test: ImageExamples | None
    plain: ImageExamples | None
    """Some of the training images as they are: their loss tells how well the model fits, whatever the augmentation."""
    tokenizer: Pixels
    classes: tuple[str, ...]
    score: Score
    fingerprint: str
    facts: dict[str, Any] = field(default_factory=dict)

    def collate(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """Items -> a batch for evaluation: labels are numbers of classes."""
        return self.tokenizer.collate(items)

    def collate_training(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """Items -> a batch for training; where images are mixed, labels are probabilities of the classes."""
        batch = self.tokenizer.collate(items)
        if not self.train.augmentation.mixes:
            return batch
        return mix_pairs(batch, torch.stack([item["mixing"] for item in items]), len(self.classes))

    def check_batch(self, size: int) -> None:
        """Raises UserError where a process cannot train on so many images at once."""
        if self.train.augmentation.mixes:
            check_pairs(size)

    def describe(self) -> dict[str, Any]:
        """What the data are, for the record."""
        lost = unreadable(self.train, self.valid, self.test)  # the plain ones count among those of training
        return {**self.facts, "fingerprint": self.fingerprint, **lost}


@dataclass(frozen=True, kw_only=True)
class ImagePretrainingTask:
    """Labelled images and the model that is trained on them from scratch."""

    images: ImageSource
    """The data. Without a size, images have 224 pixels a side; without mean and std, 0.5."""
    backbone: ImageBackbone
    """The model without branches."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """How training images are varied."""
    shorter: int | None = None
    """Evaluation brings the shorter side to so many pixels and cuts the middle out (ImageNet: 256); None: the whole
    image, squeezed into the square."""
    plain_rows: int = 2000
    """Training images whose loss is also taken without augmentation, at each evaluation; always the same ones."""
    meta_classes: int = 10
    """Classes where the data are not known yet, in counts of parameters."""

    def __post_init__(self) -> None:
        self.backbone.check_size(self.size)
        if self.shorter is not None and self.shorter < self.size:
            raise UserError(f"shorter must be at least the size of {self.size} pixels, got {self.shorter}")
        for name, least in (("plain_rows", 0), ("meta_classes", 2)):
            check_integer(name, getattr(self, name), minimum=least)

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return self.images.size or _SIZE

    @property
    def measure(self) -> Measure:
        """Accuracy."""
        return Measure(name="accuracy", higher_is_better=True, unit="")

    @property
    def sequence_length(self) -> int:
        """Patches of an image, a class token included."""
        return self.backbone.tokens(self.size)

    def prepare(self, progress: bool = True) -> PreparedPretraining:
        """Finds and splits the images; they are decoded when they are used.

        Raises:
            UserError: the source cannot be used, has fewer training images than classes, or a split of which no image
                can be read.
        """
        found, pixels = self.images.find(), self.pixels()
        if len(found.kept) < len(found.classes):
            raise UserError(
                f"{self.images.source} has {len(found.kept)} images to train on for {len(found.classes)} classes; give "
                "more images, or fewer classes (classes)"
            )
        kept = found.train.select(found.kept)
        scored = ImageExamples(found.test, pixels)
        train = VariedExamples(kept, pixels, self.augmentation)
        rows = np.sort(np.random.default_rng(3).permutation(len(kept))[: self.plain_rows])
        plain = train.part(rows.tolist()) if len(rows) else None
        if plain is not None:
            check_readable(
                plain.images, f"the loss without augmentation needs an image; set plain_rows above {len(rows)}"
            )
        return PreparedPretraining(
            train=train,
            valid=ImageExamples(found.train.select(found.held), pixels) if found.held else scored,
            test=scored if found.held else None,
            plain=plain,
            tokenizer=pixels,
            classes=found.classes,
            score=scores(("accuracy",)),
            fingerprint=fingerprint("from scratch", *found.identity(pixels), pixels, self.augmentation, len(rows)),
            facts=found.facts(pixels),
        )

    def pixels(self) -> Pixels:
        """How the images become numbers."""
        channels = self.backbone.channels
        mean, std = self.images.normalisation(channels)
        return Pixels(size=self.size, channels=channels, mean=mean, std=std, shorter=self.shorter)

    def build_model(self, prepared: Any, dense_init: DenseInit | None = None, *, seed: int = 0) -> nn.Module:
        """The plain float32 model on the CPU.

        Args:
            prepared: gives the classes.
            dense_init: overrides the backbone's.
            seed: of every draw. What is no linear of a block is the same for every dense_init.
        """
        config = self.backbone.config(self.size, len(prepared.classes))
        config.id2label = dict(enumerate(prepared.classes))
        config.label2id = {name: index for index, name in enumerate(prepared.classes)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = self.backbone.model_class(config)
        # transformers would take mixed labels for those of many classes at once.
        model.loss_function = classification_loss
        draw_linears(model.base_model, dense_init or self.backbone.dense_init, seed)
        return model

    def build_on_meta(self) -> nn.Module:
        """The plain model on the meta device: shapes and counts, no memory."""
        classes = len(self.images.classes) or self.meta_classes
        with torch.device("meta"):
            return self.backbone.model_class(self.backbone.config(self.size, classes))


def classification_loss(labels: torch.Tensor, pooled_logits: torch.Tensor, config: Any, **_: Any) -> torch.Tensor:
    """Cross-entropy; labels are numbers of classes (B,) or probabilities (B, K). Names as transformers has them."""
    return nn.functional.cross_entropy(pooled_logits.float(), labels)
