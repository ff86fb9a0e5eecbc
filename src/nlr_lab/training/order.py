"""The order of the training data."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

_WINDOW = 50  # batches that are sorted at once: transformers' own choice


class EndlessShuffle(Sampler[int]):
    """Indices of one shuffle after another, `total` in all; they depend on the seed alone.

    A run is one epoch of Trainer's, so there is no seam to resume at and no short last batch.

    Args:
        size: examples.
        total: indices in all.
        seed: of the order.
        passes: give index + size * pass, for data that change from pass to pass.
        lengths: of the examples; batches then have similar lengths: every 50 batches of the shuffle are sorted, cut
            into batches and shuffled as such.
        batch: examples of a step, with `lengths`.
    """

    def __init__(
        self,
        size: int,
        total: int,
        seed: int,
        *,
        passes: bool = False,
        lengths: Sequence[int] | None = None,
        batch: int = 1,
    ) -> None:
        self.size, self.total, self.seed, self.passes = size, total, seed, passes
        self.lengths, self.batch = lengths, batch

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        order = self._shuffles() if self.lengths is None else self._grouped(self.lengths)
        return itertools.islice(order, self.total)

    def _shuffles(self) -> Iterator[int]:
        for number in itertools.count():
            order = torch.randperm(self.size, generator=self._generator(number))
            if self.passes:
                order += number * self.size
            for part in order.split(65536):  # of a large text, not a list of all at once
                yield from part.tolist()

    def _grouped(self, lengths: Sequence[int]) -> Iterator[int]:
        shuffled = self._shuffles()
        for first in range(0, self.total, _WINDOW * self.batch):
            window = list(itertools.islice(shuffled, min(_WINDOW * self.batch, self.total - first)))
            window.sort(key=lambda index: -lengths[index % self.size])
            batches = [window[place : place + self.batch] for place in range(0, len(window), self.batch)]
            for number in torch.randperm(len(batches), generator=self._generator(f"window {first}")).tolist():
                yield from batches[number]

    def _generator(self, what: int | str) -> torch.Generator:
        # Of a seed, torch's CPU generator takes 32 bits: the two are hashed into those.
        digest = hashlib.sha256(f"{self.seed} {what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
