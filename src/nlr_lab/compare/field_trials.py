"""One fit of a neural field as a trial."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nlr_lab.bench.timing import Clock, interleaved_step_times
from nlr_lab.fields.fit import FREE, RESULT, Stepper, build, fit, load_weights
from nlr_lab.fields.problem import FieldArm, FieldMethod, Problem
from nlr_lab.fields.settings import FieldRecipe
from nlr_lab.runtime.environment import choose_device, cpu_threads, many_compiled, told_of_memory
from nlr_lab.runtime.storage import read_manifest, write_json
from nlr_lab.tasks.task import Measure
from nlr_lab.training.result import DivergedError, before
from nonlinear_lowrank.analysis.cost import count_parameters
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear

from . import field_report
from .field_report import field_sections, plot_omegas, plot_sizes, plot_strip
from .trial import PACE_ROUNDS, Choice, Measurement, Run, Stop, TimeLimit, Trials, measure_paces, tidy

_UNITS = {"psnr": "dB", "iou": "%"}  # of scores that have one
_START = 0.2  # seconds of a fit beside its steps, at the least


class FieldTrials(Trials):
    """Fits of one recipe's problem."""

    arm = FieldArm
    example = "low-rank:rank=5 sine:rank=5,omega=50"
    pictures = ("rate.png", "omega.png", "strip.png")
    report = field_report
    timing_rounds = 20
    parts = ("problem", "train")
    free = FREE | {"train.lr", "train.seed"}

    def __init__(self, recipe: FieldRecipe) -> None:
        super().__init__(recipe)
        self.device = choose_device(recipe.train.device, dtype=torch.float64)
        self.problem: Problem
        self.omegas: dict[str, float | None] = {}
        self._drawn: object = None

    def default_reference(self, arms: Sequence[FieldArm]) -> str:
        return next((arm.name for arm in arms if arm.method.kind == "dense"), arms[0].name)

    def pairs(self, reference: str, arms: Sequence[FieldArm]) -> list[list[tuple[str, str]]]:
        """Plain low rank and sine at equal size, in one family."""
        lows, sines = ([arm.name for arm in arms if arm.method.kind == kind] for kind in ("low-rank", "sine"))
        return [[(low, sine) for sine in sines for low in lows if self.sizes[low] == self.sizes[sine]]]

    def arm_settings(self, arm: FieldArm) -> dict[str, Any]:
        return {name: value for name, value in asdict(arm.method).items() if name != "init"}

    def choices(self, arm: FieldArm, grid: Sequence[float]) -> list[Choice]:
        rates = (arm.lr,) if arm.lr is not None else grid or (self.recipe.train.lr,)
        return [Choice(lr=tidy(rate), init=init) for init in arm.inits for rate in rates]

    def prepare(self, *, quiet: bool) -> None:
        self.problem = self.recipe.problem.prepare()
        self.fingerprint = self.problem.fingerprint
        score = self.problem.score
        self.measure = Measure(name=score, higher_is_better=True, unit=_UNITS.get(score, ""))

    def count_and_time(self, arms: Sequence[FieldArm], rounds: int, limit: TimeLimit) -> Measurement:
        self.sizes = {}
        for arm in arms:
            model = self._build(arm)
            self.sizes[arm.name], self.omegas[arm.name] = count_parameters(model), _omega(model)
        self.dense_parameters = count_parameters(build(self.problem, FieldMethod(), self.recipe.train.seed))
        times = self._step_times(arms, rounds, limit) if rounds else None
        paces = {} if limit.seconds is None else self._paces(arms, limit)
        return Measurement(parameters=self.sizes, times=times, paces=paces)

    def _build(self, arm: FieldArm) -> nn.Module:
        return build(self.problem, arm.method, self.recipe.train.seed)

    def _step_times(
        self, arms: Sequence[FieldArm], rounds: int, limit: TimeLimit, clock: Clock | None = None
    ) -> dict[str, list[float]]:
        """Seconds of interleaved training steps of every arm."""
        train = self.recipe.train

        def steps(arm: FieldArm) -> Callable[[], object]:
            stepper = Stepper(self.problem, self._build(arm).to(self.device), train)
            return lambda: stepper.take(0)

        if clock is None:
            clock = "process" if self.device.type == "cpu" else "wall"  # a GPU takes none of the process' time
        most = limit.timing
        with cpu_threads(train.threads), many_compiled(train.compile), told_of_memory("the timing of steps"):
            return interleaved_step_times({arm.name: steps(arm) for arm in arms}, rounds, clock=clock, max_seconds=most)

    def _paces(self, arms: Sequence[FieldArm], limit: TimeLimit) -> dict[str, tuple[float, float]]:
        """Time some steps, an evaluation and a picture; keep time for the pictures."""
        begun, train = limit.passed, self.recipe.train
        times = self._step_times(arms, PACE_ROUNDS, limit, "wall")
        start = max(_START, (limit.passed - begun - sum(map(sum, times.values()))) / len(times))
        with cpu_threads(train.threads), told_of_memory("an evaluation"), torch.no_grad():
            model = self._build(arms[0]).to(self.device).eval()
            evaluating = time.monotonic()
            self.problem.evaluate(model)
            drawing = time.monotonic()
            self.problem.picture(model)
            limit.kept += (len(arms) + 1) * (time.monotonic() - drawing)
        evaluations = sum(train.evaluates(step) for step in range(1, train.steps + 1))
        return measure_paces(times, start, evaluations, lambda step: drawing - evaluating)

    def run(self, arm: FieldArm, choice: Choice, seed: int, folder: Path, *, resume: bool, stop: Stop | None) -> None:
        try:
            fit(
                self.problem,
                replace(arm.method, init=choice.init),  # type: ignore[arg-type]  # one of the arm's
                replace(self.recipe.train, lr=choice.lr, seed=seed),
                folder,
                resume=resume,
                overwrite=False,
                quiet=True,
                pictures=False,
                about=asdict(self.recipe.problem),
                stop=stop,
            )
        except DivergedError as error:
            write_json(folder / RESULT, {"diverged": error.step})
            raise

    def read(self, record: Mapping[str, Any], choice: Choice, seed: int) -> Run:
        known: dict[str, Any] = {"seed": seed, "lr": choice.lr, "init": choice.init}
        if "diverged" in record:
            step = int(record["diverged"])
            return Run(**known, final_loss=None, steps=step, seconds=0.0, curve=(), diverged_at=step)
        known |= {"steps": int(record["steps"]), "seconds": float(record["seconds"])}
        score, curve = record["score"], tuple((entry["step"], entry["loss"]) for entry in record["curve"])
        if (at := record.get("diverged_at")) is not None:
            return Run(**known, final_loss=None, curve=before(curve, at), diverged_at=at)
        return Run(
            **known,
            final_loss=float(curve[-1][1]),
            curve=curve,
            score=float(record["metrics"][score]),
            metric_curve=tuple((entry["step"], entry[score]) for entry in record["curve"]),
            metrics=dict(record["metrics"]),
        )

    def has_weights(self, folder: Path) -> bool:
        """Return whether there are weights; a kept run has none."""
        try:
            read_manifest(folder / "model")
        except UserError:
            return False
        return True

    def about(self) -> dict[str, Any]:
        recipe = {"name": self.recipe.name, "summary": self.recipe.description}
        return {"recipe": recipe, "problem": self.problem.name, "data": {"fingerprint": self.fingerprint}}

    def add_to(self, results: dict[str, Any]) -> dict[str, Any]:
        return field_sections(results, self.dense_parameters, self.omegas)

    def draw(self, out: Path, results: Mapping[str, Any], run_folders: Mapping[str, Path]) -> None:
        """Draw the plots; the strip of the first seed's fits only where they differ from those last drawn.

        A picture can take longer than a fit (a shape is a mesh, a scene its rays), and further seeds change none.
        """
        plot_sizes(out / "rate.png", results)
        plot_omegas(out / "omega.png", results)
        shown = []
        for arm in results["arms"]:
            run = next((run for run in arm["runs"] if run["seed"] == results["tuning_seed"] + 1), None)
            if run is not None and run["score"] is not None and self.has_weights(run_folders[arm["name"]]):
                shown.append((arm, run, run_folders[arm["name"]]))
        now = [(arm["name"], arm["percent"], run) for arm, run, _ in shown]
        if now != self._drawn:
            fits = [(arm, run["score"], self.problem.picture(self._model(arm, run, at))) for arm, run, at in shown]
            plot_strip(out / "strip.png", results, self.problem.picture(None), fits)
            self._drawn = now

    def _model(self, arm: Mapping[str, Any], run: Mapping[str, Any], folder: Path) -> nn.Module:
        """A finished fit's network."""
        model = build(self.problem, FieldMethod(**arm["settings"], init=run["init"]), run["seed"])
        load_weights(model, folder)
        return model.eval()


def _omega(model: nn.Module) -> float | None:
    """The frequency of the sines, which is the same in all."""
    sines = (each for each in model.modules() if isinstance(each, SineLowRankLinear))
    omega = next((each.sine_config.omega for each in sines if each.sine_config.activation == "sine"), None)
    assert not isinstance(omega, str)
    return omega
