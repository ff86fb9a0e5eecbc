"""Reading what scenes consist of: pictures, .npz and .json files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .picture_files import over_white, read_pixels

SUFFIXES = (".png", ".jpg", ".jpeg")
"""Of files that are pictures."""


class Pictures(NamedTuple):
    """Pictures of one size."""

    colours: np.ndarray
    """(N, H // factor, W // factor, 3) float32 in [0, 1]."""
    height: int
    """H, before they were reduced."""
    width: int
    """W."""


def pictures_of_array(name: str, images: np.ndarray, factor: int) -> Pictures:
    """Pictures (N, H, W, 3 or 4) uint8; clear pixels become white, then blocks of factor x factor pixels one.

    Raises:
        UserError: the array has another form, or nothing would be left.
    """
    if images.ndim != 4 or images.shape[3] not in (3, 4) or images.dtype != np.uint8:
        raise UserError(f"{name}: images must be (N, H, W, 3 or 4) uint8, got {images.shape} {images.dtype}")
    if 0 in images.shape:
        raise UserError(f"{name} has {len(images)} images of {images.shape[2]} x {images.shape[1]} pixels; give some")
    return Pictures(np.stack([_reduced(name, image, factor) for image in images]), *images.shape[1:3])


def read_pictures(files: Sequence[Path], factor: int) -> Pictures:
    """The pictures of files, as `pictures_of_array` has them; one at a time is held at full size.

    Raises:
        UserError: a file is missing or no picture, the sizes differ, or nothing would be left.
    """
    colours: list[np.ndarray] = []
    first = (0, 0)
    for file in files:
        pixels = read_pixels(file)
        if colours and pixels.shape[:2] != first:
            raise UserError(
                f"the images are of different sizes: {files[0].name} has {first[1]} x {first[0]} pixels, "
                f"{file.name} {pixels.shape[1]} x {pixels.shape[0]}; give all one size"
            )
        first = pixels.shape[:2]
        colours.append(_reduced(file.name, pixels, factor))
    if not colours:
        raise UserError("the scene has no images")
    return Pictures(np.stack(colours), *first)


def _reduced(name: str, pixels: np.ndarray, factor: int) -> np.ndarray:
    """(H, W, 3 or 4) uint8 to (H // factor, W // factor, 3) float32; what is left over at the edge is cut off."""
    height, width = pixels.shape[:2]
    rows, columns = height // factor, width // factor
    if not rows or not columns:
        raise UserError(
            f"{name} has {width} x {height} pixels, which cannot get {factor} times smaller; give a smaller downscale"
        )
    colours = over_white(pixels[: rows * factor, : columns * factor])
    blocks = colours.reshape(rows, factor, columns, factor, 3)
    return blocks.mean((1, 3), dtype=np.float64).astype(np.float32)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(table, dict):
        raise UserError(f"{path} must hold a JSON object with frames")
    return table
