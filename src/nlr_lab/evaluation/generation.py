"""Continue a prompt with a language model, or draw images with one of image tokens; seeded."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel, TextStreamer

from nlr_lab.tasks.images.tokenizers import ImageCodec
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which the next token is drawn."""

    max_new_tokens: int | None = None
    """Stop after this many tokens, or at the end-of-text token; None: 128, or fewer where the model's
    positions end before."""
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the most likely token every time."""
    top_k: int = 50
    """Draw from the k most likely tokens; 0: from all."""
    seed: int = 0
    """The same seed, model and prompt give the same text on the same machine."""
    chat: bool = False
    """The prompt is a user's turn in the tokenizer's chat template, and the answer is generated."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        check_number("temperature", self.temperature, minimum=0)
        check_integer("top_k", self.top_k, minimum=0)

    def options(self) -> dict[str, Any]:
        """Return what `generate` of transformers takes; it raises UserError at the first logits that are not finite."""
        checked = {"logits_processor": LogitsProcessorList([_check_logits])}
        if self.temperature == 0:
            return {"do_sample": False, **checked}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, **checked}


def _check_logits(inputs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if not (logits < torch.inf).all():  # -inf is a token that must not be drawn
        raise UserError("the logits are not finite: the model is broken; nlr verify checks its weights")
    return logits


@torch.no_grad()
def generate_text(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    streamer: TextStreamer | None = None,
) -> str:
    """Continue a prompt, with the model's KV cache; return the continuation, and print it by a streamer of
    transformers.

    An empty prompt starts a new document. Raise UserError where prompt and continuation exceed the model's positions,
    or the prompt is empty and the tokenizer has no token that starts a document."""
    inputs, max_new_tokens = encode_prompt(model, tokenizer, prompt, sampling)
    named = getattr(model.generation_config, "eos_token_id", None)
    ends = {*([named] if isinstance(named, int) else named or ()), tokenizer.eos_token_id} - {None}
    torch.manual_seed(sampling.seed)
    written = model.eval().generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        # One sequence is never padded; generate() warns all the same when it is told no id.
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        eos_token_id=sorted(ends) or None,
        **sampling.options(),
    )
    return str(tokenizer.decode(written[0, inputs.shape[1] :], skip_special_tokens=True))


def encode_prompt(model: PreTrainedModel, tokenizer: Any, prompt: str, sampling: Sampling) -> tuple[torch.Tensor, int]:
    """Return a prompt's token ids (1, T) on the model's device, and how many may follow; see `generate_text`."""
    if sampling.chat:
        if tokenizer.chat_template is None or not prompt:
            what = "a prompt" if tokenizer.chat_template else "a tokenizer with a chat template, and this has none"
            raise UserError(f"a chat needs {what}; give one, or omit chat")
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"] if prompt else []
        while ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):  # the text goes on
            ids.pop()
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError("the prompt is empty and the tokenizer has no start token; give a prompt")
        ids = [start]
    limit = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    room = limit - len(ids)
    if room < (sampling.max_new_tokens or 1):
        raise UserError(
            f"the prompt's {len(ids)} tokens and {sampling.max_new_tokens or 1} new ones exceed the model's {limit} "
            "positions; shorten the prompt or ask for fewer"
        )
    return torch.tensor([ids], device=model.device), sampling.max_new_tokens or min(128, room)


_BATCH = 64  # images that are drawn at once
_LEAST = 48  # pixels of an image in the picture, by side; smaller ones are enlarged
_GAP, _NAME = 2, 8  # pixels between images, and of a letter of a class's name


@torch.no_grad()
def sample_images(model: Any, codec: ImageCodec, classes: Sequence[int], each: int, sampling: Sampling) -> np.ndarray:
    """Draw images of some classes, `each` of each, with the KV cache of an `ImageTokensForCausalLM` and the codec that
    it was trained with; (classes, each, H, W, C) uint8. Raise UserError where model and codec do not belong together,
    or a number is out of range; max_new_tokens must be None, since every image has its number."""
    config = model.config
    theirs = (config.vocab_size, config.num_classes, config.grid_rows, config.grid_columns)
    ours = (codec.tokenizer.codes, len(codec.classes), codec.rows, codec.columns)
    if theirs != ours:
        raise UserError(
            f"the model has {theirs[0]} codes, {theirs[1]} classes and a grid of {theirs[2]} x {theirs[3]}, and the "
            f"image tokenizer beside it {ours[0]}, {ours[1]} and {ours[2]} x {ours[3]}; they do not match"
        )
    tokens = codec.rows * codec.columns
    if sampling.max_new_tokens is not None:
        raise UserError(f"every image has {tokens} tokens; omit max_new_tokens")
    if each < 1 or not set(classes) <= set(range(len(codec.classes))):
        raise UserError(f"draw at least one image of classes 0 to {len(codec.classes) - 1}, got {each} of {classes}")
    prompts = torch.tensor([[config.vocab_size + number] for number in classes for _ in range(each)])
    torch.manual_seed(sampling.seed)
    model.eval()
    options = {**sampling.options(), "max_new_tokens": tokens}
    codes = [
        model.generate(part, attention_mask=torch.ones_like(part), **options)[:, 1:].cpu()
        for part in prompts.to(model.device).split(_BATCH)
    ]
    pixels = codec.tokenizer.decode(torch.cat(codes).view(-1, codec.rows, codec.columns).numpy())
    return pixels.reshape(len(classes), each, *pixels.shape[1:])


def picture(images: np.ndarray, names: Sequence[str]) -> Any:
    """Return one PIL image of (rows, columns, H, W, C) uint8: a row for each class, its name in front."""
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
