"""Random changes of training images: crop, mirror, RandAugment on each image; then Mixup or CutMix on pairs of them.

Written here on PIL and tensors: every draw must follow from the run's seed and the image's place alone, so that runs
resume bit-exactly and all arms see the same pictures, and the operations of RandAugment are drawn for each image.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_number

if TYPE_CHECKING:
    import torch

    from nlr_lab.tasks.task import Batch

    from .examples import Pixels

Operation = Callable[[Any, float, int], Any]
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
        for name, most in (("randaugment", 16), ("magnitude", 30)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise UserError(f"{name} must be an integer from 0 to {most}, got {value!r}")
        check_number("mixup", self.mixup, minimum=0)
        check_number("cutmix", self.cutmix, minimum=0)

    def vary(self, picture: Any, pixels: "Pixels", generator: np.random.Generator) -> "Batch":
        """Vary a PIL image, "L" or "RGB"; return {"pixel_values": (C, H, W) uint8, "mixing": (4,)}."""
        mixing, size = self.draw_mixing(generator), pixels.size
        picture = _random_part(picture, size, generator) if self.crop == "resized" else pixels.fitted(picture)
        if self.crop == "shift":
            edge = max(1, size // 8)  # as 4 pixels of 32
            left, top = (int(each) for each in generator.integers(-edge, edge + 1, 2))
            picture = picture.crop((left, top, left + size, top + size))  # black beyond the border
        if self.flip and generator.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for _ in range(self.randaugment):
            name = list(OPERATIONS)[int(generator.integers(len(OPERATIONS)))]
            sign = 1 if generator.random() < 0.5 else -1
            picture = OPERATIONS[name](picture, self.magnitude / 30, sign)
        return {"pixel_values": pixels.tensor(picture), "mixing": mixing}

    def draw_mixing(self, generator: np.random.Generator) -> "torch.Tensor":
        """Draw what happens to a pair: (0 nothing, 1 Mixup or 2 CutMix; the weight of the own image; centre y, x of the
        box as shares of the side), (4,) float64."""
        import torch

        both = self.mixup > 0 and self.cutmix > 0
        first = generator.random() < 0.5 if both else self.mixup > 0
        mixup, cutmix = (generator.beta(alpha, alpha) if alpha else 1.0 for alpha in (self.mixup, self.cutmix))
        y, x = generator.random(2)
        kind, weight = (1, mixup) if first else (2 if self.cutmix > 0 else 0, cutmix)
        return torch.tensor([kind, weight, y, x], dtype=torch.float64)


def _random_part(picture: Any, size: int, generator: np.random.Generator) -> Any:
    """Return a part of the image of random area and shape, stretched; after ten draws that do not fit, its middle."""
    width, height = picture.size
    for _ in range(_TRIES):
        area = width * height * generator.uniform(*_AREA)
        ratio = math.exp(generator.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(generator.integers(width - across + 1)), int(generator.integers(height - down + 1))
            break
    else:
        across, down = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
        left, top = (width - across) // 2, (height - down) // 2
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + across, top + down))


def _affine(matrix: Callable[[float, float, float], tuple[float, ...]]) -> Operation:
    """Return an operation that moves pixels by a matrix of the signed magnitude, the width and the height."""
    return lambda image, m, sign: image.transform(
        image.size, Image.Transform.AFFINE, matrix(sign * m, *image.size), resample=Image.Resampling.BILINEAR
    )


def _enhance(kind: Any) -> Operation:
    return lambda image, m, sign: kind(image).enhance(1 + sign * 0.9 * m)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, m, sign: image,
    "shear-x": _affine(lambda s, width, height: (1, 0.3 * s, -0.3 * s * height / 2, 0, 1, 0)),
    "shear-y": _affine(lambda s, width, height: (1, 0, 0, 0.3 * s, 1, -0.3 * s * width / 2)),
    "translate-x": _affine(lambda s, width, height: (1, 0, 150 / 331 * s * width, 0, 1, 0)),
    "translate-y": _affine(lambda s, width, height: (1, 0, 0, 0, 1, 150 / 331 * s * height)),
    "rotate": lambda image, m, sign: image.rotate(sign * 30 * m, resample=Image.Resampling.BILINEAR),  # degrees
    "brightness": _enhance(ImageEnhance.Brightness),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "posterize": lambda image, m, sign: ImageOps.posterize(image, 8 - round(4 * m)),
    # At m = 0 above every pixel: what is at the threshold is inverted too.
    "solarize": lambda image, m, sign: ImageOps.solarize(image, round(255 * (1 - m)) + (m == 0)),
    "autocontrast": lambda image, m, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, m, sign: ImageOps.equalize(image),
}
"""RandAugment's (Cubuk et al. 2019): (PIL image, magnitude m from 0 to 1, sign) -> PIL image."""


def mix_pairs(batch: Mapping[str, "torch.Tensor"], mixing: "torch.Tensor", classes: int) -> "Batch":
    """Mix images 0 and 1, 2 and 3, ... of pixel_values (B, C, H, W) and labels (B,), both of a pair by what was drawn
    for the first, `Augmentation.draw_mixing` (B, 4). Labels become probabilities (B, classes), weighed in CutMix by the
    pixels that were really swapped."""
    import torch

    pixels, mixed = batch["pixel_values"], batch["pixel_values"].clone()
    own = torch.nn.functional.one_hot(batch["labels"], classes).to(pixels.dtype)
    labels = own.clone()
    height, width = pixels.shape[-2:]
    for first in range(0, len(pixels), 2):
        pair, swapped = [first, first + 1], [first + 1, first]
        kind, weight, y, x = mixing[first].tolist()
        if kind == 1:
            mixed[pair] = weight * pixels[pair] + (1 - weight) * pixels[swapped]
        elif kind == 2:
            top, bottom = _span(y, height, weight)
            left, right = _span(x, width, weight)
            mixed[pair, :, top:bottom, left:right] = pixels[swapped, :, top:bottom, left:right]
            weight = 1 - (bottom - top) * (right - left) / (height * width)
        if kind:
            labels[pair] = weight * own[pair] + (1 - weight) * own[swapped]
    return {**batch, "pixel_values": mixed, "labels": labels}


def check_pairs(size: int) -> None:
    """Raise UserError where a (micro-)batch does not split into pairs."""
    if size % 2:
        raise UserError(
            f"Mixup and CutMix mix pairs, and a process takes {size} images at once; choose batch_size and "
            "gradient_accumulation so that it is even, or set mixup and cutmix to 0"
        )


def _span(centre: float, side: int, weight: float) -> tuple[int, int]:
    """Return the span of a box whose area is 1 - weight of the image, cut at the border."""
    length, middle = side * math.sqrt(1 - weight), centre * side
    return max(0, round(middle - length / 2)), min(side, round(middle + length / 2))
