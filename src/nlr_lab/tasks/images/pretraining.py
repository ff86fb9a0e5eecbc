"""Image classification from scratch: a vision transformer (noble.txt, section 4.2.1) or a ConvNeXt (sine_lowrank.txt,
appendix A.2.3) on labelled images; and `digits-vit`, a tiny pretrained one.

Every draw of the augmentation follows from the run's seed, the image and the pass over the data: all arms see the
same pictures, whatever the micro-batches and processes, and so does a run that is resumed.

Init of every tensor; draws depend on the seed alone:

| tensor                                        | dense_init | distribution                            |
|-----------------------------------------------|------------|-----------------------------------------|
| patches, class token, positions, convolutions,| any        | transformers' own, the same in all arms |
| layer scales, head                            |            |                                         |
| linears of the blocks (ViT: q, k, v, o, fc1,  | stock      | N(0, 0.02^2), transformers' own (ViT:   |
| fc2; ConvNeXt: pwconv1, pwconv2); biases 0    |            | cut at 2 std)                           |
|                                               | noble      | N(0, (0.5 / sqrt(d_in))^2)              |
|                                               | kaiming    | U(+-1 / sqrt(d_in)), nn.Linear's own    |
"""

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tyro

from nlr_lab.tasks.task import ACCURACY, Prepared, Task, cache_folder, cached, name_classes
from nlr_lab.tasks.text.language_model import DenseInit, build_meta, build_plain, check_dense_init, draw_linears
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_number, check_share

from .augmentation import Augmentation, check_pairs
from .sources import ImageSource, read_digits

if TYPE_CHECKING:
    import torch

    from .examples import Pixels

_DIGITS = (0, 1, 2, 3, 4)  # that digits-vit knows; tasks adapt it to the others
_STEPS, _LR = 200, 2e-3  # of its training


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

    model_class: ClassVar[str] = "ViTForImageClassification"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "hidden"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not split into {self.heads} heads; choose a multiple of it")
        check_share("dropout", self.dropout)
        _check_common(self)

    def check_size(self, size: int) -> None:
        """Raise UserError where images of that size do not split into patches."""
        _check_size(size, self.patch, f"patches of {self.patch}")

    def tokens(self, size: int) -> int:
        """Return the patches of an image of that size, and the class token."""
        return (size // self.patch) ** 2 + 1

    def config(self, size: int, classes: int) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "vit",
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.hidden,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            image_size=size,
            patch_size=self.patch,
            num_channels=self.channels,
            num_labels=classes,
        )


@dataclass(frozen=True, kw_only=True)
class ConvNextBackbone:
    """Sizes and init of a ConvNeXt: a stem of patches, then stages, each at half the resolution of the one before."""

    depths: tuple[int, ...]
    """Blocks of each stage; a block is a depthwise convolution, then two pointwise linears of 4 times the width."""
    widths: tuple[int, ...]
    """Channels of each stage."""
    patch: int = 4
    """Pixels of a side of a patch of the stem."""
    channels: int = 3
    """1 for grey images, 3 for colour."""
    dense_init: DenseInit = "stock"
    """Init of the pointwise linears: see the table of this file. An arm may override it."""
    drop_path: float = 0.0
    """Stochastic depth: the share of images whose last block is skipped; earlier blocks in proportion."""
    layer_scale: float = 1e-6
    """Initial factor of each block's output, channel by channel; 0: no such scales."""

    model_class: ClassVar[str] = "ConvNextForImageClassification"

    def __post_init__(self) -> None:
        for name in ("depths", "widths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON turns tuples into lists
            for value in getattr(self, name):
                check_integer(name, value, minimum=1)
        if not self.depths or len(self.depths) != len(self.widths):
            raise UserError(f"depths and widths need a number for each stage, got {self.depths!r} and {self.widths!r}")
        check_share("drop_path", self.drop_path)
        check_number("layer_scale", self.layer_scale, minimum=0)
        _check_common(self)

    def check_size(self, size: int) -> None:
        halved = len(self.depths) - 1
        _check_size(size, self.patch * 2**halved, f"patches of {self.patch}, halved {halved} times")

    def tokens(self, size: int) -> int:
        return (size // self.patch) ** 2  # of the first stage; each later one has a quarter

    def config(self, size: int, classes: int) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "convnext",
            depths=list(self.depths),
            hidden_sizes=list(self.widths),
            num_stages=len(self.depths),
            patch_size=self.patch,
            num_channels=self.channels,
            image_size=size,
            drop_path_rate=self.drop_path,
            layer_scale_init_value=self.layer_scale,
            num_labels=classes,
        )


if TYPE_CHECKING:
    ImageBackbone = VitBackbone | ConvNextBackbone
else:
    # The command line shows the fields of the recipe's own; it offers no other model.
    ImageBackbone = tyro.conf.AvoidSubcommands[VitBackbone | ConvNextBackbone]


def _check_common(backbone: VitBackbone | ConvNextBackbone) -> None:
    check_integer("patch", backbone.patch, minimum=1)
    check_dense_init(backbone.dense_init)
    if backbone.channels not in (1, 3):
        raise UserError(f"channels must be 1 or 3, got {backbone.channels!r}")


def _check_size(size: int, step: int, what: str) -> None:
    if size % step:
        near = " or ".join(str(each) for each in (size // step * step, -(-size // step) * step) if each)
        raise UserError(f"images of {size} pixels do not split into {what}; choose {near}")


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
    """Evaluation scales the shorter side to this many pixels and cuts the middle out (ImageNet: 256); None: the whole
    image, squeezed into the square."""
    plain_rows: int = 2000
    """Training images whose loss is also taken without augmentation, at each evaluation; always the same ones."""
    meta_classes: int = 10
    """Classes where the data are not known yet, in counts of parameters."""

    measure = ACCURACY

    def __post_init__(self) -> None:
        self.backbone.check_size(self.size)
        if self.shorter is not None and self.shorter < self.size:
            raise UserError(f"shorter must be at least the size of {self.size} pixels, got {self.shorter}")
        check_integer("plain_rows", self.plain_rows, minimum=0)
        check_integer("meta_classes", self.meta_classes, minimum=2)

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return self.images.size or 224

    @property
    def sequence_length(self) -> int:
        return self.backbone.tokens(self.size)

    def prepare(self, progress: bool = True) -> Prepared:
        """Find and split the images, which are decoded when they are used; raise UserError where the source cannot be
        used, has fewer training images than classes, or a split of which no image can be read."""
        from .examples import TrainingImages, prepare_classification

        found, pixels = self.images.find(), self.pixels()
        if len(found.kept) < len(found.classes):
            raise UserError(
                f"{self.images.source} has {len(found.kept)} images to train on for {len(found.classes)} classes; give "
                "more images, or fewer classes (classes)"
            )
        train = TrainingImages(found.train.select(found.kept), pixels, self.augmentation.vary, seed=0)
        rows = np.sort(np.random.default_rng(3).permutation(len(train))[: self.plain_rows]).tolist()
        plain = train.part(rows) if rows else None
        train.images.select(rows).first_readable()
        mixing: dict[str, Any] = {}
        if self.augmentation.mixup > 0 or self.augmentation.cutmix > 0:
            collate = functools.partial(pixels.collate_mixed, classes=len(found.classes))
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
        """Return the plain model; all but the blocks' linears is the same for every dense_init."""
        model = build_plain(self.backbone.model_class, self.backbone.config(self.size, len(prepared.classes)), seed)
        name_classes(model, prepared.classes)
        model.loss_function = classification_loss  # transformers would take mixed labels for those of many classes
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


def digits_vit_config() -> Any:
    """Return the architecture of `digits-vit`: 4 layers of width 64, about 200,000 parameters."""
    return VitBackbone(layers=4, width=64, heads=4, hidden=256, patch=2, channels=1).config(8, len(_DIGITS))


def digits_vit_folder() -> Path:
    """Return the folder of `digits-vit`, which knows scikit-learn's digits 0 to 4; trained on first use, in seconds."""

    def save(place: Path) -> None:
        from nonlinear_lowrank.hub.classes import quiet_loading
        from nonlinear_lowrank.hub.storage import staged_folder

        with staged_folder(place) as staged, quiet_loading():
            _train_digits_vit().save_pretrained(staged)

    path = cache_folder() / "checkpoints" / "digits-vit-1"  # the version of the training below
    return cached(path, lambda place: place if (place / "config.json").is_file() else None, save)


def _train_digits_vit() -> Any:
    """Train from a fixed seed: AdamW with a linear decay."""
    import torch
    from transformers import ViTForImageClassification

    from nlr_lab.runtime.environment import cpu_threads

    images, labels = read_digits()
    known = np.isin(labels, _DIGITS)
    pixels = (torch.from_numpy(images[known]).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    targets = torch.from_numpy(labels[known])
    threads = os.environ.get("OMP_NUM_THREADS")
    with cpu_threads(None if threads is None else int(threads)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTForImageClassification(digits_vit_config()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01)
        for step in range(_STEPS):
            optimizer.param_groups[0]["lr"] = _LR * min((step + 1) / 20, 1 - step / _STEPS)
            chosen = torch.randint(len(targets), (64,))
            model(pixel_values=pixels[chosen], labels=targets[chosen]).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model.eval()
