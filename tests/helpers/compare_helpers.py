"""Stand-ins for what a comparison runs: a task, trainings whose end a test says, and records of finished runs."""

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from PIL import Image

from nlr_lab.compare import compare
from nlr_lab.compare.model_trials import ModelTrials
from nlr_lab.compare.record import ArmRecord, build_results
from nlr_lab.compare.trial import Choice, Measurement, Run
from nlr_lab.fields.image import ImageSettings
from nlr_lab.fields.model import FieldConfig
from nlr_lab.fields.settings import FieldRecipe, FitConfig
from nlr_lab.tasks.task import LOSS, Measure, Task
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, DivergedError, Recipe, TrainConfig

BASE, CONTROL, NOBLE = Arm(), Arm(dense_init="noble"), Arm(name="noble-r4", method="noble", settings={"rank": 4})
STEPS = 100
ACCURACY = Measure(name="accuracy", higher_is_better=True, unit="")


@dataclass(frozen=True)
class StubTask(Task):
    """Stands for a task whose text is prepared already."""

    sequence_length: int = 8
    fingerprint: str = "f" * 64

    def prepare(self, progress=True):
        about = {"fingerprint": self.fingerprint, "describe": lambda: {"tokens": 12345}}
        return SimpleNamespace(train=range(800), valid=range(8), test=None, plain=None, **about)


class FakeTraining:
    """Has run_training's signature; the curve is a straight line to a final loss given by a function.

    `loss(arm name, learning rate, seed)` is the final loss; NaN diverges as run_training does.
    """

    def __init__(self, loss, every=10):
        self.loss, self.calls, self.resumed, self.stop_after = loss, [], [], math.inf
        self.evaluated = range(0, STEPS + 1, every) if every else (STEPS,)

    def __call__(self, recipe, out, *, resume, overwrite, prepared, quiet, report, stop=None):
        key = (recipe.arm.name, recipe.lr, recipe.train.seed)
        assert recipe.train.lr == recipe.arm.lr, "the learning rate must be told one way"
        assert not overwrite
        assert resume or not out.exists() or not any(out.iterdir()), "run_training refuses a used folder"
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        (out / "recipe.json").write_text("{}")
        if len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append(key)
        if resume:
            self.resumed.append(key)
        final, start = self.loss(*key), 5.0
        diverged = math.isnan(final)
        curve = [[s, start + (final - start) * s / STEPS] for s in self.evaluated]
        result = {"status": "done", "final_loss": final, "curve": curve, "steps": STEPS, "seconds": 1.5}
        if diverged:
            result |= {"status": "diverged", "final_loss": None, "curve": [[0, start]]}
        (out / "result.json").write_text(json.dumps(result))
        if diverged:
            raise DivergedError("the loss is NaN at step 7", 7)


def fake_measure(recipe, arms, prepared, *, rounds, max_seconds=None, quiet=True):
    rng = np.random.default_rng(0)
    shared = rng.uniform(0.010, 0.015, max(rounds, 1))
    cost = {arm.name: 1.0 + 0.1 * (arm.method != "baseline") for arm in arms}
    times = {name: list(shared * c * rng.normal(1, 0.01, len(shared))) for name, c in cost.items()}
    counts = {"parameters": {name: int(1000 * c) for name, c in cost.items()}}
    return Measurement(**counts, flops={name: 10.0 * c for name, c in cost.items()}, times=times if rounds else None)


def gain(arm, rate, seed):
    """NOBLE ends 0.2 lower than the baseline, the control 0.1; seeds differ far more than arms."""
    effect = {"baseline": 0.0, "baseline-init-noble": -0.1}.get(arm, -0.2)
    return 3.0 + 0.3 * math.sin(7 * seed) + effect + 0.005 * math.sin(31 * seed + sum(map(ord, arm)))


def bowl(best):
    """Final losses with the best learning rate of each arm at `best[arm]`."""
    return lambda arm, rate, seed: gain(arm, rate, seed) + 0.05 * math.log2(rate / best[arm]) ** 2


def compare_stub(recipe, out, *, train, measure_with=fake_measure, draw=False, **options):
    """`compare` with everything but the bookkeeping replaced; pictures only on demand."""
    trials = ModelTrials(recipe)
    trials.train, trials.measure_with = train, measure_with
    if not draw:
        trials.draw = lambda *_: None
    options = {"seeds": 3, "tune_lr": (), "quiet": True, "command": "nlr compare stub"} | options
    return compare(recipe, out, trials=trials, **options)


def tiny_recipe(folder, **train):
    """A one-layer language model on a small text in a folder, over 8 steps."""
    words = np.random.default_rng(5).choice(
        ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "birds."], (200, 20)
    )
    (folder / "text.txt").write_text("\n".join(map(" ".join, words)))
    sizes = {"vocab_size": 270, "sequence_length": 16, "eval_sequences": 4, "valid_fraction": 0.2}
    text = TextData(source=str(folder / "text.txt"), cache_dir=str(folder / "cache"), **sizes)
    backbone = GlmBackbone(layers=1, width=16, heads=2, hidden=32)
    defaults = {"steps": 8, "batch_size": 4, "lr": 1e-2, "log_every": 2, "tracker": "none", "threads": 1}
    task = LanguageModelTask(text=text, backbone=backbone)
    return Recipe(name="tiny", task=task, train=TrainConfig(**defaults | train))


def field_recipe(folder, name="photo.png", arms=(), seeds=2, tune_lr=(), width=16, **train):
    """A small field on a random photograph of that name in a folder, over 10 steps."""
    pixels = np.random.default_rng(3).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    field = FieldConfig(in_features=2, out_features=3, width=width)
    problem = ImageSettings(source=str(folder / name), points=0, field=field)
    defaults = {"steps": 10, "eval_every": 2, "save_every": 0, "threads": 1, "device": "cpu"}
    own = {"arms": arms, "seeds": seeds, "tune_lr": tune_lr, "train": FitConfig(**defaults | train)}
    return FieldRecipe(name="tiny", problem=problem, method="sine:rank=1,omega=30", **own)


def a_run(seed, loss=2.0, steps=10, **more):
    """A finished run, or one that diverged at its fourth step."""
    own = {"curve": ((steps, math.nan if loss is None else loss),), "diverged_at": 4 if loss is None else None}
    return Run(**{"seed": seed, "lr": 1e-3, "final_loss": loss, "steps": steps, "seconds": 1.0} | own | more)


def curved_run(shape, seed, gain, every, steps=STEPS, measure=LOSS, **more):
    """A run whose loss is `shape(step, steps)` less a gain (a score: its negative), evaluated every so many steps."""

    def value(step):
        return shape(step, steps) + 0.1 * seed - gain * (1 - 0.005 * seed**2)

    points = tuple((step, value(step)) for step in range(every, steps + 1, every))
    score = {} if measure.is_loss else {"score": -points[-1][1], "metric_curve": tuple((s, -v) for s, v in points)}
    return a_run(seed, value(steps), steps, curve=points, **score, **more)


def an_arm(name, *runs, **more):
    own = {"settings": {"method": name, "settings": {}, "dense_init": None}, "choice": Choice(lr=1e-3)}
    own |= {"source": "recipe", "parameters": 10, "flops": 1.0, "control": name == "baseline"}
    return ArmRecord(name=name, runs={run.seed: run for run in runs}, **own | more)


def a_record(arms, seeds=(1, 2, 3), pairs=None, measure=LOSS, times=None):
    """A record of arms against the first one."""
    about = {"recipe": {"name": "x", "summary": "y", "settings": {}}, "data": {}, "problem": "y"}
    about |= {"command": "c", "tuning_seed": 0, "seconds": 0.0}
    pairs = pairs or [[(arms[0].name, arm.name) for arm in arms[1:]]]
    return build_results(about, arms, pairs=pairs, reference=arms[0].name, seeds=seeds, measure=measure, times=times)
