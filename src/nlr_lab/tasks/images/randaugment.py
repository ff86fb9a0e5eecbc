"""RandAugment's operations: (PIL image, magnitude m from 0 to 1, sign) -> PIL image (Cubuk et al. 2019).

| operation                             | at m                 | operation    | at m                  |
|---------------------------------------|----------------------|--------------|-----------------------|
| identity                              |                      | posterize    | 8 - round(4 m) bits   |
| shear x, shear y                      | +- 0.3 m             | solarize     | above 255 (1 - m)     |
| translate x, translate y              | +- 150 / 331 side m  | autocontrast |                       |
| rotate                                | +- 30 m degrees      | equalize     |                       |
| brightness, color, contrast, sharpness| 1 +- 0.9 m           |              |                       |
"""

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

Operation = Callable[[Any, float, int], Any]


def _affine(picture: Any, *data: float) -> Any:
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
    return picture.rotate(sign * 30 * m, resample=Image.Resampling.BILINEAR)


def _enhanced(kind: Any) -> Operation:
    return lambda picture, m, sign: kind(picture).enhance(1 + sign * 0.9 * m)


def _posterize(picture: Any, m: float, sign: int) -> Any:
    return ImageOps.posterize(picture, 8 - round(4 * m))


def _solarize(picture: Any, m: float, sign: int) -> Any:
    return ImageOps.solarize(picture, round(255 * (1 - m)) + (m == 0))  # it inverts what is at the threshold too


OPERATIONS: dict[str, Operation] = {
    "identity": lambda picture, m, sign: picture,
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
    "rotate": _rotate,
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": lambda picture, m, sign: ImageOps.autocontrast(picture),
    "equalize": lambda picture, m, sign: ImageOps.equalize(picture),
}
