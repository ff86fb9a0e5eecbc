"""Trackers of transformers by name, offline; those that are installed."""

import contextlib
import json
import sqlite3

import pytest

from nlr_lab.training.run import run_training
from training_helpers import FakeText, cut_back, make_recipe

FILES = {
    "tensorboard": "run/tensorboard/events.*",
    "wandb": "wandb/offline-run-*/*.wandb",
    "mlflow": "mlruns/*/*/metrics/*",
    "trackio": "trackio/*.db",
}


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("tracker", FILES)
def test_a_tracker_gets_the_curves_without_a_network(tmp_path, monkeypatch, tracker):
    monkeypatch.setenv("TRACKIO_DIR", f"{tmp_path}/trackio")  # read where it is imported
    pytest.importorskip(tracker)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = run_training(make_recipe(tracker=tracker), tmp_path / "run", prepared=FakeText(), quiet=True)
    files = {path.name: path for path in tmp_path.glob(FILES[tracker])}
    assert files
    assert all(path.stat().st_size > 0 for path in files.values())
    if tracker == "mlflow":
        logged = [line.split() for line in files["eval_loss"].read_text().splitlines()]
        assert [(int(step), float(loss)) for _, loss, step in logged] == list(result.curve)
    elif tracker == "trackio":
        with contextlib.closing(sqlite3.connect(*files.values())) as database:
            rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]
        logged = [(row["train/global_step"], row["eval/loss"]) for row in rows if "eval/loss" in row]
        assert logged == list(result.curve)
    elif tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        events.Reload()
        logged = [(each.step, each.value) for each in events.Scalars("eval/loss")]
        assert logged == [(step, pytest.approx(loss)) for step, loss in result.curve]


def test_curves_of_a_resumed_run_have_no_gap(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = make_recipe(tracker="tensorboard", keep_checkpoints=9)
    result = run_training(recipe, tmp_path / "whole", prepared=FakeText(), quiet=True)
    out = cut_back(tmp_path / "whole", tmp_path / "out", 10)
    run_training(recipe, out, resume=True, prepared=FakeText(), quiet=True)
    events = accumulator.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("eval/loss")] == [step for step, _ in result.curve] == [5, 10, 12]
