"""The Trainer of a run: a fixed order of the data, evaluation in one pass, and an eye on the training loss."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from nlr_lab.tasks.task import Batch, Score, scores_of_examples

from .checkpoints import CheckpointedTrainer
from .divergence import LossWatch
from .order import EndlessShuffle
from .result import curve_of


class RunTrainer(CheckpointedTrainer):
    """Fixed order of the training data, and one pass over the held-out data as evaluation.

    Evaluations are logged as "eval_loss" and "eval_<score>" on what choices are made on; where another split is
    scored, as "test_..." on that; of training examples without their augmentation, as "plain_...".

    Args:
        *args: CheckpointedTrainer's.
        prepared: the task's data.
        group_by_length: put examples of similar lengths into a batch; the training data have `lengths` then.
        stop_diverged: raise DivergedError once the training loss spiked and did not recover.
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

    def _get_train_sampler(self, train_dataset: Any = None) -> EndlessShuffle:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        lengths = dataset.lengths if self.group_by_length else None
        order = {"passes": dataset.counts_passes, "lengths": lengths, "batch": per_step}
        return EndlessShuffle(len(dataset), args.max_steps * per_step, args.seed, **order)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does; raise DivergedError where a run that diverges is to stop."""
        super().log(logs, *args, **kwargs)
        if not self.stop_diverged or "loss" not in logs:
            return
        if self._watch is None:  # the log of a resumed run begins before this process
            self._watch = LossWatch.of(curve_of(self.state.log_history, "loss"), self.args.max_steps)
        else:
            self._watch.add(self.state.global_step, logs["loss"])
        self.keep_all = self._watch.up  # else patience would outlast the last checkpoint from before
        if (rise := self._watch.diverged) is not None:
            raise self.diverged(rise.start, f"the training loss spiked to {rise.peak:.4g} and did not recover")

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the scores of the held-out data; draws no random number.

        Raises:
            DivergedError: the loss is not finite.
        """
        # With torch.compile Trainer's own model is the uncompiled one.
        model: Any = self.model_wrapped if self.args.torch_compile else self.model
        was_training = model.training
        model.eval()
        metrics: dict[str, float] = {}
        for split, dataset in (
            ("eval", self.prepared.valid),
            ("test", self.prepared.test),
            ("plain", self.prepared.plain),
        ):
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
        for batch, real in self._evaluation_batches(dataset):
            labels = batch["labels"]
            labels[real:] = -100
            count = (labels[:, 1 if self.prepared.predicts_next else 0 :] != -100).sum()
            if self.model_accepts_loss_kwargs:
                loss = model(**batch, num_items_in_batch=1)["loss"]  # the sum
            else:
                loss = model(**batch)["loss"] * count if count else count
            nats += loss.double()
            tokens += count
        nats, tokens = self.accelerator.reduce(torch.stack([nats, tokens]), reduction="sum")
        loss_value = float(nats / tokens)
        scores = {"loss": loss_value}
        if (bytes_per_token := self.prepared.valid_bytes_per_token) is not None:
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

        What is lacking is filled with the last example: where all have one shape it compiles once, and sharded models
        wait for each other.
        """
        size, world = self.args.per_device_eval_batch_size, self.args.world_size
        steps = math.ceil(len(dataset) / (size * world))
        for step in range(steps):
            start = (step * world + self.args.process_index) * size
            items = [dataset[min(index, len(dataset) - 1)] for index in range(start, start + size)]
            batch = self.prepared.collate(items)
            yield {name: value.to(self.args.device) for name, value in batch.items()}, max(0, len(dataset) - start)
