"""Image classification from scratch: a vision transformer on labelled images (noble.txt, section 4.2.1).

Init of every tensor; draws depend on the seed alone:

| tensor                                | dense_init | distribution                                  |
|---------------------------------------|------------|-----------------------------------------------|
| patches, class token, positions, head | any        | transformers' own, the same in all arms       |
| linears of the blocks (q, k, v, o,    | stock      | N(0, 0.02^2) cut at 2 std, transformers' own  |
| fc1, fc2); biases 0                   | noble      | N(0, (0.5 / sqrt(d_in))^2)                    |
|                                       | kaiming    | U(+-1 / sqrt(d_in)), nn.Linear's own          |

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

from ..errors import UserError
from .image_augmentation import Augmentation, check_pairs, mix_pairs
from .image_data import ImageExamples, ImageSource, Pixels, unreadable
from .image_files import Images
from .language_model import DenseInit, check_dense_init, draw_linears
from .metrics import scores
from .task import Batch, Measure, Score, fingerprint

_SIZE = 224  # pixels of a side where none is given


@dataclass(frozen=True, kw_only=True)
class VitBackbone:
    """Sizes and init of a vision transformer with a class token and learned positions."""

    layers: int
    """Number of transformer blocks."""
    width: int
    """d, the model width; a multiple of heads."""
    heads: int
    """Attention heads, each width / heads wide."""
    hidden: int
    """Width of the feed-forward block between its two linears."""
    patch: int
    """Pixels of a side of a patch."""
    channels: int = 3
    """1 for grey images, 3 for colour."""
    dense_init: DenseInit = "stock"
    """Init of the linears: see the table of this file. An arm may override it."""
    dropout: float = 0.0
    """Dropout on hidden states and attention weights."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "hidden", "patch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not split into {self.heads} heads; choose a multiple of it")
        if self.channels not in (1, 3):
            raise UserError(f"channels must be 1 or 3, not {self.channels!r}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")
        check_dense_init(self.dense_init)

    def check_size(self, size: int) -> None:
        """Raises UserError where images of that size do not split into patches."""
        if size % self.patch:
            low, high = size // self.patch * self.patch, -(-size // self.patch) * self.patch
            near = f"{low} or {high}" if low else str(high)
            raise UserError(f"images of {size} pixels do not split into patches of {self.patch}; choose {near}")

    def config(self, size: int, classes: int) -> Any:
        """The transformers config of these sizes."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "vit",
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.hidden,
            hidden_act="gelu",
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            image_size=size,
            patch_size=self.patch,
            num_channels=self.channels,
            num_labels=classes,
        )


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
        lost = unreadable(self.train, self.valid, self.test, self.plain)
        return {**self.facts, "fingerprint": self.fingerprint, **lost}


@dataclass(frozen=True, kw_only=True)
class ImagePretrainingTask:
    """Labelled images and the vision transformer that is trained on them from scratch."""

    images: ImageSource
    """The data. Without a size, images have 224 pixels a side; without mean and std, 0.5."""
    backbone: VitBackbone
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
            raise UserError(f"shorter must be at least the size of {self.size} pixels, not {self.shorter}")
        for name, least in (("plain_rows", 0), ("meta_classes", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")

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
        """Patches of an image, the class token included."""
        return (self.size // self.backbone.patch) ** 2 + 1

    def prepare(self, progress: bool = True) -> PreparedPretraining:
        """Finds and splits the images; they are decoded when they are used.

        Raises:
            UserError: the source cannot be used, or has fewer training images than classes.
        """
        found, pixels = self.images.find(), self.pixels()
        if len(found.kept) < len(found.classes):
            raise UserError(
                f"{self.images.source} has {len(found.kept)} images to train on for {len(found.classes)} classes; give "
                "more images, or fewer classes (classes)"
            )
        kept = found.train.select(found.kept)
        scored = ImageExamples(found.test, pixels)
        rows = np.sort(np.random.default_rng(3).permutation(len(kept))[: self.plain_rows])
        return PreparedPretraining(
            train=VariedExamples(kept, pixels, self.augmentation),
            valid=ImageExamples(found.train.select(found.held), pixels) if found.held else scored,
            test=scored if found.held else None,
            plain=ImageExamples(kept.select(rows), pixels) if len(rows) else None,
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
        from transformers import ViTForImageClassification

        config = self.backbone.config(self.size, len(prepared.classes))
        config.id2label = dict(enumerate(prepared.classes))
        config.label2id = {name: index for index, name in enumerate(prepared.classes)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = ViTForImageClassification(config)
        # transformers would take mixed labels for those of many classes at once.
        model.loss_function = classification_loss
        draw_linears(model.base_model, dense_init or self.backbone.dense_init, seed)
        return model

    def build_on_meta(self) -> nn.Module:
        """The plain model on the meta device: shapes and counts, no memory."""
        from transformers import ViTForImageClassification

        classes = len(self.images.classes) or self.meta_classes
        with torch.device("meta"):
            return ViTForImageClassification(self.backbone.config(self.size, classes))


def classification_loss(labels: torch.Tensor, pooled_logits: torch.Tensor, config: Any, **_: Any) -> torch.Tensor:
    """Cross-entropy; labels are numbers of classes (B,) or probabilities (B, K). Names as transformers has them."""
    return nn.functional.cross_entropy(pooled_logits.float(), labels)
