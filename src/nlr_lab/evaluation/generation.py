"""Continue a prompt with a language model, seeded."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

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

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        check_number("temperature", self.temperature, minimum=0)
        check_integer("top_k", self.top_k, minimum=0)


class _Callback(TextStreamer):
    """A streamer that hands every finished piece of text to a function instead of printing it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
) -> str:
    """Continue a prompt, with the model's KV cache.

    Args:
        model: a causal language model; left in evaluation mode.
        tokenizer: the one it was trained with.
        prompt: text to continue; empty starts a new document.
        sampling: how tokens are drawn.
        on_text: called with each piece of the continuation as it is decoded.

    Returns:
        The continuation, without the prompt.

    Raises:
        UserError: the prompt and the continuation exceed the model's positions, or the prompt is empty and
            the tokenizer has no token that starts a document.
    """
    inputs, max_new_tokens = encode_prompt(model, tokenizer, prompt, sampling.max_new_tokens)
    choices: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choices = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
    pieces: list[str] = []

    def collect(text: str) -> None:
        pieces.append(text)
        on_text(text)

    torch.manual_seed(sampling.seed)
    model.eval().generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        streamer=_Callback(tokenizer, collect),
        # One sequence is never padded; generate() warns all the same when it is told no id.
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        eos_token_id=tokenizer.eos_token_id,
        **choices,
    )
    return "".join(pieces)


def encode_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int | None
) -> tuple[torch.Tensor, int]:
    """Return a prompt's token ids (1, T) on the model's device, and how many may follow; see `generate_text`."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError("the prompt is empty and the tokenizer has no start token; give a prompt")
        ids = [start]
    limit = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    room = limit - len(ids)
    if room < (max_new_tokens or 1):
        raise UserError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens or 1} new ones exceed the model's {limit} "
            "positions; shorten the prompt or ask for fewer"
        )
    return torch.tensor([ids], device=model.device), max_new_tokens or min(128, room)
