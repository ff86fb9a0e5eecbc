"""Reading what scenes consist of: pictures, .npz and .json files."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg")
"""Of files that are pictures."""


def colours_of(name: str, images: np.ndarray) -> np.ndarray:
    """(N, H, W, 3 or 4) uint8 to (N, H, W, 3) float32 in [0, 1]; clear pixels become white."""
    if images.ndim != 4 or images.shape[3] not in (3, 4) or images.dtype != np.uint8:
        raise UserError(f"{name}: images must be (N, H, W, 3 or 4) uint8, not {images.shape} {images.dtype}")
    if 0 in images.shape:
        raise UserError(f"{name} has {len(images)} images of {images.shape[2]} x {images.shape[1]} pixels; give some")
    colours = images[..., :3].astype(np.float32) / 255
    if images.shape[3] == 4:
        opacity = images[..., 3:].astype(np.float32) / 255
        colours = colours * opacity + (1 - opacity)
    return colours


def read_pictures(files: Sequence[Path]) -> np.ndarray:
    """(N, H, W, 3 or 4) uint8."""
    from PIL import Image, UnidentifiedImageError

    pictures: list[np.ndarray] = []
    for file in files:
        try:
            with Image.open(file) as image:
                clear = "A" in image.getbands() or "transparency" in image.info
                pictures.append(np.asarray(image.convert("RGBA" if clear else "RGB")))
        except FileNotFoundError as error:
            raise UserError(f"the image {file} is missing") from error
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError) as error:
            raise UserError(f"cannot read the image {file}: {' '.join(str(error).split())}") from error
        if pictures[-1].shape != pictures[0].shape:
            raise UserError(
                f"the images are of different sizes: {files[0].name} has {_size(pictures[0])}, "
                f"{file.name} {_size(pictures[-1])}; give all one size"
            )
    if not pictures:
        raise UserError("the scene has no images")
    return np.stack(pictures)


def _size(picture: np.ndarray) -> str:
    height, width, channels = picture.shape
    return f"{width} x {height} pixels in {channels} channels"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no .npz file that can be read: {' '.join(str(error).split())}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(table, dict):
        raise UserError(f"{path} must hold a JSON object with frames")
    return table
