"""The loop that fits a field: small enough for steps of a millisecond, and it can be killed at any moment.

Nothing random is carried from step to step (a step's batch comes from the seed and the step's number), so a fit that
resumes from a checkpoint gives the same bits as one that was never stopped.
"""

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from nlr_lab.runtime.environment import (
    OutOfTimeError,
    check_bytes,
    choose_device,
    cpu_threads,
    many_compiled,
    provenance,
    seeded_generator,
    told_of_memory,
)
from nlr_lab.runtime.log import LOG, append_entry
from nlr_lab.runtime.storage import (
    disk_errors,
    flatten,
    holds_former,
    newest_valid,
    opened,
    prune,
    read_json,
    read_manifest,
    remove_temporaries,
    write_json,
)
from nlr_lab.runtime.tables import duration
from nlr_lab.training.result import DivergedError, stability
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import staged_folder
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear

from .problem import FieldMethod, Problem
from .settings import FitConfig

SETTINGS, RESULT = "fit.json", "result.json"
_OF_PICTURES = ("frames", "frame_downscale", "picture_height", "azimuth", "elevation", "up", "mesh_resolution")
FREE = frozenset(
    {
        *("train.save_every", "train.keep_checkpoints", "train.threads", "train.device"),
        *(f"problem.{name}" for name in _OF_PICTURES),
    }
)
"""Settings of a recipe that change no number of a fit, or only by rounding: those of pictures and meshes too."""
# A resumed fit may also read its data from elsewhere.
_FREE = FREE | {"problem.name", "problem.source"}

# SETTINGS last: while it is there, the folder can still be resumed or overwritten.
_OURS = (RESULT, LOG, "model", "pictures", "checkpoints", SETTINGS)
_HINT = "use another folder, or --overwrite"


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A finished fit."""

    score: str
    """Name of the metric by which fits are compared; higher is better."""
    metrics: dict[str, float]
    """At the last step."""
    curve: list[dict[str, float]]
    """Step, mean training loss since the entry before, and the metrics, at each evaluation."""
    parameters: int
    steps: int
    seconds: float
    """Seconds of training and evaluating, those before a resume included."""
    diverged_at: int | None = None
    """The step at which the training loss rose and did not recover (`training.result` has the rule)."""
    files: list[str] = field(default_factory=list)
    """Paths, in the folder, of what the problem wrote."""
    model: nn.Module = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """All but the model."""
        return {name: value for name, value in vars(self).items() if name != "model"}


def fit(
    problem: Problem,
    method: FieldMethod,
    config: FitConfig,
    out: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    pictures: bool = True,
    about: Mapping[str, Any] | None = None,
    stop: Callable[[int], bool] | None = None,
) -> FitResult:
    """Fit a field to a problem.

    Args:
        problem: what is fitted.
        method: the linears.
        config: the optimization.
        out: folder, new or empty unless `resume` or `overwrite`.
        resume: continue from the newest whole checkpoint in `out`; a finished fit is returned as it is, with
            new pictures where a setting differs.
        overwrite: delete what a former fit wrote to `out`.
        quiet: show nothing.
        pictures: whether the problem writes its pictures and meshes at the end.
        about: the problem's settings, kept in fit.json; a resume with other ones is refused by their names.
        stop: asked after each step but the last, with its number; a resume continues from the last checkpoint.

    Raises:
        UserError: a rank that saves nothing, a device that cannot be used, too little memory, a folder that may not be
            used, a fit of other settings or data, a damaged result, a full disk.
        DivergedError: the loss or a weight is no longer finite; the message says at which step.
        OutOfTimeError: `stop` said so.
    """
    path = Path(out)
    # The fingerprint last: a setting that differs is named before the data that it changed.
    of_problem = {"name": problem.name, **(about or {}), "fingerprint": problem.fingerprint}
    settings = {"problem": of_problem, "method": asdict(method), "train": asdict(config)}
    former, changed = None, False
    if holds_former(path, SETTINGS, "fit", resume=resume, overwrite=overwrite):
        changed = _changes(path, settings)
        kinds = {"score": str, "metrics": dict, "curve": list, "parameters": int, "seconds": float, "files": list}
        former = read_json(path / RESULT, _HINT, **kinds) if (path / RESULT).is_file() else None
    device = choose_device(config.device, dtype=torch.float64)  # losses are summed so
    model = build(problem, method, config.seed)
    if former is not None:
        load_weights(model, path)
        result = FitResult(**former, model=model.to(device))
        lost = any(not (path / file).is_file() for file in result.files)
        if not ((changed or lost) and pictures):
            return result
    with (
        disk_errors(str(path)),
        opened(path, *_OURS, overwrite=overwrite),
        cpu_threads(config.threads),
        many_compiled(config.compile),
        told_of_memory("the fit"),
    ):
        remove_temporaries(path / "checkpoints")
        if not (path / SETTINGS).is_file():
            write_json(path / SETTINGS, {"settings": settings, **provenance()})
        if former is None:
            result = _Run(problem, model.to(device), config, path).train(stop, quiet=quiet)
        if pictures:
            with staged_folder(path / "pictures") as staged, torch.no_grad():
                written = problem.write(result.model.eval(), staged)
            result = replace(result, files=[f"pictures/{file.relative_to(staged)}" for file in written])
        write_json(path / RESULT, result.to_json())
        write_json(path / SETTINGS, {**read_json(path / SETTINGS), "settings": settings})
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return result


def build(problem: Problem, method: FieldMethod, seed: int) -> nn.Module:
    """Build the network that a fit of this seed starts from.

    Raises:
        UserError: no linear of it gets smaller at this rank, or it does not fit memory.
    """
    # Checked before allocating: an allocation succeeds without memory, and filling it kills the process.
    with contextlib.suppress(RuntimeError, TypeError), told_of_memory("the network"), torch.device("meta"):
        model = problem.build(method, torch.Generator("cpu"))
        size = sum(each.numel() for each in model.parameters())
        sines = [each for each in _factored(model) if each.sine_config.activation != "identity"]
        formed = max((each.in_features * each.out_features for each in sines), default=0)
        # float32: of a parameter value, gradient and Adam's moments; of one formed weight at a time it and its gradient
        what = f"the network has {size:,} parameters" + (f" and forms weights of {formed:,}" if formed else "")
        check_bytes(4 * 4 * size + 2 * 4 * formed, f"{what}, whose fit", "choose a smaller width")
    with told_of_memory("the network"):
        model = problem.build(method, torch.Generator().manual_seed(seed))
    if method.rank is not None and not _factored(model):
        raise UserError(f"rank {method.rank} saves no parameters in any linear of this field; choose a smaller rank")
    return model


def load_weights(model: nn.Module, out: Path | str) -> None:
    """Put a finished fit's weights, out of the folder it was fitted in, into a model built for the same settings.

    Raises:
        UserError: there are none, they are damaged, or they do not fit.
    """
    folder = Path(out) / "model"
    try:
        read_manifest(folder)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (UserError, SafetensorError, OSError) as error:
        raise UserError(f"{error}; fit it again with --overwrite, or in another folder") from error
    except RuntimeError as error:
        raise UserError(f"{folder} does not fit the model; build it with the settings of fit.json") from error


class Stepper:
    """Take single steps of a model, in place; what a step sees follows from the seed and its number alone."""

    def __init__(self, problem: Problem, model: nn.Module, config: FitConfig) -> None:
        self.problem, self.model, self.config = problem, model, config
        self.device = next(model.parameters()).device
        # for training only: evaluations come in other sizes
        self.compiled: Any = torch.compile(model, dynamic=False) if config.compile else model
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.optimizer = torch.optim.Adam(
            self.parameters.values(), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def take(self, step: int) -> Tensor:
        """Take a step (from 0); return its loss, detached, on the device."""
        config = self.config
        batch = self.problem.batch(step, seeded_generator(config.seed, step))
        if self.device.type != "cpu":
            batch = tree_map_only(Tensor, lambda each: each.to(self.device, non_blocking=True), batch)
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate(step)
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.compiled, batch)
        loss.backward()
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        self.optimizer.step()
        return loss.detach()


class _Run(Stepper):
    """A fit from its newest checkpoint to its end."""

    def __init__(self, problem: Problem, model: nn.Module, config: FitConfig, path: Path) -> None:
        super().__init__(problem, model, config)
        self.path, self.checkpoints = path, path / "checkpoints"
        self.step, self.summed, self.curve = 0, 0, list[dict[str, float]]()
        self.untrained: float | None = None
        self.losses = torch.zeros((), dtype=torch.float64, device=self.device)
        self.started = time.monotonic()
        self._read()

    def train(self, stop: Callable[[int], bool] | None, *, quiet: bool) -> FitResult:
        """Take the steps that are left, write the model, and return the result."""
        config, steps = self.config, self.config.steps
        first, begun, hidden = self.step, time.monotonic(), quiet or not sys.stderr.isatty()
        append_entry(self.path, step=first, of=steps)
        with tqdm(total=steps, initial=first, desc=self.problem.name, disable=hidden, leave=False) as bar:
            while self.step < steps:
                loss = self.take(self.step)
                if self.step == 0:
                    self.untrained = float(loss)
                self.losses += loss
                self.step, self.summed = self.step + 1, self.summed + 1
                if self.device.type == "cpu":  # on a GPU looking would stop it each time
                    self._check_finite("the loss", self.losses)
                bar.update()
                if config.evaluates(self.step):
                    numbers = self._evaluate()
                    speed = (self.step - first) / max(time.monotonic() - begun, 1e-9)
                    to_go = f"  {duration((steps - self.step) / speed)} left" if self.step < steps else ""
                    line = f"{self.problem.name}  step {self.step}/{steps}  {numbers}  {speed:.1f} steps/s{to_go}"
                    if not quiet:
                        tqdm.write(line, file=sys.stderr)
                if self.step == steps:
                    break
                if config.save_every and self.step % config.save_every == 0:
                    self._save()
                if stop is not None and stop(self.step):
                    raise OutOfTimeError(f"stopped for time at step {self.step} of {steps}; continue with --resume")
        seconds = time.monotonic() - self.started
        curve = tuple((int(entry["step"]), entry["loss"]) for entry in self.curve)
        with staged_folder(self.path / "model", {"step": self.step}) as staged:
            save_file(self.model.state_dict(), staged / "model.safetensors")
        return FitResult(
            score=self.problem.score,
            metrics={name: value for name, value in self.curve[-1].items() if name not in ("step", "loss")},
            curve=self.curve,
            diverged_at=stability(curve, self.step, self.untrained)["diverged_at"],
            parameters=sum(each.numel() for each in self.model.parameters()),
            steps=self.step,
            seconds=seconds,
            model=self.model,
        )

    def _check_finite(self, what: str, *values: Tensor) -> None:
        if torch.stack([each.isfinite().all() for each in values]).all():
            return
        found, _ = newest_valid(self.checkpoints)
        last = f"the last good checkpoint is {found}" if found else "there is no checkpoint before it"
        by = "at" if self.device.type == "cpu" else "at or before"
        where = f"{what} is no longer a finite number {by} step {self.step}"
        raise DivergedError(f"{where}; {last}; lower the learning rate and start over", self.step)

    def _check_state(self) -> None:
        # A loss is of the weights before its step, and a score can be finite though a weight is not.
        self._check_finite("the loss", self.losses)
        self._check_finite("a weight", *self.model.state_dict().values())

    @torch.no_grad()
    def _evaluate(self) -> str:
        """Add an entry to the curve; return its numbers as text."""
        self._check_state()
        metrics = self.problem.evaluate(self.model.eval())
        self.model.train()
        if math.isnan(score := metrics[self.problem.score]):
            self._check_finite(f"the {self.problem.score}", torch.tensor(score))
        entry = {"loss": float(self.losses) / self.summed, **metrics}
        self.curve.append({"step": self.step, **entry})
        append_entry(self.path, **self.curve[-1])
        self.losses.zero_()
        self.summed = 0
        return "  ".join(f"{name} {value:.4g}" for name, value in entry.items())

    def _save(self) -> None:
        self._check_state()
        self.checkpoints.mkdir(exist_ok=True)
        moments: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            moments |= {f"{key}/{name}": value for key, value in self.optimizer.state[parameter].items()}
        state = {"step": self.step, "summed": self.summed, "curve": self.curve, "losses": float(self.losses)}
        state["untrained"] = self.untrained
        with staged_folder(self.checkpoints / f"step-{self.step:06d}", {"step": self.step}) as staged:
            save_file(self.model.state_dict(), staged / "model.safetensors")
            save_file(moments, staged / "optimizer.safetensors")
            write_json(staged / "state.json", {**state, "seconds": time.monotonic() - self.started})
        prune(self.checkpoints, self.step, self.config.keep_checkpoints)

    def _read(self) -> None:
        found, damaged = newest_valid(self.checkpoints)
        for line in damaged:
            print(f"skipped: {line}", file=sys.stderr)
        if found is None:
            return
        self.model.load_state_dict(load_file(found / "model.safetensors"))
        for path, value in load_file(found / "optimizer.safetensors").items():
            key, _, name = path.partition("/")
            self.optimizer.state[self.parameters[name]][key] = value.to(self.device)
        state = read_json(found / "state.json")
        self.step, self.summed, self.curve = state["step"], state["summed"], state["curve"]
        self.untrained = state.get("untrained")
        self.started -= state["seconds"]
        self.losses.fill_(state["losses"])


def _changes(path: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a resumed fit has other settings; raise UserError where they would change its numbers."""
    before = flatten(read_json(path / SETTINGS, _HINT, settings=dict)["settings"])
    now = flatten(json.loads(json.dumps(settings)))
    changed = [name for name, value in now.items() if name not in before or before[name] != value]
    for name in changed:
        if name == "problem.fingerprint":
            raise UserError(f"the fit in {path} was started on other data; restore it or choose another folder")
        if name not in _FREE:
            raise UserError(
                f"the fit in {path} was started with {name} {before.get(name)!r}, not {now[name]!r}; "
                "resume with the former, or choose another folder"
            )
    return bool(changed)


def _factored(model: nn.Module) -> list[SineLowRankLinear]:
    return [each for each in model.modules() if isinstance(each, SineLowRankLinear)]
