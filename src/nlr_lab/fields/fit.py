"""The loop that fits a field: small enough for steps of a millisecond, and it can be killed at any moment.

Nothing random is carried from step to step (a step's batch comes from the seed and the step's number), so a fit that
resumes from a checkpoint gives the same bits as one that was never stopped.
"""

import contextlib
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

from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nlr_lab.runtime.resources import check_bytes, choose_device, told_of_memory
from nlr_lab.runtime.storage import disk_errors, newest_valid, prune, read_json, read_manifest, write_json
from nlr_lab.runtime.time_limit import OutOfTimeError
from nonlinear_lowrank.errors import DivergedError, UserError
from nonlinear_lowrank.hub.storage import staged_folder
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear

from .folder import PICTURES, FitFolder
from .problem import FieldMethod, Problem
from .progress import FitProgress
from .step import FitConfig, Stepper


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
    factored: int
    """Linears that are factored."""
    steps: int
    seconds: float
    """Seconds of training and evaluating, those before a resume included."""
    files: list[str] = field(default_factory=list)
    """Paths, in the folder, of what the problem wrote."""
    model: nn.Module = field(repr=False, compare=False)

    @property
    def value(self) -> float:
        """The score."""
        return self.metrics[self.score]

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
    title: str = "",
    about: Mapping[str, Any] | None = None,
    stop: Callable[[int], bool] | None = None,
) -> FitResult:
    """Fit a field to a problem.

    Args:
        problem: what is fitted.
        method: the linears.
        config: the optimization.
        out: folder, new or empty unless `resume` or `overwrite`.
        resume: go on from the newest whole checkpoint in `out`; a finished fit is handed back as it is, with
            new pictures where other ones are asked for.
        overwrite: delete what a former fit wrote to `out`.
        quiet: show nothing.
        pictures: whether the problem writes its pictures and meshes at the end.
        title: stands before the numbers shown; the problem's name unless given.
        about: the problem's settings, kept in fit.json; a resume with other ones is refused by their names.
        stop: asked after each step but the last, with its number; the fit then goes on from its last checkpoint when it
            is resumed.

    Raises:
        UserError: a rank that saves nothing anywhere, a device that cannot be used, too little memory, a folder that
            may not be used, a fit of other settings or data, a damaged result, a full disk.
        DivergedError: the loss or a weight is no longer finite; the message says at which step.
        OutOfTimeError: `stop` said so.
    """
    # The fingerprint last: a setting that differs is named before the data that it changed.
    of_problem = {"name": problem.name, **(about or {}), "fingerprint": problem.fingerprint}
    folder = FitFolder(Path(out), {"problem": of_problem, "method": asdict(method), "train": asdict(config)})
    former = folder.check(resume=resume, overwrite=overwrite)
    device = choose_device(config.device, dtype=torch.float64)  # losses are summed so
    model = build(problem, method, config.seed)
    if former is not None:
        load_weights(model, folder.path)
        found = FitResult(**former, model=model.to(device))
        if not (pictures and folder.shows_otherwise()):
            return found
    with (
        disk_errors(str(folder.path)),
        folder.opened(overwrite=overwrite),
        cpu_threads(config.threads),
        many_compiled(config.compile),
        told_of_memory("the fit"),
    ):
        if former is not None:
            found = replace(found, files=_draw(problem, found.model, folder))
            folder.write_result(found.to_json())
            return found
        run = _Run(problem, model.to(device), config, folder, device)
        run.train(FitProgress(title or problem.name, config.steps, quiet=quiet), stop)
        return run.finish(pictures)


def build(problem: Problem, method: FieldMethod, seed: int) -> nn.Module:
    """Build the network that a fit of this seed starts from.

    Raises:
        UserError: no linear of it gets smaller at this rank, or it does not fit memory.
    """
    _check_memory(problem, method)
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
    file = Path(out) / "model" / "model.safetensors"
    again = "fit it again with --overwrite, or in another folder"
    if not file.is_file():
        raise UserError(f"{out} holds no fitted field (it has no model/model.safetensors); {again}")
    try:
        read_manifest(file.parent)
        model.load_state_dict(load_file(file))
    except (UserError, SafetensorError) as error:
        raise UserError(f"{error}; {again}") from error
    except RuntimeError as error:
        raise UserError(f"{file} does not fit the model; build it with the settings of fit.json") from error


def _check_memory(problem: Problem, method: FieldMethod) -> None:
    """Ask before it is taken: an allocation succeeds where there is no memory, and filling it kills the process."""
    size = formed = 0
    # Somebody's own problem may not build without values.
    with contextlib.suppress(RuntimeError, TypeError), told_of_memory("the network"), torch.device("meta"):
        model = problem.build(method, torch.Generator("cpu"))
        size = sum(each.numel() for each in model.parameters())
        layers = [each for each in model.modules() if isinstance(each, SineLowRankLinear)]
        whole = [each for each in layers if each.sine_config.activation != "identity"]
        formed = max((each.in_features * each.out_features for each in whole), default=0)
    # float32: of each parameter value, gradient and Adam's two moments; of one weight at a time itself and its gradient
    what = f"the network has {size:,} parameters" + (f" and forms weights of {formed:,}" if formed else "")
    check_bytes(4 * 4 * size + 2 * 4 * formed, f"{what}, whose fit", "choose a smaller width")


class _Run:
    """The state of one fit: what a checkpoint holds."""

    def __init__(
        self, problem: Problem, model: nn.Module, config: FitConfig, folder: FitFolder, device: torch.device
    ) -> None:
        self.problem, self.model, self.config, self.folder, self.device = problem, model, config, folder, device
        self.stepper = Stepper(problem, model, config)
        self.step, self.seconds_before, self.started = 0, 0.0, time.monotonic()
        self.curve: list[dict[str, float]] = []
        self.losses = torch.zeros((), dtype=torch.float64, device=device)
        self.summed = 0
        self._read()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def train(self, progress: FitProgress, stop: Callable[[int], bool] | None) -> None:
        config = self.config
        with progress.shown(self.step):
            while self.step < config.steps:
                self.losses += self.stepper.take(self.step)
                self.step, self.summed = self.step + 1, self.summed + 1
                if self.device.type == "cpu":  # on a GPU looking would stop it each time
                    self._check_loss()
                progress.moved(self.step)
                if config.evaluates(self.step):
                    self._evaluate()
                    progress.evaluated(self.step, self.curve[-1])
                if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                    self._check_loss()
                    self._check_weights()
                    self._save()
                if stop is not None and self.step < config.steps and stop(self.step):
                    raise OutOfTimeError(f"stopped for time at step {self.step} of {config.steps}; go on with --resume")

    def _check_loss(self) -> None:
        if not torch.isfinite(self.losses):
            raise self._diverged("the loss")

    def _check_weights(self) -> None:
        # A loss is of the weights before its step, and a score can be a number though a weight is none.
        if not torch.stack([each.isfinite().all() for each in self.model.state_dict().values()]).all():
            raise self._diverged("a weight")

    def _diverged(self, what: str) -> DivergedError:
        found, _ = newest_valid(self.folder.checkpoints)
        last = f"the last good checkpoint is {found}" if found else "there is no checkpoint before it"
        by = "at" if self.device.type == "cpu" else "at or before"
        return DivergedError(
            f"{what} is no longer a finite number {by} step {self.step}; {last}; "
            "lower the learning rate and start anew",
            self.step,
        )

    @torch.no_grad()
    def _evaluate(self) -> None:
        self._check_loss()
        self._check_weights()
        self.model.eval()
        metrics = self.problem.evaluate(self.model)
        self.model.train()
        if math.isnan(metrics[self.problem.score]):
            raise self._diverged(f"the {self.problem.score}")
        self.curve.append({"step": self.step, "loss": float(self.losses) / self.summed, **metrics})
        self.losses.zero_()
        self.summed = 0

    def _save(self) -> None:
        checkpoints = self.folder.checkpoints
        checkpoints.mkdir(exist_ok=True)
        plain = {"step": self.step, "seconds": self.seconds, "curve": self.curve, "summed": self.summed}
        with staged_folder(checkpoints / f"step-{self.step:06d}", {"step": self.step}) as staged:
            save_file(_contiguous(self.model.state_dict()), staged / "model.safetensors")
            save_file(_contiguous(self.stepper.state()), staged / "optimizer.safetensors")
            write_json(staged / "state.json", {**plain, "losses": float(self.losses)})
        prune(checkpoints, self.step, self.config.keep_checkpoints)

    def _read(self) -> None:
        found, damaged = newest_valid(self.folder.checkpoints)
        for line in damaged:
            print(f"skipped: {line}", file=sys.stderr)
        if found is None:
            return
        self.model.load_state_dict(load_file(found / "model.safetensors"))
        self.stepper.load_state(load_file(found / "optimizer.safetensors"))
        plain = read_json(found / "state.json")
        self.step, self.seconds_before = plain["step"], plain["seconds"]
        self.curve, self.summed = plain["curve"], plain["summed"]
        self.losses.fill_(plain["losses"])

    @torch.no_grad()
    def finish(self, pictures: bool) -> FitResult:
        """Write the model, the pictures and, last, the result."""
        path, seconds = self.folder.path, self.seconds
        self.model.eval()
        with staged_folder(path / "model", {"step": self.step}) as staged:
            save_file(_contiguous(self.model.state_dict()), staged / "model.safetensors")
        result = FitResult(
            score=self.problem.score,
            metrics={name: value for name, value in self.curve[-1].items() if name not in ("step", "loss")},
            curve=self.curve,
            parameters=sum(each.numel() for each in self.model.parameters()),
            factored=_factored(self.model),
            steps=self.step,
            seconds=seconds,
            files=_draw(self.problem, self.model, self.folder) if pictures else [],
            model=self.model,
        )
        self.folder.write_result(result.to_json())
        shutil.rmtree(self.folder.checkpoints, ignore_errors=True)  # of no more use
        return result


@torch.no_grad()
def _draw(problem: Problem, model: nn.Module, folder: FitFolder) -> list[str]:
    """Write the problem's pictures and meshes in the place of former ones; return their paths in the fit's folder."""
    with staged_folder(folder.path / PICTURES) as staged:
        return [f"{PICTURES}/{file.relative_to(staged)}" for file in problem.write(model.eval(), staged)]


def _factored(model: nn.Module) -> int:
    return sum(isinstance(module, SineLowRankLinear) for module in model.modules())


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
