"""Reading picture files to 8 bits: deep greys, clear pixels, pictures that lie on their side.

| pixels of the file                    | what they become                                                  |
|---------------------------------------|-------------------------------------------------------------------|
| 8 bits, of any kind that Pillow knows | red, green, blue, and opacity where there is any                  |
| grey of 16 bits                       | a 257th of them, rounded: 65535 is white                          |
| grey of 32 bits, whole or real        | refused: nothing says which value is white                        |
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nlr_lab.runtime.pictures import eight_bits
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112  # EXIF's number of the tag


def read_pixels(file: Path, *, upright: bool = False) -> np.ndarray:
    """(height, width, 3) uint8, or (height, width, 4) where the picture may have clear pixels.

    Args:
        file: a picture.
        upright: whether it is turned as its EXIF orientation says. Pixels that a camera's pose belongs to must not be.

    Raises:
        UserError: the file is missing, is no picture, or has values of more than 16 bits.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            image = eight_bits(_upright(opened) if upright else opened)
            clear = "A" in image.getbands() or "transparency" in image.info
            return np.asarray(image.convert("RGBA" if clear else "RGB"))
    except FileNotFoundError as error:
        raise UserError(f"the image {file} is missing") from error
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        TypeError,
        ValueError,
        EOFError,
        Image.DecompressionBombError,
    ) as error:
        raise UserError(f"cannot read the image {file}: {one_line(error)}") from error


def _upright(image: "Image") -> "Image":
    """The image turned as EXIF says; as it is where EXIF cannot be read, for its pixels can.

    `PIL.ImageOps.exif_transpose` writes the tags anew, and fails on some that are broken.
    """
    from PIL.Image import Transpose

    image.load()  # Pillow turns .tiff files while it loads them, and drops the tag
    try:
        with warnings.catch_warnings(action="ignore"):
            said = image.getexif().get(_ORIENTATION)
    except Exception:  # whatever a parser meets in broken tags
        return image
    turn = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(said if isinstance(said, int) else 1)
    return image if turn is None else image.transpose(turn)


def over_white(pixels: np.ndarray) -> np.ndarray:
    """Pixels (H, W, 3 or 4) uint8 as colours (H, W, 3) float32 in [0, 1], clear ones before white."""
    colours = pixels[..., :3].astype(np.float32) / 255
    if pixels.shape[2] == 4:
        opacity = pixels[..., 3:].astype(np.float32) / 255
        colours = colours * opacity + (1 - opacity)
    return colours
