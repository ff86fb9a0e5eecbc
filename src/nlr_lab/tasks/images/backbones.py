"""The models that learn to classify images from scratch: their sizes, and the init of every tensor.

Draws depend on the seed alone:

| tensor                                        | dense_init | distribution                            |
|-----------------------------------------------|------------|-----------------------------------------|
| patches, class token, positions, convolutions,| any        | transformers' own, the same in all arms |
| layer scales, head                            |            |                                         |
| linears of the blocks (ViT: q, k, v, o, fc1,  | stock      | N(0, 0.02^2), transformers' own (ViT:   |
| fc2; ConvNeXt: pwconv1, pwconv2); biases 0    |            | cut at 2 std)                           |
|                                               | noble      | N(0, (0.5 / sqrt(d_in))^2)              |
|                                               | kaiming    | U(+-1 / sqrt(d_in)), nn.Linear's own    |
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from nlr_lab.tasks.text.language_model import DenseInit, check_dense_init
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_number, check_share


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
        for name in ("layers", "width", "heads", "hidden", "patch"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not split into {self.heads} heads; choose a multiple of it")
        _check_channels(self.channels)
        check_share("dropout", self.dropout)
        check_dense_init(self.dense_init)

    def check_size(self, size: int) -> None:
        """Raise UserError where images of that size do not split into patches."""
        _check_size(size, self.patch, f"patches of {self.patch}")

    def tokens(self, size: int) -> int:
        """Return the patches of an image of that size, and the class token."""
        return (size // self.patch) ** 2 + 1

    def config(self, size: int, classes: int) -> Any:
        """Return the transformers config of these sizes."""
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
        # JSON turns tuples into lists.
        for name in ("depths", "widths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for value in getattr(self, name):
                check_integer(name, value, minimum=1)
        if not self.depths or len(self.depths) != len(self.widths):
            raise UserError(f"depths and widths need a number for each stage, got {self.depths!r} and {self.widths!r}")
        check_integer("patch", self.patch, minimum=1)
        _check_channels(self.channels)
        check_share("drop_path", self.drop_path)
        check_number("layer_scale", self.layer_scale, minimum=0)
        check_dense_init(self.dense_init)

    def check_size(self, size: int) -> None:
        """Raise UserError where images of that size do not split evenly down to the last stage."""
        step = self.patch * 2 ** (len(self.depths) - 1)
        _check_size(size, step, f"patches of {self.patch}, halved {len(self.depths) - 1} times")

    def tokens(self, size: int) -> int:
        """Return the places of the first stage; each later stage has a quarter of the one before."""
        return (size // self.patch) ** 2

    def config(self, size: int, classes: int) -> Any:
        """Return the transformers config of these sizes."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "convnext",
            depths=list(self.depths),
            hidden_sizes=list(self.widths),
            num_stages=len(self.depths),
            patch_size=self.patch,
            num_channels=self.channels,
            image_size=size,
            hidden_act="gelu",
            drop_path_rate=self.drop_path,
            layer_scale_init_value=self.layer_scale,
            num_labels=classes,
        )


if TYPE_CHECKING:
    ImageBackbone = VitBackbone | ConvNextBackbone
else:
    # The command line shows the fields of the recipe's own; it offers no other model.
    ImageBackbone = tyro.conf.AvoidSubcommands[VitBackbone | ConvNextBackbone]


def _check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise UserError(f"channels must be 1 or 3, got {channels!r}")


def _check_size(size: int, step: int, what: str) -> None:
    """Raise UserError unless the size is a multiple of the step."""
    if size % step:
        low, high = size // step * step, -(-size // step) * step
        near = f"{low} or {high}" if low else str(high)
        raise UserError(f"images of {size} pixels do not split into {what}; choose {near}")
