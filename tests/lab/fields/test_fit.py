"""The loop that fits fields: exact resume, finite losses, folders, schedules."""

import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nlr_lab.fields.fit import Stepper, build, fit, load_weights
from nlr_lab.fields.image import ImageProblem
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.settings import FieldConfig, FitConfig
from nlr_lab.runtime import environment
from nlr_lab.runtime.environment import OutOfTimeError
from nlr_lab.training.result import DivergedError
from nlr_lab.watch.runs import Watched
from refusals import assert_refused

SINE = FieldMethod(kind="sine", rank=1, omega=60.0)
SHORT = FitConfig(steps=12, lr=1e-3, eval_every=4, save_every=5, threads=1, device="cpu")


def _problem(seed: int = 0, points: int = 20, width: int = 16) -> ImageProblem:
    pixels = np.random.default_rng(seed).random((9, 8, 3))
    return ImageProblem(pixels, points=points, field=FieldConfig(in_features=2, out_features=3, width=width))


def _fit(out, problem=None, method=SINE, config=SHORT, **options):
    return fit(problem or _problem(), method, config, out, quiet=True, **options)


def _bits(out):
    return (out / "model" / "model.safetensors").read_bytes()


def _with_loss(step, change):
    """A problem whose loss in one step (from 1) is changed."""
    problem, taken = _problem(), []
    loss = problem.loss

    def changed(model, batch):
        taken.append(1)
        return change(model, loss(model, batch)) if len(taken) == step else loss(model, batch)

    problem.loss = changed
    return problem


def _stop(model, loss):
    raise KeyboardInterrupt


def test_every_seed_and_step_has_a_batch_of_its_own(tmp_path):
    def places(out, seed):
        problem, taken = _problem(), []
        loss = problem.loss
        problem.loss = lambda model, batch: taken.append(batch[0].clone()) or loss(model, batch)
        _fit(tmp_path / out, problem, config=replace(SHORT, seed=seed, steps=2))
        return taken

    one, again, other = places("one", 1), places("again", 1), places("other", 2)
    assert all(map(torch.equal, one, again))
    assert not any(torch.equal(each, its) for each, its in ((one[0], other[0]), (one[1], other[1]), one))


def test_fit_improves_and_writes_its_result(tmp_path, capsys):
    config = replace(SHORT, steps=150, eval_every=50, lr=1e-2)
    result = fit(_problem(points=0), SINE, config, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 50/150", "step 100/150", "step 150/150"]
    assert [entry["step"] for entry in result.curve] == [50, 100, 150]
    assert result.metrics["psnr"] > result.curve[0]["psnr"] + 0.3
    assert result.parameters == sum(each.numel() for each in result.model.parameters())
    assert json.loads((tmp_path / "result.json").read_text()) == result.to_json()
    assert all((tmp_path / file).is_file() for file in result.files)
    assert not (tmp_path / "checkpoints").exists()
    model = build(_problem(), SINE, seed=99)
    load_weights(model, tmp_path)
    assert _problem().evaluate(model) == result.metrics
    again = _fit(tmp_path, _problem(points=0), config=config, resume=True)
    assert again == result
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), result.model.parameters(), strict=True))


@pytest.mark.parametrize("damaged", [False, True])
def test_resumes_a_stopped_fit_bit_exactly(tmp_path, capsys, damaged):
    config = replace(SHORT, keep_checkpoints=2)
    whole, cut = _fit(tmp_path / "whole", config=config), tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        _fit(cut, _with_loss(12, _stop), config=config)
    assert sorted(each.name for each in (cut / "checkpoints").iterdir()) == ["step-000005", "step-000010"]
    (view,) = Watched(cut).look().runs
    assert (view.state, view.step, view.steps) == ("running", 8, 12)
    if damaged:
        (cut / "checkpoints" / "step-000010" / "optimizer.safetensors").write_bytes(b"torn")
    resumed = _fit(cut, config=config, resume=True)
    assert ("skipped" in capsys.readouterr().err) == damaged
    assert _bits(cut) == _bits(tmp_path / "whole")
    assert resumed.curve == whole.curve
    (view,) = Watched(cut).look().runs
    assert view.curves["training loss"] == [(entry["step"], entry["loss"]) for entry in whole.curve]


def _infinite_slope(model, loss):
    return loss + (model.last.bias.sum() * 0).sqrt()  # 0


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (8, lambda model, loss: loss * float("nan"), r"the loss .* at step 8; the last good checkpoint is .*5;"),
        (10, _infinite_slope, r"a weight .* at step 10; .*\d;"),
        (12, _infinite_slope, r"a weight .* at step 12; .*\d;"),
    ],
    ids=["loss", "weight-at-a-checkpoint", "weight-at-the-end"],
)
def test_stops_at_what_is_no_number(tmp_path, step, change, message):
    with pytest.raises(DivergedError, match=message) as error:
        _fit(tmp_path, _with_loss(step, change))
    assert error.value.step == step
    assert not (tmp_path / "result.json").exists()
    for file in tmp_path.glob("checkpoints/*/model.safetensors"):
        assert all(torch.isfinite(each).all() for each in load_file(file).values())


def test_resumes_with_other_pictures_and_places(tmp_path):
    def about(**changed):
        before = {"source": "here/photo.png", "frames": 12, "picture_height": 480, "up": "y", "points": 20}
        return {"about": {**before, **changed}, "resume": bool(changed)}

    with pytest.raises(KeyboardInterrupt):
        _fit(tmp_path, _with_loss(8, _stop), **about())
    assert_refused(r"problem\.points 20, not 21", _fit, tmp_path, **about(points=21))
    moved, drawn = _problem(), []
    moved.name, write = "moved", moved.write
    moved.write = lambda model, folder: drawn.append(folder) or write(model, folder)
    now = {"source": "there/moved.png", "frames": 0, "up": "z"}
    for _ in range(2):  # goes on, is handed back
        assert _fit(tmp_path, moved, **about(**now)).steps == 12
    assert len(drawn) == 1
    picture = next((tmp_path / "pictures").iterdir())
    picture.write_bytes(b"of other settings")
    for _ in range(2):
        found = _fit(tmp_path, moved, **about(**now, picture_height=48))
    assert len(drawn) == 2
    assert picture.read_bytes() != b"of other settings"
    picture.unlink()
    _fit(tmp_path, moved, **about(**now, picture_height=48))
    assert len(drawn) == 3
    assert picture.exists()
    assert json.loads((tmp_path / "result.json").read_text()) == found.to_json()


def test_refuses_to_overwrite_or_mix_folders(tmp_path):
    _fit(tmp_path)
    for options, message in (
        ({}, r"is not empty; .*--resume"),
        ({"config": replace(SHORT, lr=2e-3), "resume": True, "pictures": False}, r"train\.lr 0\.001, not 0\.002"),
        ({"method": replace(SINE, rank=2), "resume": True}, r"method\.rank 1, not 2"),
        ({"problem": _problem(seed=1), "resume": True}, "other data"),
        ({"resume": True, "overwrite": True}, "choose one"),
    ):
        assert_refused(message, _fit, tmp_path, **options)
    former = _bits(tmp_path)
    (tmp_path / "photo.png").write_bytes(b"somebody's")
    (tmp_path / "pictures" / "more.png").write_bytes(b"in ours")
    _fit(tmp_path, config=replace(SHORT, seed=1), overwrite=True)
    assert _bits(tmp_path) != former
    assert (tmp_path / "photo.png").read_bytes() == b"somebody's"
    assert not (tmp_path / "pictures" / "more.png").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    for option in ("resume", "overwrite"):
        assert_refused("holds no fit", _fit, tmp_path / "other", **{option: True})
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"


def test_refuses_broken_files_in_one_line(tmp_path):
    _fit(tmp_path)
    weights = _bits(tmp_path)
    for file, content in (
        ("fit.json", b"{"),
        ("fit.json", b"[]"),
        ("result.json", b"{}"),
        ("result.json", b'{"score": "psnr", "metrics": {}, "curve": []}'),
        ("model/model.safetensors", weights[: len(weights) // 2]),
        ("model/model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1])),
        ("model/model.safetensors", None),
        ("model/manifest.json", None),
    ):
        former = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content) if content else (tmp_path / file).unlink()
        assert_refused(rf"{file.partition('.')[0].partition('/')[0]}.*--overwrite", _fit, tmp_path, resume=True)
        (tmp_path / file).write_bytes(former)
    (tmp_path / "result.json").write_text("{}")
    assert _fit(tmp_path, overwrite=True).steps == 12


def test_refuses_what_cannot_be_fitted_here_in_one_line(tmp_path, monkeypatch):
    words = r"the network has [\d,]+ parameters .*whose fit takes .*smaller width"
    assert_refused(words, _fit, tmp_path / "wide", _problem(width=10**12))
    with monkeypatch.context() as patch:
        patch.setattr(environment, "free_memory", lambda: 10**9)
        words = "forms weights of 400,000,000, whose fit takes 3.3 GB"
        assert_refused(words, _fit, tmp_path / "wide", _problem(width=20_000))
    for device, message in (("tpu", "device tpu cannot be used here"), ("meta", "device meta cannot be used here")):
        assert_refused(message, _fit, tmp_path / "wide", config=replace(SHORT, device=device))
    assert_refused("rank 8 saves no parameters in any linear", _fit, tmp_path / "wide", method=replace(SINE, rank=8))
    assert not (tmp_path / "wide").exists()
    vast = _with_loss(1, lambda model, loss: torch.empty(10**16).sum())
    assert_refused("the fit does not fit memory; choose a smaller width", _fit, tmp_path / "large", vast)


def test_learning_rates_follow_their_schedule():
    linear = FitConfig(steps=101, lr=2.0, warmup_steps=0, end=0.1, schedule="linear")
    for config, steps, expected in (
        (linear, (0, 50, 100), [2.0, 1.1, 0.2]),
        (replace(linear, schedule="exponential"), (0, 50, 100), [2.0, 2 * 0.1**0.5, 0.2]),
        (replace(linear, schedule="cosine"), (0, 25, 100), [2.0, 1.1 + 0.9 * 0.5**0.5, 0.2]),
        (replace(linear, warmup_steps=20), (0, 19, 20, 60, 100), [0.1, 2.0, 2.0, 1.1, 0.2]),
        (replace(linear, schedule="constant", end=0.01, warmup_steps=4), (0, 1, 3, 4, 100), [0.5, 1.0, 2.0, 2.0, 2.0]),
    ):
        assert [config.rate(step) for step in steps] == pytest.approx(expected)


def test_clipped_gradients_have_the_norm(tmp_path):
    start, moved = build(_problem(), SINE, seed=0), []
    for norm in (0.0, 1e-9):
        found = _fit(tmp_path / str(norm), config=replace(SHORT, max_grad_norm=norm)).model
        pairs = zip(found.parameters(), start.parameters(), strict=True)
        moved.append(max(float((a - b).detach().abs().max()) for a, b in pairs))
    assert moved[1] < 0.2 * moved[0]  # Adam's eps then matters


@pytest.mark.slow
def test_compiled_fit_computes_the_same(tmp_path):
    eager, compiled = (_fit(tmp_path / str(on), config=replace(SHORT, compile=on)) for on in (False, True))
    for one, other in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_fit_is_evaluated_ten_times_unless_told():
    assert [step for step in range(1, 51) if FitConfig(steps=50).evaluates(step)] == list(range(5, 51, 5))
    assert [step for step in range(1, 8) if FitConfig(steps=7, eval_every=3).evaluates(step)] == [3, 6, 7]


def test_adam_has_the_settings():
    problem, config = _problem(), replace(SHORT, betas=(0.5, 0.6), eps=1e-3)
    (group,) = Stepper(problem, build(problem, SINE, 0), config).optimizer.param_groups
    assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3)


def test_a_resumed_fit_knows_its_seconds_and_its_first_loss(tmp_path):
    def blown_up(*first):
        problem, factors = _problem(), itertools.chain(first, itertools.repeat(1e6))
        loss = problem.loss
        problem.loss = lambda model, batch: loss(model, batch) * next(factors)
        return problem

    def wait(step):
        time.sleep(0.1)
        return step == 5

    whole = _fit(tmp_path / "whole", blown_up(1.0))
    with pytest.raises(OutOfTimeError):
        _fit(tmp_path / "cut", blown_up(1.0), stop=wait)
    resumed = _fit(tmp_path / "cut", blown_up(), resume=True)
    assert resumed.diverged_at == whole.diverged_at == 4
    assert resumed.seconds > 0.4
