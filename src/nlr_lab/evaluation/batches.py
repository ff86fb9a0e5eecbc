"""A check that a batch fits memory before it is run: the system ends a process that takes too much of it."""

from typing import Any

import torch

from nlr_lab.runtime.environment import RESERVE, free_memory
from nonlinear_lowrank.errors import UserError


def check_batch(model: Any, rows: int, tokens: int, *, beams: int = 0) -> None:
    """Raise UserError where a batch takes more memory than is free; a single row is never refused.

    Counted is the least that it takes: the widest activation twice, before and after what follows it (of a language
    model, logits and their softmax); for generated text, the keys and values of all layers instead of logits.

    Args:
        model: of transformers, on its device.
        rows: B, sequences (or images) in the batch.
        tokens: T, of the longest sequence (patches of an image).
        beams: of each row, where text is generated: logits are those of the last token alone, and keys and values are
            kept; 0: none is.
    """
    head = model.get_output_embeddings() if beams else None
    numbers = 2 * max((_width(module) for module in model.modules() if module is not head), default=0)
    if beams:
        numbers += _cached(model.config.get_text_config())
    each, free = tokens * max(1, beams) * numbers * model.dtype.itemsize, _free(model.device) - RESERVE
    if rows > 1 and rows * each > free:
        raise UserError(
            f"a batch of {rows:,} rows of {tokens:,} tokens takes at least {rows * each / 1e9:,.1f} GB of memory, of "
            f"which {max(0, free) / 1e9:,.1f} GB are free; lower the batch size (--batch-size) to at most "
            f"{max(1, free // each):,}"
        )


def _width(module: Any) -> int:
    """Outputs of a linear, also of a quantized one; 0 of any other module."""
    width = getattr(module, "out_features", getattr(module, "nf", 0))  # GPT-2's Conv1D has nf
    return width if isinstance(width, int) else 0


def _cached(config: Any) -> int:
    """Numbers that generation keeps of a token, where the model's attention is of the usual kind."""
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        return 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * width)


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
