"""What training images go through: crop, mirror, RandAugment on each image; then Mixup or CutMix on pairs of them.

Written here on PIL and tensors: every draw must follow from the run's seed and the image's place alone, so that runs
resume bit by bit and all arms see the same pictures, and the operations of RandAugment are drawn for each image.

RandAugment's operations at magnitude m of 30 (Cubuk et al. 2019; where two signs make sense one is drawn):

| operation                             | at m                      | operation    | at m                       |
|---------------------------------------|---------------------------|--------------|----------------------------|
| identity                              |                           | posterize    | 8 - round(4 m / 30) bits   |
| shear x, shear y                      | +- 0.3 m / 30             | solarize     | above 255 (1 - m / 30)     |
| translate x, translate y              | +- 150 / 331 side m / 30  | autocontrast |                            |
| rotate                                | +- 30 m / 30 degrees      | equalize     |                            |
| brightness, color, contrast, sharpness| 1 +- 0.9 m / 30           |              |                            |
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from nlr_lab.tasks.task import Batch
from nonlinear_lowrank.errors import UserError

_PADDING = 8  # "shift" moves by up to 1 / 8 of the side, as 4 pixels of 32
_GREATEST = 30  # RandAugment's scale
_AREA, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # of "resized", as everyone has them for ImageNet


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are varied; evaluation sees them as they are."""

    crop: Literal["none", "shift", "resized"] = "none"
    """"shift": moved by up to an eighth of the side; "resized": a part of 8 to 100 % of the area, stretched."""
    flip: bool = False
    """Mirror half of the images."""
    randaugment: int = 2
    """Operations of RandAugment on each image; 0: none."""
    magnitude: int = 9
    """Of these operations, 0 to 30."""
    mixup: float = 0.8
    """alpha of Mixup: pairs of images are averaged with a weight from Beta(alpha, alpha); 0: no Mixup."""
    cutmix: float = 1.0
    """alpha of CutMix: pairs of images swap a box whose area is from Beta(alpha, alpha); 0: no CutMix. With both,
    each pair has one of the two, by the toss of a coin."""

    def __post_init__(self) -> None:
        if self.crop not in ("none", "shift", "resized"):
            raise UserError(f"unknown crop {self.crop!r}; choose one of none, shift, resized")
        for name, most in (("randaugment", 16), ("magnitude", _GREATEST)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise UserError(f"{name} must be an integer from 0 to {most}, got {value!r}")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be at least 0, got {getattr(self, name)!r}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.mixup > 0 or self.cutmix > 0

    def picture(self, picture: Any, size: int, fitted: Callable[[Any], Any], generator: np.random.Generator) -> Any:
        """One image, varied.

        Args:
            picture: a PIL image in its own size, "L" or "RGB".
            size: pixels of a side.
            fitted: brings an image to that size.
            generator: every draw comes from it.
        """
        picture = _resized(picture, size, generator) if self.crop == "resized" else fitted(picture)
        if self.crop == "shift":
            edge = max(1, size // _PADDING)
            left, top = (int(each) for each in generator.integers(-edge, edge + 1, 2))
            picture = picture.crop((left, top, left + size, top + size))  # black beyond the border
        if self.flip and generator.random() < 0.5:
            picture = picture.transpose(0)  # FLIP_LEFT_RIGHT
        for _ in range(self.randaugment):
            name = list(_OPERATIONS)[int(generator.integers(len(_OPERATIONS)))]
            sign = 1 if generator.random() < 0.5 else -1
            picture = _OPERATIONS[name](picture, self.magnitude / _GREATEST, sign)
        return picture

    def draw_mixing(self, generator: np.random.Generator) -> torch.Tensor:
        """What happens to a pair: (0 nothing, 1 Mixup or 2 CutMix; the weight of the own image; centre y, x of the
        box as shares of the side), (4,) float64."""
        both = self.mixup > 0 and self.cutmix > 0
        first = generator.random() < 0.5 if both else self.mixup > 0
        weights = [generator.beta(alpha, alpha) if alpha else 1.0 for alpha in (self.mixup, self.cutmix)]
        y, x = generator.random(2)
        kind = 0 if not self.mixes else 1 if first else 2
        return torch.tensor([kind, weights[max(0, kind - 1)], y, x], dtype=torch.float64)


def mix_pairs(batch: Mapping[str, torch.Tensor], mixing: torch.Tensor, classes: int) -> Batch:
    """Mixes images 0 and 1, 2 and 3, ...: both of a pair by what was drawn for the first.

    Args:
        batch: pixel_values (B, C, H, W) and labels (B,); B is even.
        mixing: (B, 4), `Augmentation.draw_mixing` of each image.
        classes: K.

    Returns:
        pixel_values as before, and labels (B, K) as probabilities. CutMix weighs them by the pixels that were really
        swapped.

    Raises:
        UserError: there are no labels to mix, or the number of images is odd.
    """
    if "labels" not in batch:
        raise UserError(
            "Mixup and CutMix mix labels as they mix images, and these have none; set mixup and cutmix to 0"
        )
    check_pairs(len(mixing))
    pixels, mixed = batch["pixel_values"], batch["pixel_values"].clone()
    own = torch.nn.functional.one_hot(batch["labels"], classes).to(pixels.dtype)
    labels = own.clone()
    height, width = pixels.shape[-2:]
    for one in range(0, len(pixels), 2):
        two = one + 1
        kind, weight, y, x = mixing[one].tolist()
        if kind == 1:
            mixed[one] = weight * pixels[one] + (1 - weight) * pixels[two]
            mixed[two] = weight * pixels[two] + (1 - weight) * pixels[one]
        elif kind == 2:
            top, bottom = _span(y, height, weight)
            left, right = _span(x, width, weight)
            box = (..., slice(top, bottom), slice(left, right))
            mixed[one][box], mixed[two][box] = pixels[two][box], pixels[one][box]
            weight = 1 - (bottom - top) * (right - left) / (height * width)
        if kind:
            labels[one] = weight * own[one] + (1 - weight) * own[two]
            labels[two] = weight * own[two] + (1 - weight) * own[one]
    return {**batch, "pixel_values": mixed, "labels": labels}


def check_pairs(size: int) -> None:
    """Raises UserError where a (micro-)batch does not split into pairs."""
    if size % 2:
        raise UserError(
            f"Mixup and CutMix mix pairs, and a process takes {size} images at once; choose batch_size and "
            "gradient_accumulation so that it is even, or set mixup and cutmix to 0"
        )


def _span(centre: float, side: int, weight: float) -> tuple[int, int]:
    """Of a box whose area is 1 - weight of the image, cut at the border."""
    length, middle = side * math.sqrt(1 - weight), centre * side
    return max(0, round(middle - length / 2)), min(side, round(middle + length / 2))


def _resized(picture: Any, size: int, generator: np.random.Generator) -> Any:
    """A part of the image of random area and shape, stretched; after ten draws that do not fit, its middle."""
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


# --- RandAugment: (PIL image, magnitude from 0 to 1, sign) -> PIL image ---------------------------------------


def _affine(picture: Any, a: float, b: float, c: float, d: float, e: float, f: float) -> Any:
    from PIL import Image

    data = (a, b, c, d, e, f)
    return picture.transform(picture.size, Image.Transform.AFFINE, data, resample=Image.Resampling.BILINEAR)


def _shear_x(picture: Any, m: float, sign: int) -> Any:
    s = sign * 0.3 * m
    return _affine(picture, 1, s, -s * picture.size[1] / 2, 0, 1, 0)


def _shear_y(picture: Any, m: float, sign: int) -> Any:
    s = sign * 0.3 * m
    return _affine(picture, 1, 0, 0, s, 1, -s * picture.size[0] / 2)


def _translate_x(picture: Any, m: float, sign: int) -> Any:
    return _affine(picture, 1, 0, sign * 150 / 331 * m * picture.size[0], 0, 1, 0)


def _translate_y(picture: Any, m: float, sign: int) -> Any:
    return _affine(picture, 1, 0, 0, 0, 1, sign * 150 / 331 * m * picture.size[1])


def _rotate(picture: Any, m: float, sign: int) -> Any:
    return picture.rotate(sign * 30 * m, resample=2)  # BILINEAR


def _enhanced(kind: str) -> Callable[[Any, float, int], Any]:
    def change(picture: Any, m: float, sign: int) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(picture).enhance(1 + sign * 0.9 * m)

    return change


def _posterize(picture: Any, m: float, sign: int) -> Any:
    from PIL import ImageOps

    return ImageOps.posterize(picture, 8 - round(4 * m))


def _solarize(picture: Any, m: float, sign: int) -> Any:
    from PIL import ImageOps

    return ImageOps.solarize(picture, round(255 * (1 - m)) + (m == 0))  # it turns what is at the threshold too


def _autocontrast(picture: Any, m: float, sign: int) -> Any:
    from PIL import ImageOps

    return ImageOps.autocontrast(picture)


def _equalize(picture: Any, m: float, sign: int) -> Any:
    from PIL import ImageOps

    return ImageOps.equalize(picture)


_OPERATIONS: dict[str, Callable[[Any, float, int], Any]] = {
    "identity": lambda picture, m, sign: picture,
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
    "rotate": _rotate,
    "brightness": _enhanced("Brightness"),
    "color": _enhanced("Color"),
    "contrast": _enhanced("Contrast"),
    "sharpness": _enhanced("Sharpness"),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
