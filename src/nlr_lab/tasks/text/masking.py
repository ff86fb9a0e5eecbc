"""Sequences with hidden tokens."""

import copy
from collections.abc import Sequence

import numpy as np
import torch

from nlr_lab.tasks.task import Batch, Examples

from .masked_language_model import Masking
from .packed import TokenBlocks

_TRAINING, _EVALUATION = 0, 1  # the first word of a draw's entropy: the two never share one
_IGNORED = -100


class MaskedBlocks(Examples):
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
        """Return the same sequences with the draws of a run."""
        found = copy.copy(self)
        found.seed = seed
        return found

    @property
    def counts_passes(self) -> bool:  # type: ignore[override]
        """Return whether an index tells the pass too."""
        return self.seed is not None

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Batch:
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
