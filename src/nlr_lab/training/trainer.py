"""The Trainer of a run: a fixed order of the data, evaluation in one pass, progress, and an eye on the loss."""

import hashlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler
from tqdm.auto import tqdm
from transformers import TrainerCallback, set_seed

from nlr_lab.runtime.environment import OutOfTimeError, duration
from nlr_lab.runtime.processes import on_rank_0
from nlr_lab.tasks.task import Batch, scores_of_examples

from .checkpoints import CheckpointedTrainer
from .recipe import TrainConfig
from .result import curve_of, rises

_WINDOW = 50  # batches that are sorted by length at once: transformers' own choice
_SILENT = 20.0  # seconds after which a line is due, also without an evaluation
_LABELS = {"eval_loss": "eval", "eval_bits_per_byte": "bits/byte", "plain_loss": "plain train"}


@dataclass(eq=False)
class EndlessShuffle(Sampler[int]):
    """Indices of one shuffle after another, `total` in all; they depend on the seed alone.

    A run is one epoch of Trainer's, so there is no seam to resume at and no short last batch.

    `passes` gives index + size * pass, for data that change from pass to pass. With `lengths` of the examples, batches
    have similar ones: every 50 batches of the shuffle are sorted, cut into batches of `batch` and shuffled as such.
    """

    size: int
    total: int
    seed: int
    passes: bool = False
    lengths: Sequence[int] | None = None
    batch: int = 1

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        shuffled = self._shuffles()
        if self.lengths is None:
            yield from itertools.islice(shuffled, self.total)
            return
        for first in range(0, self.total, _WINDOW * self.batch):
            window = list(itertools.islice(shuffled, min(_WINDOW * self.batch, self.total - first)))
            window.sort(key=lambda index: -self.lengths[index % self.size])  # type: ignore[index]
            batches = [window[place : place + self.batch] for place in range(0, len(window), self.batch)]
            for number in torch.randperm(len(batches), generator=self._generator(f"window {first}")).tolist():
                yield from batches[number]

    def _shuffles(self) -> Iterator[int]:
        for number in itertools.count():
            order = torch.randperm(self.size, generator=self._generator(number))
            for part in order.split(65536):  # of a large text, not a list of all at once
                yield from (part + number * self.size if self.passes else part).tolist()

    def _generator(self, what: int | str) -> torch.Generator:
        # Of a seed, torch's CPU generator takes 32 bits: the two are hashed into those.
        digest = hashlib.sha256(f"{self.seed} {what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


class Schedule(TrainerCallback):
    """Decide when to log, evaluate, save and stop, and seed the dropout.

    Every evaluation and checkpoint also closes an entry of the training curve: a resumed run then has the same entries
    as one that was never killed. Where `stop` says so of a step the run ends, without a checkpoint, by OutOfTimeError;
    it can be resumed.
    """

    def __init__(self, train: TrainConfig, stop: Callable[[int], bool] | None = None) -> None:
        self.config, self.stop = train, stop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # not from what the arm's init left behind, and another in each process
            set_seed((args.seed + 1_000_003 * args.process_index) % 2**32)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = last or step % self.config.eval_every == 0
        control.should_save = last or step % self.config.save_every == 0
        control.should_log = control.should_evaluate or control.should_save or step % self.config.log_every == 0
        stop = self.stop
        asked = stop is not None and not last and (args.world_size == 1 or control.should_log)
        if asked and on_rank_0(lambda: stop is not None and stop(step)):
            raise OutOfTimeError(f"stopped for time at step {step} of {state.max_steps}; go on with --resume")
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The run's only epoch ends with its last step, which has done all this.
        control.should_evaluate = control.should_save = control.should_log = False
        return control


class ProgressLines(TrainerCallback):
    """Step, losses, speed and time to go of a run, on stderr: a line an evaluation, and on a terminal a bar too."""

    def __init__(self, title: str) -> None:
        self.title, self.bar, self.train_loss = title, tqdm(disable=True), float("nan")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step, self.started = state.global_step, time.monotonic()
        self.printed = self.started
        shown = {"desc": self.title, "total": state.max_steps, "initial": state.global_step, "leave": False}
        self.bar = tqdm(disable=not sys.stderr.isatty(), **shown)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()
        if self.bar.disable and time.monotonic() - self.printed > _SILENT:
            self._print("", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.train_loss = (logs or {}).get("loss", self.train_loss)
        self.bar.set_postfix_str(f"loss {self.train_loss:.4f}", refresh=False)
        if "eval_loss" in (logs or {}):
            scores = {key: value for key, value in logs.items() if key.startswith("eval_") or key in _LABELS}
            words = [f"  {_LABELS.get(key, key.removeprefix('eval_'))} {value:.4f}" for key, value in scores.items()]
            self._print(f"  train {self.train_loss:.4f}{''.join(words)}", state)

    def _print(self, words: str, state: Any) -> None:
        self.printed = time.monotonic()
        speed = (state.global_step - self.first_step) / max(self.printed - self.started, 1e-9)
        left = state.max_steps - state.global_step
        to_go = f"  {duration(left / speed)} to go" if left and speed else ""
        line = f"{self.title}  step {state.global_step}/{state.max_steps}{words}  {speed:.2f} steps/s{to_go}"
        tqdm.write(line, file=sys.stderr)


class RunTrainer(CheckpointedTrainer):
    """Fixed order of the training data, and one pass over the held-out data as evaluation.

    Evaluations are logged as "eval_loss" and "eval_<score>" on what choices are made on; where another split is
    scored, as "test_..." on that; of training examples without their augmentation, as "plain_...".
    """

    def __init__(self, *args: Any, prepared: Any, config: TrainConfig, **kwargs: Any) -> None:
        self.config = config
        super().__init__(*args, train_dataset=prepared.train, data_collator=prepared.collate_training, **kwargs)
        self.prepared, self.score = prepared, prepared.score
        self.train_dataset = prepared.train.seeded(self.args.seed)
        if self.score is not None:
            # Classifiers average over the examples of a micro-batch, whatever they are told; all are of one size.
            self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, train_dataset: Any = None) -> EndlessShuffle:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        lengths = dataset.lengths if self.config.group_by_length else None
        order = {"passes": dataset.counts_passes, "lengths": lengths, "batch": per_step}
        return EndlessShuffle(len(dataset), args.max_steps * per_step, args.seed, **order)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does; raise DivergedError where a run that diverges is to stop."""
        super().log(logs, *args, **kwargs)
        if self.config.stop_diverged and "loss" in logs:
            found = rises(curve_of(self.state.log_history, "loss"), self.args.max_steps)
            # While the loss is up, or waiting would outlast the last checkpoint from before.
            self.keep_all = bool(found) and found[-1].end is None
            if (rise := next((each for each in found if each.diverged), None)) is not None:
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
        for split, name in (("eval", "valid"), ("test", "test"), ("plain", "plain")):
            if (dataset := getattr(self.prepared, name)) is not None:
                found = self._of_tokens(model, dataset) if self.score is None else self._of_examples(model, dataset)
                metrics |= {f"{split}_{key}": value for key, value in found.items()}
        model.train(was_training)
        if not math.isfinite(metrics["eval_loss"]):
            raise self.diverged(self.state.global_step)
        self.log(dict(metrics))
        return metrics

    def _of_tokens(self, model: Any, dataset: Any) -> dict[str, float]:
        """Mean nats a token; of whole text also bits a byte."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # nats and tokens
        for batch, real in self._evaluation_batches(dataset):
            labels = batch["labels"]
            labels[real:] = -100
            count = (labels[:, 1 if self.prepared.predicts_next else 0 :] != -100).sum()
            if self.model_accepts_loss_kwargs:
                loss = model(**batch, num_items_in_batch=1)["loss"]  # the sum
            else:
                loss = model(**batch)["loss"] * count if count else count
            totals += torch.stack([loss.double(), count.double()])
        nats, tokens = self.accelerator.reduce(totals, reduction="sum")
        scores = {"loss": float(nats / tokens)}
        if (bytes_per_token := self.prepared.valid_bytes_per_token) is not None:
            scores["bits_per_byte"] = scores["loss"] / math.log(2) / bytes_per_token
        return scores

    def _of_examples(self, model: Any, dataset: Any) -> dict[str, float]:
        """The loss and the task's scores, over the examples of all processes."""
        logits, labels = [], []
        for batch, real in self._evaluation_batches(dataset):
            output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
            kept = torch.arange(len(batch["labels"]), device=self.args.device) < real
            found = self.accelerator.gather((output["logits"].float(), batch["labels"], kept))
            logits.append(found[0][found[2]].cpu())
            labels.append(found[1][found[2]].cpu())
        return scores_of_examples(torch.cat(logits), torch.cat(labels), self.score)  # type: ignore[arg-type]

    def _evaluation_batches(self, dataset: Any) -> Iterator[tuple[Batch, int]]:
        """This process's share as (batch, how many of its examples are real), equally many in every process.

        What is lacking is filled with the last example: where all have one shape it compiles once, and sharded models
        wait for each other.
        """
        size, world = self.args.per_device_eval_batch_size, self.args.world_size
        for step in range(math.ceil(len(dataset) / (size * world))):
            start = (step * world + self.args.process_index) * size
            items = [dataset[min(index, len(dataset) - 1)] for index in range(start, start + size)]
            batch = self.prepared.collate(items)
            yield {name: value.to(self.args.device) for name, value in batch.items()}, max(0, len(dataset) - start)
