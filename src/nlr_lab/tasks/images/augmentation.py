"""Random changes of training images: crop, mirror, RandAugment on each image; then Mixup or CutMix on pairs of them.

Written here on PIL and tensors: every draw must follow from the run's seed and the image's place alone, so that runs
resume bit-exactly and all arms see the same pictures, and the operations of RandAugment are drawn for each image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_number

if TYPE_CHECKING:
    import torch

    from nlr_lab.tasks.task import Batch

    from .examples import Pixels

_PADDING = 8  # "shift" moves by up to 1 / 8 of the side, as 4 pixels of 32
_GREATEST = 30  # RandAugment's scale
_AREA, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # of "resized", as everyone has them for ImageNet


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images; evaluation sees them as they are."""

    crop: Literal["none", "shift", "resized"] = "none"
    """"shift": moved by up to an eighth of the side; "resized": a part of 8 to 100 % of the area, stretched."""
    flip: bool = False
    """Mirror half of the images."""
    randaugment: int = 2
    """Operations of RandAugment on each image; 0: none."""
    magnitude: int = 9
    """Strength of these operations, 0 to 30."""
    mixup: float = 0.8
    """alpha of Mixup: pairs of images are averaged with a weight from Beta(alpha, alpha); 0: no Mixup."""
    cutmix: float = 1.0
    """alpha of CutMix: pairs of images swap a box whose area is from Beta(alpha, alpha); 0: no CutMix. With both,
    each pair has one of the two, by the toss of a coin."""

    def __post_init__(self) -> None:
        check_choice("crop", self.crop, ("none", "shift", "resized"))
        for name, most in (("randaugment", 16), ("magnitude", _GREATEST)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise UserError(f"{name} must be an integer from 0 to {most}, got {value!r}")
        for name in ("mixup", "cutmix"):
            check_number(name, getattr(self, name), minimum=0)

    @property
    def mixes(self) -> bool:
        """Return whether images are mixed in pairs."""
        return self.mixup > 0 or self.cutmix > 0

    def vary(self, picture: Any, pixels: "Pixels", generator: np.random.Generator) -> "Batch":
        """Return an item without its label: {"pixel_values": (C, H, W) uint8, "mixing": (4,)}."""
        import torch

        mixing = self.draw_mixing(generator)
        numbers = pixels.numbers(self.picture(picture, pixels.size, pixels.fitted, generator))
        return {"pixel_values": torch.from_numpy(numbers), "mixing": mixing}

    def picture(self, picture: Any, size: int, fitted: Callable[[Any], Any], generator: np.random.Generator) -> Any:
        """Vary one image.

        Args:
            picture: a PIL image in its own size, "L" or "RGB".
            size: pixels of a side.
            fitted: brings an image to that size.
            generator: every draw comes from it.
        """
        from .randaugment import OPERATIONS

        picture = _resized(picture, size, generator) if self.crop == "resized" else fitted(picture)
        if self.crop == "shift":
            edge = max(1, size // _PADDING)
            left, top = (int(each) for each in generator.integers(-edge, edge + 1, 2))
            picture = picture.crop((left, top, left + size, top + size))  # black beyond the border
        if self.flip and generator.random() < 0.5:
            picture = picture.transpose(0)  # FLIP_LEFT_RIGHT
        for _ in range(self.randaugment):
            name = list(OPERATIONS)[int(generator.integers(len(OPERATIONS)))]
            sign = 1 if generator.random() < 0.5 else -1
            picture = OPERATIONS[name](picture, self.magnitude / _GREATEST, sign)
        return picture

    def draw_mixing(self, generator: np.random.Generator) -> "torch.Tensor":
        """Draw what happens to a pair: (0 nothing, 1 Mixup or 2 CutMix; the weight of the own image; centre y, x of the
        box as shares of the side), (4,) float64."""
        import torch

        both = self.mixup > 0 and self.cutmix > 0
        first = generator.random() < 0.5 if both else self.mixup > 0
        weights = [generator.beta(alpha, alpha) if alpha else 1.0 for alpha in (self.mixup, self.cutmix)]
        y, x = generator.random(2)
        kind = 0 if not self.mixes else 1 if first else 2
        return torch.tensor([kind, weights[max(0, kind - 1)], y, x], dtype=torch.float64)


def _resized(picture: Any, size: int, generator: np.random.Generator) -> Any:
    """Return a part of the image of random area and shape, stretched; after ten draws that do not fit, its middle."""
    width, height = picture.size
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    for _ in range(_TRIES):
        area = width * height * generator.uniform(*_AREA)
        ratio = math.exp(generator.uniform(low, high))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(generator.integers(width - across + 1)), int(generator.integers(height - down + 1))
            break
    else:
        across, down = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
        left, top = (width - across) // 2, (height - down) // 2
    return picture.resize((size, size), 2, box=(left, top, left + across, top + down))  # BILINEAR
