"""One training run of a model as a trial; its costs before it is trained, and baselines matched to an arm's."""

import functools
import inspect
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nlr_lab.bench.timing import interleaved_step_times
from nlr_lab.bench.training import UNKNOWN_TO_TORCH
from nlr_lab.runtime.environment import cpu_threads, deterministic, many_compiled
from nlr_lab.runtime.processes import on_rank_0, world_size
from nlr_lab.training.arms import ARM_METHODS, Arm
from nlr_lab.training.fp8 import to_float8
from nlr_lab.training.methods import Sized, mlp_width
from nlr_lab.training.recipe import Recipe, TrainConfig
from nlr_lab.training.result import before, stability
from nlr_lab.training.run import (
    apply_arm,
    build_model,
    count_parameters,
    optimizer_settings,
    run_training,
    training_arguments,
)
from nlr_lab.training.run_folder import FREE
from nlr_lab.training.trainer import smoothed
from nonlinear_lowrank.analysis.cost import active_parameters, model_cost
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file
from nonlinear_lowrank.methods.sine import SineLowRankLinear

from . import report
from .record import clean
from .trial import PACE_ROUNDS, Choice, Curve, Measurement, Run, Stop, TimeLimit, Trials, measure_paces, tidy

_START = 2.0  # seconds of a run beside its steps, at the least
_EVALUATION = 0.4  # of a training step, for as many examples: a forward pass and its batch
_POINTS = 50  # of a training curve, as recorded
_WARMUP = 2  # rounds, after a first step of each
# Time does not depend on the learning rate, but at the recipe's own a model that sees one batch again and again
# may blow up, and arithmetic on subnormal or infinite numbers has other speeds.
_RATE = 1e-6
_WIDEST = 4096  # times the plain width: how far beyond the guess a match is sought


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
    found = Measurement(parameters={})
    for arm in arms:
        model = _build(recipe, arm, prepared)
        found.parameters[arm.name] = count_parameters(model)
        found.trainable[arm.name] = count_parameters(model, trainable=True)
        found.active[arm.name] = active = active_parameters(model)
        if active is not None and active < (total := found.parameters[arm.name]):
            found.notes.append(f"`{arm.name}`: {active:,} of {total:,} parameters are active for a token.")
        # For a pretrained model, what is trained says more than a forward pass.
        found.flops[arm.name] = None if recipe.task.pretrained else forward_flops(model, recipe, prepared)
        if found.flops[arm.name] is None and not recipe.task.pretrained:
            found.notes.append(f"`{arm.name}`: its FLOPs could not be counted.")
    del model
    if not rounds:
        return found
    if not quiet:
        print(f"timing steps of {len(arms)} arms", file=sys.stderr)
    train = recipe.train
    try:
        compiled = many_compiled(train.compile, lengths_vary=prepared.lengths_vary)
        with deterministic(train.deterministic), cpu_threads(train.threads), compiled:
            steppers, starts = {}, []
            for arm in arms:
                begun = time.monotonic()
                steppers[arm.name] = training_step(recipe, arm, prepared)
                steppers[arm.name]()
                starts.append(time.monotonic() - begun)
            times = interleaved_step_times(steppers, rounds, _WARMUP, clock="wall", max_seconds=max_seconds)
        # The least: imports and our C++ operators are loaded once, by whichever arm comes first.
        return replace(found, times=times, start=min(starts))
    except torch.OutOfMemoryError:
        found.notes.append("Step times were not measured: the models of all arms do not fit on the device together.")
        return found
    finally:
        steppers = {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def forward_flops(model: nn.Module, recipe: Recipe, prepared: Any) -> float | None:
    """FLOPs per token (or patch) of the matrix products of a step's forward pass, attention included.

    Counted as the operators run on the CPU, so that a user's own change is counted as well, for one sequence and for
    two: what does not grow, such as forming a weight, is paid once for a batch. None when the model cannot run under
    the counter.
    """
    counted = [_count_flops(model, prepared.collate([prepared.train[0]] * rows)) for rows in (1, 2)]
    if None in counted:
        return None
    one, two = counted
    rows = max(1, recipe.train.batch_size // (world_size() * recipe.train.gradient_accumulation))
    return (two - one + (2 * one - two) / rows) / recipe.task.sequence_length


def _count_flops(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    inputs = {name: value for name, value in batch.items() if name != "labels"}

    fallback = {torch.ops.transformers.grouped_mm_fallback: UNKNOWN_TO_TORCH[torch.ops.aten._grouped_mm]}
    counter = FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH | fallback)
    try:
        with torch.no_grad(), counter:
            model.eval()(**inputs)
    except (RuntimeError, NotImplementedError):
        return None
    return counter.get_total_flops()


def training_step(recipe: Recipe, arm: Arm, prepared: Any) -> Callable[[], None]:
    """Return a function that takes one training step of an arm, as the Trainer would."""
    train = recipe.train
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model: Any = _build(recipe, arm, prepared).to(device).train()
    if train.fp8:
        to_float8(model)
    if train.gradient_checkpointing:  # as the Trainer does
        model.activation_checkpointing_enable({"use_reentrant": False})
    kind, settings = optimizer_settings(model, recipe, arm, _RATE, device)
    optimizer = kind(**settings)
    forward = model
    if train.compile:
        forward = torch.compile(model, mode=train.compile_mode, fullgraph=train.compile_fullgraph)
    size = max(1, train.batch_size // (world_size() * train.gradient_accumulation))
    items = [prepared.train[index % len(prepared.train)] for index in range(size)]
    batch = {name: value.to(device) for name, value in prepared.collate_training(items).items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        for _ in range(train.gradient_accumulation):
            with torch.autocast(device.type, torch.bfloat16, enabled=train.bf16):
                outputs = forward(**batch)
            loss = outputs["loss"]
            if train.label_smoothing:
                loss = smoothed(loss, outputs, batch["labels"], train.label_smoothing, prepared)
            (loss / train.gradient_accumulation).backward()
        if train.max_grad_norm:
            nn.utils.clip_grad_norm_(trained, train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _build(recipe: Recipe, arm: Arm, prepared: Any) -> nn.Module:
    return apply_arm(recipe, arm, build_model(recipe, prepared, arm))


class ModelTrials(Trials):
    """Training runs of one recipe."""

    arm = Arm
    example = "baseline noble:rank=64"
    pictures = ("curves.png", "training.png", "rates.png")
    report = report
    timing_rounds = 30
    parts = ("task", "train")
    free = FREE | {"train.lr", "train.seed"}

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.train, self.measure_with, self.measure = run_training, measure_arms, recipe.task.measure
        self.prepared: Any = None
        self.quiet = True

    def __getstate__(self) -> dict[str, Any]:
        # A worker prepares the data itself.
        return vars(self) | {"prepared": None, "quiet": True}

    def resolve(self, arms: Sequence[Arm]) -> list[Arm]:
        return resolve_matches(self.recipe, arms)

    def control(self, arm: Arm) -> bool:
        return arm.control

    def arm_settings(self, arm: Arm) -> dict[str, Any]:
        settings = {
            "method": arm.method,
            "settings": clean(dict(arm.settings)),
            "dense_init": arm.dense_init,
            "qk_norm": arm.qk_norm,
            "optimizer": arm.optimizer,
        }
        if ":" in arm.method and (file := inspect.getsourcefile(arm.function())):
            settings["code"] = hash_file(Path(file))  # seeds of two versions of a user's change are not to be mixed
        return settings

    def choices(self, arm: Arm, grid: Sequence[float]) -> list[Choice]:
        rates = (arm.lr,) if arm.lr is not None else sorted(arm.grid) or grid or (self.recipe.train.lr,)
        heads = sorted(map(tidy, arm.head_lr)) if arm.head_lr else (None,)
        return [Choice(lr=tidy(rate), head_lr=head) for head in heads for rate in rates]

    def join(self, out: Path) -> None:
        if world_size() > 1:
            training_arguments(self.recipe, out)

    def prepare(self, *, quiet: bool) -> None:
        on_rank_0(lambda: self.recipe.task.prepare(progress=not quiet) and None)  # fills the cache
        self.prepared, self.quiet = self.recipe.task.prepare(progress=False), quiet
        self.fingerprint = self.prepared.fingerprint

    def in_steps(self) -> TrainConfig:
        return self.recipe.train.resolved(len(self.prepared.train))

    def count_and_time(self, arms: Sequence[Arm], rounds: int, limit: TimeLimit) -> Measurement:
        timed = rounds if limit.seconds is None else max(rounds, PACE_ROUNDS)
        known: dict[str, Any] = {"rounds": timed, "max_seconds": limit.timing, "quiet": self.quiet}
        found = self.measure_with(self.recipe, arms, self.prepared, **known)
        named = {arm.name: arm for arm in arms}
        notes = [_match_note(self.recipe, arm, named, found) for arm in arms if "match" in _own(arm)] + found.notes
        if not self.measure.is_loss and self.prepared.test is None:
            notes.append("Learning rates and best steps were chosen on the scored examples themselves.")
        paces = self._paces(found.times, found.start) if found.times else {}
        return replace(found, times=found.times if rounds else None, paces=paces, notes=notes)

    def _paces(self, times: Mapping[str, Sequence[float]], start: float) -> dict[str, tuple[float, float]]:
        train, splits = self.in_steps(), (self.prepared.valid, self.prepared.test, self.prepared.plain)
        batches = max(1.0, sum(len(split) for split in splits if split is not None) / train.batch_size)
        evaluations = math.ceil(train.steps / train.eval_every)
        return measure_paces(times, max(_START, start), evaluations, lambda step: _EVALUATION * step * batches)

    def run(self, arm: Arm, choice: Choice, seed: int, folder: Path, *, resume: bool, stop: Stop | None) -> None:
        train = replace(self.recipe.train, lr=choice.lr, seed=seed)
        head = () if choice.head_lr is None else (choice.head_lr,)
        recipe = replace(self.recipe, arm=replace(arm, lr=choice.lr, grid=(), head_lr=head), train=train)
        known = {"prepared": self.prepared, "quiet": self.quiet, "report": False, "stop": stop}
        self.train(recipe, folder, resume=resume, overwrite=False, **known)

    def read(self, record: Mapping[str, Any], choice: Choice, seed: int) -> Run:
        steps, train_curve = int(record["steps"]), _points(record, "train_curve")
        known: dict[str, Any] = {"seed": seed, "lr": choice.lr, "head_lr": choice.head_lr, "steps": steps}
        known |= {"seconds": float(record["seconds"]), "curve": _points(record, "curve")}
        known |= {"train_curve": _thinned(train_curve, steps)}
        stable: dict[str, Any] = {"diverged_at": steps}
        if record["status"] == "done":
            stable = stability(train_curve, steps, record.get("untrained_loss"))
        if stable["diverged_at"] is not None:
            # An explosion would flatten the other arms in the pictures.
            known |= {name: before(known[name], stable["diverged_at"]) for name in ("curve", "train_curve")}
            return Run(**known, **stable, final_loss=None)
        metric_curve, score_curve = _points(record, "metric_curve"), _points(record, "score_curve")
        plain_curve = _points(record, "plain_curve")
        late = [point for point in _weighted(train_curve) if point[1] > 0.9 * steps]
        scores: dict[str, Any] = {name: record.get(name) for name in ("score", "selection", "best_score")}
        return Run(
            **known,
            final_loss=float(record["final_loss"]),
            metric_curve=metric_curve,
            score_curve=score_curve if score_curve != metric_curve else (),
            train_loss=_mean(late) if late else None,
            plain_loss=plain_curve[-1][1] if plain_curve else None,
            **scores,
            **stable,
        )

    def about(self) -> dict[str, Any]:
        train = self.recipe.train
        length = f"{train.length} in steps of {train.batch_size} examples"
        if self.measure.is_loss and train.steps:
            length = f"{train.steps} steps of {train.batch_size} sequences"
        summary = f"{self.recipe.description.rstrip('.')}. Each run takes {length}."
        return {"recipe": {"name": self.recipe.name, "summary": summary}, "data": self.prepared.describe()}

    def draw(self, out: Path, results: Mapping[str, Any], run_folders: Mapping[str, Path]) -> None:
        report.draw_models(out, results)


def _points(record: Mapping[str, Any], name: str) -> Curve:
    return tuple((int(step), float(loss)) for step, loss in record.get(name, ()))


def _thinned(curve: Curve, steps: int) -> Curve:
    """Means of a training curve over each fiftieth of the steps, at the last step of each."""
    parts: dict[int, list[tuple[int, int, float]]] = {}
    for point in _weighted(curve):
        parts.setdefault(_POINTS * (point[1] - 1) // steps, []).append(point)
    return tuple((part[-1][1], _mean(part)) for part in parts.values())


def _weighted(curve: Curve) -> list[tuple[int, int, float]]:
    """Entries of a training curve, each a mean since the one before, after the number of steps that it stands for."""
    befores = (0, *(step for step, _ in curve))
    return [(step - before, step, loss) for (step, loss), before in zip(curve, befores, strict=False)]


def _mean(points: Sequence[tuple[int, int, float]]) -> float:
    return sum(weight * loss for weight, _, loss in points) / sum(weight for weight, _, _ in points)


# --- matched baselines -------------------------------------------------------------------------------------------


def resolve_matches(recipe: Recipe, arms: Sequence[Arm]) -> list[Arm]:
    """Give `wide-mlp:match=ARM` and `moe:match=ARM` the smallest width with no fewer parameters, or forward FLOPs.

    Without such a baseline a gain may be nothing but more parameters (or more arithmetic) than the baseline has. The
    width is found before anything is trained, on models without memory. Both counts grow with the MLP's width, along a
    line where the arm is a wider MLP alone: two widths give a guess, two more models check it, and where methods that
    are joined to it bend the line the width is bisected. Such a method may refuse widths: those too narrow for its rank
    are below the search, and groups that must divide the width make its step. (A joined budget's integer ranks let the
    count dip now and then; the width is then the smallest up to such a dip.) The backward pass costs twice the forward
    in both arms, except for a branch's recomputed r x r products, so matched FLOPs are matched training FLOPs.

    Raises:
        UserError: there is no such arm, it is a matched one itself, or it cannot be matched by width.
    """
    named = {arm.name: arm for arm in arms}
    resolved = []
    for arm in arms:
        wanted = _own(arm).get("match")
        if wanted is None:
            resolved.append(arm)
            continue
        if wanted not in named:
            others = ", ".join(name for name in named if name != arm.name)
            raise UserError(f"{arm.name} is to match the unknown arm {wanted!r}; choose from {others}")
        if "match" in _own(named[wanted]):
            raise UserError(f"{arm.name} is to match {wanted}, which is matched itself; name an unmatched arm")
        hidden = _matching_width(recipe, arm, named[wanted])
        given = _own(arm).get("hidden", hidden)
        if given != hidden:
            raise UserError(f"{arm.name} sets hidden={given}, but {hidden} matches {wanted}; omit it")
        resolved.append(_with_hidden(arm, hidden))
    return resolved


def _match_note(recipe: Recipe, arm: Arm, named: Mapping[str, Arm], measured: Measurement) -> str:
    """Return a sentence for the report; raise UserError where the real models differ from those that were matched."""
    own, plain = _own(arm), mlp_width(recipe.task.build_on_meta())
    target = named[own["match"]]
    more = measured.parameters[arm.name] - measured.parameters[target.name]
    if more != _count(recipe, arm, "parameters") - _count(recipe, target, "parameters"):  # a budget's rank is another
        raise UserError(
            f"{arm.name} was matched to another rank than {target.name} has in a model of this vocabulary or number "
            f"of classes; give {target.name} rank= in place of budget=, or --vocab-size as the data have it"
        )
    by, counts = "parameters", dict[str, float | None](measured.parameters)
    if _by(arm) == "flops":
        by, counts = "FLOPs per token", measured.flops
    mine, other = counts[arm.name], counts[target.name]
    shown = "" if mine is None or other is None else f": {mine:,.0f} for {other:,.0f}"
    kind: Any = ARM_METHODS[_sized(arm)]
    return (
        f"`{arm.name}` has {kind.of_width} of width {own['hidden']} (MLPs of {plain} in the recipe's model), the "
        f"smallest with no fewer {by} than `{own['match']}`{shown}."
    )


def _matching_width(recipe: Recipe, arm: Arm, target: Arm) -> int:
    name, by = _sized(arm), _by(arm)
    kind: Any = ARM_METHODS[name]
    plain = kind.width(recipe.task.build_on_meta())
    # Refused where the model's blocks are not known, or it is a pretrained one.
    own = {key: value for key, value in _own(arm).items() if key not in ("match", "by")}
    apply_arm(recipe, Arm(method=name, settings={**own, "hidden": plain}), recipe.task.build_on_meta())
    wanted = _count(recipe, target, by)

    @functools.cache
    def count(hidden: int) -> int:
        return _count(recipe, _with_hidden(arm, hidden), by)

    def allowed(hidden: int) -> bool:
        try:
            count(hidden)
        except UserError:
            if hidden > plain:
                raise
            return False  # too narrow for a method that is joined to it
        return True

    def enough(hidden: int) -> bool:
        return allowed(hidden) and count(hidden) >= wanted

    count(plain)  # raises here if the plain model does not fit
    step = _step(count, plain)
    slope = count(plain + step) - count(plain)
    guess = plain + step * (-(-(wanted - count(plain)) // slope) if slope > 0 else 0)
    widths = range(plain % step or step, max(guess, _WIDEST * plain) + step, step)
    guess = max(guess, widths[0])
    exact = enough(guess) and (guess == widths[0] or not enough(guess - step))
    hidden = guess if exact else widths[min(bisect_left(widths, True, key=enough), len(widths) - 1)]
    narrower = hidden > widths[0] and allowed(hidden - step)
    if count(hidden) < wanted or (count(hidden) > wanted and not narrower):
        raise UserError(
            f"{arm.name} cannot match {target.name}: even with {kind.of_width} of width {hidden} it has "
            f"{count(hidden):,} {by}, and {target.name} has {wanted:,}"
        )
    return hidden


def _step(count: Callable[[int], int], plain: int) -> int:
    """Return how far apart the arm's widths are: groups that divide the plain width divide its step too."""
    for step in (each for each in range(1, plain) if plain % each == 0):
        try:
            count(plain + step)
        except UserError:
            continue
        return step
    return plain


def _count(recipe: Recipe, arm: Arm, by: str) -> int:
    """Parameters, or forward FLOPs per token, of an arm's model on the meta device."""
    plain, length = recipe.task.build_on_meta(), recipe.task.sequence_length
    known = set(model_cost(plain, length).notes) if by == "flops" else set()
    try:
        model = apply_arm(recipe, arm, plain)
    except UserError:
        raise
    except Exception as error:  # a user's function need not know of models without memory
        raise UserError(f"{arm.name} cannot be matched: {arm.method} fails on the meta device ({error})") from error
    if by == "parameters":
        return count_parameters(model)
    cost = model_cost(model, length)
    forms_weight = any(
        isinstance(each, SineLowRankLinear) and each.sine_config.activation != "identity" for each in model.modules()
    )
    if set(cost.notes) - known or forms_weight:  # a weight formed in each step costs per batch
        raise UserError(f"{arm.name} cannot be matched by FLOPs: its cost is not one per token; match its parameters")
    return cost.flops


def _sized(arm: Arm) -> str:
    """The part of an arm whose width can be matched; empty where it has none."""
    return next((name for name in arm.method.split("+") if isinstance(ARM_METHODS.get(name), Sized)), "")


def _own(arm: Arm) -> dict[str, Any]:
    """The settings of that part."""
    return arm.settings if arm.method == _sized(arm) else arm.settings.get(_sized(arm), {})


def _by(arm: Arm) -> str:
    """The count that is matched."""
    kind: Any = ARM_METHODS[_sized(arm)]
    return str(_own(arm).get("by", kind.by))


def _with_hidden(arm: Arm, hidden: int) -> Arm:
    name, settings = _sized(arm), {**_own(arm), "hidden": hidden}
    return replace(arm, settings=settings if arm.method == name else {**arm.settings, name: settings})
