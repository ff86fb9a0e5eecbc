"""One training run of a model as a trial; its costs before it is trained."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nlr_lab.bench.timing import interleaved_step_times
from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nlr_lab.runtime.processes import on_rank_0, world_size
from nlr_lab.training.arms import Arm
from nlr_lab.training.recipe import Recipe, TrainConfig
from nlr_lab.training.result import stability
from nlr_lab.training.run import (
    apply_arm,
    build_model,
    count_parameters,
    join_processes,
    optimizer_settings,
    run_training,
)

from . import report
from .matching import Match, resolve_matches
from .plots import draw_models
from .record import clean, flatten
from .time_limit import PACE_ROUNDS, TIMING_SHARE, Forecast, TimeLimit, evaluation_seconds, median_steps, seconds_around
from .trial import Choice, Curve, Measurement, Run, Stop, Trials, tidy

_START = 2.0  # seconds of a run beside its steps, at the least
_WARMUP = 3
# Time does not depend on the learning rate, but at the recipe's own a model that sees one batch again and again
# may blow up, and arithmetic on subnormal or infinite numbers has other speeds.
_RATE = 1e-6


def measure_arms(
    recipe: Recipe,
    arms: Sequence[Arm],
    prepared: Any,
    *,
    rounds: int,
    max_seconds: float | None = None,
    quiet: bool = True,
) -> Measurement:
    """Build every arm (UserError where one cannot be), count it, and time training steps of all arms in turn.

    The models live side by side while they are timed (wall clock). A step is forward, backward, clipping and optimizer
    on one batch of the recipe's size, in the recipe's precision, compiled if the recipe says so. Rounds of 0 leave
    times out; after `max_seconds` no further round is begun.
    """
    parameters: dict[str, int] = {}
    trainable: dict[str, int] = {}
    flops: dict[str, float | None] = {}
    notes, times = [], None
    tuned = recipe.task.pretrained  # what is trained then says more than a forward pass
    for arm in arms:
        model = _build(recipe, arm, prepared)
        parameters[arm.name] = count_parameters(model)
        trainable[arm.name] = count_parameters(model, trainable=True)
        flops[arm.name] = None if tuned else forward_flops(model, recipe, prepared)
        if flops[arm.name] is None and not tuned:
            notes.append(f"`{arm.name}`: its FLOPs could not be counted.")
    del model
    if rounds:
        if not quiet:
            print(f"timing steps of {len(arms)} arms", file=sys.stderr)
        try:
            train = recipe.train
            with cpu_threads(train.threads), many_compiled(train.compile, lengths_vary=prepared.lengths_vary):
                steppers = {arm.name: training_step(recipe, arm, prepared) for arm in arms}
                times = interleaved_step_times(steppers, rounds, _WARMUP, clock="wall", max_seconds=max_seconds)
        except torch.OutOfMemoryError:
            notes.append("Step times were not measured: the models of all arms do not fit on the device together.")
        finally:
            steppers = {}
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return Measurement(parameters=parameters, trainable=trainable, flops=flops, times=times, notes=notes)


def forward_flops(model: nn.Module, recipe: Recipe, prepared: Any) -> float | None:
    """FLOPs per token (or patch) of the matrix products of one forward pass on the CPU, attention included.

    Counted as the operators run, so that a user's own change is counted as well; None when the model cannot run under
    the counter.
    """
    batch = prepared.collate([prepared.train[0]])
    inputs = {name: value for name, value in batch.items() if name != "labels"}

    # The branch adds its last product in place, which torch's table of operators does not have.
    def in_place(into: torch.Size, left: torch.Size, right: torch.Size, **_: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place})
    was_training = model.training
    model.eval()
    try:
        # The fused attention of the CPU is unknown to the counter; its plain formula is two products.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            model(**inputs)
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        model.train(was_training)
    return counter.get_total_flops() / recipe.task.sequence_length


def training_step(recipe: Recipe, arm: Arm, prepared: Any) -> Callable[[], None]:
    """Return a function that takes one training step of an arm, as the Trainer would."""
    train = recipe.train
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = _build(recipe, arm, prepared).to(device).train()
    if train.gradient_checkpointing:
        recompute(model)
    kind, settings = optimizer_settings(model, recipe, arm, _RATE, device)
    optimizer = kind(**settings)
    forward: Any = torch.compile(model) if train.compile else model
    size = max(1, train.batch_size // (world_size() * train.gradient_accumulation))
    items = [prepared.train[index % len(prepared.train)] for index in range(size)]
    batch = {name: value.to(device) for name, value in prepared.collate_training(items).items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        for _ in range(train.gradient_accumulation):
            with torch.autocast(device.type, torch.bfloat16, enabled=train.bf16):
                loss = forward(**batch)["loss"] / train.gradient_accumulation
            loss.backward()
        if train.max_grad_norm:
            nn.utils.clip_grad_norm_(trained, train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def recompute(model: Any) -> None:
    """Switch activation checkpointing on as the Trainer does, under the name that this transformers version has."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _build(recipe: Recipe, arm: Arm, prepared: Any) -> nn.Module:
    return apply_arm(recipe, arm, build_model(recipe, prepared, arm))


class ModelTrials(Trials):
    """Training runs of one recipe.

    Args:
        recipe: of all runs, but for arm, learning rate and seed.
        train: trains one arm; has `run_training`'s signature.
        measure_with: builds and times the arms; has `measure_arms`' signature.
    """

    example = "baseline noble:rank=64"
    pictures = ("curves.png", "rates.png")
    report = report
    timing_rounds = 30
    free = frozenset(
        {
            *("train.lr", "train.seed", "train.save_every", "train.keep_checkpoints", "train.log_every"),
            *("train.tracker", "train.threads", "train.gradient_accumulation", "train.eval_batch_size"),
            *("train.dataloader_workers", "task.text.cache_dir", "task.tokens.cache_dir"),
        }
    )

    def __init__(
        self,
        recipe: Recipe,
        *,
        train: Callable[..., Any] = run_training,
        measure_with: Callable[..., Measurement] = measure_arms,
    ) -> None:
        super().__init__(recipe)
        self.train, self.measure_with, self.measure = train, measure_with, recipe.task.measure
        self.prepared: Any = None
        self.quiet = True
        self.matches: tuple[Match, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # A worker prepares the data itself.
        return vars(self) | {"prepared": None, "quiet": True}

    def parse_arm(self, text: str) -> Arm:
        return Arm.parse(text)

    def resolve(self, arms: Sequence[Arm]) -> tuple[Arm, ...]:
        resolved, self.matches = resolve_matches(self.recipe, arms)
        return resolved

    def control(self, arm: Arm) -> bool:
        return arm.control

    def settings(self) -> dict[str, Any]:
        return flatten(self.recipe.task, "task") | flatten(self.recipe.train, "train")

    def arm_settings(self, arm: Arm) -> dict[str, Any]:
        return {
            "method": arm.method,
            "settings": clean(dict(arm.settings)),
            "dense_init": arm.dense_init,
            "qk_norm": arm.qk_norm,
            "optimizer": arm.optimizer,
        }

    def choices(self, arm: Arm, grid: Sequence[float]) -> list[Choice]:
        rates = (arm.lr,) if arm.lr is not None else sorted(arm.grid) or grid or (self.recipe.train.lr,)
        return [Choice(lr=tidy(rate)) for rate in rates]

    def join(self, out: Path) -> None:
        if world_size() > 1:
            join_processes(self.recipe, out)

    def prepare(self, *, quiet: bool) -> None:
        on_rank_0(lambda: self.recipe.task.prepare(progress=not quiet) and None)  # fills the cache
        self.prepared, self.quiet = self.recipe.task.prepare(progress=False), quiet
        self.fingerprint = self.prepared.fingerprint

    def in_steps(self) -> TrainConfig:
        train = self.recipe.train
        return train if train.steps else train.resolved(len(self.prepared.train))

    def count_and_time(
        self, arms: Sequence[Arm], rounds: int, former: dict[str, list[float]] | None, limit: TimeLimit
    ) -> tuple[Measurement, Forecast | None]:
        timed, limited = 0 if former is not None else rounds, {}
        if limit.seconds is not None:
            timed, limited = max(timed, PACE_ROUNDS), {"max_seconds": TIMING_SHARE * limit.left}
        begun = limit.passed
        found = self.measure_with(self.recipe, arms, self.prepared, rounds=timed, quiet=self.quiet, **limited)
        forecast = None
        if found.times:
            forecast = self._forecast(found.times, seconds_around(limit.passed - begun, found.times, _START))
        return replace(found, times=former or (found.times if rounds else None)), forecast

    def _forecast(self, times: Mapping[str, Sequence[float]], start: float) -> Forecast:
        train, step = self.in_steps(), median_steps(times)
        splits = (self.prepared.valid, self.prepared.test, self.prepared.plain)
        examples = sum(len(split) for split in splits if split is not None)
        return Forecast(
            step=step,
            evaluation={name: evaluation_seconds(each, examples, train.batch_size) for name, each in step.items()},
            evaluations=math.ceil(train.steps / train.eval_every),
            start=start,
        )

    def notes(self, measured: Measurement) -> list[str]:
        counts: dict[str, Mapping[str, float | None]] = {"parameters": measured.parameters, "flops": measured.flops}  # type: ignore[dict-item]
        notes = [match.describe(counts[match.by]) for match in self.matches] + measured.notes
        if not self.measure.is_loss and self.prepared.test is None:
            notes.append("Learning rates and best steps were chosen on the scored examples themselves.")
        return notes

    def run(self, arm: Arm, choice: Choice, seed: int, folder: Path, *, resume: bool, stop: Stop | None) -> None:
        train = replace(self.recipe.train, lr=choice.lr, seed=seed)
        recipe = replace(self.recipe, arm=replace(arm, lr=choice.lr, grid=()), train=train)
        known = {"prepared": self.prepared, "quiet": self.quiet, "report": False, "stop": stop}
        self.train(recipe, folder, resume=resume, overwrite=False, **known)

    def read(self, record: Mapping[str, Any], choice: Choice, seed: int) -> Run:
        diverged, steps = record["status"] != "done", int(record["steps"])
        train_curve, plain_curve = _points(record, "train_curve"), _points(record, "plain_curve")
        return Run(
            seed=seed,
            lr=choice.lr,
            final_loss=None if diverged else float(record["final_loss"]),
            steps=steps,
            seconds=float(record["seconds"]),
            curve=_points(record, "curve"),
            score=record.get("score"),
            selection=record.get("selection"),
            best_score=record.get("best_score"),
            metric_curve=_points(record, "metric_curve"),
            train_loss=None if diverged else _last_tenth(train_curve, steps),
            plain_loss=plain_curve[-1][1] if plain_curve and not diverged else None,
            **({"diverged_at": steps} if diverged else stability(train_curve, steps)),
        )

    def about(self) -> dict[str, Any]:
        train = self.recipe.train
        length = f"{train.length} in steps of {train.batch_size} examples"
        if self.measure.is_loss and train.steps:
            length = f"{train.steps} steps of {train.batch_size} sequences"
        summary = f"{self.recipe.description.rstrip('.')}. Each run takes {length}."
        return {"recipe": {"name": self.recipe.name, "summary": summary}, "data": self.prepared.describe()}

    def draw(self, out: Path, results: Mapping[str, Any], run_folders: Mapping[str, Path]) -> None:
        draw_models(out, results)


def _points(record: Mapping[str, Any], name: str) -> Curve:
    # A loss that JSON could not hold is null: not a number, as it was.
    return tuple((int(s), float("nan") if loss is None else float(loss)) for s, loss in record.get(name, ()))


def _last_tenth(curve: Curve, steps: int) -> float | None:
    """Mean of a training curve, whose entries stand for the steps since the one before, over the last steps."""
    weights = [(step - before, loss) for (step, loss), before in zip(curve, (0, *(s for s, _ in curve)), strict=False)]
    late = [each for each, (step, _) in zip(weights, curve, strict=True) if step > 0.9 * steps]
    total = sum(weight for weight, _ in late)
    return sum(weight * loss for weight, loss in late) / total if total else None
