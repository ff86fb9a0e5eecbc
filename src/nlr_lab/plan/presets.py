"""Language models of known sizes for plans: their configs, batch and length of training.

| name | architecture                | layers x width | tokens a sequence | sequences a step |
|------|-----------------------------|----------------|-------------------|------------------|
| 124m | GPT-2                       | 12 x 768       | 1,024             | 512              |
| 350m | GPT-2 medium                | 24 x 1024      | 1,024             | 512              |
| 1.3b | GPT-3 XL's shape as a Llama | 24 x 2048      | 2,048             | 512              |
| 7b   | Llama 2 7B                  | 32 x 4096      | 4,096             | 1,024            |
| 13b  | Llama 2 13B                 | 40 x 5120      | 4,096             | 1,024            |
| 70b  | Llama 2 70B                 | 80 x 8192      | 4,096             | 4,096            |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

PRESET_ARMS = ("baseline", "noble:rank=64", "noble:rank=256")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A size, and how it would be trained."""

    config: Callable[[], Any]
    """Function that returns the transformers config."""
    sequence_length: int
    batch_size: int
    """Sequences of a step, over all GPUs."""

    def steps(self, parameters: int) -> int:
        """Return the steps of 20 tokens for each parameter (Hoffmann et al. 2022, arXiv:2203.15556)."""
        return max(1, round(20 * parameters / (self.batch_size * self.sequence_length)))


def _gpt2(layers: int, width: int, heads: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=50257, n_positions=1024)


def _llama(layers: int, width: int, heads: int, hidden: int, length: int, key_value_heads: int | None = None) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=32000,
        max_position_embeddings=length,
    )


PRESETS = {
    "124m": Preset(config=partial(_gpt2, 12, 768, 12), sequence_length=1024, batch_size=512),
    "350m": Preset(config=partial(_gpt2, 24, 1024, 16), sequence_length=1024, batch_size=512),
    "1.3b": Preset(config=partial(_llama, 24, 2048, 16, 5504, 2048), sequence_length=2048, batch_size=512),
    "7b": Preset(config=partial(_llama, 32, 4096, 32, 11008, 4096), sequence_length=4096, batch_size=1024),
    "13b": Preset(config=partial(_llama, 40, 5120, 40, 13824, 4096), sequence_length=4096, batch_size=1024),
    "70b": Preset(config=partial(_llama, 80, 8192, 64, 28672, 4096, 8), sequence_length=4096, batch_size=4096),
}
