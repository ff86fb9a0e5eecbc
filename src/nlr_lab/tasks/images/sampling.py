"""Draw images of given classes with a language model of image tokens, seeded, and put them into one picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nlr_lab.evaluation.generation import Sampling
from nonlinear_lowrank.errors import UserError

from .tokenizers import ImageCodec

_BATCH = 64  # images that are drawn at once
_LEAST = 48  # pixels of an image in the picture, by side; smaller ones are enlarged
_GAP, _NAME = 2, 8  # pixels between images, and of a letter of a class's name


@torch.no_grad()
def sample_images(model: Any, codec: ImageCodec, classes: Sequence[int], each: int, sampling: Sampling) -> np.ndarray:
    """Draw images of some classes, with the model's KV cache.

    Args:
        model: an `ImageTokensForCausalLM`, plain or augmented; left in evaluation mode.
        codec: the one it was trained with.
        classes: numbers of the classes.
        each: images of each.
        sampling: how codes are drawn; max_new_tokens must be None, every image has its number.

    Returns:
        (len(classes), each, H, W, C) uint8.

    Raises:
        UserError: model and codec do not belong together, or a number is out of range.
    """
    config = model.config
    theirs = (config.vocab_size, config.num_classes, config.grid_rows, config.grid_columns)
    ours = (codec.tokenizer.codes, len(codec.classes), codec.rows, codec.columns)
    if theirs != ours:
        raise UserError(
            f"the model has {theirs[0]} codes, {theirs[1]} classes and a grid of {theirs[2]} x {theirs[3]}, and the "
            f"image tokenizer beside it {ours[0]}, {ours[1]} and {ours[2]} x {ours[3]}; they do not belong together"
        )
    if sampling.max_new_tokens is not None:
        raise UserError(f"every image has {codec.rows * codec.columns} tokens; omit max_new_tokens")
    if each < 1 or not classes:
        raise UserError(f"draw at least one image of at least one class, got {each} of {len(classes)}")
    if min(classes) < 0 or max(classes) >= len(codec.classes):
        raise UserError(f"classes go from 0 to {len(codec.classes) - 1}, not from {min(classes)} to {max(classes)}")
    choices: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choices = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
    prompts = torch.tensor([[config.vocab_size + number] for number in classes for _ in range(each)])
    torch.manual_seed(sampling.seed)
    model.eval()
    choices["max_new_tokens"] = codec.rows * codec.columns
    codes = [
        model.generate(part, attention_mask=torch.ones_like(part), **choices)[:, 1:].cpu()
        for part in prompts.to(model.device).split(_BATCH)
    ]
    pixels = codec.tokenizer.decode(torch.cat(codes).view(-1, codec.rows, codec.columns).numpy())
    return pixels.reshape(len(classes), each, *pixels.shape[1:])


def picture(images: np.ndarray, names: Sequence[str]) -> Any:
    """Return one PIL image: a row for each class, its name in front.

    Args:
        images: (rows, columns, H, W, C) uint8.
        names: of the rows.
    """
    from PIL import Image, ImageDraw

    rows, columns, height, width, channels = images.shape
    scale = max(1, -(-_LEAST // min(height, width)))
    height, width = height * scale, width * scale
    margin = _NAME * max(map(len, names)) + 2 * _GAP
    size = (margin + columns * (width + _GAP), rows * (height + _GAP) + _GAP)
    sheet = Image.new("RGB", size, (255, 255, 255))
    pen = ImageDraw.Draw(sheet)
    for row in range(rows):
        top = _GAP + row * (height + _GAP)
        pen.text((_GAP, top + height // 2 - 6), names[row], fill=(0, 0, 0))
        for column in range(columns):
            pixels = images[row, column]
            tile = Image.fromarray(pixels[..., 0] if channels == 1 else pixels).convert("RGB")
            sheet.paste(tile.resize((width, height), Image.Resampling.NEAREST), (margin + column * (width + _GAP), top))
    return sheet
