"""GPT-3's language model: an OPT backbone without biases on packed text (nonlinear_queries.md, "Key Experimental
Results").

Learned positions, LayerNorm (with its biases) before attention and MLP, GELU, no dropout, the output head tied to the
input embedding. At 12 layers of width 768 that is GPT-3 small: 84,973,056 parameters outside the embeddings.

Init: that of `language_model`, but for the head, which is the embedding; positions are N(0, 0.02^2).
"""

from dataclasses import dataclass
from typing import ClassVar

from transformers import OPTConfig, OPTForCausalLM

from .language_model import Backbone, NextTokenTask


@dataclass(frozen=True, kw_only=True)
class OptBackbone(Backbone):
    """An OPT without biases. Every linear is separate: q, k, v, out, fc1, fc2; `hidden` is the width between the last
    two."""

    _head_multiple: ClassVar[int] = 1

    def config(self, vocab_size: int, sequence_length: int, eos_token_id: int | None = None) -> OPTConfig:
        """The transformers config of these sizes. OPT's own defaults are ReLU, biases, and dropout 0.1."""
        return OPTConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            word_embed_proj_dim=self.width,
            ffn_dim=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=sequence_length,
            activation_function="gelu",
            enable_bias=False,
            dropout=self.dropout,
            attention_dropout=self.dropout,
            # OPT's own special tokens would leave a row of the embedding untrained.
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=eos_token_id,
        )


@dataclass(frozen=True, kw_only=True)
class OptLanguageModelTask(NextTokenTask):
    """Next-token prediction on packed text, by an OPT."""

    backbone: OptBackbone
    """The model that is not changed."""
    tie_embeddings: bool = True
    """Whether the output head is the input embedding."""

    _model_class = OPTForCausalLM

    def _config(self, vocab_size: int, eos_token_id: int | None) -> OPTConfig:
        config = super()._config(vocab_size, eos_token_id)
        config.tie_word_embeddings = self.tie_embeddings
        return config
