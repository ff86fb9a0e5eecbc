"""The Trainer of a run: a fixed order of the data, evaluation in one pass, and when to do what."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from .checkpoints import CheckpointedTrainer
from .recipe import TrainConfig
from .state_files import seed_all


class RunTrainer(CheckpointedTrainer):
    """Fixed order of the training data, and one pass over the held-out text as evaluation.

    Args:
        *args: CheckpointedTrainer's.
        bytes_per_token: of the held-out text, for bits per byte.
        **kwargs: CheckpointedTrainer's.
    """

    def __init__(self, *args: Any, bytes_per_token: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bytes_per_token = bytes_per_token

    def _get_train_sampler(self, train_dataset: Any = None) -> "EndlessShuffle":
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return EndlessShuffle(len(dataset), args.max_steps * per_step, args.seed)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean nats a token over the whole held-out text. Draws no random number.

        Raises:
            DivergedError: it is not finite.
        """
        # With torch.compile Trainer's own model is the uncompiled one.
        model: Any = self.model_wrapped if self.args.torch_compile else self.model
        was_training = model.training
        model.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self.args.device)
        tokens = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for input_ids, labels in self._evaluation_batches(self.eval_dataset):
            count = (labels[:, 1:] != -100).sum()  # the first token of a sequence is not predicted
            if self.model_accepts_loss_kwargs:
                loss = model(input_ids=input_ids, labels=labels, num_items_in_batch=1)["loss"]  # the sum
            else:
                loss = model(input_ids=input_ids, labels=labels)["loss"] * count if count else count
            nats += loss.double()
            tokens += count
        model.train(was_training)
        nats, tokens = self.accelerator.reduce(torch.stack([nats, tokens]), reduction="sum")
        loss_value = float(nats / tokens)
        if not math.isfinite(loss_value):
            raise self.diverged(self.state.global_step)
        metrics = {
            "eval_loss": loss_value,
            "eval_bits_per_byte": loss_value / math.log(2) / self.bytes_per_token,
        }
        self.log(dict(metrics))
        return metrics

    def _evaluation_batches(self, dataset: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This process's share as (B, T) pairs, all of one shape and equally many in every process.

        What is lacking is filled with sequences that have no labels: one shape compiles once, and sharded
        models wait for each other.
        """
        size, world = self.args.per_device_eval_batch_size, self.args.world_size
        for start in range(self.args.process_index * size, _round_up(len(dataset), size * world), size * world):
            items = [dataset[min(index, len(dataset) - 1)] for index in range(start, start + size)]
            input_ids = torch.stack([item["input_ids"] for item in items])
            labels = torch.stack([item["labels"] for item in items])
            labels[max(0, len(dataset) - start) :] = -100
            yield input_ids.to(self.args.device), labels.to(self.args.device)


class EndlessShuffle(Sampler[int]):
    """Indices of one shuffle after another, `total` in all; they depend on the seed alone.

    A run is one epoch of Trainer's, so there is no seam to resume at and no short last batch.
    """

    def __init__(self, size: int, total: int, seed: int) -> None:
        self.size, self.total, self.seed = size, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self.total, self.size):
            # Of a seed, torch's CPU generator takes 32 bits: the two numbers are hashed into those.
            digest = hashlib.sha256(f"{self.seed} {first // self.size}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
            order = torch.randperm(self.size, generator=generator)[: self.total - first]
            for part in order.split(65536):  # of a large text, not a list of all at once
                yield from part.tolist()


class Schedule(TrainerCallback):
    """When to log, evaluate and save. Every evaluation and checkpoint also closes an entry of the training
    curve: a resumed run then has the same entries as one that was never killed."""

    def __init__(self, train: TrainConfig) -> None:
        self.config = train

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = last or step % self.config.eval_every == 0
        control.should_save = last or step % self.config.save_every == 0
        control.should_log = control.should_evaluate or control.should_save or step % self.config.log_every == 0
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The run's only epoch ends with its last step, which has done all this.
        control.should_evaluate = control.should_save = control.should_log = False
        return control


class SeedDropout(TrainerCallback):
    """Dropout starts from the seed, not from what the arm's init left behind, and differs by process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            seed_all(args.seed + 1_000_003 * args.process_index)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
