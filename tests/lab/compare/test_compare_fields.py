"""Fields side by side: choices, seeds, statistics, curves, pictures, folders."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from nlr_lab.compare import field_pictures as pictures_module
from nlr_lab.compare import field_runs as runs_module
from nlr_lab.compare import fields as compare_module
from nlr_lab.compare.field_plan import FieldArm
from nlr_lab.compare.field_record import FieldArmRecord, FieldRun, build_record
from nlr_lab.compare.field_report import render_report
from nlr_lab.compare.fields import compare_fields
from nlr_lab.compare.rate_distortion import bd_psnr, bd_rate
from nlr_lab.fields.image import ImageSettings
from nlr_lab.fields.model import FieldConfig
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.fields.step import FitConfig
from nlr_lab.runtime.environment import cpu_threads
from nonlinear_lowrank.errors import DivergedError, UserError

ARMS = ("dense", *(f"{kind}:rank={rank}" for rank in (1, 2, 3) for kind in ("low-rank", "sine")))


@pytest.fixture
def recipe(tmp_path):
    return _recipe(tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    return _compare(_recipe(folder), folder / "out", timing_rounds=2)


def _recipe(tmp_path):
    pixels = np.random.default_rng(3).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((12, 12)).save(tmp_path / "photo.png")
    field = FieldConfig(in_features=2, out_features=3, width=16)
    return FieldRecipe(
        name="tiny",
        problem=ImageSettings(source=str(tmp_path / "photo.png"), points=0, field=field),
        method=FieldMethod(kind="sine", rank=1, omega=30.0),
        train=FitConfig(steps=10, eval_every=2, save_every=0, threads=1, device="cpu", seed=7),
        arms=ARMS,
        seeds=2,
        tune_lr=(1e-3, 1e-2),
    )


def _compare(recipe, out, **options):
    settled = {"timing_rounds": 0, "max_extensions": 0, "command": "compare"}
    return compare_fields(recipe, out, quiet=True, **settled | options)


def test_the_record_says_what_the_runs_gave(compared):
    found, out = compared.results, compared.out
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(found))
    assert found["seeds"] == [8, 9]
    assert found["tuning_seed"] == 7
    assert [arm["name"] for arm in found["arms"]] == [
        "dense", "low-rank-k1", "sine-k1", "low-rank-k2", "sine-k2", "low-rank-k3", "sine-k3",
    ]  # fmt: skip
    for arm in found["arms"]:
        folder = out / "runs" / arm["name"]
        tried = {(each["init"], each["lr"]): each["value"] for each in arm["tuning"]}
        assert set(tried) == {(i, r) for i in ("kaiming_sqrt5", "kaiming_zero") for r in (1e-3, 1e-2)}
        assert tried[arm["init"], arm["lr"]] == max(tried.values())
        results = [
            json.loads((folder / arm["init"] / f"lr-{arm['lr']:g}" / f"seed-{seed}" / "result.json").read_text())
            for seed in (8, 9)
        ]
        scores = [each["metrics"]["psnr"] for each in results]
        assert arm["mean"] == pytest.approx(np.mean(scores))
        assert arm["sd"] == pytest.approx(np.std(scores, ddof=1))
        assert arm["parameters"] == results[0]["parameters"]
        assert arm["rate"] == pytest.approx(32 * arm["parameters"] / 144)
        gains = [each["curve"][-1]["psnr"] - each["curve"][-2]["psnr"] for each in results]
        assert arm["late_gain"] == pytest.approx(np.mean(gains))
    assert found["arms"][0]["percent"] == 100
    assert found["arms"][0]["step_time"]["median"] == 1


def test_sine_is_compared_with_low_rank_of_its_size_and_by_curves(compared, tmp_path):
    found = compared.results
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert [(pair["sine"], pair["low_rank"]) for pair in found["pairs"]] == [
        (f"sine-k{k}", f"low-rank-k{k}") for k in (1, 2, 3)
    ]
    for pair in found["pairs"]:
        assert arms[pair["sine"]]["parameters"] == arms[pair["low_rank"]]["parameters"]
        assert pair["delta"]["value"] == pytest.approx(arms[pair["sine"]]["mean"] - arms[pair["low_rank"]]["mean"])
        assert pair["delta"]["n"] == 2
    for key in ("bd_rate", "bd_score"):
        assert (found["rate_distortion"][key] is None) == bool(found["rate_distortion"][f"{key}_note"])
    report = (compared.out / "report.md").read_text()
    assert str(compared.out.parent) not in report + json.dumps(found)  # no path of this machine
    for text in ("BD-rate", "BD-PSNR", "sine-k1", "n = 2", "rate.png", "strip.png", "setting"):
        assert text in report
    assert {arm["name"]: arm["omega"] for arm in found["arms"]} == {
        "dense": None, **{f"low-rank-k{k}": None for k in (1, 2, 3)}, "sine-k1": 200, "sine-k2": 100, "sine-k3": 100,
    }  # fmt: skip
    assert "| sine-k1 | 200 | kaiming" in report
    assert "omega.png" not in report + str(compared), "one frequency a rank is no sweep"
    assert not (compared.out / "omega.png").exists()
    for picture in ("rate.png", "strip.png"):
        with Image.open(compared.out / picture) as opened:
            assert opened.size[0] > 300
    assert "sine-k3 against low-rank-k3" in str(compared)
    (tmp_path / "study").mkdir()
    compared.copy_to(tmp_path / "study", "photo")
    names = sorted(each.name for each in (tmp_path / "study").iterdir())
    assert names == ["photo-rate.png", "photo-strip.png", "photo.json", "photo.md"]
    assert "(photo-strip.png)" in (tmp_path / "study" / "photo.md").read_text()


def _record(kind, rank, scores, tuned=0.0, name=""):
    runs = [
        FieldRun(
            init="kaiming_zero", lr=1e-3, seed=seed, score="iou", metrics={"iou": score},
            curve=[{"step": 10, "loss": 1.0, "iou": score - 1}, {"step": 20, "loss": 1.0, "iou": score}],
        )
        for seed, score in enumerate(scores)
    ]  # fmt: skip
    return FieldArmRecord(
        name=name or f"{kind}-k{rank}",
        method=FieldMethod(kind=kind, rank=rank),
        choice=("kaiming_zero", 1e-3),
        parameters=100 * rank,
        runs=tuple(runs),
        tuning=(replace(runs[0], metrics={"iou": tuned}),),
    )


def _build(arms):
    return build_record(
        name="x", problem="y", settings={}, fingerprint="f", arms=arms, dense=1000, seeds=[0, 1, 2], tuning_seed=9,
        times=None, notes=[], command="c", seconds=1.0,
    )  # fmt: skip


def test_the_distance_of_the_curves_is_bjontegaards_of_the_means_and_of_each_seed():
    low = {1: [60.0, 61.0, 62.0], 2: [70.0, 70.5, 72.0], 4: [80.0, 80.2, 79.0], 8: [85.0, 84.0, 86.0]}
    sine = {rank: [each + 6 - rank / 2 for each in scores] for rank, scores in low.items()}
    kinds = (("low-rank", low), ("sine", sine))
    arms = [_record(kind, rank, scores) for kind, by in kinds for rank, scores in by.items()]
    found = _build([*arms, _record("sine", 2, [1.0, 1.1, 1.2], tuned=-1.0, name="worse")])
    assert found["rate_distortion"]["sine"] == [f"sine-k{rank}" for rank in (1, 2, 4, 8)]
    for key, delta in (("bd_rate", bd_rate), ("bd_score", bd_psnr)):
        means = [[(100 * rank, np.mean(scores)) for rank, scores in by.items()] for _, by in kinds]
        assert found["rate_distortion"][key] == pytest.approx(delta(*means))
        each = [delta(*([(100 * rank, s[i]) for rank, s in by.items()] for _, by in kinds)) for i in range(3)]
        assert found["rate_distortion"][f"{key}_by_seed"] == pytest.approx(each)
    assert found["pairs"][0]["delta"]["value"] == pytest.approx(5.5)
    assert (found["arms"][0]["late_gain"], found["arms"][0]["late_share"]) == (1, 0.5)
    text = render_report(found)
    assert "what the last 50 % of the steps added" in text
    assert f"BD-iou of sine over low rank: {found['rate_distortion']['bd_score']:+.3g}" in text
    assert "worse against low-rank-k2: below by" in text


def test_of_several_omegas_the_one_that_was_best_where_rates_were_chosen_is_on_the_curve():
    low = [_record("low-rank", rank, [60.0 + rank, 61.0 + rank]) for rank in (1, 2, 4)]
    sine = [_record("sine", rank, [70.0 + rank, 71.0 + rank]) for rank in (1, 2)]
    two = [_record("sine", 4, [float(70 + i), 71.0 + i], tuned=9.0 - i, name=f"omega-{i}") for i in range(3)]
    assert _build([*low, *sine, *two])["rate_distortion"]["sine"] == ["sine-k1", "sine-k2", "omega-0"]
    two[1] = replace(two[1], tuning=())  # its rate was given: nothing was chosen, so what counts is how it ended
    assert _build([*low, *sine, *two])["rate_distortion"]["sine"] == ["sine-k1", "sine-k2", "omega-2"]


def test_a_sweep_over_omega_has_a_picture_of_its_own(recipe, tmp_path, monkeypatch):
    drawn = []
    save = pictures_module.save
    monkeypatch.setattr(
        pictures_module, "save", lambda figure, path: (drawn.append((path.name, figure)), save(figure, path))
    )
    recipe = replace(recipe, tune_lr=(), train=replace(recipe.train, steps=2))
    arms = [FieldArm.parse(f"sine:rank=1,omega={omega},init=kaiming_zero") for omega in (40, 10, 160)]
    arms.append(FieldArm.parse("low-rank:rank=1,init=kaiming_zero"))
    swept = _compare(recipe, tmp_path / "out", arms=[*arms, FieldArm.parse("sine:rank=2,init=kaiming_zero")])
    axes = next(figure.axes[0] for name, figure in drawn[::-1] if name == "omega.png")
    means = {arm["omega"]: arm["mean"] for arm in swept.results["arms"] if arm["method"]["rank"] == 1}
    points = next(line for line in axes.lines if list(line.get_xdata()) == [10, 40, 160])
    assert list(points.get_ydata()) == [means[omega] for omega in (10, 40, 160)]
    assert any(np.allclose(line.get_ydata(), means[None]) for line in axes.lines), "plain low rank beside them"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["low-rank, k=1", "sine, k=1"]
    assert "(omega.png)" in (tmp_path / "out" / "report.md").read_text()
    assert "omega.png" in str(swept)
    assert (
        "BD-rate of sine over low rank: none, since a Bjontegaard delta needs at least 3 points; low-rank has 1"
        in str(swept)
    )
    (tmp_path / "study").mkdir()
    swept.copy_to(tmp_path / "study", "photo")
    assert "(photo-omega.png)" in (tmp_path / "study" / "photo.md").read_text()
    with Image.open(tmp_path / "study" / "photo-omega.png") as opened:
        assert opened.size[0] > 300
    fewer = _compare(recipe, tmp_path / "out", arms=arms[1:3], resume=True)
    assert "BD-rate" not in str(fewer), "without plain low rank there is nothing to be over"
    assert "omega.png" not in str(fewer) + (tmp_path / "out" / "report.md").read_text()
    fewer.copy_to(tmp_path / "study", "photo")
    assert not list(tmp_path.glob("*/*omega.png")), "a picture of arms that are no longer there"


def test_the_strip_has_low_rank_above_sine_rank_by_rank(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures_module, "save", lambda figure, path: drawn.append(figure))
    picture = np.zeros((4, 4, 3), np.uint8)

    def layout(*names):
        shown = []
        for name in names:
            kind, _, rank = name.partition("-k")
            method = {"kind": kind, "rank": int(rank) if rank else None}
            shown.append(({"name": name, "method": method, "percent": 1.0}, 9.0, picture))
        pictures_module.plot_strip(tmp_path / "s.png", {"unit": "dB"}, picture, shown)
        figure = drawn.pop()
        columns = figure.axes[0].get_gridspec().ncols
        titles = [axes.get_title().partition("\n")[0] for axes in figure.axes]
        return [titles[start : start + columns] for start in range(0, len(titles), columns)]

    arms = ["low-rank-k1", "sine-k1", "low-rank-k5", "sine-k5"]
    assert layout(*arms) == [["ground truth", "low-rank-k1", "low-rank-k5"], ["", "sine-k1", "sine-k5"]]
    assert layout("sine-k5", "dense", "low-rank-k5", "sine-k5", "low-rank-k1") == [
        ["ground truth", "low-rank-k5", "", "low-rank-k1"],
        ["dense", "sine-k5", "sine-k5", ""],
    ]
    assert layout("low-rank-k1") == [["ground truth", "low-rank-k1"]]


@pytest.mark.parametrize("how", ["a seed", "every choice"])
def test_a_curve_without_its_diverged_point_is_none(how):
    low = [_record("low-rank", rank, [60.0 + 5 * rank, 61.0 + 5 * rank, 62.0 + 6 * rank]) for rank in (1, 2, 4)]
    sine = [_record("sine", rank, [65.0 + 5 * rank, 66.0 + 4 * rank, 66.5 + 5 * rank]) for rank in (1, 2, 4)]
    whole = _build([*low, *sine])
    assert whole["rate_distortion"]["bd_rate"] is not None
    runs = sine[2].runs
    if how == "a seed":
        sine[2] = replace(sine[2], runs=(*runs[:2], FieldRun(init="kaiming_zero", lr=1e-3, seed=2, diverged=3)))
    else:
        lost = (FieldRun(init="kaiming_zero", lr=1e-3, seed=9, diverged=3),)
        sine[2] = replace(sine[2], runs=(), choice=None, tuning=lost)
    found = _build([*low, *sine])
    assert found["rate_distortion"]["bd_rate"] is found["rate_distortion"]["bd_score"] is None
    assert [pair["delta"]["value"] is None for pair in found["pairs"]] == [False, False, True]
    assert [pair["p_holm"] is None for pair in found["pairs"]] == [False, False, True]
    text = render_report(found)
    assert "BD-rate of sine over low rank: none, since sine-k4 diverged." in text
    assert "sine-k4 against low-rank-k4: no difference to give (sine-k4 diverged)." in text
    assert "| sine-k4 | low-rank-k4 | sine-k4 diverged | - | - |" in text


def test_a_seed_that_an_arm_has_not_finished_does_not_count():
    found = _build([_record("low-rank", 1, [60.0, 61.0, 62.0]), _record("sine", 1, [63.0, 64.0])])
    assert found["seeds"] == [0, 1]
    assert [arm["n"] for arm in found["arms"]] == [2, 2]
    assert "at least 3 points" in found["rate_distortion"]["bd_rate_note"]


def test_it_goes_on_where_it_was_stopped(recipe, tmp_path, monkeypatch):
    whole = _compare(recipe, tmp_path / "whole", arms=[FieldArm.parse(each) for each in ARMS[1:3]]).results
    arms = [FieldArm.parse(each) for each in ARMS[1:3]]
    fit, fitted = runs_module.fit, []

    def stops(problem, method, config, folder, **options):
        fitted.append(folder)
        if len(fitted) == 6:
            raise KeyboardInterrupt
        return fit(problem, method, config, folder, **options)

    monkeypatch.setattr(runs_module, "fit", stops)
    with pytest.raises(KeyboardInterrupt):
        _compare(recipe, tmp_path / "cut", arms=arms)
    done = fitted[:5]
    resumed = _compare(recipe, tmp_path / "cut", arms=arms, resume=True).results
    assert not set(done) & set(fitted[6:])
    scores = [[arm["scores"] for arm in each["arms"]] for each in (whole, resumed)]
    assert scores[0] == scores[1]
    third = FieldArm.parse("sine:rank=2,lr=1e-3,init=kaiming_zero")
    more = _compare(recipe, tmp_path / "cut", arms=[*arms, third], seeds=3, resume=True).results
    assert [(arm["name"], arm["n"]) for arm in more["arms"]][2] == ("sine-k2-kaiming_zero", 3)


def test_an_arm_that_diverges_is_reported_and_left_out(recipe, tmp_path, monkeypatch):
    fit = runs_module.fit

    def diverges(problem, method, config, folder, **options):
        if method.kind == "sine" and (config.lr > 5e-3 or method.rank == 2):
            folder.mkdir(parents=True)
            raise DivergedError("no number", 3)
        return fit(problem, method, config, folder, **options)

    monkeypatch.setattr(runs_module, "fit", diverges)
    found = _compare(recipe, tmp_path / "out", arms=[FieldArm.parse(each) for each in ARMS[1:5]]).results
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert arms["sine-k1"]["lr"] == 1e-3
    assert arms["sine-k2"]["mean"] is None
    assert any("`sine-k2` diverged at every choice" in note for note in found["notes"])
    assert [pair["delta"]["note"] for pair in found["pairs"] if pair["sine"] == "sine-k2"] == ["sine-k2 diverged"]
    assert "diverged" in (tmp_path / "out" / "report.md").read_text()


@pytest.fixture
def scores(monkeypatch):
    """Fits score what the test says of init and rate (None: the fit diverges), not what they reach."""
    fit = runs_module.fit

    def install(score):
        def scored(problem, method, config, folder, **options):
            value = score(method.init, config.lr)
            if value is None:
                folder.mkdir(parents=True)
                raise DivergedError("no number", 3)
            found = fit(problem, method, config, folder, **options)
            result = json.loads((folder / "result.json").read_text())
            (folder / "result.json").write_text(json.dumps(result | {"metrics": result["metrics"] | {"psnr": value}}))
            return found

        monkeypatch.setattr(runs_module, "fit", scored)

    return install


def _tried(arm, init):
    return sorted(each["lr"] for each in arm["tuning"] if each["init"] == init)


def test_the_grid_of_the_best_init_grows_while_its_best_rate_is_at_the_edge(recipe, tmp_path, scores):
    scores(lambda init, rate: -abs(np.log(rate / 0.03)) - (init == "kaiming_zero"))
    arms = [FieldArm.parse(each) for each in ("low-rank:rank=1", "sine:rank=1,lr=1e-3")]
    recipe = replace(recipe, tune_lr=(2.5e-3, 5e-3, 1e-2), train=replace(recipe.train, steps=1))
    found = _compare(recipe, tmp_path / "out", arms=arms, seeds=1, max_extensions=4).results
    low, sine = found["arms"]
    assert _tried(low, "kaiming_sqrt5") == [2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2]
    assert _tried(low, "kaiming_zero") == [2.5e-3, 5e-3, 1e-2]
    assert (low["init"], low["lr"]) == ("kaiming_sqrt5", 4e-2)
    assert _tried(sine, "kaiming_sqrt5") == [1e-3], "an arm's own rate is no grid"
    assert not found["notes"]
    fewer = _compare(recipe, tmp_path / "fewer", arms=arms, seeds=1, max_extensions=1).results
    assert _tried(fewer["arms"][0], "kaiming_sqrt5") == [2.5e-3, 5e-3, 1e-2, 2e-2]
    assert any("its best rate 0.02 is at the edge" in note for note in fewer["notes"])
    more = _compare(recipe, tmp_path / "fewer", arms=arms, seeds=1, max_extensions=4, resume=True).results
    assert [arm["tuning"] for arm in more["arms"]] == [arm["tuning"] for arm in found["arms"]]


def test_of_equal_scores_the_lower_loss_is_better(recipe, tmp_path, scores):
    scores(lambda init, rate: 0.0)
    arms = [FieldArm.parse(each) for each in ("low-rank:rank=1", "sine:rank=1,lr=1e-3")]
    found = _compare(recipe, tmp_path / "out", arms=arms, seeds=1).results["arms"][0]
    losses = {}
    for init, rate in ((init, rate) for init in ("kaiming_sqrt5", "kaiming_zero") for rate in (1e-3, 1e-2)):
        result = tmp_path / "out" / "runs" / "low-rank-k1" / init / f"lr-{rate:g}" / "seed-7" / "result.json"
        losses[init, rate] = json.loads(result.read_text())["curve"][-1]["loss"]
    assert (found["init"], found["lr"]) == min(losses, key=losses.__getitem__)


def test_where_every_choice_diverges_the_grid_grows_downwards(recipe, tmp_path, scores):
    scores(lambda init, rate: None if rate > 3e-4 else 20.0 + (init == "kaiming_zero"))
    arms = [FieldArm.parse(each) for each in ("low-rank:rank=1", "sine:rank=1,lr=1e-4")]
    recipe = replace(recipe, tune_lr=(1e-3, 2e-3), train=replace(recipe.train, steps=1))
    found = _compare(recipe, tmp_path / "out", arms=arms, seeds=1, max_extensions=2).results
    low = found["arms"][0]
    assert _tried(low, "kaiming_sqrt5") == _tried(low, "kaiming_zero") == [2.5e-4, 5e-4, 1e-3, 2e-3]
    assert (low["init"], low["lr"]) == ("kaiming_zero", 2.5e-4)
    with pytest.raises(UserError, match="max_extensions must be an integer of at least 0"):
        _compare(recipe, tmp_path / "none", arms=arms, max_extensions=-1)
    assert not (tmp_path / "none").exists()


def test_time_stops_it_with_every_arm_at_the_same_seeds(recipe, tmp_path, monkeypatch):
    fit, fitted = runs_module.fit, []
    monkeypatch.setattr(runs_module, "fit", lambda *args, **options: fitted.append(args) or fit(*args, **options))
    found = _compare(recipe, tmp_path / "out", max_seconds=200, clock=lambda: 10.0 * len(fitted)).results
    assert found["seeds"] == [8]
    assert {arm["n"] for arm in found["arms"]} == {1}
    assert {len(arm["tuning"]) for arm in found["arms"]} == {1}
    assert any("Stopped for time before seed 9" in note for note in found["notes"])


def test_arms_are_read_with_what_is_tuned_of_them():
    arm = FieldArm.parse("sine:rank=5,omega=50")
    assert arm.method == FieldMethod(kind="sine", rank=5, omega=50.0)
    assert (arm.name, arm.lr, arm.inits) == ("sine-k5-w50", None, ("kaiming_sqrt5", "kaiming_zero"))
    arm = FieldArm.parse("low-rank:rank=2,lr=1e-3,init=kaiming_zero,name=mine")
    assert arm.method == FieldMethod(kind="low-rank", rank=2, init="kaiming_zero")
    assert (arm.name, arm.lr, arm.inits) == ("mine", 1e-3, ("kaiming_zero",))
    for text, message in (
        ("sine:rank=5,lr=fast", "lr must be a number, got 'fast'"),
        ("sine:rank=5,lr=-1", "lr must be a finite number above 0"),
        ("sine:rank=5,name=a/b", "must be made of letters"),
        ("sine:rank=5,omega=2,rank=3", "has rank twice"),
        ("sine:rank=5,lr=1e-3,lr=1e-2", "has lr twice"),
        ("cosine:rank=5", "unknown kind"),
    ):
        with pytest.raises(UserError, match=message):
            FieldArm.parse(text)


def test_what_makes_no_comparison_is_refused_before_anything_is_written(recipe, tmp_path):
    def arms(*texts):
        return {"arms": [FieldArm.parse(text) for text in texts]}

    for options, message in (
        (arms("dense"), "at least two arms"),
        (arms("dense", "dense"), "two arms are called 'dense'"),
        (arms("dense", "sine:rank=8"), "rank 8 saves no parameters"),
        ({"seeds": 0}, "seeds must be a positive integer"),
        ({"tune_lr": (1e-3,)}, "at least two different rates"),
        ({"tune_lr": (1e-3, -1.0)}, "a finite number above 0"),
        ({"resume": True, "overwrite": True}, "choose one"),
        ({"kept_runs": tmp_path / "nowhere" / "runs.jsonl"}, "make it first"),
    ):
        with pytest.raises(UserError, match=message):
            _compare(recipe, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_comparison_is_refused(recipe, tmp_path):
    two = {"arms": [FieldArm.parse(each) for each in ARMS[1:3]], "seeds": 1, "tune_lr": ()}
    recipe = replace(recipe, tune_lr=())
    out = tmp_path / "out"
    _compare(recipe, out, **two)
    with pytest.raises(UserError, match=r"not empty; .*--resume"):
        _compare(recipe, out, **two)
    with pytest.raises(UserError, match=r"train\.steps was 10 .* is 11 now"):
        _compare(replace(recipe, train=replace(recipe.train, steps=11)), out, resume=True, **two)
    other = [FieldArm.parse("low-rank:rank=2,name=low-rank-k1"), two["arms"][1]]
    with pytest.raises(UserError, match="arm 'low-rank-k1' was"):
        _compare(recipe, out, resume=True, **two | {"arms": other})
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(recipe.problem.source)
    with pytest.raises(UserError, match="fitted to other data"):
        _compare(recipe, out, resume=True, **two)
    (out / "letter.txt").write_text("dear")
    assert _compare(recipe, out, overwrite=True, **two).results["n"] == 1
    assert (out / "letter.txt").read_text() == "dear"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for option in ("resume", "overwrite"):
        with pytest.raises(UserError, match="holds no comparison of fields"):
            _compare(recipe, tmp_path / "mine", **two, **{option: True})


def test_a_name_may_look_like_a_formula_or_markup(recipe, tmp_path):
    photo = tmp_path / "shot [draft] x$_$y.png"
    photo.write_bytes((tmp_path / "photo.png").read_bytes())
    recipe = replace(recipe, problem=replace(recipe.problem, source=str(photo)), tune_lr=())
    recipe = replace(recipe, train=replace(recipe.train, steps=2))
    found = _compare(recipe, tmp_path / "out", arms=[FieldArm.parse(each) for each in ARMS[:2]], seeds=1)
    assert "shot [draft] x$_$y" in str(found)
    assert (tmp_path / "out" / "rate.png").is_file()


def test_a_run_whose_beginning_is_damaged_is_fitted_again(recipe, tmp_path):
    two = {"arms": [FieldArm.parse(f"{each},init=kaiming_zero") for each in ARMS[1:3]], "seeds": 1, "tune_lr": ()}
    recipe = replace(recipe, tune_lr=())
    former = _compare(recipe, tmp_path / "out", **two).results["arms"]
    run = next(tmp_path.glob("out/runs/sine*/**/result.json")).parent
    (run / "result.json").unlink()
    (run / "fit.json").write_text("{")
    again = _compare(recipe, tmp_path / "out", resume=True, **two).results["arms"]
    assert [arm["scores"] for arm in again] == [arm["scores"] for arm in former]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inits": ()}, "inits must be one or more of kaiming_sqrt5, kaiming_zero"),
        ({"inits": ("orthogonal",)}, "inits must be one or more"),
        ({"inits": ("kaiming_zero", "kaiming_zero")}, "inits must be one or more"),
        ({"lr": "1e-3"}, "lr must be a finite number above 0, got '1e-3'"),
        ({"lr": float("nan")}, "lr must be a finite number above 0"),
    ],
)
def test_an_arm_made_in_python_is_checked(options, message):
    with pytest.raises(UserError, match=message):
        FieldArm(method=FieldMethod(), **options)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"settings": {}}'])
def test_a_broken_marker_is_one_clear_line(compared, recipe, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fields.json").write_text(text)
    with pytest.raises(UserError, match=r"fields\.json .*--overwrite"):
        _compare(recipe, tmp_path / "out", resume=True)


def test_the_strip_is_drawn_when_what_it_shows_has_changed(recipe, tmp_path, monkeypatch):
    drawn = []

    def note(path, results, truth, shown):
        drawn.append([record["name"] for record, *_ in shown])
        plot_strip(path, results, truth, shown)

    plot_strip = compare_module.plot_strip
    monkeypatch.setattr(compare_module, "plot_strip", note)
    recipe = replace(recipe, tune_lr=(), train=replace(recipe.train, steps=2))
    arms = [FieldArm.parse(f"{kind}:rank=1,init=kaiming_zero") for kind in ("low-rank", "sine")]
    more = [*arms, FieldArm.parse("dense:init=kaiming_zero")]
    _compare(recipe, tmp_path / "whole", arms=more, seeds=3)
    names = [arm.name for arm in more]
    assert drawn == [names]  # once, though three seeds were published
    stopped = tmp_path / "stopped"
    _compare(recipe, stopped, arms=arms, seeds=1)
    _compare(recipe, stopped, arms=more, seeds=2, resume=True)
    assert drawn[1:] == [names[:2], names]
    (stopped / "strip.png").unlink()
    _compare(recipe, stopped, arms=more, seeds=3, resume=True)
    assert (stopped / "strip.png").read_bytes() == (tmp_path / "whole" / "strip.png").read_bytes()


def test_step_times_are_those_of_the_fits_threads(recipe, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        compare_module,
        "interleaved_step_times",
        lambda arms, rounds, **_: seen.append(torch.get_num_threads()) or {name: [1.0] * rounds for name in arms},
    )
    with cpu_threads(2):
        short = replace(recipe, arms=ARMS[:2], seeds=1, tune_lr=(), train=replace(recipe.train, steps=2))
        _compare(short, tmp_path / "out", timing_rounds=2)
        assert torch.get_num_threads() == 2
    assert seen == [1]


def test_step_times_are_taken_on_the_fits_device(recipe, tmp_path, monkeypatch):
    seen = []

    def note(problem, model, config):
        seen.append(next(model.parameters()).device.type)
        return SimpleNamespace(take=lambda step: None)

    def times(arms, rounds, clock, max_seconds):
        seen.append(clock)
        return {name: [1.0] * rounds for name in arms}

    monkeypatch.setattr(compare_module, "choose_device", lambda name, dtype: torch.device("meta"))  # stands for a GPU
    monkeypatch.setattr(compare_module, "Stepper", note)
    monkeypatch.setattr(compare_module, "interleaved_step_times", times)
    short = replace(recipe, arms=ARMS[:2], seeds=1, tune_lr=(), train=replace(recipe.train, steps=2))
    _compare(short, tmp_path / "out", timing_rounds=2)
    assert seen == ["meta", "meta", "wall"]
