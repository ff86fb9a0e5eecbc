"""Every table maps to runs at every scale, published numbers are those printed, and cheap tables truly run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import nlr_lab.reproduce.run as reproduce_run
from cli_helpers import refused, succeed
from compare_helpers import ACCURACY, FakeTraining, StubTask, a_record, a_run, an_arm, fake_measure, gain
from nlr_lab.compare import model_trials
from nlr_lab.reproduce import SCALES, noble, tables
from nlr_lab.reproduce.measures import MEASURES, Arm
from nlr_lab.reproduce.run import check_options, count_parts, model_folder, parse_arms
from nlr_lab.reproduce.sine import rate_distortion
from nlr_lab.reproduce.table import Absent, Compare, slug
from nlr_lab.training import TrainConfig
from nlr_lab.training.recipe import Recipe
from nonlinear_lowrank.errors import UserError

TABLES = tables()
ALL = list(TABLES.values())
MEASURED = [table.name for table in ALL if table.trials is not None]
STUDIES = Path(__file__).parents[3] / "studies"
HOMES = sorted({table.home for table in ALL if table.home})
NAMES = [
    *(f"noble/{each}" for each in ("table1", "table2", "table3", "table4", "table5", "step-times")),
    *(f"noble/fig{number}" for number in range(1, 6)),
    *(f"notes/{each}" for each in ("c4", "glue", "latency")),
    *("query/results", "query/stability"),
    *(f"sine/table{number}" for number in range(1, 14)),
    *(f"sine/fig{number}" for number in range(1, 10)),
    *(f"nora/table{number}" for number in range(1, 9)),
    *(f"nora/fig{number}" for number in range(1, 8)),
]
"""All that the references number, and the tables of the notes and of the document on queries."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path_factory.getbasetemp() / "reproduce-cache"))


def test_every_numbered_table_and_figure_is_there_and_runs_or_is_a_diagram():
    assert {table.name for table in ALL} >= set(NAMES)
    assert [table.name for table in ALL if (table.trials is None) != table.diagram] == []
    for table in ALL:
        assert all(len(values) == len(table.columns) for values in table.rows.values()), table.name
        assert all(name in TABLES for name in table.seen_in), table.name


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", MEASURED)
def test_every_row_maps_to_an_arm_a_measure_or_a_reason(name, scale):
    table = TABLES[name]
    rows, columns, measured = set(), set(), False
    for trial in table.trials(scale):
        if isinstance(trial, Compare):
            arms = [arm.name for arm in parse_arms(trial)]
            assert len(set(arms)) == len(arms) >= 2
            rows |= trial.arms.keys()
            columns |= {trial.column, *trial.tasks, *(column for column in table.columns if column in MEASURES)}
            measured |= trial.after is not None
        elif isinstance(trial, Absent):
            rows |= set(trial.rows or table.rows)
            columns |= set(trial.columns or table.columns)
            assert trial.why
        else:
            measured = True
    assert measured or rows >= table.rows.keys()
    assert measured or columns | {"avg"} >= {*table.columns}


@pytest.mark.parametrize(
    "scale", [pytest.param(scale, marks=pytest.mark.slow) if scale == "small" else scale for scale in SCALES]
)
@pytest.mark.parametrize("name", HOMES)
def test_arms_fit_their_models_on_meta(name, scale):
    for trial in TABLES[name].trials(scale):
        if isinstance(trial, Compare) and isinstance(trial.recipe, Recipe):
            counted = count_parts(trial)
            untrained = {row: trial.arms[row] for row, count in counted.items() if not count["trained_body"]}
            assert {row for row, arm in untrained.items() if arm != "head"} <= {"ELU"}  # which has no parameters


@pytest.mark.parametrize(
    ("name", "found"),
    {
        "sine/table5": {"sine LoRA k=8": {"omega": 600, "lr": 1e-4, "epochs": 3}},
        "sine/table9": {"ViT-Base k=250": {"omega": 150}},
        "nora/table7": {"batch size": {"value": 256}},
    }.items(),
)
def test_settings_are_the_published_ones(name, found, capsys, tmp_path):
    assert "nothing is measured" in succeed(capsys, "reproduce", name, "--out", tmp_path)
    record = json.loads((tmp_path / slug(name) / "demo" / "table.json").read_text())
    rows = {row["row"]: row for row in record["rows"]}
    assert record["measured"] == record["cells"]
    for row, values in found.items():
        assert {column: cell["value"] for column, cell in rows[row]["ours"].items()} == values
    for row in rows.values():
        ours = {column: cell["value"] for column, cell in row["ours"].items()}
        assert ours == row["published"], row["row"]


def test_a_figure_uses_the_runs_of_its_table_and_the_list_says_what_was_run(capsys, tmp_path, monkeypatch):
    tiny = {"layers": 1, "width": 16, "heads": 2, "hidden": 32}
    recipe = noble.recipe
    monkeypatch.setattr(noble, "recipe", lambda name, steps=None, **_: recipe(name, 10, **tiny))
    monkeypatch.setattr(noble, "RANKS", (64,))
    printed = succeed(capsys, "reproduce", "noble/table5", "--out", tmp_path)
    assert "| tanh, 1 layer | 2.968 |" in printed
    record = json.loads((tmp_path / "noble-table5" / "demo" / "table.json").read_text())
    assert (record["measured"], record["cells"], record["n"]) == (19, 20, 1)  # the baseline has no difference
    rows = {row["row"]: row for row in record["rows"]}
    ours = rows["cosine, 2 layers"]["ours"]
    assert ours["delta_loss"]["value"] == pytest.approx(
        ours["eval_loss"]["value"] - rows["baseline"]["ours"]["eval_loss"]["value"]
    )
    assert math.isfinite(ours["eval_loss at equal time"]["value"])
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("noble-table5/**/result.json")}
    succeed(capsys, "reproduce", "noble/fig5", "--out", tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("noble-*/**/result.json")} == runs
    listed = succeed(capsys, "reproduce", "noble/*", "--list", "--out", tmp_path)
    assert "demo   run: 19 of 20 cells, n = 1" in listed
    assert "diagram, nothing to measure" in listed
    assert refused(capsys, "reproduce", "noble/fig2").endswith("noble/fig2 is a diagram, with nothing to measure\n")


def test_branches_go_on_the_linears_that_score_highest(capsys, tmp_path, monkeypatch):
    from nlr_lab.reproduce import noble

    tiny, recipe = {"layers": 2, "width": 16, "heads": 2, "hidden": 32}, noble.recipe
    monkeypatch.setattr(noble, "recipe", lambda name, steps=None: recipe(name, 10, **tiny))
    succeed(capsys, "reproduce", "notes/4.2", "--out", tmp_path)
    home = tmp_path / "notes-4.2" / "demo"
    record, linears = (json.loads((home / name).read_text()) for name in ("table.json", "importance.json"))
    assert len(linears["linears"]) == 4  # of 12
    assert json.loads((home / "importance" / "result.json").read_text())["steps"] == 1
    added = {row["row"]: row["ours"]["params_plus_pct"]["value"] for row in record["rows"]}
    assert 0 < added["most important 30 %"] < added["all layers"]
    arm = record["parts"][0]["arms"]["most important 30 %"]
    assert all(name.replace(".", "\\.") in arm for name in linears["linears"])
    stamp = (home / "importance.json").stat().st_mtime_ns
    succeed(capsys, "reproduce", "notes/4.2", "--out", tmp_path)  # continues where it stopped: nothing is scored anew
    assert (home / "importance.json").stat().st_mtime_ns == stamp


def test_scores_of_likelihoods_and_of_answers_are_kept_apart(tmp_path, monkeypatch):
    calls = []

    def score(task, model, names, sources, shots):
        calls.append((*names, *sources))
        return dict.fromkeys(names, 40.0 if sources else 60.0)

    monkeypatch.setattr(reproduce_run, "score_model", score)
    trial = Compare(part="tuned", recipe=SimpleNamespace(task=None), arms={}, tasks={"PIQA": "piqa"})
    arm = SimpleNamespace(own={"name": "lora"}, runs=[{"lr": 1e-3, "init": "", "head_lr": None, "seed": 1}])
    model_folder(tmp_path, "lora", arm.runs[0]).mkdir(parents=True)
    for _ in range(2):
        for sources, percent in (({}, 60.0), ({"commonsense": "rows"}, 40.0)):
            assert reproduce_run._evaluate(trial, tmp_path, arm, sources)["PIQA"]["value"] == percent
    assert calls == [("piqa",), ("piqa", "commonsense")]


def test_random_matrices_are_those_of_the_paper(capsys, tmp_path, monkeypatch):
    drawn = {"seeds": 5, "figure_2": {"matrices": {"dense": {"stable_rank": {"mean": 32.0}}}}}
    monkeypatch.setattr("nlr_lab.rank.figures.rank_figures", lambda seeds: drawn)
    monkeypatch.setattr("nlr_lab.rank.figures.plot_rank_figures", lambda file, figures: file.touch())
    printed = succeed(capsys, "reproduce", "sine/fig2", "--out", tmp_path)
    assert "Ours are means of five random draws of the paper's sizes" in printed
    assert "other models" not in printed
    assert "![rank-figures](rank-figures.png)" in printed


def test_a_fit_that_diverged_leaves_no_distance_of_curves(tmp_path):
    folders = [tmp_path / "fern", tmp_path / "room"]
    for folder in folders:
        arms = [
            {"name": f"{kind}-k-{k}", "parameters": 100 * k, "score": {"mean": 20 + math.log(k) + (kind == "sine")}}
            for kind in ("low-rank", "sine")
            for k in (1, 5, 10, 30, 60)
        ]
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps({"arms": arms}))
    assert rate_distortion(folders)["bd_psnr_db"]["value"] == pytest.approx(1)
    arms[-1]["score"]["mean"] = None
    (folders[1] / "results.json").write_text(json.dumps({"arms": arms}))
    why = {"why": "diverged: sine k=60"}
    assert rate_distortion(folders) == {"bd_rate_pct": why, "bd_psnr_db": why}


def test_equal_time_is_where_an_arm_is_when_the_reference_has_finished():
    seconds = {"base": 1.0, "slow": 2.0, "fast": 0.5, "late": 2.0, "lost": 1.0, "untrained": 1.0}
    curves = {
        "base": [(50, 4.0), (100, 3.0)],
        "slow": [(40, 2.8), (60, 2.0), (90, 1.0)],  # at step 50 after the 100 s of the reference
        "fast": [(50, 2.0), (80, 1.9)],
        "late": [(60, 2.0), (100, 1.0)],
    }

    def arm(name, **more):
        runs = [a_run(seed, 1.0 + seed / 10, 100, curve=curves.get(name, ()), **more) for seed in (1, 2)]
        if name == "untrained":
            return an_arm(name, choice=None)
        return an_arm(name, *runs) if name != "lost" else an_arm(name, runs[0], a_run(2, None))

    results = a_record([*map(arm, seconds)], (1, 2), times={name: [own] * 3 for name, own in seconds.items()})
    of_arm = {name: Arm(results, name, {}, 1.0) for name in seconds}
    found = {name: MEASURES["eval_loss at equal time"](own) for name, own in of_arm.items()}
    expected = {"base": 1.15, "slow": 2.4, "fast": 1.15}  # done by then: the mean of the final losses
    assert {name: found[name]["value"] for name in expected} == pytest.approx(expected)
    assert found["slow"]["n"] == 2
    assert found["late"] == {"why": "no evaluation before the reference had finished"}
    assert found["lost"] == found["untrained"] == {"why": "diverged"}
    assert MEASURES["perplexity at equal time"](of_arm["slow"])["value"] == pytest.approx(math.exp(2.4))
    untimed = Arm(a_record([*map(arm, seconds)], (1, 2)), "slow", {}, 1.0)
    assert untimed.score_at_equal_time() == {"why": "not timed"}
    chosen, scored = [(40, 0.5), (100, 0.7)], [(40, 0.4), (60, 0.8), (100, 0.9)]
    own = {"score": 0.9, "metric_curve": chosen, "score_curve": scored}
    record = a_record(
        [arm(name, **own) for name in ("base", "slow")],
        (1, 2),
        measure=ACCURACY,
        times={"base": [1.0] * 3, "slow": [2.0] * 3},
    )
    assert MEASURES["top1_pct at equal time"](Arm(record, "slow", {}, 100.0))["value"] == pytest.approx(60.0)


def test_a_page_has_losses_at_equal_time_its_study_and_the_curves_of_its_tables_runs(capsys, tmp_path, monkeypatch):
    class Training(FakeTraining):
        def __call__(self, recipe, out, **options):
            super().__call__(recipe, out, **options)
            result = json.loads((out / "result.json").read_text())
            (out / "result.json").write_text(json.dumps(result | {"train_curve": result["curve"][1:]}))

    training = Training(gain)
    monkeypatch.setattr(model_trials, "run_training", training)
    monkeypatch.setattr(model_trials, "measure_arms", fake_measure)
    monkeypatch.setattr(
        noble,
        "recipe",
        lambda *_: Recipe(name="x", task=StubTask(), train=TrainConfig(steps=100, batch_size=8, lr=1e-3)),
    )
    for name in ("noble/table5", "noble/fig5"):
        printed = succeed(capsys, "reproduce", name, "--out", tmp_path)
        folder = tmp_path / slug(name) / "demo"
        assert len(training.calls) == 11
        assert "studies/llm_small" in printed
        linked = [folder / line.split("(")[1].rstrip(")") for line in printed.splitlines() if line.startswith("![")]
        shown = tmp_path / "noble-table5" / "demo" / "ablation"
        assert [path.resolve() for path in linked] == [shown / "curves.png", shown / "training.png"]
        assert all(path.is_file() for path in linked)
        record = json.loads((folder / "table.json").read_text())
        assert record["columns"][:2] == ["eval_loss", "eval_loss at equal time"]
        rows = {
            row["row"]: {column: each.get("value") for column, each in row["ours"].items()} for row in record["rows"]
        }
        assert rows["baseline"]["eval_loss at equal time"] == rows["baseline"]["eval_loss"]
        late = rows["tanh, 1 layer"]
        slower = 5.0 + (late["eval_loss"] - 5.0) / 1.1  # the curve is a line from 5, a step takes 1.1 times as long
        assert late["eval_loss at equal time"] == pytest.approx(slower, rel=0.01)


def test_studies_that_are_named_are_in_the_repository_and_listed(capsys):
    named = {name for table in ALL for name in table.studies}
    assert len(named) > 10
    assert [name for name in named if not (STUDIES / name / "README.md").is_file()] == []
    assert "; see studies/nerf\n" in succeed(capsys, "reproduce", "sine/table3", "--list")


def test_refusals(capsys):
    assert "did you mean 'noble/table1'" in refused(capsys, "reproduce", "noble/tabel1")
    assert "name a table" in refused(capsys, "reproduce")
    assert "NAME=PATH" in refused(capsys, "reproduce", "noble/table1", "--source", "cifar")
    assert "read nothing of that name at --scale demo" in refused(
        capsys, "reproduce", "noble/table1", "--source", "a=b"
    )


def test_sources_of_a_scale_are_known_by_name():
    tables = [TABLES["noble/table1"], TABLES["sine/table2"]]
    check_options(tables, "paper", ["Skylion007/openwebtext", "commonsense", "meta-llama/Meta-Llama-3-8B"], None)
    check_options([TABLES["nora/table2"]], "small", ["mmlu", "Open-Orca/OpenOrca"], 2)
    with pytest.raises(UserError, match="commonsense: nora/table2"):
        check_options([TABLES["nora/table2"]], "small", ["commonsense"], None)
    with pytest.raises(UserError, match="commonsense: noble/table1"):
        check_options(tables[:1], "paper", ["commonsense"], None)
    with pytest.raises(UserError, match="--seeds does nothing for sine/fig3 at --scale demo"):
        check_options([TABLES["sine/fig3"]], "demo", [], 2)


@pytest.fixture(scope="session")
def demos(tmp_path_factory):
    return tmp_path_factory.mktemp("demos")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(TABLES[name].home)) for name in MEASURED]
)
def test_every_demo_runs(name, capsys, demos):
    """Entries with the runs of one table share a process, and its folder: what has been run is not run again."""
    home = demos / slug(TABLES[name].home)
    runs = {path: path.stat().st_mtime_ns for path in home.rglob("result.json")}
    succeed(capsys, "reproduce", name, "--out", demos)
    record = json.loads((demos / slug(name) / "demo" / "table.json").read_text())
    assert any("value" in cell for row in record["rows"] for cell in row["ours"].values())
    assert {path: path.stat().st_mtime_ns for path in runs} == runs


def test_a_lower_loss_is_a_relative_gain_with_its_ends_in_order():
    gains = {"baseline": 0.0, "noble": 0.4}
    arms = [an_arm(name, *(a_run(s, 4.0 - gain * (1 + 0.1 * s)) for s in (1, 2, 3))) for name, gain in gains.items()]
    found = MEASURES["relative_gain_pct"](Arm(a_record(arms), "noble", {}, 1.0))
    assert found["value"] == pytest.approx(12.0)
    assert found["low"] < found["value"] < found["high"]
