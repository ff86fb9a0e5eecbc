"""Pictures of any depth -> 8 bits a channel. Pillow's own conversion cuts 16 bits off at 255, which is white."""

from typing import Any

import numpy as np

from nonlinear_lowrank.errors import UserError


def eight_bits(image: Any) -> Any:
    """Return a PIL image of 8 bits a channel, of a PIL image or an array (H, W) or (H, W, C) uint8.

    Grey of 16 bits is divided by 257, so that white stays white.

    Raises:
        UserError: there is no image, or nothing says which value is white: integers of 32 bits, or real ones.
    """
    from PIL import Image

    if image is None:
        raise UserError("there is no image")
    if isinstance(image, np.ndarray):
        return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
    # Pillow before 11 has 16-bit PNGs in 32-bit integers.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(
            f"its values are 32-bit (mode {image.mode}), and nothing says which is white; save it with 8 or 16 bits"
        )
    return image
