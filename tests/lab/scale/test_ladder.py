"""`nlr scale`: a ladder from end to end, going on, predictions that are written first, and refusals."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

import nlr_lab.scale.run as scale_run
from cli_helpers import run, succeed
from nlr_lab.recipes import get_recipe
from nlr_lab.scale.ladder import SCALES, Rung, backbone, inner_parameters, scaled
from nlr_lab.scale.record import build_record
from nlr_lab.scale.report import render
from nlr_lab.scale.run import run_ladder, write
from nonlinear_lowrank.errors import UserError
from pretraining_helpers import corpus
from processes_helpers import run_processes
from refusals import assert_refused, refuse_to_open

ARMS = ("baseline:name=plain", "noble:rank_ratio=0.25,name=noble")
SIZES = [
    *("--vocab-size", "280", "--sequence-length", "16", "--eval-sequences", "8", "--batch-size", "4"),
    *("--seeds", "2", "--tune-lr", "4e-3", "8e-3", "--max-extensions", "0", "--timing-rounds", "2"),
    *("--evaluations", "2", "--arms", *ARMS, "--tokens", "0.06"),
]


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """A ladder of two widths, and how to climb further."""
    folder = tmp_path_factory.mktemp("scale")
    text = ["--source", corpus(folder), "--cache-dir", folder / "cache"]
    command = ["scale", "--scale", "demo", "--out", folder / "out", *text, *SIZES]
    return folder / "out", command


def read(path):
    return json.loads(path.read_text())


def test_climbs_goes_on_and_judges_what_it_predicted(climbed, capsys, monkeypatch):
    out, command = climbed
    printed = succeed(capsys, *command, "--widths", "24", "16")
    assert "FLOPs multiplier" in printed
    results = read(out / "results.json")
    assert [rung["rung"] for rung in results["rungs"]] == ["w16-t0.06", "w24-t0.06"]
    for rung in results["rungs"]:
        plain, noble = rung["arms"]["plain"], rung["arms"]["noble"]
        assert (rung["n"], len(plain["losses"]), rung["reference"]) == (2, 2, "plain")
        assert plain["compute"] == 3 * rung["trained_tokens"] * plain["flops_per_token"] < noble["compute"]
        assert rung["trained_tokens"] == rung["steps"] * 4 * 16
        assert len(plain["tuning"]) >= 2
        assert noble["against"]["delta"]["n"] == 2
    assert results["rungs"][0]["trained_tokens"] < results["rungs"][1]["trained_tokens"]
    assert [(law["arm"], law["form"]) for law in results["laws"]] == [("plain", "A C^-b"), ("noble", "A C^-b")]
    # The width after the last is predicted, and nothing of it is run.
    predicted = read(out / "predicted" / "w32-t0.06.json")
    assert all(said["rungs"] == ["w16-t0.06", "w24-t0.06"] for said in predicted["losses"].values())
    assert predicted["losses"].keys() == predicted["rates"].keys() == {"plain", "noble"}
    assert not (out / "w32-t0.06").exists()
    assert results["predicted"]["w32-t0.06"]["losses"] == predicted["losses"]

    # The same command again trains nothing.
    runs = {path: path.stat().st_mtime_ns for path in out.glob("w*/runs/**/result.json")}
    succeed(capsys, *command, "--widths", "16", "24")
    assert {path: path.stat().st_mtime_ns for path in out.glob("w*/runs/**/result.json")} == runs
    assert read(out / "results.json")["rungs"] == results["rungs"]

    # What is run cannot be predicted any more.
    succeed(capsys, *command, "--widths", "16", "--next-width", "24")
    assert {path.name for path in (out / "predicted").iterdir()} == {"w32-t0.06.json"}

    # Rungs that an older version ran get their grades.
    rung = read(out / "w16-t0.06" / "results.json")
    del rung["against"]["plain"]["noble"]["grade"]
    (out / "w16-t0.06" / "results.json").write_text(json.dumps(rung))

    # The next width has three rates around the one predicted, and is held against what was written before.
    succeed(capsys, *command, "--widths", "32", "--timing-rounds", "0")
    assert read(out / "predicted" / "w32-t0.06.json") == predicted
    assert read(out / "results.json")["rungs"][:2] == results["rungs"]
    results = read(out / "results.json")
    assert [rung["rung"] for rung in results["rungs"]] == ["w16-t0.06", "w24-t0.06", "w32-t0.06"]
    judged = results["predicted"]["w32-t0.06"]
    for name, arm in results["rungs"][2]["arms"].items():
        rate = predicted["rates"][name]["lr"]
        assert {rate / 2, rate, 2 * rate} <= {tried for tried, _ in arm["tuning"]}
        assert judged["rates"][name]["held"] == (arm["lr"] == pytest.approx(rate))
        said = judged["losses"][name]["loss"]
        assert said["measured"] == arm["mean"]
        inside = said["low"] <= arm["mean"] <= said["high"]
        assert said["verdict"] == ("confirmed" if inside else "refuted")
    assert results["laws"][0]["form"] == "E + A C^-b"
    report = (out / "report.md").read_text()
    assert "## Predicted: w32-t0.06" in report
    assert "**confirmed**" in report or "**refuted**" in report
    assert "With two seeds a rung its interval holds about 77 %" in report
    assert "No joint law" in report
    diverged = json.loads(json.dumps(results["rungs"]))
    diverged[2]["arms"]["noble"] |= {"losses": [1.0, None], "mean": None, "against": None}
    again = build_record(diverged, {"w32-t0.06": predicted}, results["settings"], "nlr scale")
    said = again["predicted"]["w32-t0.06"]["losses"]
    assert {each["verdict"] for each in said["noble"].values()} == {"diverged"}
    assert {each["verdict"] for each in said["plain"].values()} <= {"confirmed", "refuted"}
    assert "| - | **diverged** |" in render(again)
    assert (out / "ladder.png").stat().st_size > 1000

    # A rung that is stopped in its middle loses nothing of the others, and what one width tells is no law.
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(scale_run, "compare", stopped)
    code, _, error = run(capsys, *command, "--widths", "24", "--tokens", "0.1")
    assert (code, "resume from the last checkpoint with: nlr scale" in error) == (130, True)
    assert read(out / "results.json")["rungs"] == results["rungs"]
    longer = read(out / "predicted" / "w24-t0.1.json")
    assert (longer["losses"], longer["rates"].keys()) == ({}, {"plain", "noble"})

    # Other first arms would be compared with by another measure.
    code, _, error = run(capsys, *command, "--widths", "16", "--arms", *reversed(ARMS))
    assert code == 2
    assert "the first arm, which others are compared with, was 'plain' in" in error
    assert "w16-t0.06 and is 'noble' now; put that one first, or use another --out" in error
    assert "noble:rank_ratio=0.25 " in succeed(capsys, "recommend", "llm-demo", "--ladder", out, "--tokens", "0.06")


def test_report_grades_its_claims():
    report = render(read(Path(__file__).parents[3] / "studies" / "ladder" / "results.json"))
    assert "-0.0648 [-0.0749, -0.0548], p 0.0091, grade 5/7 |" in report
    assert "-0.0721 [-0.1525, +0.0083], p 0.18, no difference shown |" in report


def test_refuses_other_settings_data_and_folders(tmp_path):
    ladder = scaled("demo", text=replace(SCALES["demo"].text, source=str(corpus(tmp_path)), cache_dir=str(tmp_path)))
    ladder = replace(ladder, widths=(16,), arms=ARMS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert_refused("is not empty and holds no ladder; name another --out", run_ladder, ladder, tmp_path / "mine")
    (tmp_path / "out").mkdir()
    settings = {"settings": ladder.shared() | {"batch_size": 4}, "fingerprint": "other"}
    (tmp_path / "out" / "ladder.json").write_text(json.dumps(settings))
    assert_refused("batch_size was 4 in .* and is 8 now; use the former", run_ladder, ladder, tmp_path / "out")
    other = replace(ladder, batch_size=4)
    assert_refused("used other data; restore them", run_ladder, other, tmp_path / "out")
    (tmp_path / "out" / "ladder.json").write_text('{"settings": ')
    assert_refused(
        "ladder.json is damaged, .*; restore it, or use another folder$", run_ladder, other, tmp_path / "out"
    )


def test_a_rung_that_no_seed_finished_is_named(tmp_path, capsys):
    text = ["--source", corpus(tmp_path), "--cache-dir", tmp_path / "cache"]
    settings = [*SIZES, "--seeds", "1", "--tune-lr", "1e8", "1e9", "--widths", "16"]
    code, _, error = run(capsys, "scale", "--scale", "demo", "--out", tmp_path / "out", *text, *settings)
    assert (code, read(tmp_path / "out" / "results.json")["rungs"]) == (0, [])
    assert "w16-t0.06 is not in the report: there is no seed that every arm finished; give lower --tune-lr" in error


def test_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    text = replace(SCALES["demo"].text, source=str(corpus(tmp_path)), cache_dir=str(tmp_path / "cache"))
    ladder, out = scaled("demo", text=text, widths=(16,), arms=ARMS), tmp_path / "out"
    hint = "no space left on the disk; make room and run the same command again"
    refuse_to_open(monkeypatch, errno.ENOSPC, *(out / f".tmp-{name}" for name in ("ladder.json", "report.md")))
    assert_refused(f"cannot write .*ladder.json: {hint}", run_ladder, ladder, out)
    (out / "ladder.json").write_text(json.dumps({"settings": ladder.shared()}))
    assert_refused(f"cannot write the report to .*out: {hint}", write, out, "nlr scale")


def test_shapes_are_those_of_the_recipes():
    for name in ("llm-demo", "llm-small", "llm-base", "llm-large"):
        wanted = get_recipe(name).task.backbone
        assert backbone(wanted.width, 1.0, "stock") == wanted


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_a_model_and_arms_at_every_width(scale):
    ladder = SCALES[scale]
    rungs = [*ladder.rungs(), ladder.following()]
    recipes = [ladder.recipe(rung) for rung in rungs]
    for rung, recipe in zip(rungs, recipes, strict=True):
        tokens = recipe.train.steps * recipe.train.batch_size * recipe.task.sequence_length
        assert tokens == pytest.approx(rung.tokens * inner_parameters(recipe.task.build_on_meta()), rel=0.05)
    assert Rung(width=48, tokens=20.0).name == "w48-t20"


def test_tokens_are_those_that_a_folders_name_keeps():
    ladder = replace(SCALES["demo"], tokens=(20 / 3, 1e7 / 3))
    assert [float(rung.name.partition("-t")[2]) for rung in ladder.rungs()[:: len(ladder.widths)]] == [*ladder.tokens]
    with pytest.raises(UserError, match="or more different"):
        replace(SCALES["demo"], tokens=(20 / 3, 6.666670001))


def test_memory_settings_leave_the_batch_and_the_folder_as_they_are():
    plain, rung = SCALES["demo"], Rung(width=16, tokens=5.0)
    saving = replace(plain, gradient_accumulation=4, gradient_checkpointing=True)
    before, after = plain.recipe(rung).train, saving.recipe(rung).train
    assert (after.gradient_accumulation, after.gradient_checkpointing) == (4, True)
    assert replace(after, gradient_accumulation=1, gradient_checkpointing=False) == before
    assert saving.shared() == plain.shared()
    with pytest.raises(UserError, match="batch_size 8 does not split into gradient_accumulation 3"):
        replace(plain, gradient_accumulation=3).recipe(rung)


def test_the_scale_of_gpus_reaches_one_and_a_half_billion_parameters_in_small_micro_batches():
    ladder = SCALES["gpu"]
    largest = ladder.recipe(max(ladder.rungs(), key=lambda rung: rung.width))
    assert sum(each.numel() for each in largest.task.build_on_meta().parameters()) > 1.4e9
    assert largest.train.batch_size // largest.train.gradient_accumulation == 8


SEVERAL = """
import json, sys
from nlr_lab.cli.main import main
sys.exit(main(json.loads(sys.argv[1])))
"""


def test_two_processes_climb_as_one_does(tmp_path):
    text = ["--source", corpus(tmp_path), "--cache-dir", tmp_path / "cache", "--widths", "16", "--seeds", "1"]
    arms = ["--timing-rounds", "0", "--arms", *(f"{arm},lr=8e-3" for arm in ARMS)]
    losses = []
    for count, more in ((2, ()), (1, ("--gradient-accumulation", "2"))):
        out = tmp_path / str(count)
        arguments = ["scale", "--scale", "demo", "--out", out, *SIZES, *text, *arms, *more]
        run_processes(SEVERAL, json.dumps(list(map(str, arguments))), count=count)
        (rung,) = read(out / "results.json")["rungs"]
        losses.append({name: arm["losses"] for name, arm in rung["arms"].items()})
    assert losses[0].keys() == losses[1].keys() == {"plain", "noble"}
    for name, own in losses[0].items():
        assert own == pytest.approx(losses[1][name], rel=1e-4)
