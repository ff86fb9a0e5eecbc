"""Callbacks that say when a run logs, evaluates, saves and stops, that seed its dropout, and that show its progress."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from nlr_lab.runtime.processes import on_rank_0
from nlr_lab.runtime.time_limit import OutOfTimeError, duration

from .recipe import TrainConfig
from .state_files import seed_all

_SILENT = 20.0  # seconds after which a line is due, also without an evaluation


class Schedule(TrainerCallback):
    """Decide when to log, evaluate and save.

    Every evaluation and checkpoint also closes an entry of the training curve: a resumed run then has the same entries
    as one that was never killed.
    """

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
    """Ends a run, without a checkpoint, by OutOfTimeError where `stop` says so of a step; it can be resumed."""

    def __init__(self, stop: Callable[[int], bool]) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step >= state.max_steps or not (args.world_size == 1 or control.should_log):
            return
        if on_rank_0(lambda: self.stop(step)):
            raise OutOfTimeError(f"stopped for time at step {step} of {state.max_steps}; go on with --resume")


class SeedDropout(TrainerCallback):
    """Dropout starts from the seed, not from what the arm's init left behind, and differs by process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            seed_all(args.seed + 1_000_003 * args.process_index)


class ProgressLines(TrainerCallback):
    """Progress on rank 0, step, losses, speed and time to go: a bar on a terminal, else lines.

    Args:
        title: stands before the numbers, e.g. the arm's name.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.console = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        self.task: Any = None
        self.train_loss = float("nan")
        self.first_step = 0
        self.started = self.printed = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step, self.started = state.global_step, time.monotonic()
        self.printed = self.started
        if state.is_world_process_zero and sys.stderr.isatty():
            numbers = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            columns = (*numbers, TextColumn("{task.fields[numbers]}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task(self.title, total=state.max_steps, completed=state.global_step, numbers="")
            self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)
        elif state.is_world_process_zero and time.monotonic() - self.printed > _SILENT:
            self._print("", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self.train_loss = logs.get("loss", self.train_loss)
        if self.bar is not None:
            self.bar.update(self.task, numbers=f"loss {self.train_loss:.4f}")
        if "eval_loss" not in logs:
            return
        words = f"  train {self.train_loss:.4f}  eval {logs['eval_loss']:.4f}"
        for key, value in logs.items():
            if key == "eval_bits_per_byte":
                words += f"  {value:.4f} bits/byte"
            elif key == "plain_loss":
                words += f"  plain train {value:.4f}"
            elif key.startswith("eval_") and key != "eval_loss":
                words += f"  {key.removeprefix('eval_')} {value:.4f}"
        self._print(words, state)

    def _print(self, words: str, state: Any) -> None:
        self.printed = time.monotonic()
        speed = (state.global_step - self.first_step) / max(self.printed - self.started, 1e-9)
        left = state.max_steps - state.global_step
        to_go = f"  {duration(left / speed)} to go" if left and speed else ""
        line = f"{self.title}  step {state.global_step}/{state.max_steps}{words}  {speed:.2f} steps/s{to_go}"
        self.console.print(line, soft_wrap=True, markup=False)  # not wrapped: a log file has whole lines

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; also when training was cut short."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
