"""The scripts under studies/: their options, their folders, smoke runs and errors; and that all start."""

import json
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import ttest_rel

from compare_helpers import field_recipe, tiny_recipe
from nlr_lab.compare.report import p_text
from nlr_lab.fields.problem import FieldArm
from nlr_lab.training import Arm
from nonlinear_lowrank.errors import UserError
from refusals import assert_refused
from studies import study

SCRIPTS = sorted((Path(__file__).parents[3] / "studies").glob("*/run.py"))
OPTIONS = {"timing_rounds": 0, "quiet": True}


@pytest.fixture
def into(tmp_path):
    (tmp_path / "study").mkdir()
    return tmp_path / "study"


@pytest.fixture
def photo(tmp_path):
    arms = ("low-rank:rank=1,init=kaiming_zero", "sine:rank=1,init=kaiming_zero")
    return field_recipe(tmp_path, arms=arms, seeds=3, steps=4)


@pytest.fixture
def novel(tmp_path):
    return tiny_recipe(tmp_path, steps=4, eval_every=2)


def table(file):
    """Every arm's runs out of a study's record, and what its rate was chosen by."""
    arms = read(file)["arms"]
    return {arm["name"]: [run | {"seconds": 0} for run in (*arm["runs"], *arm["tuning"])] for arm in arms}


def read(file):
    return json.loads(file.read_text())


def carry(folder, to):
    """Copy what of a comparison is no weight: what docs/compare.md takes to another machine."""
    for file in (folder / "compare.json", *folder.glob("runs/**/result.json")):
        (to / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / file.relative_to(folder))


def test_resumes_a_study_of_fields_from_carried_records(photo, tmp_path, into, capsys):
    study.run_study(photo, tmp_path / "one", into, "small", seeds=2, command="python run.py", **OPTIONS)
    assert "sine-k1" in capsys.readouterr().out
    assert "python run.py" in (into / "small.md").read_text()
    assert {path.name for path in into.iterdir()} == {"small.json", "small.md", "small-rate.png", "small-strip.png"}
    shutil.copytree(into, tmp_path / "whole")
    carry(tmp_path / "one", tmp_path / "two")
    marker = tmp_path / "two" / "compare.json"
    marker.write_text(re.sub('"processor": "[^"]*"', '"processor": "Z80"', marker.read_text()))
    next((tmp_path / "two").glob("runs/sine-*/**/seed-2/result.json")).unlink()
    study.run_study(photo, tmp_path / "two", into, "small", seeds=2, **OPTIONS)
    assert table(into / "small.json") == table(tmp_path / "whole" / "small.json")
    assert "made by several processors: Z80, " in (into / "small.md").read_text()
    # Of the carried fits the first seed's are made again for the strip of pictures, and no other.
    fitted = {path.relative_to(tmp_path / "two" / "runs").parts for path in (tmp_path / "two").glob("runs/**/model")}
    assert {parts[3] for parts in fitted if parts[0] == "low-rank-k1-kaiming_zero"} == {"seed-1"}
    assert {parts[3] for parts in fitted if parts[0] == "sine-k1-kaiming_zero"} == {"seed-1", "seed-2"}
    assert (into / "small-strip.png").read_bytes() == (tmp_path / "whole" / "small-strip.png").read_bytes()


def test_resumes_a_study_of_a_model_from_carried_records(novel, tmp_path, into, capsys):
    options = OPTIONS | {"max_extensions": 0}
    options["arms"] = [Arm.parse(text) for text in ("baseline:grid=1e-3/2e-3", "noble:rank=2,lr=1e-3")]
    study.run_study(novel, tmp_path / "one", into, "small", seeds=1, **options)
    shutil.copytree(into, tmp_path / "whole")
    carry(tmp_path / "one", tmp_path / "two")
    study.run_study(novel, tmp_path / "two", into, "small", seeds=1, **options)
    assert not list((tmp_path / "two").glob("runs/**/model")), "nothing was trained again"
    assert table(into / "small.json") == table(tmp_path / "whole" / "small.json")
    study.run_study(novel, tmp_path / "two", into, "small", seeds=2, **options)
    trained = (tmp_path / "two" / "runs").glob("**/model")
    assert {path.parent.name for path in trained} == {"seed-2"}
    capsys.readouterr()


def test_resumes_for_moved_data_and_no_other_data(photo, tmp_path, into):
    study.run_study(photo, tmp_path / "one", into, "small", seeds=1, **OPTIONS)
    moved = tmp_path / "album.png"
    (tmp_path / "photo.png").rename(moved)
    elsewhere = replace(photo, problem=replace(photo.problem, source=str(moved)))
    study.run_study(elsewhere, tmp_path / "one", into, "small", seeds=1, **OPTIONS)
    before = sorted((tmp_path / "one").rglob("*"))
    Image.fromarray(np.zeros((12, 12, 3), dtype=np.uint8)).save(moved)
    assert_refused("other data", study.run_study, elsewhere, tmp_path / "one", into, "small", seeds=1, **OPTIONS)
    moved.unlink()
    assert_refused(r"album\.png", study.run_study, elsewhere, tmp_path / "one", into, "small", seeds=1, **OPTIONS)
    assert sorted((tmp_path / "one").rglob("*")) == before


def test_runs_tuned_arms_for_longer(photo, tmp_path, into):
    arms = [FieldArm.parse(text) for text in ("low-rank:rank=1", "sine:rank=2,omega=7,gain=3,name=wave", "dense")]
    options = OPTIONS | {"seeds": 1, "tune_lr": (1e-3, 1e-2)}
    study.run_study(photo, tmp_path / "short", into, "short", arms=arms, **options)
    record, tuned = read(into / "short.json"), study.tuned_arms(into / "short.json")
    chosen = [(arm["name"], arm["init"]) for arm in record["arms"]]
    assert [(arm.name, *arm.inits) for arm in tuned] == chosen
    assert [arm.lr for arm in tuned] == [arm["lr"] for arm in record["arms"]]
    for arm, former in zip(tuned, arms, strict=True):
        assert replace(arm.method, init="kaiming_zero") == replace(former.method, init="kaiming_zero")
    retuned = study.tuned_arms(into / "short.json", rates=False)
    assert [replace(arm, lr=before.lr) for arm, before in zip(retuned, tuned, strict=True)] == tuned
    longer = replace(photo, train=replace(photo.train, steps=8))
    study.run_study(longer, tmp_path / "long", into, "long", arms=[*tuned[:1], *retuned[1:]], **options)
    after = read(into / "long.json")["arms"]
    assert [(arm["name"], arm["init"]) for arm in after] == chosen
    assert [bool(arm["tuning"]) for arm in after] == [False, True, True]
    assert_refused(r"no .*none\.json: run the stage", study.tuned_arms, into / "none.json")
    (into / "none.json").write_text("{}")
    assert_refused("has no valid 'arms'", study.record_arms, into / "none.json")


def test_compares_arms_of_several_records_by_seed():
    def an_arm(*scores):
        runs = [{"seed": seed, "score": score} for seed, score in enumerate(scores)]
        return {"runs": runs, "score": {"mean": np.mean(scores), "sd": np.std(scores, ddof=1), "n": len(scores)}}

    pairs = [(an_arm(3.0, 4.5, 5.2), an_arm(1.0, 2.0, 3.0)), (an_arm(2.0, 2.5, 2.0), an_arm(2.1, 2.2, 2.3))]
    cells = study.difference_cells(pairs)
    p_values = []
    for (arm, other), (delta, p_value, _) in zip(pairs, cells, strict=True):
        new, old = ([run["score"] for run in each["runs"]] for each in (arm, other))
        test = ttest_rel(new, old)
        interval = test.confidence_interval(0.95)
        assert delta == f"{np.mean(new) - np.mean(old):+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
        p_values.append(test.pvalue)
        assert p_value == p_text(test.pvalue)
    low, high = sorted(p_values)
    assert sorted(cell[2] for cell in cells) == sorted(map(p_text, (min(2 * low, 1), min(max(2 * low, high), 1))))
    assert study.score_text(pairs[0][0]) == "4.23 +- 1.12 (3)"
    del pairs[0][1]["runs"][1:]
    assert study.difference_cells(pairs)[0] == ("+2.00 (n = 1)", "-", "-")


def test_smoke_run_of_a_model_is_small_and_apart(novel, tmp_path, capsys):
    arms = [Arm.parse(text) for text in ("baseline:lr=1e-3", "noble:rank=2,lr=1e-3")]
    options = {"arms": arms, "seeds": 3, "max_extensions": 2, "timing_rounds": 30, "quiet": True}
    study.run_study(novel, tmp_path / "runs" / "cpu", tmp_path / "absent", "cpu", smoke=True, **options)
    assert "noble-r2" in capsys.readouterr().out
    folder = tmp_path / "runs" / "cpu-smoke"
    assert {path.name for path in folder.glob("runs/*/lr-*/seed-*")} == {"seed-1"}
    assert not (folder / "timing.json").exists()
    assert not (tmp_path / "runs" / "cpu").exists()


def test_keeps_all_finished_runs(into, tmp_path, monkeypatch):
    def keep(work, **losses):
        with study.kept_runs(into, tmp_path / work):
            for name, loss in losses.items():
                (tmp_path / work / name).mkdir(parents=True, exist_ok=True)
                result = {"final_loss": float(loss), "train_curve": [[1, float(loss) / 3]]}
                (tmp_path / work / name / "result.json").write_text(json.dumps(result))
        found = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / work).glob("*/result.json")}
        assert all(abs(each["train_curve"][0][1] * 3 - each["final_loss"]) < 2e-3 for each in found.values())
        return {name: f"{each['final_loss']:g}" for name, each in found.items()}

    assert keep("one", a="1", b="2") == {"a": "1", "b": "2"}
    (tmp_path / "two" / "b").mkdir(parents=True)
    (tmp_path / "two" / "b" / "result.json").write_text('{"final_loss": 3.0, "train_curve": [[1, 1.0]]}')
    assert keep("two", c="4") == {"a": "1", "b": "3", "c": "4"}, "what is there stays"
    assert keep("three") == {"a": "1", "b": "3", "c": "4"}

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(study.tarfile.TarFile, "addfile", full)
    with pytest.raises(OSError, match="no space"):
        keep("four")
    monkeypatch.undo()
    assert keep("five") == {"a": "1", "b": "3", "c": "4"}, "a write that fails loses nothing"
    (tmp_path / "five" / "b" / "result.json").unlink()
    assert keep("five") == {"a": "1", "c": "4"}, "to be made anew"


def test_reads_a_studys_options(capsys):
    parser = study.study_parser("What it asks.\n\n    python run.py", "tiny", "text", "rows", seeds=2, sized=True)
    given = vars(parser.parse_args(["a.txt", "b"]))
    plain = {"size": "cpu", "smoke": False, "seeds": 2, "threads": 1, "work": Path("runs/tiny")}
    assert given == {"text": Path.cwd() / "a.txt", "rows": Path.cwd() / "b", **plain}
    given = vars(parser.parse_args(["a", "b", "--size=gpu", "--smoke", "--seeds=5", "--threads=4", "--work=w"]))
    assert given.items() >= {"size": "gpu", "smoke": True, "seeds": 5, "threads": 4, "work": Path("w")}.items()
    with pytest.raises(SystemExit):
        study.study_parser("", "tiny", "text").parse_args(["a.txt", "--smoke"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "What it asks.\n\n    python run.py\n" in capsys.readouterr().out


@pytest.mark.parametrize(("part", "line"), [("table", "table: no rates"), ("", "no rates")])
def test_turns_user_errors_into_one_line(part, line):
    with pytest.raises(SystemExit, match=f"^{line}$") as left, study.one_line_errors(part):
        raise UserError("no rates")
    assert left.value.__suppress_context__


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.parent.name for script in SCRIPTS])
def test_prints_what_each_script_is(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"studies.{script.parent.name}.run", run_name="__main__")
    assert left.value.code == 0
    assert f"python -m studies.{script.parent.name}.run" in capsys.readouterr().out
