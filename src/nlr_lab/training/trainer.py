"""The Trainer of a run: a fixed order of the data, evaluation in one pass, and when to do what."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from nlr_lab.runtime.processes import on_first_process
from nlr_lab.runtime.time_limit import OutOfTimeError
from nlr_lab.tasks.metrics import scores_of_examples
from nlr_lab.tasks.task import Batch, Score

from .checkpoints import CheckpointedTrainer
from .divergence import LossWatch
from .recipe import TrainConfig
from .result import curve_of
from .state_files import seed_all

_WINDOW = 50  # batches that are sorted at once: transformers' own choice


class RunTrainer(CheckpointedTrainer):
    """Fixed order of the training data, and one pass over the held-out data as evaluation.

    Evaluations are logged as "eval_loss" and "eval_<score>" on what choices are made on, and where another
    split is scored, as "test_loss" and "test_<score>" on that; of training examples without their augmentation, as
    "plain_loss" and "plain_<score>".

    Args:
        *args: CheckpointedTrainer's.
        prepared: the task's data (see `tasks.task`).
        group_by_length: put examples of similar lengths into a batch; the training data have `lengths` then.
        stop_diverged: raise DivergedError once the training loss has risen and not come back.
        **kwargs: CheckpointedTrainer's.
    """

    def __init__(
        self, *args: Any, prepared: Any, group_by_length: bool = False, stop_diverged: bool = False, **kwargs: Any
    ) -> None:
        self.group_by_length, self.stop_diverged = group_by_length, stop_diverged
        self._watch: LossWatch | None = None
        super().__init__(*args, train_dataset=prepared.train, data_collator=prepared.collate_training, **kwargs)
        self.prepared = prepared
        self.train_dataset = prepared.train.seeded(self.args.seed)
        self.score: Score | None = prepared.score
        if self.score is not None:
            # Classifiers average over the examples of a micro-batch, whatever they are told; all are of one size.
            self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, train_dataset: Any = None) -> "EndlessShuffle":
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        lengths = dataset.lengths if self.group_by_length else None
        total = args.max_steps * per_step
        return EndlessShuffle(len(dataset), total, args.seed, passes=dataset.counts_passes, lengths=lengths, batch=per_step)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's; looks at the training loss where a run that diverges is to stop.

        Raises:
            DivergedError: the loss rose and did not come back.
        """
        super().log(logs, *args, **kwargs)
        if not self.stop_diverged or "loss" not in logs:
            return
        if self._watch is None:  # the log of a resumed run begins before this process
            self._watch = LossWatch.of(curve_of(self.state.log_history, "loss"), self.args.max_steps)
        else:
            self._watch.add(self.state.global_step, logs["loss"])
        self.keep_all = self._watch.up  # else patience would outlast the last checkpoint from before
        if (rise := self._watch.diverged) is not None:
            raise self.diverged(rise.start, f"the training loss rose to {rise.peak:.4g} and did not come back")

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Scores of the held-out data. Draws no random number.

        Raises:
            DivergedError: the loss is not finite.
        """
        # With torch.compile Trainer's own model is the uncompiled one.
        model: Any = self.model_wrapped if self.args.torch_compile else self.model
        was_training = model.training
        model.eval()
        metrics: dict[str, float] = {}
        splits = (("eval", self.prepared.valid), ("test", self.prepared.test))
        for split, dataset in (*splits, ("plain", self.prepared.plain)):
            if dataset is not None:
                found = self._of_tokens(model, dataset) if self.score is None else self._of_examples(model, dataset)
                metrics |= {f"{split}_{name}": value for name, value in found.items()}
        model.train(was_training)
        if not math.isfinite(metrics["eval_loss"]):
            raise self.diverged(self.state.global_step)
        self.log(dict(metrics))
        return metrics

    def _of_tokens(self, model: Any, dataset: Any) -> dict[str, float]:
        """Mean nats a token; of whole text also bits a byte."""
        nats = torch.zeros((), dtype=torch.float64, device=self.args.device)
        tokens = torch.zeros((), dtype=torch.float64, device=self.args.device)
        shifted = self.prepared.predicts_next
        for batch, real in self._evaluation_batches(dataset):
            labels = batch["labels"]
            labels[real:] = -100
            count = (labels[:, 1 if shifted else 0 :] != -100).sum()
            if self.model_accepts_loss_kwargs:
                loss = model(**batch, num_items_in_batch=1)["loss"]  # the sum
            else:
                loss = model(**batch)["loss"] * count if count else count
            nats += loss.double()
            tokens += count
        nats, tokens = self.accelerator.reduce(torch.stack([nats, tokens]), reduction="sum")
        loss_value = float(nats / tokens)
        scores = {"loss": loss_value}
        bytes_per_token = self.prepared.valid_bytes_per_token
        if bytes_per_token is not None:
            scores["bits_per_byte"] = loss_value / math.log(2) / bytes_per_token
        return scores

    def _of_examples(self, model: Any, dataset: Any) -> dict[str, float]:
        """The loss and the task's scores, over the examples of all processes."""
        assert self.score is not None
        logits, labels = [], []
        for batch, real in self._evaluation_batches(dataset):
            output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
            kept = torch.arange(len(batch["labels"]), device=self.args.device) < real
            found = self.accelerator.gather((output["logits"].float(), batch["labels"], kept))
            logits.append(found[0][found[2]].cpu())
            labels.append(found[1][found[2]].cpu())
        return scores_of_examples(torch.cat(logits), torch.cat(labels), self.score)

    def _evaluation_batches(self, dataset: Any) -> Iterator[tuple[Batch, int]]:
        """This process's share as (batch, how many of its examples are real), equally many in every process.

        What is lacking is filled with the last example: where all have one shape it compiles once, and
        sharded models wait for each other.
        """
        size, world = self.args.per_device_eval_batch_size, self.args.world_size
        for start in range(self.args.process_index * size, _round_up(len(dataset), size * world), size * world):
            items = [dataset[min(index, len(dataset) - 1)] for index in range(start, start + size)]
            batch = self.prepared.collate(items)
            yield {name: value.to(self.args.device) for name, value in batch.items()}, max(0, len(dataset) - start)


class EndlessShuffle(Sampler[int]):
    """Indices of one shuffle after another, `total` in all; they depend on the seed alone.

    A run is one epoch of Trainer's, so there is no seam to resume at and no short last batch.

    Args:
        size: examples.
        total: indices in all.
        seed: of the order.
        passes: give index + size * pass, for data that change from pass to pass.
        lengths: of the examples; batches are then made of examples of similar lengths: every 50 batches of the
            shuffle are sorted, cut into batches and shuffled as such.
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
        return itertools.islice(self._shuffles() if self.lengths is None else self._grouped(), self.total)

    def _shuffles(self) -> Iterator[int]:
        for number in itertools.count():
            order = torch.randperm(self.size, generator=self._generator(number))
            if self.passes:
                order += number * self.size
            for part in order.split(65536):  # of a large text, not a list of all at once
                yield from part.tolist()

    def _grouped(self) -> Iterator[int]:
        assert self.lengths is not None
        shuffled = self._shuffles()
        for first in range(0, self.total, _WINDOW * self.batch):
            window = list(itertools.islice(shuffled, min(_WINDOW * self.batch, self.total - first)))
            window.sort(key=lambda index: -self.lengths[index % self.size])  # type: ignore[index]
            batches = [window[place : place + self.batch] for place in range(0, len(window), self.batch)]
            for number in torch.randperm(len(batches), generator=self._generator(f"window {first}")).tolist():
                yield from batches[number]

    def _generator(self, what: int | str) -> torch.Generator:
        # Of a seed, torch's CPU generator takes 32 bits: the two are hashed into those.
        digest = hashlib.sha256(f"{self.seed} {what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


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


class Stop(TrainerCallback):
    """Ends a run where `stop` says so, without a checkpoint: it is resumed from its last one, bit by bit.

    Args:
        stop: asked with the step's number.
    """

    def __init__(self, stop: Callable[[int], bool]) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises OutOfTimeError in all processes."""
        step = state.global_step
        if step >= state.max_steps or not (args.world_size == 1 or control.should_log):
            return
        if on_first_process(lambda: self.stop(step)):
            raise OutOfTimeError(f"stopped for time at step {step} of {state.max_steps}; go on with --resume")


class SeedDropout(TrainerCallback):
    """Dropout starts from the seed, not from what the arm's init left behind, and differs by process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            seed_all(args.seed + 1_000_003 * args.process_index)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
