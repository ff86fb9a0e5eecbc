"""Language models of known sizes for plans: shapes on the meta device, batch and length of training.

| name | architecture                | layers x width | tokens a sequence | sequences a step |
|------|-----------------------------|----------------|-------------------|------------------|
| 124m | GPT-2                       | 12 x 768       | 1,024             | 512              |
| 350m | GPT-2 medium                | 24 x 1024      | 1,024             | 512              |
| 1.3b | GPT-3 XL's shape as a Llama | 24 x 2048      | 2,048             | 512              |
| 7b   | Llama 2 7B                  | 32 x 4096      | 4,096             | 1,024            |
| 13b  | Llama 2 13B                 | 40 x 5120      | 4,096             | 1,024            |
| 70b  | Llama 2 70B                 | 80 x 8192      | 4,096             | 4,096            |

Steps are those of 20 tokens for each parameter (Hoffmann et al. 2022, arXiv:2203.15556).
"""

from dataclasses import dataclass
from typing import Any

TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A size: what its config takes, and how it would be trained."""

    kind: str
    """"gpt2" or "llama"."""
    layers: int
    width: int
    heads: int
    hidden: int = 0
    """Of the gated MLP; GPT-2's is 4 x width."""
    key_value_heads: int = 0
    """0: as many as heads."""
    vocab_size: int
    sequence_length: int
    batch_size: int
    """Sequences of a step, over all GPUs."""

    def config(self) -> Any:
        """The transformers config."""
        from transformers import GPT2Config, LlamaConfig

        if self.kind == "gpt2":
            return GPT2Config(
                n_layer=self.layers,
                n_embd=self.width,
                n_head=self.heads,
                vocab_size=self.vocab_size,
                n_positions=self.sequence_length,
            )
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads or self.heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
        )

    def steps(self, parameters: int) -> int:
        """Steps of 20 tokens for each parameter."""
        return max(1, round(TOKENS_PER_PARAMETER * parameters / (self.batch_size * self.sequence_length)))


def _gpt2(layers: int, width: int, heads: int) -> Preset:
    return Preset(
        kind="gpt2",
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=50257,
        sequence_length=1024,
        batch_size=512,
    )


def _llama(layers: int, width: int, heads: int, hidden: int, length: int, batch: int, key_value: int = 0) -> Preset:
    return Preset(
        kind="llama",
        layers=layers,
        width=width,
        heads=heads,
        hidden=hidden,
        key_value_heads=key_value,
        vocab_size=32000,
        sequence_length=length,
        batch_size=batch,
    )


PRESETS: dict[str, Preset] = {
    "124m": _gpt2(12, 768, 12),
    "350m": _gpt2(24, 1024, 16),
    "1.3b": _llama(24, 2048, 16, 5504, 2048, 512),
    "7b": _llama(32, 4096, 32, 11008, 4096, 1024),
    "13b": _llama(40, 5120, 40, 13824, 4096, 1024),
    "70b": _llama(80, 8192, 64, 28672, 4096, 4096, key_value=8),
}
"""By name."""
PRESET_ARMS = ("baseline", "noble:rank=64", "noble:rank=256")
