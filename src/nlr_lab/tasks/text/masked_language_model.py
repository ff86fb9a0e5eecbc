"""BERT's objective: tokens that were hidden are predicted from both sides (noble.txt, section 4.1.2).

The backbone is EuroBERT: bidirectional attention, rotary positions, GeGLU, RMSNorm, no biases, an untied head;
that is the language model's block of section 4.1.1 without the causal mask. Gate and up projection are two
linears here. Init as in the table of `language_model`.

Which tokens are hidden follows from the run's seed, the sequence and the pass over the text alone: all arms of a
comparison see the same masks, and so does a run that is resumed. The masks of the evaluation are always the same.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import EuroBertConfig, EuroBertForMaskedLM, PreTrainedTokenizerBase

from nlr_lab.tasks.task import Measure, fingerprint
from nonlinear_lowrank.errors import UserError

from .data import PackedText, TextData, TokenBlocks, prepare_text
from .language_model import HEAD_STD, Backbone, DenseInit, draw_init

_TRAINING, _EVALUATION = 0, 1  # the first word of a draw's entropy: the two never share one
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Which tokens are predicted, and what stands in their places. The defaults are BERT's."""

    probability: float = 0.15
    """Of a token to be predicted, each for itself; special tokens never are. At least one of a sequence is."""
    mask_share: float = 0.8
    """Share of those that [MASK] stands for."""
    random_share: float = 0.1
    """Share of those that a random token of the vocabulary stands for; the rest stay as they are."""

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise UserError(f"probability must be above 0 and below 1, got {self.probability!r}")
        for name in ("mask_share", "random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be at least 0 and at most 1, got {getattr(self, name)!r}")
        if self.mask_share + self.random_share > 1:
            both = self.mask_share + self.random_share
            raise UserError(f"mask_share and random_share must not exceed 1 together, not {both:g}")


class MaskedBlocks(Dataset[dict[str, torch.Tensor]]):
    """Sequences with hidden tokens: item i is {"input_ids": (T,), "labels": (T,)}, int64; labels are -100 but
    where a token is predicted.

    Args:
        blocks: the sequences.
        masking: what is hidden.
        mask: id of the mask token.
        special: ids that are never hidden.
        vocab_size: V; random tokens are drawn from 0 to V - 1.
        seed: of training's draws, an index beyond the sequences being a later pass; None: one draw for ever.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        masking: Masking,
        *,
        mask: int,
        special: Sequence[int],
        vocab_size: int,
        seed: int | None = None,
    ) -> None:
        self.blocks, self.masking, self.vocab_size, self.seed = blocks, masking, vocab_size, seed
        self.length = blocks.length
        self._mask = mask
        self._special = np.zeros(vocab_size, dtype=bool)
        self._special[list(special)] = True

    def seeded(self, seed: int) -> "MaskedBlocks":
        """The same sequences with the draws of a run."""
        found = copy.copy(self)
        found.seed = seed
        return found

    @property
    def counts_passes(self) -> bool:
        """Whether an index tells the pass too."""
        return self.seed is not None

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.blocks.block(index % len(self.blocks)).astype(np.int64)
        draw = [_EVALUATION, index] if self.seed is None else [_TRAINING, self.seed, index]
        generator = np.random.default_rng(draw)
        # As many numbers are drawn for every sequence, whatever becomes of them.
        chance, kind = generator.random(len(tokens)), generator.random(len(tokens))
        others = generator.integers(0, self.vocab_size, len(tokens))
        ordinary = ~self._special[tokens]
        chosen = ordinary & (chance < self.masking.probability)
        if not chosen.any():
            chosen = ordinary & (chance == chance.min(where=ordinary, initial=1.0))
        labels = np.where(chosen, tokens, _IGNORED)
        hidden, changed = self.masking.mask_share, self.masking.mask_share + self.masking.random_share
        shown = np.where(chosen & (kind < hidden), self._mask, tokens)
        replaced = chosen & (kind >= hidden) & (kind < changed)
        shown = np.where(replaced, others, shown)
        return {"input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


@dataclass(frozen=True)
class PreparedMaskedText:
    """Text that is ready for training, with its masks."""

    text: PackedText
    train: MaskedBlocks
    valid: MaskedBlocks
    fingerprint: str
    predicts_next: bool = False
    """Labels stand where the tokens are, not one place on."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the text."""
        return self.text.tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.text.vocab_size

    def describe(self) -> dict[str, Any]:
        """What the data are, for the record. A masked token's loss is no measure of the text's bytes."""
        facts = {name: value for name, value in self.text.describe().items() if name != "valid_bytes_per_token"}
        return {**facts, "text_fingerprint": self.text.fingerprint, "fingerprint": self.fingerprint}


@dataclass(frozen=True, kw_only=True)
class EncoderBackbone(Backbone):
    """A EuroBERT: attention to both sides, every linear separate."""

    def config(self, vocab_size: int, sequence_length: int, *, mask: int = 0, pad: int | None = None) -> EuroBertConfig:
        """The transformers config of these sizes; `mask` and `pad` are tokens."""
        return EuroBertConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.width // self.heads,
            hidden_act="gelu",
            attention_dropout=self.dropout,
            attention_bias=False,
            mlp_bias=False,
            max_position_embeddings=sequence_length,
            initializer_range=HEAD_STD,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=pad,
            mask_token_id=mask,
        )


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelTask:
    """Prediction of hidden tokens in packed text."""

    text: TextData
    """Where the text comes from, its tokenizer, and the sequence length."""
    backbone: EncoderBackbone
    """The model without branches."""
    masking: Masking = Masking()
    """What is hidden."""

    def __post_init__(self) -> None:
        if self.text.tokenizer == "bpe":
            raise UserError(
                "hidden tokens need a tokenizer with a mask token, which 'bpe' has not; choose 'wordpiece', a folder "
                "with BERT's vocab.txt, or a hub name such as bert-base-uncased"
            )

    @property
    def measure(self) -> Measure:
        """The loss of the tokens that are predicted."""
        return Measure(unit="nats per masked token")

    def prepare(self, progress: bool = True) -> PreparedMaskedText:
        """Tokenized, packed, cached text with its masks.

        Raises:
            UserError: the text cannot be used, or its tokenizer has no mask token.
        """
        text = prepare_text(self.text, progress=progress)
        if text.tokenizer.mask_token_id is None:
            raise UserError(
                f"the tokenizer {self.text.tokenizer!r} has no mask token; choose 'wordpiece', a folder with BERT's "
                "vocab.txt, or a hub name such as bert-base-uncased"
            )
        tokens: Any = {"mask": text.tokenizer.mask_token_id, "special": text.tokenizer.all_special_ids}
        tokens["vocab_size"] = text.vocab_size
        return PreparedMaskedText(
            text=text,
            train=MaskedBlocks(text.train, self.masking, **tokens, seed=0),
            valid=MaskedBlocks(text.valid, self.masking, **tokens),
            fingerprint=fingerprint("masked", text.fingerprint, self.masking),
        )

    def build_model(self, prepared: Any, dense_init: DenseInit | None = None, *, seed: int = 0) -> EuroBertForMaskedLM:
        """The plain float32 model on the CPU.

        Args:
            prepared: gives the vocabulary and the special tokens.
            dense_init: overrides the backbone's.
            seed: of every draw. Embedding and head are the same for every dense_init.
        """
        tokenizer = prepared.tokenizer
        tokens = {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}
        config = self.backbone.config(prepared.vocab_size, self.text.sequence_length, **tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = EuroBertForMaskedLM(config)
        draw_init(model, self.backbone.embedding_std, dense_init or self.backbone.dense_init, seed)
        return model

    def build_on_meta(self, vocab_size: int | None = None) -> EuroBertForMaskedLM:
        """The plain model on the meta device: shapes and counts, no memory."""
        config = self.backbone.config(vocab_size or self.text.vocab_size, self.text.sequence_length)
        with torch.device("meta"):
            return EuroBertForMaskedLM(config)
