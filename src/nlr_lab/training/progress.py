"""Progress of a run: on stderr losses, steps and tokens per second, MFU and time left; in its folder a log."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from nlr_lab.plan.estimate import training_flops
from nlr_lab.plan.presets import device_rate
from nlr_lab.runtime.log import append_entry
from nlr_lab.runtime.tables import duration

from .recipe import Recipe

_SILENT = 20.0  # seconds after which a line is due, also without an evaluation
_LOGGED, _SCORES = ("loss", "grad_norm", "learning_rate"), ("eval_", "test_", "plain_")
_LABELS = {"eval_loss": "eval", "eval_bits_per_byte": "bits/byte", "plain_loss": "plain train"}


class ProgressLines(TrainerCallback):
    """A line an evaluation, and on a terminal a bar too.

    Steps and tokens per second are of training alone, since the line before; the time left counts evaluations and
    checkpoints too.

    Args:
        title: begins each line.
        tokens: tokens of a step; 0: not shown.
        utilization: MFU at one token a second (`utilization_of`); None: not shown.
    """

    def __init__(self, title: str, tokens: int = 0, utilization: float | None = None) -> None:
        self.title, self.tokens, self.utilization = title, tokens, utilization
        self.bar, self.train_loss = tqdm(disable=True), float("nan")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step, self.started = state.global_step, time.monotonic()
        self.printed = self.since = self.started
        self.seen, self.steps, self.seconds = state.global_step, 0, 0.0
        shown = {"desc": self.title, "total": state.max_steps, "initial": state.global_step, "leave": False}
        self.bar = tqdm(disable=not sys.stderr.isatty(), **shown)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()
        if self.bar.disable and time.monotonic() - self.printed > _SILENT:
            self._print("", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:  # which was read off the device: the steps are done
            now = time.monotonic()
            self.steps, self.seconds = self.steps + state.global_step - self.seen, self.seconds + now - self.since
        self.seen, self.since = state.global_step, time.monotonic()
        self.train_loss = logs.get("loss", self.train_loss)
        self.bar.set_postfix_str(f"loss {self.train_loss:.4f}", refresh=False)
        if "eval_loss" in logs:
            scores = {key: value for key, value in logs.items() if key.startswith("eval_") or key in _LABELS}
            words = [f"  {_LABELS.get(key, key.removeprefix('eval_'))} {value:.4f}" for key, value in scores.items()]
            self._print(f"  train {self.train_loss:.4f}{''.join(words)}", state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.since = time.monotonic()

    def _print(self, words: str, state: Any) -> None:
        self.printed = time.monotonic()
        whole = (state.global_step - self.first_step) / max(self.printed - self.started, 1e-9)
        speed = self.steps / max(self.seconds, 1e-9) if self.steps else whole
        self.steps, self.seconds = 0, 0.0
        words += f"  {speed:.2f} steps/s"
        if self.tokens:
            words += f"  {speed * self.tokens:,.0f} tokens/s"
        if self.utilization is not None:
            words += f"  MFU {100 * speed * self.tokens * self.utilization:.1f} %"
        left = state.max_steps - state.global_step
        to_go = f"  {duration(left / whole)} left" if left and whole else ""
        tqdm.write(f"{self.title}  step {state.global_step}/{state.max_steps}{words}{to_go}", file=sys.stderr)


class RunLog(TrainerCallback):
    """Write what is logged to the run's own log, with the steps in all where it begins or resumes.

    Args:
        folder: the run's.
        tokens: of a step; 0: not known.
    """

    def __init__(self, folder: Path, tokens: int) -> None:
        self.folder, self.tokens = folder, tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            append_entry(self.folder, step=state.global_step, of=state.max_steps, tokens=self.tokens)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        known = {name: float(value) for name, value in logs.items() if name in _LOGGED or name.startswith(_SCORES)}
        if known and state.is_world_process_zero:
            append_entry(self.folder, step=state.global_step, **known)


def progress_of(recipe: Recipe, model: Any, prepared: Any, processes: int) -> ProgressLines:
    """Return the lines of a run; the model is on any device, before it is sharded."""
    tokens = recipe.train.batch_size * recipe.task.sequence_length
    if not prepared.vocab_size or prepared.lengths_vary:
        return ProgressLines(recipe.arm.name)
    return ProgressLines(recipe.arm.name, tokens, utilization_of(recipe, model, processes))


def utilization_of(recipe: Recipe, model: Any, processes: int) -> float | None:
    """Return the MFU of one token a second: training FLOPs of a token, recomputation not counted, by the peak of all
    devices. None where the peak is not known (CPUs, float8, devices outside the table), or not all FLOPs are."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    peak = None if recipe.train.fp8 else device_rate(name, bf16=recipe.train.bf16, tf32=tf32)
    flops = None if peak is None else training_flops(model, recipe.task.sequence_length)
    return None if peak is None or flops is None else flops / (peak * processes)
