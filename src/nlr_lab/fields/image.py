"""An image as a function of position: what it takes to hold a photograph in a network's weights.

Positions are pixel centres, the longer side from -1 to 1 and pixels square. Values are red, green, blue from 0 to 1.

| metric               | what it is                                                                              |
|----------------------|-----------------------------------------------------------------------------------------|
| psnr                 | dB, of the image as it is written: clipped, and rounded to 8 bits                       |
| bits_per_pixel       | 32 x parameters / pixels: weights and biases as they are, float32, no entropy coding    |
| psnr_half            | psnr with every parameter rounded to float16                                            |
| bits_per_pixel_half  | 16 x parameters / pixels, to which psnr_half belongs                                    |
"""

import copy
import hashlib
import math
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.Image import Transpose
from torch import Tensor, nn

from nlr_lab.runtime.bounds import eight_bits, open_image
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .model import Field, values
from .problem import FieldMethod
from .settings import FieldConfig, ImageSettings

EMBEDDED = {"china": "china.jpg", "flower": "flower.jpg"}
"""scikit-learn's photographs, 640 x 427, for which nothing is downloaded."""

_ORIENTATION = 0x0112  # EXIF's number of the tag
_FLIPS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_TURNS = {number: Transpose[name] for number, name in enumerate(_FLIPS.split(), 2)}  # by EXIF's orientation


def prepare(settings: ImageSettings) -> "ImageProblem":
    source, crop, pixels = settings.source, settings.crop, read_image(settings.source)
    height, width = pixels.shape[:2]
    if crop:
        if crop > min(height, width):
            raise UserError(f"crop {crop} is larger than {source}, {width} x {height} pixels")
        top, left = (height - crop) // 2, (width - crop) // 2
        pixels = pixels[top : top + crop, left : left + crop]
        height = width = crop
    if settings.size and settings.size < (longer := max(height, width)):
        size = [max(round(side * settings.size / longer), 1) for side in (width, height)]
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    return ImageProblem(pixels, name=Path(source).stem, field=settings.field, points=settings.points)


def read_image(source: str) -> np.ndarray:
    """Read an embedded photograph or an image file, (height, width, 3) uint8: upright, clear pixels before white."""
    if source in EMBEDDED:
        from sklearn.datasets import load_sample_image

        return load_sample_image(EMBEDDED[source])
    if not Path(source).is_file():
        raise UserError(f"no such file: {source}; name an image file, or one of {', '.join(EMBEDDED)}")
    pixels = over_white(read_pixels(Path(source), upright=True))
    return np.rint(pixels * 255).astype(np.uint8)


def read_pixels(file: Path, *, upright: bool = False) -> np.ndarray:
    """Read (height, width, 3) uint8, or (height, width, 4) where the picture may have clear pixels.

    With `upright` it is turned as its EXIF orientation says; pixels that a camera's pose belongs to must not be.
    """
    try:
        with open_image(file) as opened:
            image = eight_bits(_upright(opened) if upright else opened)
            clear = "A" in image.getbands() or "transparency" in image.info
            return np.asarray(image.convert("RGBA" if clear else "RGB"))
    except FileNotFoundError as error:
        raise UserError(f"the image {file} is missing") from error
    except (OSError, SyntaxError, TypeError, ValueError, EOFError, Image.DecompressionBombError) as error:
        fix = "; make it smaller first" if isinstance(error, Image.DecompressionBombError) else ""
        raise UserError(f"cannot read the image {file}: {one_line(error)}{fix}") from error


def _upright(image: Image.Image) -> Image.Image:
    """The image turned; not by `ImageOps.exif_transpose`, which rewrites the tags and fails on broken ones."""
    image.load()  # Pillow turns .tiff files while it loads them, and drops the tag
    try:
        with warnings.catch_warnings(action="ignore"):
            turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # whatever a parser meets in broken tags: the pixels can be read
        turn = None
    return image if turn is None else image.transpose(turn)


def over_white(pixels: np.ndarray) -> np.ndarray:
    """Pixels (H, W, 3 or 4) uint8 as colours (H, W, 3) float32 in [0, 1], clear ones before white."""
    colours = pixels[..., :3].astype(np.float32) / 255
    if pixels.shape[2] == 4:
        opacity = pixels[..., 3:].astype(np.float32) / 255
        colours = colours * opacity + (1 - opacity)
    return colours


class ImageProblem:
    """An image to be fitted (see `problem.Problem`, and this file's table for the metrics).

    Args:
        pixels: (height, width, 3), uint8, or floats from 0 to 1; UserError for others.
        name: of the image.
        field: the network; two inputs and three outputs.
        points: pixels of a step; 0: all.
    """

    score = "psnr"

    def __init__(self, pixels: np.ndarray, *, name: str = "image", field: FieldConfig | None = None, points: int = 0):
        pixels = np.asarray(pixels)
        if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise UserError(f"{name} must be an array (height, width, 3) of some pixels, got {pixels.shape}")
        if pixels.dtype != np.uint8:
            if not (np.issubdtype(pixels.dtype, np.floating) and (pixels >= 0).all() and (pixels <= 1).all()):
                raise UserError(f"the values of {name} must be uint8, or floats from 0 to 1")
            pixels = np.round(pixels * 255).astype(np.uint8)
        self.name, self.points = name, points
        self.field = field or FieldConfig(in_features=2, out_features=3)
        if (self.field.in_features, self.field.out_features) != (2, 3):
            raise UserError("the network of an image has in_features 2 and out_features 3")
        self._pixels, (height, width) = pixels, pixels.shape[:2]
        self._values = torch.from_numpy(pixels.reshape(-1, 3).astype(np.float32) / 255)
        self._positions = positions(height, width)
        about = f"{pixels.shape} {points} {self.field}"
        self.fingerprint = hashlib.sha256(about.encode() + pixels.tobytes()).hexdigest()

    def build(self, method: FieldMethod, generator: torch.Generator) -> nn.Module:
        """Build the network; an omega left open is that published for shapes at this rank."""
        return Field(self.field, method.resolved("occupancy"), generator)

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return positions (points, 2) and values (points, 3)."""
        if not 0 < self.points < len(self._values):
            return self._positions, self._values
        chosen = torch.randint(len(self._values), (self.points,), generator=generator)
        return self._positions[chosen], self._values[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        where, colours = batch
        return (model(where) - colours).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return PSNR and bits per pixel, as in this file's table."""
        per_pixel = sum(each.numel() for each in model.parameters()) / len(self._values)
        rounded = copy.deepcopy(model)
        for each in rounded.parameters():
            each.data = each.data.half().float()
        return {
            "psnr": psnr(self.picture(model), self._pixels),
            "bits_per_pixel": 32 * per_pixel,
            "psnr_half": psnr(self.picture(rounded), self._pixels),
            "bits_per_pixel_half": 16 * per_pixel,
        }

    def picture(self, model: nn.Module | None) -> np.ndarray:
        """Return the image as the model has it, or as it is."""
        if model is None:
            return self._pixels
        pixels = (values(model, self._positions).clamp(0, 1) * 255).round().to(torch.uint8)
        return pixels.numpy().reshape(self._pixels.shape)

    def write(self, model: nn.Module, folder: Path) -> list[Path]:
        """Write fitted.png, and truth.png beside it."""
        Image.fromarray(self.picture(model)).save(folder / "fitted.png")
        Image.fromarray(self._pixels).save(folder / "truth.png")
        return [folder / "fitted.png", folder / "truth.png"]


def positions(height: int, width: int) -> Tensor:
    """Pixel centres, row by row, as (x, y): (height width, 2); the longer side from -1 to 1."""
    longer = max(height, width)
    y = (torch.arange(height) + 0.5 - height / 2) * (2 / longer)
    x = (torch.arange(width) + 0.5 - width / 2) * (2 / longer)
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio of 8-bit images, dB; of equal ones as if one number were off by one: finite."""
    error = float(np.mean((image.astype(np.float64) - truth.astype(np.float64)) ** 2))
    return 10 * math.log10(255**2 / (error or 1 / truth.size))
