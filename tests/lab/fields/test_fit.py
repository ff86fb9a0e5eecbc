"""The loop that fits fields: exact resume, finite losses, folders, schedules."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nlr_lab.fields.fit import build, fit, load_weights
from nlr_lab.fields.image import ImageProblem
from nlr_lab.fields.model import FieldConfig
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.recipe import FitConfig
from nlr_lab.runtime import resources
from nonlinear_lowrank.errors import DivergedError, UserError

SINE = FieldMethod(kind="sine", rank=1, omega=60.0)
SHORT = FitConfig(steps=12, lr=1e-3, eval_every=4, save_every=5, threads=1, device="cpu")


def _problem(seed: int = 0, points: int = 20) -> ImageProblem:
    pixels = np.random.default_rng(seed).random((9, 8, 3))
    return ImageProblem(pixels, points=points, field=FieldConfig(in_features=2, out_features=3, width=16))


def _fit(out, problem=None, method=SINE, config=SHORT, **options):
    return fit(problem or _problem(), method, config, out, quiet=True, **options)


def _bits(out):
    return (out / "model" / "model.safetensors").read_bytes()


def test_fit_improves_and_writes_its_result(tmp_path):
    result = _fit(tmp_path / "run", _problem(points=0), config=replace(SHORT, steps=150, eval_every=50, lr=1e-2))
    assert result.score == "psnr"
    assert [entry["step"] for entry in result.curve] == [50, 100, 150]
    assert result.value > result.curve[0]["psnr"] + 0.3
    assert result.parameters == sum(each.numel() for each in result.model.parameters())
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["metrics"] == result.metrics
    assert all((tmp_path / "run" / file).is_file() for file in written["files"])
    assert not (tmp_path / "run" / "checkpoints").exists()
    model = build(_problem(), SINE, seed=99)
    load_weights(model, tmp_path / "run")
    assert _problem().evaluate(model) == result.metrics


def test_resumes_a_stopped_fit_bit_exactly(tmp_path, monkeypatch):
    whole = _fit(tmp_path / "whole")
    problem = _problem()
    loss, taken = problem.loss, []

    def stops(model, batch):
        taken.append(1)
        if len(taken) == 8:
            raise KeyboardInterrupt
        return loss(model, batch)

    monkeypatch.setattr(problem, "loss", stops)
    with pytest.raises(KeyboardInterrupt):
        _fit(tmp_path / "cut", problem)
    assert [each.name for each in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-000005"]
    resumed = _fit(tmp_path / "cut", resume=True)
    assert _bits(tmp_path / "cut") == _bits(tmp_path / "whole")
    assert resumed.curve == whole.curve


def test_resumes_bit_exactly_after_sigkill(tmp_path):
    """SIGKILL at whatever moment, in a process of its own."""
    config = replace(SHORT, steps=1200, save_every=100, eval_every=600)
    code = (
        "import numpy as np\n"
        "from nlr_lab.fields.fit import FitConfig, FieldMethod, fit\n"
        "from nlr_lab.fields.image import ImageProblem\n"
        "from nlr_lab.fields.model import FieldConfig\n"
        "pixels = np.random.default_rng(0).random((9, 8, 3))\n"
        "problem = ImageProblem(pixels, points=20, field=FieldConfig(in_features=2, out_features=3, width=16))\n"
        f"fit(problem, {SINE!r}, {config!r}, {str(tmp_path / 'cut')!r}, quiet=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    checkpoints = tmp_path / "cut" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "result.json").exists()
    _fit(tmp_path / "cut", config=config, resume=True)
    _fit(tmp_path / "whole", config=config)
    assert _bits(tmp_path / "cut") == _bits(tmp_path / "whole")


def _cut(out, monkeypatch, *, step=7, **options):
    """A fit that was stopped at that step; checkpoints are every fifth."""
    problem = _problem()
    batch = problem.batch

    def stops(now, generator):
        if now == step:
            raise KeyboardInterrupt
        return batch(now, generator)

    monkeypatch.setattr(problem, "batch", stops)
    with pytest.raises(KeyboardInterrupt):
        _fit(out, problem, **options)


def test_skips_a_damaged_checkpoint(tmp_path, monkeypatch, capsys):
    config = replace(SHORT, keep_checkpoints=2)
    _cut(tmp_path / "cut", monkeypatch, step=11, config=config)
    (tmp_path / "cut" / "checkpoints" / "step-000010" / "optimizer.safetensors").write_bytes(b"torn")
    _fit(tmp_path / "cut", config=config, resume=True)
    assert "skipped" in capsys.readouterr().err
    _fit(tmp_path / "whole", config=config)
    assert _bits(tmp_path / "cut") == _bits(tmp_path / "whole")


def test_returns_a_finished_fit(tmp_path):
    first = _fit(tmp_path)
    again = _fit(tmp_path, resume=True)
    assert again == first
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), first.model.parameters(), strict=True))


def test_draws_another_network_with_another_seed(tmp_path):
    bits = {_bits_of(tmp_path / str(seed), seed) for seed in (0, 1, 1)}
    assert len(bits) == 2


def _bits_of(out, seed):
    if not out.exists():
        _fit(out, config=replace(SHORT, seed=seed))
    return _bits(out)


def test_stops_at_a_loss_that_is_no_number(tmp_path, monkeypatch):
    problem = _problem()
    loss, taken = problem.loss, []

    def breaks(model, batch):
        taken.append(1)
        return loss(model, batch) * (float("nan") if len(taken) == 8 else 1)

    monkeypatch.setattr(problem, "loss", breaks)
    with pytest.raises(
        DivergedError, match=r"no longer a finite number at step 8; the last good checkpoint is .*5;"
    ) as e:
        _fit(tmp_path, problem)
    assert e.value.step == 8
    weights = load_file(tmp_path / "checkpoints" / "step-000005" / "model.safetensors")
    assert all(torch.isfinite(each).all() for each in weights.values())


@pytest.mark.parametrize("broken", [10, 12])
def test_writes_no_checkpoint_of_weights_that_are_no_numbers(tmp_path, monkeypatch, broken):
    """The step's loss is finite and its gradient is not: at a checkpoint, and at the end."""
    problem = _problem()
    loss, taken = problem.loss, []

    def breaks(model, batch):
        taken.append(1)
        slope = (model.last.bias.sum() * 0).sqrt() if len(taken) == broken else 0  # 0, of infinite slope
        return loss(model, batch) + slope

    monkeypatch.setattr(problem, "loss", breaks)
    with pytest.raises(DivergedError, match=rf"a weight is no longer a finite number at step {broken}; .*\d;") as error:
        _fit(tmp_path, problem)
    assert error.value.step == broken
    assert not (tmp_path / "result.json").exists()
    for file in tmp_path.glob("checkpoints/*/model.safetensors"):
        assert all(torch.isfinite(each).all() for each in load_file(file).values())


def test_resumes_with_other_pictures_and_places(tmp_path, monkeypatch):
    before = {"source": "here/photo.png", "frames": 12, "frame_downscale": 2, "picture_height": 480, "points": 20}
    views = {"azimuth": 30.0, "elevation": 15.0, "up": "y", "mesh_resolution": 128}
    _cut(tmp_path, monkeypatch, about={**before, **views})
    now = {"source": "there/moved.png", "frames": 0, "frame_downscale": 1, "picture_height": 64, "points": 20}
    views = {"azimuth": 0.0, "elevation": 0.0, "up": "z", "mesh_resolution": 64}
    with pytest.raises(UserError, match=r"problem\.points 20, not 21"):
        _fit(tmp_path, resume=True, about={**now, **views, "points": 21})
    moved = _problem()
    moved.name = "moved"
    write, drawn = moved.write, []
    monkeypatch.setattr(moved, "write", lambda model, folder: drawn.append(folder) or write(model, folder))
    for _ in range(2):  # goes on, is handed back
        assert _fit(tmp_path, moved, resume=True, about={**now, **views}).steps == 12
    assert len(drawn) == 1
    picture = next((tmp_path / "pictures").iterdir())
    picture.write_bytes(b"of other settings")
    _fit(tmp_path, moved, resume=True, about={**now, **views})
    assert picture.read_bytes() == b"of other settings"
    found = _fit(tmp_path, moved, resume=True, about={**now, **views, "picture_height": 48})
    assert len(drawn) == 2
    assert picture.read_bytes() != b"of other settings"
    assert json.loads((tmp_path / "result.json").read_text()) == found.to_json()
    assert _fit(tmp_path, moved, resume=True, about={**now, **views, "picture_height": 48}) == found
    assert len(drawn) == 2


def test_refuses_to_overwrite_or_mix_folders(tmp_path):
    _fit(tmp_path)
    with pytest.raises(UserError, match=r"is not empty; .*--resume"):
        _fit(tmp_path)
    with pytest.raises(UserError, match=r"train\.lr 0\.001, not 0\.002"):
        _fit(tmp_path, config=replace(SHORT, lr=2e-3), resume=True)
    with pytest.raises(UserError, match=r"method\.rank 1, not 2"):
        _fit(tmp_path, method=replace(SINE, rank=2), resume=True)
    with pytest.raises(UserError, match="other data"):
        _fit(tmp_path, _problem(seed=1), resume=True)
    with pytest.raises(UserError, match="choose one"):
        _fit(tmp_path, resume=True, overwrite=True)
    former = _bits(tmp_path)
    (tmp_path / "photo.png").write_bytes(b"somebody's")
    (tmp_path / "pictures" / "more.png").write_bytes(b"in ours")
    _fit(tmp_path, config=replace(SHORT, lr=2e-3), overwrite=True)
    assert _bits(tmp_path) != former
    assert (tmp_path / "photo.png").read_bytes() == b"somebody's"
    assert not (tmp_path / "pictures" / "more.png").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    for option in ("resume", "overwrite"):
        with pytest.raises(UserError, match="holds no fit"):
            _fit(tmp_path / "other", **{option: True})
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("fit.json", "{"),
        ("fit.json", "[]"),
        ("result.json", "{}"),
        ("result.json", '{"score": "psnr", "metrics": {}, "curve": []}'),
    ],
)
def test_refuses_a_broken_file_in_one_line(tmp_path, file, text):
    _fit(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=rf"{file} .*--overwrite"):
        _fit(tmp_path, resume=True)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "unlisted"])
def test_refuses_damaged_weights_in_one_line(tmp_path, damage):
    _fit(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    bits = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(bits[: len(bits) // 2])
    elif damage == "changed":
        bits[-1] ^= 1
        file.write_bytes(bits)
    elif damage == "missing":
        file.unlink()
    else:
        (tmp_path / "model" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"model.*; fit it again with --overwrite"):
        _fit(tmp_path, resume=True)
    assert _fit(tmp_path, overwrite=True).steps == 12


def test_refuses_what_does_not_fit_memory_in_one_line(tmp_path, monkeypatch):
    wide = ImageProblem(np.zeros((4, 4, 3)), field=FieldConfig(in_features=2, out_features=3, width=10**12))
    with pytest.raises(UserError, match=r"the network has [\d,]+ parameters .*whose fit takes .*smaller width"):
        _fit(tmp_path / "wide", wide)
    monkeypatch.setattr(resources, "free_memory", lambda: 10**9)
    few = ImageProblem(np.zeros((4, 4, 3)), field=FieldConfig(in_features=2, out_features=3, width=20_000))
    with pytest.raises(UserError, match=r"forms weights of 400,000,000, whose fit takes 3.3 GB"):
        _fit(tmp_path / "wide", few)
    assert not (tmp_path / "wide").exists()
    problem = _problem()
    monkeypatch.setattr(problem, "loss", lambda model, batch: torch.empty(10**16).sum())
    with pytest.raises(UserError, match="the fit does not fit memory; choose a smaller width"):
        _fit(tmp_path / "large", problem)


def test_refuses_a_rank_that_saves_nothing(tmp_path):
    with pytest.raises(UserError, match="rank 8 saves no parameters in any linear"):
        _fit(tmp_path / "run", method=replace(SINE, rank=8))
    assert not (tmp_path / "run").exists()


def test_learning_rates_follow_their_schedule():
    config = FitConfig(steps=101, lr=2.0, warmup_steps=0, end=0.1, schedule="linear")
    assert [config.rate(step) for step in (0, 50, 100)] == pytest.approx([2.0, 1.1, 0.2])
    assert [replace(config, schedule="exponential").rate(step) for step in (0, 50, 100)] == pytest.approx(
        [2.0, 2 * 0.1**0.5, 0.2]
    )
    assert [replace(config, schedule="cosine").rate(step) for step in (0, 50, 100)] == pytest.approx([2.0, 1.1, 0.2])
    warm = replace(config, warmup_steps=4, schedule="constant")
    assert [warm.rate(step) for step in (0, 1, 3, 4, 100)] == pytest.approx([0.5, 1.0, 2.0, 2.0, 2.0])


def test_clipped_gradients_have_the_norm(tmp_path):
    plain, clipped = (_fit(tmp_path / str(norm), config=replace(SHORT, max_grad_norm=norm)) for norm in (0.0, 1e-9))
    start = build(_problem(), SINE, seed=0)
    moved = [
        max(
            float((a - b).detach().abs().max())
            for a, b in zip(each.model.parameters(), start.parameters(), strict=True)
        )
        for each in (plain, clipped)
    ]
    assert moved[1] < 0.2 * moved[0]  # Adam's eps then matters


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.slow
def test_compiled_fit_computes_the_same(tmp_path):
    eager, compiled = (_fit(tmp_path / str(on), config=replace(SHORT, compile=on)) for on in (False, True))
    for one, other in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer"),
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"lr": float("nan")}, "lr must be a finite number above 0"),
        ({"schedule": "step"}, "unknown schedule"),
        ({"end": 1.5}, "end must be a share"),
        ({"schedule": "exponential", "end": 0.0}, "end must be a share"),
        ({"seed": 2**31}, "seed must be below"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "meta"}, "device meta cannot be used here"),
        ({"betas": (1.5, 0.9)}, "betas must be two numbers of at least 0 and below 1"),
        ({"betas": (0.9, float("nan"))}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
    ],
)
def test_refuses_bad_settings(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        _fit(tmp_path / "run", config=replace(SHORT, **settings))
    assert not (tmp_path / "run").exists()
