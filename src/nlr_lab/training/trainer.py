"""The Trainer of a run: order of the data, evaluation, whole checkpoints, and an eye on the loss."""

import functools
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils import signal_handling
from transformers import Trainer, TrainerCallback, set_seed

from nlr_lab.runtime.environment import OutOfTimeError, seeded_generator
from nlr_lab.runtime.processes import gather_objects, largest, on_rank_0, own_group, together
from nlr_lab.runtime.signals import StoppedBySignal, StopRequest
from nlr_lab.runtime.storage import disk_errors, prune, step_folders
from nlr_lab.tasks.task import Batch, scores_of_examples
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import MANIFEST, staged_folder
from nonlinear_lowrank.validation import one_line

from . import checkpoints as files
from . import deepspeed
from .arms import is_adapted
from .background import Background
from .recipe import TrainConfig
from .result import DivergedError, after_divergence, curve_of, rises, untrained_loss

_SHUFFLED = 1 << 24  # sequences that are shuffled at once
_RUN = 1 << 12
_WINDOW = 50  # batches that are sorted by length at once: transformers' own choice


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
            generator = seeded_generator(self.seed, f"window {first}")
            for number in torch.randperm(len(batches), generator=generator).tolist():
                yield from batches[number]

    def _shuffles(self) -> Iterator[int]:
        for number in itertools.count():
            for order in self._orders(seeded_generator(self.seed, number)):
                for part in order.split(65536):  # of a large text, not a list of all at once
                    yield from (part + number * self.size if self.passes else part).tolist()

    def _orders(self, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Yield one shuffle of all; of more than _SHUFFLED, runs of neighbours are shuffled, and then what so many of
        them hold, so that memory is bounded."""
        if self.size <= _SHUFFLED:
            yield torch.randperm(self.size, generator=generator)
            return
        runs = torch.randperm(math.ceil(self.size / _RUN), generator=generator)
        for some in runs.split(_SHUFFLED // _RUN):
            places = (some[:, None] * _RUN + torch.arange(_RUN)).flatten()
            places = places[places < self.size]
            yield places[torch.randperm(len(places), generator=generator)]


class Schedule(TrainerCallback):
    """Decide when to log, evaluate, save and stop, and seed the dropout.

    Every evaluation and checkpoint also closes an entry of the training curve: a resumed run then has the same entries
    as one that was never killed. Where `stop` is true at a step (rank 0 asks) the run ends, without a checkpoint, by
    OutOfTimeError; on a signal to any process, after a checkpoint of that step, by StoppedBySignal.
    """

    def __init__(
        self, train: TrainConfig, stop: Callable[[int], bool] | None = None, request: StopRequest | None = None
    ) -> None:
        self.config, self.stop, self.request = train, stop, request or StopRequest()
        self.stopping = 0  # the signal, in all processes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # not from what the arm's init left behind, and another in each process
            set_seed((args.seed + 1_000_003 * args.process_index) % 2**32)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = last or step % self.config.eval_every == 0
        control.should_save = last or step % self.config.save_every == 0
        control.should_log = control.should_evaluate or control.should_save or step % self.config.log_every == 0
        if not last:  # in every step: torchrun kills half a minute after it has passed a signal on
            asked = self.stop if args.process_index == 0 else None
            late, self.stopping = largest(asked is not None and asked(step), self.request.number)
            if late:
                raise OutOfTimeError(f"stopped for time at step {step} of {state.max_steps}; continue with --resume")
            control.should_save |= bool(self.stopping)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopping:
            raise StoppedBySignal(self.stopping, f" at step {state.global_step} of {state.max_steps}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The run's only epoch ends with its last step, which has done all this.
        control.should_evaluate = control.should_save = control.should_log = False
        return control


@dataclass
class WarmOptimizer(TrainerCallback):
    """Fill the optimizer from another run's checkpoint where training begins, not where it resumes."""

    checkpoint: Path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            files.read_optimizer(self.checkpoint, kwargs["model"], kwargs["optimizer"])


def smoothed(
    loss: torch.Tensor, outputs: Any, labels: torch.Tensor, share: float, prepared: Any, tokens: Any = None
) -> torch.Tensor:
    """Return a cross-entropy with a share of every label spread over all classes; it is linear in the labels.

    Args:
        loss: cross-entropy with the labels, scalar.
        outputs: the model's, with logits (B, T, K), or (B, K) of classifiers.
        labels: (B, T), (B,), or probabilities (B, K); -100 is not predicted.
        share: of the labels.
        prepared: the task's data.
        tokens: what the loss is a sum over labels divided by; None: their number, a mean.

    Raises:
        UserError: the model returns no logits.
    """
    if (logits := outputs.get("logits")) is None:
        raise UserError("label_smoothing needs logits, which the model does not return in training; omit it")
    if prepared.score is None and prepared.predicts_next:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits.float()
    kept = torch.ones_like(labels[..., 0]) if labels.is_floating_point() else labels != -100
    even = torch.where(kept.bool(), logits.logsumexp(-1) - logits.mean(-1), 0.0)
    return (1 - share) * loss + share * even.sum() / (kept.sum() if tokens is None else tokens)


class RunTrainer(Trainer):
    """Trainer with a fixed order of the data, exact resume, and a stop at the first loss that is not finite.

    Evaluations, one pass over the held-out data, are logged as "eval_loss" and "eval_<score>"; where another split is
    scored, as "test_..." on that; of training examples without their augmentation, as "plain_...".

    The loss is checked in every step on one CPU process; otherwise, since that would stop the GPU each time, at every
    log and before every checkpoint, which therefore never holds a diverged model. The step named is exact all the same.

    Trainer writes checkpoints into the final folder and pickles, and has no public hook for either: `_save_checkpoint`
    and the three `_load_...` that read its files back are replaced (`checkpoints`).
    """

    def __init__(
        self, model: Any, args: Any, *, prepared: Any, config: TrainConfig, checkpoints: Path, **kwargs: Any
    ) -> None:
        data = {"train_dataset": prepared.train.seeded(args.seed), "data_collator": prepared.collate_training}
        super().__init__(model, args, **data, **kwargs)
        # Trainer's types allow for None and for other kinds, which neither is once training.
        self.model: Any
        self.lr_scheduler: Any
        self.prepared, self.config, self.checkpoints = prepared, config, checkpoints
        if prepared.score is not None:
            # Classifiers average over the examples of a micro-batch, whatever they are told; all are of one size.
            self.model_accepts_loss_kwargs = False
        else:  # known of transformers' own classes alone, and a user's arm may be another
            self._loss_shifts_labels = prepared.predicts_next
        self._writing = Background()
        self._balancing: torch.Tensor | None = None  # the load-balancing part of the last micro-batch's loss
        self._untrained = 0.0  # loss of the first step's micro-batches
        self._keep_all = False  # while it is not known yet whether the newest checkpoints are of any use
        self._started = time.monotonic()
        # The first step with a bad loss, or 0; on the device, so that looking after it does not wait.
        self._bad_step = torch.zeros((), dtype=torch.int64, device=self.args.device)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; `resume_from_checkpoint` is a checkpoint's path or None.

        UserError where the checkpoint cannot be resumed from, or a data-loading process died; DivergedError where
        the loss, or a weight, is not finite.
        """
        self._started = time.monotonic()
        if resume_from_checkpoint is not None:
            folder, here = Path(resume_from_checkpoint), {"deepspeed": self.is_deepspeed_enabled}
            deepspeed.check_readable(folder, self.checkpoints, processes=self.args.world_size, **here)
            self._started -= json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["seconds"]
            resume_from_checkpoint = str(folder)
        # torch's handler of SIGCHLD raises inside whatever runs when a data-loading process dies: a checkpoint, a
        # message, another exception's handling. Without it torch notices when it waits for the next batch, in 5 s.
        before, signal_handling._SIGCHLD_handler_set = signal_handling._SIGCHLD_handler_set, True
        try:
            with warnings.catch_warnings():  # here, since filters are those of all threads
                warnings.filterwarnings("ignore", ".*in a single process")
                try:
                    return super().train(resume_from_checkpoint, *args, **kwargs)
                finally:
                    self._writing.finish()
        except (RuntimeError, OSError, EOFError) as error:
            # torch has no class for it. A reader that dies while it hands a batch over breaks the connection first.
            dead = not isinstance(error, RuntimeError) or str(error).startswith(("DataLoader worker", "Pin memory"))
            if not (dead and self.args.dataloader_num_workers):
                raise
            raise UserError(
                f"a data-loading process died at step {self.state.global_step} ({one_line(error)}); "
                f"{self._last_good()}; if memory ran out lower --train.dataloader-workers, and continue with --resume"
            ) from error
        finally:
            signal_handling._SIGCHLD_handler_set = before

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return time.monotonic() - self._started

    def plain_model(self) -> Any:
        """Return the model without wrappers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # Trainer recounts all parameters in each step, which in small models is a good part of it

    def _get_train_sampler(self, train_dataset: Any = None) -> EndlessShuffle:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        args, per_step = self.args, self._per_step
        lengths = dataset.lengths if self.config.group_by_length else None
        order = {"passes": dataset.counts_passes, "lengths": lengths, "batch": per_step}
        return EndlessShuffle(len(dataset), args.max_steps * per_step, args.seed, **order)

    @property
    def _per_step(self) -> int:
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size

    @functools.cached_property
    def drawn(self) -> list[dict[str, Any]]:
        """Counts of what the run has drawn from each source of a mixture, before a resume too; asked for at its end."""
        done = self.state.global_step * self._per_step
        dataset: Any = self.train_dataset
        return dataset.drawn(itertools.islice(self._get_train_sampler(), done))  # type: ignore[no-any-return]

    # --- the loss ------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        smoothing = self.config.label_smoothing
        times = self.args.world_size if self.args.average_tokens_across_devices else 1
        if smoothing:
            tokens = None if num_items_in_batch is None else num_items_in_batch / times
            loss = smoothed(loss, outputs, inputs["labels"], smoothing, self.prepared, tokens)
        # A router's load-balancing loss is a mean, and Trainer takes it for a micro-batch's share of a sum.
        if num_items_in_batch is not None and self._balances:
            share = 1 / self.current_gradient_accumulation_steps
            weighted = self.plain_model().config.router_aux_loss_coef * outputs["aux_loss"].to(loss.device)
            loss = loss + (share - (1 - smoothing) * times) * weighted
            self._balancing = share * weighted.detach()
        return (loss, outputs) if return_outputs else loss

    @functools.cached_property
    def _balances(self) -> bool:
        """True if the model's loss has the load-balancing loss of a router in it."""
        return bool(getattr(getattr(self.plain_model(), "config", None), "output_router_logits", False))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.args.world_size == 1:  # several processes learn of it at the next checkpoint, all at once
            self._writing.finish(wait=False)
        loss = super().training_step(*args, **kwargs)
        if self._balancing is not None:  # what is logged is the text's alone, as in evaluations and other arms
            loss = loss - self._balancing
        if self.state.global_step == 0:  # looked at once, a GPU need not wait again
            self._untrained += float(self.accelerator.gather(loss.detach().reshape(1)).mean())
            if self.accelerator.sync_gradients:
                self.state.log_history.append({"untrained_loss": self._untrained, "step": 1})
        bad = ~torch.isfinite(loss) & (self._bad_step == 0)
        self._bad_step = torch.where(bad, self.state.global_step + 1, self._bad_step)
        if loss.device.type == "cpu" and self.args.world_size == 1:
            self.check_finite()
        return loss

    def check_finite(self) -> None:
        """Raise DivergedError, in every process, if the loss of any step so far was not finite anywhere."""
        steps = self.accelerator.gather(self._bad_step.reshape(1))
        if bad := [step for step in steps.tolist() if step]:
            raise self._diverged(min(bad))

    def _diverged(self, step: int, why: str = "the loss is no longer a finite number") -> DivergedError:
        return DivergedError(f"{why} at step {step}; {self._last_good(step)}; {after_divergence(step)}", step)

    def _last_good(self, before: float = math.inf) -> str:
        self._writing.finish()
        found = [folder for step, folder in step_folders(self.checkpoints).items() if step < before]
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint before it"

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does; raise DivergedError where a loss is not finite, or a run that diverges is to stop."""
        self.check_finite()
        super().log(logs, *args, **kwargs)
        if self.config.stop_diverged and "loss" in logs:
            history = self.state.log_history
            found = rises(curve_of(history, "loss"), self.args.max_steps, untrained_loss(history))
            # While the loss is up, or waiting would outlast the last checkpoint from before.
            self._keep_all = bool(found) and found[-1].end is None
            if (rise := next((each for each in found if each.diverged), None)) is not None:
                raise self._diverged(rise.start, f"the training loss rose to {rise.peak:.4g} and did not recover")

    # --- evaluation ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the scores of the held-out data, without a random draw; DivergedError where the loss is not finite."""
        # With torch.compile Trainer's own model is the uncompiled one.
        model: Any = self.model_wrapped if self.args.torch_compile else self.model
        was_training = model.training
        model.eval()
        score = self._of_tokens if self.prepared.score is None else self._of_examples
        metrics: dict[str, float] = {}
        for split, name in (("eval", "valid"), ("test", "test"), ("plain", "plain")):
            if (dataset := getattr(self.prepared, name)) is not None:
                metrics |= {f"{split}_{key}": value for key, value in score(model, dataset).items()}
        model.train(was_training)
        if not math.isfinite(metrics["eval_loss"]):
            raise self._diverged(self.state.global_step)
        self.log(dict(metrics))
        return metrics

    def _of_tokens(self, model: Any, dataset: Any) -> dict[str, float]:
        """Mean nats a token; of whole text also bits a byte."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # nats and tokens
        # The load-balancing loss of a router is of training alone.
        options: Any = {"output_router_logits": False} if self._balances else {}
        for batch, real in self._evaluation_batches(dataset):
            labels = batch["labels"]
            labels[real:] = -100
            count = (labels[:, 1 if self.prepared.predicts_next else 0 :] != -100).sum()
            if self.model_accepts_loss_kwargs:
                loss = model(**batch, **options, num_items_in_batch=1)["loss"]  # the sum
            else:
                loss = model(**batch, **options)["loss"] * count if count else count
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
        return scores_of_examples(torch.cat(logits), torch.cat(labels), self.prepared.score)

    def _evaluation_batches(self, dataset: Any) -> Iterator[tuple[Batch, int]]:
        """This process's share as (batch, how many of its examples are real), equally many in every process.

        What is lacking is filled with the last example: where all have one shape it compiles once, and sharded models
        wait for each other.
        """
        size, world = self.args.per_device_eval_batch_size, self.args.world_size
        steps = range(math.ceil(len(dataset) / (size * world)))
        starts = [(step * world + self.args.process_index) * size for step in steps]
        loader: Any = DataLoader(
            dataset,
            batch_sampler=[[min(start + each, len(dataset) - 1) for each in range(size)] for start in starts],
            collate_fn=self.prepared.collate,
            num_workers=self.args.dataloader_num_workers,
            generator=torch.Generator(),  # or it would draw from the process's
        )
        for start, batch in zip(starts, loader, strict=True):
            yield {name: value.to(self.args.device) for name, value in batch.items()}, max(0, len(dataset) - start)

    # --- files ---------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write the model, or the adapter alone, as save_pretrained does. All processes call it; rank 0 writes."""
        weights = files.whole_weights(self)
        if self.is_world_process_zero():
            files.write_model(folder, self.plain_model(), weights)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Copy what a checkpoint holds, and write it beside the next steps, under a temporary name until it is whole.

        All processes call it.
        """
        self.check_finite()
        plain, step, rank = self.plain_model(), self.state.global_step, self.args.process_index
        if not all(gather_objects(files.is_finite(plain))):  # a loss can be finite, and its gradient not
            raise self._diverged(step)
        self._writing.finish()
        states = gather_objects(files.random_state(self.args.device))
        # The open entry of the training curve: a signal does not wait for it.
        window = {"losses": gather_objects(self._tr_loss.item()), "since": self._globalstep_last_logged}
        about = {"step": step, "seconds": self.seconds, "processes": self.args.world_size}
        hint = f"{self._last_good()}; make room and continue with --resume"
        refused = functools.partial(disk_errors, f"the checkpoint of step {step} to {self.checkpoints}", hint)
        keep = 0 if self._keep_all else self.config.keep_checkpoints
        group = own_group("checkpoints", timedelta(seconds=self.args.ddp_timeout))  # training uses the default one
        with refused(), ExitStack() as stack:

            def begin() -> str:  # rank 0 has the folder in its stack: gone again if anyone fails
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                return str(stack.enter_context(staged_folder(self.checkpoints / f"step-{step:06d}", about)))

            folder = Path(on_rank_0(begin))
            share, optimizer = dict[str, Any](), None
            if self.is_deepspeed_enabled:
                engine: Any = self.model_wrapped
                together(lambda: engine.save_checkpoint(str(folder), exclude_frozen_parameters=is_adapted(plain)))
            else:
                shards = self.args.world_size if self.is_fsdp_enabled else 1
                share = files.copied_weights(folder, plain, rank=rank, processes=shards)
                part = {"rank": rank, "processes": self.args.world_size}
                optimizer = files.copied_optimizer(self.model, self.optimizer, **part)

            def describe() -> None:
                groups = None if optimizer is None else optimizer.groups
                state = {"groups": groups, "scheduler": self.lr_scheduler.state_dict(), "random": states}
                state["window"] = window
                (folder / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
                self.state.save_to_json(str(folder / "trainer_state.json"))

            on_rank_0(describe)
            staged = stack.pop_all()

        def write() -> None:
            def finish() -> None:
                staged.close()
                if keep:
                    prune(self.checkpoints, step, keep)

            with refused(), staged:
                if optimizer is not None:
                    together(lambda: files.write_weights(folder, share), group)
                    files.write_optimizer(folder, optimizer, group)
                on_rank_0(finish, group)

        self._writing.start(write)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read weights, where DeepSpeed's engine does not read its own; all processes call it."""
        target = self.model if model is None else model
        plain = self.accelerator.unwrap_model(target, keep_torch_compile=False)
        files.read_weights(Path(resume_from_checkpoint), plain)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = files.read_state(checkpoint)
            self.lr_scheduler.load_state_dict(state["scheduler"])
            if not self.is_deepspeed_enabled:
                files.read_optimizer(Path(checkpoint), self.model, self.optimizer, state["groups"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        saved, here = files.read_state(checkpoint), self.args.process_index
        states = saved["random"]
        if len(states) == self.args.world_size:
            files.set_random_state(states[here], self.args.device)
            self._tr_loss.fill_(saved["window"]["losses"][here])
            self._globalstep_last_logged = saved["window"]["since"]
            return
        if self.is_world_process_zero():
            print(
                f"the checkpoint was written by {len(states)} processes and there are {self.args.world_size} now: "
                "the run resumes, but not bit-exactly"
            )
        set_seed((self.args.seed + 7919 * self.state.global_step + here) % 2**32)
