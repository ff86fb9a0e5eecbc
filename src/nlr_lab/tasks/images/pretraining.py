"""Image classification from scratch: a vision transformer (noble.txt, section 4.2.1) or a ConvNeXt (sine_lowrank.txt,
appendix A.2.3) on labelled images. The models, and the init of every tensor, are in `backbones`.

Every draw of the augmentation follows from the run's seed, the image and the pass over the data: all arms see the
same pictures, whatever the micro-batches and processes, and so does a run that is resumed.
"""

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nlr_lab.tasks.task import ACCURACY, Measure, Prepared, Task, name_classes
from nlr_lab.tasks.text.language_model import DenseInit, build_meta, build_plain, draw_linears
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .augmentation import Augmentation
from .backbones import ImageBackbone
from .data import ImageSource, check_readable

if TYPE_CHECKING:
    import torch

    from .examples import Pixels

_SIZE = 224  # pixels of a side where none is given


@dataclass(frozen=True, kw_only=True)
class ImagePretrainingTask(Task):
    """Labelled images and the model that is trained on them from scratch."""

    images: ImageSource
    """The data. Without a size, images have 224 pixels a side; without mean and std, 0.5."""
    backbone: ImageBackbone
    """The model without branches."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """Random changes of training images."""
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
        return ACCURACY

    @property
    def sequence_length(self) -> int:
        """Patches of an image, a class token included."""
        return self.backbone.tokens(self.size)

    def prepare(self, progress: bool = True) -> Prepared:
        """Find and split the images; they are decoded when they are used.

        Raises:
            UserError: the source cannot be used, has fewer training images than classes, or a split of which no image
                can be read.
        """
        from .examples import TrainingImages, prepare_classification
        from .mixing import check_pairs, collate_mixed

        found, pixels = self.images.find(), self.pixels()
        if len(found.kept) < len(found.classes):
            raise UserError(
                f"{self.images.source} has {len(found.kept)} images to train on for {len(found.classes)} classes; give "
                "more images, or fewer classes (classes)"
            )
        train = TrainingImages(found.train.select(found.kept), pixels, self.augmentation.vary, seed=0)
        rows = np.sort(np.random.default_rng(3).permutation(len(train))[: self.plain_rows]).tolist()
        plain = train.part(rows) if rows else None
        if plain is not None:
            check_readable(
                plain.images, f"the loss without augmentation needs an image; set plain_rows above {len(rows)}"
            )
        mixing: dict[str, Any] = {}
        if self.augmentation.mixes:
            collate = functools.partial(collate_mixed, pixels=pixels, classes=len(found.classes))
            mixing = {"collate_training": collate, "check_batch": check_pairs}
        extra = (self.augmentation, len(rows))
        return prepare_classification(found, train, *extra, kind=("from scratch",), plain=plain, **mixing)

    def pixels(self) -> "Pixels":
        """Return how the images become numbers."""
        from .examples import Pixels

        channels = self.backbone.channels
        mean, std = self.images.normalisation(channels)
        return Pixels(size=self.size, channels=channels, mean=mean, std=std, shorter=self.shorter)

    def build_model(self, prepared: Any, dense_init: DenseInit | None = None, *, seed: int = 0) -> Any:
        """Return the plain model; what is no linear of a block is the same for every dense_init."""
        model = build_plain(self.backbone.model_class, self.backbone.config(self.size, len(prepared.classes)), seed)
        name_classes(model, prepared.classes)
        # transformers would take mixed labels for those of many classes at once.
        model.loss_function = classification_loss
        draw_linears(model.base_model, dense_init or self.backbone.dense_init, seed)
        return model

    def build_on_meta(self) -> Any:
        """Return the plain model on the meta device."""
        classes = len(self.images.classes) or self.meta_classes
        return build_meta(self.backbone.model_class, self.backbone.config(self.size, classes))


def classification_loss(labels: "torch.Tensor", pooled_logits: "torch.Tensor", config: Any, **_: Any) -> "torch.Tensor":
    """Cross-entropy; labels are numbers of classes (B,) or probabilities (B, K). Names as transformers has them."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(pooled_logits.float(), labels)
