"""Comparisons side by side on a local Ray cluster: the numbers of the serial one, and nothing lost with a worker."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from compare_helpers import tiny_recipe
from nlr_lab.compare import compare
from nlr_lab.compare.model_trials import ModelTrials
from nlr_lab.training import Arm, run_training
from nonlinear_lowrank import UserError
from refusals import assert_refused

pytest.importorskip("ray")

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

ARMS = (Arm(), Arm.parse("noble:rank=4"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_recipe(tmp_path_factory.mktemp("text"), steps=6, warmup_steps=1, eval_every=3, save_every=2)


def go(recipe, out, run=run_training, **options):
    settings = {"arms": ARMS, "seeds": 2, "tune_lr": (1e-3, 1e-2), "max_extensions": 1, "timing_rounds": 0}
    trials = ModelTrials(recipe)
    trials.train = run
    return compare(recipe, out, **settings | options, quiet=True, command="x", trials=trials).results


def numbers(results):
    timeless = lambda entry: {k: v for k, v in entry.items() if "second" not in k}  # noqa: E731
    return json.loads(json.dumps(results), object_hook=timeless)


def die_once(recipe, out, **options):
    """Trains; the first attempt at one run is killed after a checkpoint."""
    doomed = recipe.arm.method == "noble" and recipe.train.seed == 1
    marker = Path(out).parent / "died"
    if doomed and not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        stepped = replace(recipe, arm=replace(recipe.arm, method="test_workers:die", settings={}, name="dying"))
        run_training(stepped, Path(out).parent / "other", quiet=True)
    return run_training(recipe, out, **options)


def die(model):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_workers_give_the_numbers_of_a_serial_comparison(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    serial = go(recipe, tmp_path / "serial")
    found = go(recipe, tmp_path / "workers", workers=2, run=die_once)
    assert list(tmp_path.glob("workers/runs/*/*/died"))
    assert numbers(found)["arms"] == numbers(serial)["arms"]
    for one in (tmp_path / "serial" / "runs").rglob("model.safetensors"):
        other = tmp_path / "workers" / one.relative_to(tmp_path / "serial")
        assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / "workers").rglob("step-*"))
    # Interrupted: what is missing is run, the rest is found.
    (gone,) = (tmp_path / "workers" / "runs" / "noble-r4").rglob("seed-2/result.json")
    gone.unlink()
    again = go(recipe, tmp_path / "workers", workers=2, resume=True)
    assert numbers(again)["arms"] == numbers(serial)["arms"]


@pytest.mark.slow
def test_refuses_a_run_that_fits_on_no_machine(recipe, tmp_path):
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        wide = replace(recipe, train=replace(recipe.train, threads=2))
        with pytest.raises(UserError, match=r"asks for 2 cores.*at most 1 cores.*lower --train.threads"):
            go(wide, tmp_path / "out", workers=1)
    finally:
        ray.shutdown()


def meet(recipe, out, **options):
    """Trains once another run has begun too."""
    Path(out).parents[3].joinpath(f"met-{recipe.arm.method}").touch()
    end = time.monotonic() + 60
    while len(list(Path(out).parents[3].glob("met-*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    return run_training(recipe, out, **options)


@pytest.mark.slow
def test_more_workers_than_gpus_share_them(recipe, tmp_path, monkeypatch):
    import ray

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert go(recipe, tmp_path / "out", workers=2, run=meet, seeds=1, tune_lr=())["n"] == 1
    finally:
        ray.shutdown()


def sleep(recipe, out, **options):
    Path(out).mkdir(parents=True)
    time.sleep(600)


@pytest.mark.slow
def test_workers_stop_at_the_time_limit(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    started = time.monotonic()
    found = go(recipe, tmp_path / "out", workers=2, run=sleep, max_seconds=15)
    assert time.monotonic() - started < 60
    assert found["n"] == 0
    assert "Stopped for time before the first seed: stopped 2 runs for time; continue with --resume." in found["notes"]
    assert (tmp_path / "out" / "report.md").exists()


@pytest.mark.parametrize(
    ("workers", "world", "words"),
    [(0, "1", "positive integer"), (2, "2", "omit torchrun"), (2, "1", r"pip install '.*\[ray\]'")],
)
def test_refuses_workers_before_anything_is_written(recipe, tmp_path, monkeypatch, workers, world, words):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert_refused(words, go, recipe, tmp_path / "out", workers=workers)
    assert not (tmp_path / "out").exists()
