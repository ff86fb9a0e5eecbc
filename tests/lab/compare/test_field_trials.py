"""Neural fields side by side: choices, seeds, statistics, curves, pictures, folders."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from compare_helpers import a_record, a_run, an_arm, field_recipe
from nlr_lab.compare import compare
from nlr_lab.compare import field_report as pictures
from nlr_lab.compare import field_trials as trial
from nlr_lab.compare.field_report import bd_psnr, bd_rate, field_sections, findings, render_report
from nlr_lab.compare.trial import Choice
from nlr_lab.fields.problem import FieldArm
from nlr_lab.runtime.environment import cpu_threads
from nlr_lab.tasks.task import Measure
from nlr_lab.training.result import DivergedError
from refusals import assert_refused
from studies.study import copy

ARMS = ("dense", *(f"{kind}:rank={rank}" for rank in (1, 2, 3) for kind in ("low-rank", "sine")))


def parsed(*texts):
    return [FieldArm.parse(text) for text in texts]


NAME = "shot [draft] x$_$y.png"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    recipe = field_recipe(folder, NAME, ARMS, tune_lr=(1e-3, 1e-2), seed=7)
    return go(recipe, folder / "out", timing_rounds=2)


@pytest.fixture
def recipe(tmp_path):
    return field_recipe(tmp_path, NAME, ARMS, tune_lr=(1e-3, 1e-2), seed=7)


def go(recipe, out, **options):
    given = {"timing_rounds": 0, "max_extensions": 0, "command": "compare"} | options
    return compare(recipe, out, quiet=True, **given)


def test_record_holds_what_the_runs_gave(compared):
    found, out = compared.results, compared.out
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(found))
    assert (found["seeds"], found["tuning_seed"], found["reference"]) == ([8, 9], 7, "dense")
    kinds = [f"{kind}-k{rank}" for rank in (1, 2, 3) for kind in ("low-rank", "sine")]
    assert [arm["name"] for arm in found["arms"]] == ["dense", *kinds]
    for arm in found["arms"]:
        tried = {(run["init"], run["lr"]): run["score"] for run in arm["tuning"]}
        assert set(tried) == {(i, r) for i in ("kaiming_sqrt5", "kaiming_zero") for r in (1e-3, 1e-2)}
        assert tried[arm["init"], arm["lr"]] == max(tried.values())
        folder = out / "runs" / arm["name"] / arm["init"] / f"lr-{arm['lr']:g}"
        results = [json.loads((folder / f"seed-{seed}" / "result.json").read_text()) for seed in (8, 9)]
        scores = [each["metrics"]["psnr"] for each in results]
        gains = [each["curve"][-1]["psnr"] - each["curve"][-2]["psnr"] for each in results]
        assert arm["score"]["mean"] == pytest.approx(np.mean(scores))
        assert arm["score"]["sd"] == pytest.approx(np.std(scores, ddof=1))
        assert arm["late_gain"] == pytest.approx(np.mean(gains))
        assert arm["parameters"] == results[0]["parameters"]
        assert arm["size"] == pytest.approx(32 * arm["parameters"] / 144)
    files = list(out.glob("runs/*/*/lr-*/seed-*/fit.json"))
    rates = [json.loads(file.read_text())["settings"]["train"]["lr"] for file in files]
    assert [f"lr-{rate:g}" for rate in rates] == [file.parts[-3] for file in files] != []
    assert found["arms"][0]["percent"] == 100
    assert found["arms"][0]["step_time_ratio"]["median"] == 1


def test_compares_sine_with_low_rank_of_its_size_and_by_curves(compared):
    found = compared.results
    arms = {arm["name"]: arm for arm in found["arms"]}
    against = {other: list(pairs) for other, pairs in found["against"].items()}
    assert against == {f"low-rank-k{k}": [f"sine-k{k}"] for k in (1, 2, 3)}
    for k in (1, 2, 3):
        sine, low = arms[f"sine-k{k}"], arms[f"low-rank-k{k}"]
        delta = found["against"][low["name"]][sine["name"]]["delta"]
        assert sine["parameters"] == low["parameters"]
        assert delta["value"] == pytest.approx(sine["score"]["mean"] - low["score"]["mean"])
        assert delta["n"] == 2
    report = (compared.out / "report.md").read_text()
    assert report == render_report(found)
    assert str(compared.out.parent) not in report + json.dumps(found)  # no path of this machine
    assert "shot [draft] x$_$y" in str(compared), "a name that looks like markup or a formula"
    assert "difference from `low-rank-k3`" in str(compared) or "than `low-rank-k3`" in str(compared)
    for text in ("BD-rate", "BD-PSNR", "n = 2", "rate.png", "strip.png", "setting", "| sine-k1 | 200 | kaiming"):
        assert text in report
    omegas = dict.fromkeys(arms) | {"sine-k1": 200, "sine-k2": 100, "sine-k3": 100}
    assert {name: arm["omega"] for name, arm in arms.items()} == omegas
    assert "omega.png" not in report + str(compared), "one frequency a rank is no sweep"
    for picture in ("rate.png", "strip.png"):
        with Image.open(compared.out / picture) as opened:
            assert opened.size[0] > 300


def arm_of(kind, rank, scores, tuned=0.0, name="", lost=()):
    """Ends at `scores`; the seeds named as lost diverge."""
    runs = [
        a_run(seed, None if seed in lost else 1.0, 20, score=score, metric_curve=((10, score - 1), (20, score)))
        for seed, score in enumerate(scores)
    ]
    runs = [replace(run, metrics={"iou": run.score}) for run in runs]
    settings, tuning = {"kind": kind, "rank": rank}, (a_run(9, 1.0, 20, score=tuned),)
    return an_arm(name or f"{kind}-k{rank}", *runs, settings=settings, parameters=100 * rank, tuning=tuning)


def build(arms):
    sizes = {arm.name: (arm.settings["kind"], arm.parameters) for arm in arms}
    lows, sines = ([name for name in sizes if sizes[name][0] == kind] for kind in ("low-rank", "sine"))
    pairs = [(low, sine) for sine in sines for low in lows if sizes[low][1] == sizes[sine][1]]
    measure = Measure(name="iou", higher_is_better=True, unit="%")
    results = a_record(arms, (0, 1, 2), [pairs], measure)
    return field_sections(results, 1000, dict.fromkeys(sizes))


def test_distance_of_the_curves_is_bjontegaards_of_the_means_and_of_each_seed():
    low = {1: [60.0, 61.0, 62.0], 2: [70.0, 70.5, 72.0], 4: [80.0, 80.2, 79.0], 8: [85.0, 84.0, 86.0]}
    sine = {rank: [each + 6 - rank / 2 for each in scores] for rank, scores in low.items()}
    kinds = (("low-rank", low), ("sine", sine))
    arms = [arm_of(kind, rank, scores) for kind, by in kinds for rank, scores in by.items()]
    found = build([*arms, arm_of("sine", 2, [1.0, 1.1, 1.2], tuned=-1.0, name="worse")])
    assert found["rate_distortion"]["sine"] == [f"sine-k{rank}" for rank in (1, 2, 4, 8)]
    for key, delta in (("bd_rate", bd_rate), ("bd_score", bd_psnr)):
        means = [[(100 * rank, np.mean(scores)) for rank, scores in by.items()] for _, by in kinds]
        assert found["rate_distortion"][key] == pytest.approx(delta(*means))
        each = [delta(*([(100 * rank, s[i]) for rank, s in by.items()] for _, by in kinds)) for i in range(3)]
        assert found["rate_distortion"][f"{key}_by_seed"] == pytest.approx(each)
    assert found["against"]["low-rank-k1"]["sine-k1"]["delta"]["value"] == pytest.approx(5.5)
    assert (found["arms"][0]["late_gain"], found["arms"][0]["late_share"]) == (1, 0.5)
    text = render_report(found)
    assert "what the last 50 % of the steps added" in text
    assert f"BD-iou of sine over low rank: {found['rate_distortion']['bd_score']:+.3g}" in text
    assert "**lower** than `low-rank-k2`, worse" in text


@pytest.mark.parametrize(("gain", "cautioned"), [(1.1, False), (0.5, True)])
def test_cautions_a_claim_by_the_curves_rule(gain, cautioned):
    low = arm_of("low-rank", 1, [60.0, 61.0, 62.0])
    results = build([low, arm_of("sine", 1, [60.0 + gain, 61.01 + gain, 62.02 + gain])])
    line = findings(results)[0]
    assert "% **higher** than `low-rank-k1`, better" in line
    assert ("Caution" in line) == cautioned == bool(results["against"]["low-rank-k1"]["sine-k1"]["cautions"])
    assert ("over the last 50 % of the steps `low-rank-k1` by 1" in line) == cautioned
    assert f"Grade {4 if cautioned else 5} of 7; not shown: tuned, {'flattened, ' * cautioned}equal hours." in line


def test_says_that_nothing_is_compared_without_both_kinds():
    results = build([arm_of("low-rank", rank, [60.0 + rank, 61.0, 62.0]) for rank in (1, 2)])
    assert findings(results) == ["Nothing is compared: no sine could be with a low rank of its size."]


def test_puts_the_best_omega_of_the_tuning_on_the_curve():
    low = [arm_of("low-rank", rank, [60.0 + rank, 61.0 + rank, 61.5]) for rank in (1, 2, 4)]
    sine = [arm_of("sine", rank, [70.0 + rank, 71.0 + rank, 71.5]) for rank in (1, 2)]
    two = [arm_of("sine", 4, [float(70 + i), 71.0 + i, 71.5], tuned=9.0 - i, name=f"omega-{i}") for i in range(3)]
    found = build([*low, *sine, *two])["rate_distortion"]
    assert found["sine"] == ["sine-k1", "sine-k2", "omega-0"]
    assert found["bd_score"] is not None
    two[1] = replace(two[1], tuning=())  # its rate was given: nothing was chosen, so what counts is how it ended
    found = build([*low, *sine, *two])
    assert found["rate_distortion"]["sine"] == ["sine-k1", "sine-k2", "omega-2"]
    assert found["rate_distortion"]["bd_score"] is found["rate_distortion"]["bd_rate"] is None
    assert "none, since one of omega-0, omega-1, omega-2 is picked by these scores" in render_report(found)


@pytest.mark.parametrize("how", ["a seed", "every choice"])
def test_gives_no_distance_of_a_curve_that_lacks_a_point(how):
    low = [arm_of("low-rank", rank, [60.0 + 5 * rank, 61.0 + 5 * rank, 62.0 + 6 * rank]) for rank in (1, 2, 4)]
    scores = {rank: [65.0 + 5 * rank, 66.0 + 4 * rank, 66.5 + 5 * rank] for rank in (1, 2, 4)}
    sine = [arm_of("sine", rank, each) for rank, each in scores.items()]
    assert build([*low, *sine])["rate_distortion"]["bd_rate"] is not None
    if how == "a seed":
        sine[2] = arm_of("sine", 4, scores[4], lost=[2])
    else:
        sine[2] = replace(sine[2], runs={}, choice=None, tuning=(a_run(9, None),))
    found = build([*low, *sine])
    assert found["rate_distortion"]["bd_rate"] is found["rate_distortion"]["bd_score"] is None
    text = render_report(found)
    assert "BD-rate of sine over low rank: none, since sine-k4 diverged." in text
    if how == "a seed":
        lost = found["against"]["low-rank-k4"]["sine-k4"]
        assert lost["delta"]["value"] is lost["p_holm"] is None
        assert "no iou difference from `low-rank-k4` can be given (diverged in 1 of 3 seeds)." in text


def test_draws_a_sweep_over_omega(recipe, tmp_path, monkeypatch):
    drawn = {}
    save = pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: (drawn.update({path.name: figure}), save(figure, path)))
    recipe = replace(recipe, tune_lr=(), train=replace(recipe.train, steps=2))
    arms = parsed(*(f"sine:rank=1,omega={omega},init=kaiming_zero" for omega in (40, 10, 160)))
    arms += parsed("low-rank:rank=1,init=kaiming_zero")
    swept = go(recipe, tmp_path / "out", arms=arms)
    axes = drawn["omega.png"].axes[0]
    means = {arm["omega"]: arm["score"]["mean"] for arm in swept.results["arms"]}
    points = next(line for line in axes.lines if list(line.get_xdata()) == [10, 40, 160])
    assert list(points.get_ydata()) == [means[omega] for omega in (10, 40, 160)]
    assert any(np.allclose(line.get_ydata(), means[None]) for line in axes.lines), "plain low rank beside them"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["low-rank, k=1", "sine, k=1"]
    none = "none, since a Bjontegaard delta needs at least 3 points; low-rank has 1"
    assert f"BD-rate of sine over low rank: {none}" in str(swept)
    (tmp_path / "study").mkdir()
    copy(swept, tmp_path / "study", "photo")
    names = {f"photo{name}" for name in ("-omega.png", "-rate.png", "-strip.png", ".json", ".md")}
    assert {path.name for path in (tmp_path / "study").iterdir()} == names
    assert "(photo-omega.png)" in (tmp_path / "study" / "photo.md").read_text()
    fewer = go(recipe, tmp_path / "out", arms=arms[1:3], resume=True)
    assert "BD-rate" not in str(fewer), "without plain low rank there is nothing to be over"
    assert "omega.png" not in str(fewer) + (tmp_path / "out" / "report.md").read_text()
    copy(fewer, tmp_path / "study", "photo")
    assert not list(tmp_path.glob("*/*omega.png")), "a picture of arms that are no longer there"


def test_strip_has_low_rank_above_sine_rank_by_rank(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure))
    picture = np.zeros((4, 4, 3), np.uint8)

    def layout(*names):
        shown = []
        for name in names:
            kind, _, rank = name.partition("-k")
            settings = {"kind": kind, "rank": int(rank) if rank else None}
            shown.append(({"name": name, "settings": settings, "percent": 1.0}, 9.0, picture))
        pictures.plot_strip(tmp_path / "s.png", {"metric": {"unit": "dB"}}, picture, shown)
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


def test_draws_the_strip_again_only_when_its_fits_have_changed(recipe, tmp_path, monkeypatch):
    drawn = []
    plot_strip = trial.plot_strip

    def note(path, results, truth, shown):
        drawn.append([record["name"] for record, *_ in shown])
        plot_strip(path, results, truth, shown)

    monkeypatch.setattr(trial, "plot_strip", note)
    recipe = replace(recipe, tune_lr=(), train=replace(recipe.train, steps=2))
    arms = parsed("dense:init=kaiming_zero", *(f"{arm},init=kaiming_zero" for arm in ARMS[1:3]))
    go(recipe, tmp_path / "out", arms=arms[:2], seeds=1)
    go(recipe, tmp_path / "out", arms=arms, seeds=3, resume=True)
    names = [arm.name for arm in arms]
    assert drawn == [names[:2], names], "once a session, though more seeds were published"


def test_records_fits_that_diverge_at_every_choice(recipe, tmp_path, monkeypatch):
    fit = trial.fit

    def diverge(problem, method, config, folder, **options):
        if method.kind == "sine":
            folder.mkdir(parents=True)
            raise DivergedError("no number", 3)
        fit(problem, method, config, folder, **options)

    monkeypatch.setattr(trial, "fit", diverge)
    recipe = replace(recipe, tune_lr=(1e-3, 2e-3), train=replace(recipe.train, steps=1))
    arms = parsed("low-rank:rank=1,lr=1e-3,init=kaiming_zero", "sine:rank=1")
    low, sine = go(recipe, tmp_path / "out", arms=arms, seeds=1, max_extensions=1).results["arms"]
    tried = {(run["init"], run["lr"]) for run in sine["tuning"] if run["diverged_at"] == 3}
    assert tried == {(init, rate) for init in ("kaiming_sqrt5", "kaiming_zero") for rate in (5e-4, 1e-3, 2e-3)}
    assert (sine["lr"], sine["runs"], low["tuning"]) == (None, [], [])
    assert low["score"]["n"] == 1, "the other arm goes on"


def test_refuses_bad_arguments_before_anything_is_written(recipe, tmp_path):
    arms = parsed("dense", "sine:rank=8")
    assert_refused("rank 8 saves no parameters", go, recipe, tmp_path / "out", arms=arms)
    assert not (tmp_path / "out").exists()


def test_times_steps_on_the_fits_device(recipe, tmp_path, monkeypatch):
    seen = []

    def note(problem, model, config):
        seen.append(next(model.parameters()).device.type)
        return SimpleNamespace(take=lambda step: None)

    def times(arms, rounds, clock, max_seconds):
        seen.extend([clock, torch.get_num_threads()])
        return {name: [1.0] * rounds for name in arms}

    monkeypatch.setattr(trial, "choose_device", lambda name, dtype: torch.device("meta"))  # stands for a GPU
    monkeypatch.setattr(trial, "Stepper", note)
    monkeypatch.setattr(trial, "interleaved_step_times", times)
    short = replace(recipe, arms=ARMS[:2], seeds=1, tune_lr=(), train=replace(recipe.train, steps=2))
    with cpu_threads(2):
        go(short, tmp_path / "out", timing_rounds=2)
    assert seen == ["meta", "meta", "wall", 1]


def test_score_is_that_of_the_last_step_not_the_best(recipe):
    curve = [{"step": 1, "loss": 2.0, "psnr": 30.0}, {"step": 2, "loss": 1.0, "psnr": 20.0}]
    record = {"score": "psnr", "metrics": {"psnr": 20.0}, "curve": curve, "steps": 2, "seconds": 1.0}
    assert trial.FieldTrials(recipe).read(record, Choice(lr=1e-3), 0).score == 20.0
