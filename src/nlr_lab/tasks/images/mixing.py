"""Mixup and CutMix on pairs of images."""

import math
from collections.abc import Mapping

import torch

from nlr_lab.tasks.task import Batch, Items
from nonlinear_lowrank.errors import UserError

from .examples import Pixels


def collate_mixed(items: Items, pixels: Pixels, classes: int) -> Batch:
    """Items -> a batch for training, whose labels are probabilities of the classes."""
    return mix_pairs(pixels.collate(items), torch.stack([item["mixing"] for item in items]), classes)


def mix_pairs(batch: Mapping[str, torch.Tensor], mixing: torch.Tensor, classes: int) -> Batch:
    """Mix images 0 and 1, 2 and 3, ...: both of a pair by what was drawn for the first.

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
