"""A Trainer that can be killed at any moment and resumes bit-exactly.

A checkpoint is a folder `step-000100`, complete when it has that name:

    config.json, model.safetensors   as save_pretrained writes them, so that it loads as a model too (see `weights`);
        or adapter_config.json, adapter_model.safetensors    of an adapter, its head with it
        or trainable.safetensors     of a model that is partly frozen: what is trained
    optimizer/*.safetensors          the optimizer's state, a file from each process that has a part of it
    optimizer.json, scheduler.json   parameter groups and schedule
    random.json                      the random states of every process
    trainer_state.json               step and log history, as Trainer has it
    manifest.json                    step, seconds, bytes and sha256 of every file

Nothing is pickled, but for DeepSpeed's own state in the place of weights and optimizer (see `deepspeed`). The folder
must be visible to all processes. With another number of processes a run resumes, but not bit-exactly.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data._utils import signal_handling
from transformers import Trainer

from nlr_lab.runtime.processes import gather_objects, on_rank_0
from nlr_lab.runtime.storage import disk_errors, newest_valid, prune, remove_temporaries, step_folders
from nonlinear_lowrank.errors import DivergedError, UserError
from nonlinear_lowrank.hub.storage import MANIFEST, staged_folder
from nonlinear_lowrank.validation import one_line

from . import deepspeed
from .state_files import (
    random_state,
    read_optimizer,
    read_plain,
    seed_all,
    set_random_state,
    write_optimizer,
    write_plain,
)
from .weights import is_adapted, is_finite, read_weights, without_frozen, write_weights


class CheckpointedTrainer(Trainer):
    """Trainer with whole checkpoints, exact resume, and a stop at the first loss that is not finite.

    When to save is `TrainerControl.should_save`'s business, as in Trainer; `save_total_limit` says how many of the
    newest complete checkpoints are kept. The loss is looked at in every step on one CPU process; otherwise, since that
    would stop the GPU each time, at every log and before every checkpoint, which therefore never holds a diverged
    model. The step named is exact all the same.

    Trainer writes into the final folder and pickles, and has no public hook for either: `_save_checkpoint` and the
    three `_load_...` that read its files back are replaced.

    Args:
        checkpoints: folder for the `step-N` folders.
        allow_torch_checkpoints: under DeepSpeed, write and read its engine's checkpoints, which are pickled.
        *args: Trainer's.
        **kwargs: Trainer's.
    """

    def __init__(self, checkpoints: Path, *args: Any, allow_torch_checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled and not allow_torch_checkpoints:
            raise UserError(deepspeed.PICKLED)
        # Trainer's types allow for None and for other kinds, which neither is once training.
        self.model: Any
        self.lr_scheduler: Any
        self.checkpoints = Path(checkpoints)
        self.keep_all = False  # while it is not known yet whether the newest checkpoints are of any use
        self.seconds_before = 0.0
        self._started = time.monotonic()
        self._flops_per_token: int | None = None
        # The first step with a bad loss, or 0; on the device, so that looking after it does not wait.
        self._bad_step = torch.zeros((), dtype=torch.int64, device=self.args.device)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; `resume_from_checkpoint` is a checkpoint's path or None.

        Raises:
            UserError: a checkpoint that cannot be resumed from, or a process that reads data died.
            DivergedError: the loss, or a weight, is not finite.
        """
        if resume_from_checkpoint is not None:
            folder, processes = Path(resume_from_checkpoint), self.args.world_size
            uses_deepspeed = self.is_deepspeed_enabled
            deepspeed.check_readable(folder, self.checkpoints, deepspeed=uses_deepspeed, processes=processes)
            self.seconds_before = read_plain(folder / MANIFEST)["seconds"]
            resume_from_checkpoint = str(folder)
        self._started = time.monotonic()
        try:
            with _without_signal_handler():
                return super().train(resume_from_checkpoint, *args, **kwargs)
        except (RuntimeError, OSError, EOFError) as error:
            if not _is_dead_reader(error):
                raise
            raise UserError(
                f"a process that reads data died at step {self.state.global_step} ({one_line(error)}); "
                f"{self._last_good()}; if memory ran out lower --train.dataloader-workers, and go on with --resume"
            ) from error

    def newest(self) -> tuple[Path | None, list[str]]:
        """Return the checkpoint to resume from (None: start anew), and a line for each damaged one that is skipped.

        Removes what a killed process left half written. All processes call it and get rank 0's answer.
        """

        def look() -> tuple[Path | None, list[str]]:
            remove_temporaries(self.checkpoints)
            return newest_valid(self.checkpoints)

        return on_rank_0(look)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self.seconds_before + time.monotonic() - self._started

    # --- finite losses -------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step + 1
        if loss.device.type == "cpu" and self.args.world_size == 1:
            if not torch.isfinite(loss):
                raise self.diverged(step)
        else:
            self._note_bad(loss, step)
        return loss

    def _note_bad(self, loss: torch.Tensor, step: int) -> None:
        bad = ~torch.isfinite(loss) & (self._bad_step == 0)
        self._bad_step = torch.where(bad, step, self._bad_step)

    def check_finite(self) -> None:
        """Raise DivergedError, in every process, if the loss of any step so far was not finite anywhere."""
        steps = self.accelerator.gather(self._bad_step.reshape(1))
        if bad := [step for step in steps.tolist() if step]:
            raise self.diverged(min(bad))

    def diverged(self, step: int, why: str = "the loss is no longer a finite number") -> DivergedError:
        """Return the error that says so, with the checkpoint that is left from before."""
        return DivergedError(
            f"{why} at step {step}; {self._last_good(step)}; lower the learning rate or lengthen the warm-up, and "
            "start anew",
            step,
        )

    def _last_good(self, before: float = float("inf")) -> str:
        found = [folder for step, folder in step_folders(self.checkpoints).items() if step < before]
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint before it"

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does; raise DivergedError if a loss since the last entry was not finite."""
        self.check_finite()
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # Trainer counts all parameters anew in each step, which in small models is a good part of the step.
        size = next(iter(inputs.values())).numel()
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // max(1, size)
        return self._flops_per_token * size

    # --- saving --------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write the model, or the adapter alone, as save_pretrained does. All processes call it; rank 0 writes."""
        weights = self._weights()
        if self.is_world_process_zero():
            write_weights(folder, self._plain(), weights, everything=True)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name, and rename it when it is whole. All processes call it."""
        self.check_finite()
        self.store_flos()
        plain = self._plain()
        if not all(gather_objects(is_finite(plain))):
            raise self.diverged(self.state.global_step)
        weights = {} if self.is_deepspeed_enabled else without_frozen(plain, self._weights())
        states = gather_objects(random_state(self.args.device))
        what = f"the checkpoint of step {self.state.global_step} to {self.checkpoints}"
        hint = f"{self._last_good()}; make room and go on with --resume"
        with disk_errors(what, hint), ExitStack() as stack:  # rank 0 has the folder in it: gone again if anyone fails
            folder = Path(on_rank_0(lambda: str(stack.enter_context(self._staged()))))
            if self.is_deepspeed_enabled:
                deepspeed.write_engine(self.model_wrapped, folder, adapted=is_adapted(plain))
            else:
                write_optimizer(folder, self.model, _plain_optimizer(self.optimizer))

            def finish() -> None:
                if weights:
                    write_weights(folder, plain, weights, everything=False)
                write_plain(folder / "scheduler.json", self.lr_scheduler.state_dict())
                write_plain(folder / "random.json", states)
                self.state.save_to_json(str(folder / "trainer_state.json"))
                stack.close()

            on_rank_0(finish)

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """The folder of this step's checkpoint, to be filled; on leaving, older ones go."""
        step = self.state.global_step
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        about = {"step": step, "seconds": self.seconds, "processes": self.args.world_size}
        with staged_folder(self.checkpoints / f"step-{step:06d}", about) as folder:
            yield folder
        if not self.keep_all:
            prune(self.checkpoints, step, self.args.save_total_limit or 1)

    def _weights(self) -> dict[str, Any]:
        """Weights by their names in memory; of a sharded model whole, and on rank 0 alone."""
        if self.is_deepspeed_enabled:
            return deepspeed.gathered_weights(self._plain(), keep=self.is_world_process_zero())
        if self.is_fsdp_enabled:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return dict(get_model_state_dict(self.model, options=options))
        return self._plain().state_dict()

    def _plain(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # --- resuming ------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read weights, where DeepSpeed's engine does not read its own; all processes call it."""
        target = self.model if model is None else model
        read_weights(Path(resume_from_checkpoint), self.accelerator.unwrap_model(target, keep_torch_compile=False))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.lr_scheduler.load_state_dict(read_plain(Path(checkpoint) / "scheduler.json"))
        if not self.is_deepspeed_enabled:
            read_optimizer(Path(checkpoint), self.model, _plain_optimizer(self.optimizer))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states, here = read_plain(Path(checkpoint) / "random.json"), self.args.process_index
        if len(states) == self.args.world_size:
            set_random_state(states[here], self.args.device)
            return
        if self.is_world_process_zero():
            print(
                f"the checkpoint was written by {len(states)} processes and there are {self.args.world_size} now: "
                "the run resumes, but not bit-exactly"
            )
        seed_all(self.args.seed + 7919 * self.state.global_step + here)


def _plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


# --- processes that read data may die: memory ran out, or a scheduler killed them --------------------------------


@contextmanager
def _without_signal_handler() -> Iterator[None]:
    """Keep torch from installing its handler of SIGCHLD for the loaders that begin to read in here.

    The handler raises out of whatever the parent process is doing: a checkpoint, a message, or another exception's
    handling. Without it torch finds the dead reader when it waits for its next batch, after 5 s at most.
    """
    before = signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = before


def _is_dead_reader(error: BaseException) -> bool:
    """Return whether torch's DataLoader raised this because a process of its own died; torch has no class for it.

    A reader that dies while it hands a batch over breaks the connection first: then the error is the connection's.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker", "Pin memory thread exited"))
    frames = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    fetching = "_MultiProcessingDataLoaderIter._try_get_data"
    return isinstance(error, OSError | EOFError) and fetching in frames
