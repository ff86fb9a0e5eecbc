"""Commands from training to a converted model, and what they refuse."""

import json
import re
import shutil
import types
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from cli_helpers import refused, run, succeed
from nlr_lab.cli import main as cli
from nlr_lab.cli import train as train_command
from nlr_lab.cli.options import parse_recipe
from nlr_lab.cli.train import TrainOptions
from nlr_lab.recipes import get_recipe, recipes_of
from pretraining_helpers import corpus

SIZES = [
    *("--layers", "1", "--width", "32", "--heads", "2", "--hidden", "48", "--vocab-size", "280"),
    *("--sequence-length", "16", "--eval-sequences", "4", "--tracker", "none", "--threads", "1"),
    *("--steps", "4", "--batch-size", "2", "--warmup-steps", "1", "--eval-every", "2", "--save-every", "2"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    options = ["--source", corpus(folder), "--cache-dir", folder / "cache", *SIZES]
    command = ["train", "llm-demo", "--out", folder / "run", "--arm", "noble:rank=4", *options]
    assert cli.main([str(each) for each in command]) == 0
    return folder, options


def test_train_leaves_a_run_that_evaluate_repeats(trained, capsys, tmp_path):
    folder, _ = trained
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["arm"] == "noble-r4"
    out = succeed(capsys, "evaluate", folder / "run", "--out", tmp_path / "score.json")
    assert "held-out text of llm-demo" in out
    score = json.loads((tmp_path / "score.json").read_text())["text"]
    # Two ways to the same number: Trainer's evaluation, and a loaded model on the packed text.
    assert score["loss"] == pytest.approx(result["final_loss"], rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)
    # A checkpoint in the middle of the run is a model too, and knows its run.
    out = succeed(capsys, "evaluate", folder / "run" / "checkpoints" / "step-000004")
    assert f"loss {result['final_loss']:.4f}" in out
    out = succeed(capsys, "evaluate", folder / "run", "--source", folder / "corpus.txt")
    assert re.search(r"perplexity \d.* bits per byte \d", out)


def test_data_may_move_and_not_change(tmp_path, capsys, monkeypatch):
    text, out, elsewhere = corpus(tmp_path), tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    command = ["train", "llm-demo", "--arm", "baseline", "--cache-dir", tmp_path / "cache", *SIZES, "--out", out]
    said = succeed(capsys, *command, "--source", text.name)
    words = r"[\d,]+ parameters; [\d,]+ documents, [\d,]+ tokens to train on, seen [\d.e-]+ times; into "
    assert re.search(rf"^{words}{re.escape(str(out))}$", said, re.MULTILINE)
    scored = succeed(capsys, "evaluate", out).replace(text.name, "")
    before = json.loads((out / "result.json").read_text())
    (out / "result.json").unlink()
    monkeypatch.chdir(elsewhere)
    assert "in the folder that the run was started in, or pass --source" in refused(capsys, "evaluate", out)
    succeed(capsys, *command, "--source", text, "--resume")
    assert json.loads((out / "result.json").read_text())["curve"] == before["curve"]
    assert succeed(capsys, "evaluate", out).replace(str(text), "") == scored, "the new place is known"
    moved = text.rename(tmp_path / "moved.txt")
    assert "after 4 steps" in succeed(capsys, *command, "--source", moved, "--resume")
    moved.write_text(moved.read_text().swapcase())
    assert "no longer the one that the run" in refused(capsys, *command, "--source", moved, "--resume")
    moved.rename(text)
    error = "no longer those that the run was trained on; restore the former ones, or pass --source"
    assert error in refused(capsys, "evaluate", out)
    (out / "recipe.json").write_text((out / "recipe.json").read_text()[:99])
    assert f"{out / 'recipe.json'} is damaged, " in (error := refused(capsys, "evaluate", out))
    assert "; restore it, or score text with --source FILE" in error


@pytest.mark.parametrize("kind", ["toml", "yaml", "json"])
def test_settings_come_from_a_file_and_options_override_it(trained, capsys, tmp_path, kind):
    _, options = trained
    content = {
        "toml": 'arm = "noble:rank=2"\n[train]\nlr = 3e-3\nseed = 5\n',
        "yaml": "arm: noble:rank=2\nlr: 3e-3\ntrain:\n  seed: 5\n",  # 3e-3 is a text to YAML
        "json": '{"arm": "noble:rank=2", "train": {"lr": 3e-3, "seed": 5}}',
    }
    file, out = tmp_path / f"settings.{kind}", tmp_path / "run"
    file.write_text(content[kind], encoding="utf-8-sig")  # as Windows' editors do
    succeed(capsys, "train", "llm-demo", "--config", file, "--seed", "6", "--out", out, *options)
    recipe = json.loads((out / "recipe.json").read_text())["recipe"]
    assert (recipe["arm"]["settings"], recipe["train"]["lr"], recipe["train"]["seed"]) == ({"rank": 2}, 3e-3, 6)


def test_a_runs_own_file_makes_it_again_with_changes(trained, capsys, tmp_path):
    folder, _ = trained
    succeed(capsys, "train", "--config", folder / "run" / "recipe.json", "--out", tmp_path / "same")
    weights = [load_file(run / "model" / "model.safetensors") for run in (folder / "run", tmp_path / "same")]
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
    command = ["train", f"--config={folder / 'run' / 'recipe.json'}", "--arm", "baseline", "--out", tmp_path / "other"]
    succeed(capsys, *command)
    assert json.loads((tmp_path / "other" / "result.json").read_text())["arm"] == "baseline"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "[train]\nwarmup_step = 3", "unknown setting train.warmup_step; did you mean train.warmup_steps?"),
        ("a.toml", "widht = 3", "unknown setting widht; did you mean width?"),
        ("a.toml", "train = 3", "unknown setting train; did you mean train."),
        ("a.toml", "[train]\nbf16 = 'no'", "unrecognized argument no"),
        ("a.toml", "[train]\nthreads = 'two'", "--train.threads: "),
        ("a.toml", "[arm]\nmethods = 'noble'", "has no arm in its table"),
        ("a.toml", "[train", "a.toml cannot be read: "),
        ("a.toml", "[train]\nlr = -1", "lr must be"),
        ("a.json", "[1]", "must hold settings by their names"),
        ("a.json", '{"name": "mlm-demo"}', "is of the recipe 'mlm-demo'; name that one, or none"),
        ("a.yaml", "arm: os:system", "calls code, os:system; if you know what it does, give it as --arm"),
        ("a.yaml", "arm: ' os:system,x=1'", "calls code, os:system,x=1; if you know what it does"),
        ("a.toml", "[train]\nbetas = ['0.9', '0.9', '--arm', 'os:system']", "has '--arm' in the list train.betas"),
        ("a.toml", "overwrite = true", "sets overwrite, which the command line must: --overwrite"),
        ("a.ini", "", ".ini is not .toml, .json or .yaml"),
    ],
)
def test_wrong_files_of_settings_are_refused(capsys, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    command = ["train", "llm-demo", "--config", tmp_path / name, "--out", tmp_path / "run"]
    assert words in refused(capsys, *command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_the_settings_of_every_recipe_survive_a_file(tmp_path, command):
    file = tmp_path / "recipe.json"
    for recipe in map(get_recipe, recipes_of(command)):
        others = {"bf16": not recipe.train.bf16, "compile": not recipe.train.compile}
        train = replace(recipe.train, seed=7, betas=(0.5, 0.75), threads=3, head_lr=None, **others)
        file.write_text(json.dumps({"recipe": replace(recipe, train=train).to_dict()}))
        defaults = lambda _: {"out": "", "arm": ""}  # noqa: E731
        found, options = parse_recipe(TrainOptions, ["--config", str(file)], command=command, defaults=defaults)
        assert (found.task, found.train, options.arm) == (recipe.task.with_data_known(), train, str(recipe.arm))


def test_generate_continues_a_prompt(trained, capsys):
    folder, _ = trained
    arguments = ["generate", folder / "run", "--prompt", "tree river", "--max-new-tokens", "5", "--seed", "1"]
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith("tree river")
    assert len(out) > len("tree river\n")
    assert run(capsys, *arguments)[1] == out


def test_compare_writes_table_picture_and_report(trained, capsys, tmp_path):
    _, options = trained
    arms = ["--arms", "baseline", "noble:rank=4", "--seeds", "2", "--timing-rounds", "2"]
    # `make demo` always resumes, the first time too.
    out = succeed(capsys, "compare", "llm-demo", "--out", tmp_path / "c", "--resume", *arms, *options)
    assert "n = 2" in out
    assert "noble-r4" in out
    for name in ("results.json", "report.md", "curves.png"):
        assert (tmp_path / "c" / name).stat().st_size > 0
    assert "--resume" in refused(capsys, "compare", "llm-demo", "--out", tmp_path / "c", *arms, *options)


def test_convert_makes_a_model_with_the_same_outputs(trained, capsys, tmp_path):
    _, options = trained
    plain = tmp_path / "plain"
    succeed(capsys, "train", "llm-demo", "--out", plain, "--arm", "baseline", *options)
    assert "bit-equal" in succeed(capsys, "convert", plain, tmp_path / "up", "--rank", "4")
    paper = succeed(capsys, "convert", plain, tmp_path / "paper", "--rank", "4", "--up-init", "paper")
    assert "bit-equal" not in paper
    succeed(capsys, "generate", tmp_path / "up", "--prompt", "tree", "--max-new-tokens", "2")
    exact = ["--method", "rational", "--groups", "4", "--anchor", "exact"]
    out = succeed(capsys, "convert", plain, tmp_path / "rational", *exact)
    assert "bit-equal" in out
    assert "activations swapped" in out
    small = succeed(capsys, "convert", plain, tmp_path / "small", "--method", "sine-lowrank", "--rank", "4")
    assert "relative error of the fit" in small
    succeed(capsys, "generate", tmp_path / "small", "--prompt", "tree", "--max-new-tokens", "2")
    split = succeed(capsys, "convert", plain, tmp_path / "split", "--rank", "4", "--split-fused")
    assert "mlp.gate_up_proj.up_proj" in split
    wrong = tmp_path / "wrong"
    assert "rank" in refused(capsys, "convert", plain, wrong, "--rank", "32")
    for options, message in {
        "--method rational --rank 4": "unrecognized argument --rank",
        "--groups 4": "unrecognized argument --groups",
        "--rank 12 --rank-ratio 0.25": "replaces --rank",
        "--init scratch": "redraws the weights",
        "--method qk-norm": "--method must be one of noble, nonlinear-query, rational, sine-lowrank, which keep",
        "--method sine-lowrank --init kaiming_zero": "redraws the weights",
        "--method sine-lowrank --gain 3": "gain is found by the fit",
    }.items():
        assert message in refused(capsys, "convert", plain, wrong, *options.split())
    assert not wrong.exists()


def test_inspect_counts_recipes_folders_and_configs_alike(trained, capsys):
    folder, _ = trained
    saved = load_file(folder / "run" / "model" / "model.safetensors")
    counts = []
    for model in (folder / "run", folder / "run" / "model", folder / "run" / "model" / "config.json"):
        out = succeed(capsys, "inspect", model, "--json")
        counts.append(json.loads(out)["parameters"])
    assert counts == [sum(tensor.numel() for tensor in saved.values())] * 3
    out = succeed(capsys, "inspect", folder / "run")
    assert f"{counts[0]:,}" in out
    assert "saved bytes" in out

    plain = json.loads(run(capsys, "inspect", "llm-demo", "--arm", "baseline", "--json")[1])
    noble = json.loads(run(capsys, "inspect", "llm-demo", "--rank", "8", "--json")[1])
    # One branch on each of q, k, v, o (128 -> 128), gate-up (128 -> 688) and down (344 -> 128) of 4 layers.
    widths = [256, 256, 256, 256, 816, 472]
    assert noble["parameters"] - plain["parameters"] == 4 * sum(8 * width + 8 * 8 + 4 * 8 for width in widths)
    assert noble["kept_bytes"] > plain["kept_bytes"]


def test_bench_step_measures_and_records(capsys, tmp_path):
    small = ["--width", "32", "--heads", "2", "--hidden", "48", "--layers", "1", "--sequence-length", "8"]
    options = ["--ranks", "4", "--modes", "eager", "--rounds", "3", "--warmup", "1", "--out", tmp_path / "b.json"]
    options += ["--device", ""]  # the one there is
    out = succeed(capsys, "bench", "step", *small, *options, "--picture", tmp_path / "b.png")
    assert "step over flops" in out
    assert (tmp_path / "b.png").is_file()
    assert len(json.loads((tmp_path / "b.json").read_text())["times"]["eager"]["baseline"]) == 3


@pytest.mark.parametrize(("final", "said"), [(3.0, True), (2.01, False)])
def test_a_loss_that_rose_from_its_lowest_is_said(capsys, monkeypatch, tmp_path, final, said):
    result = types.SimpleNamespace(final_loss=final, best_score=2.0, best_step=4, steps=9, diverged_at=None)
    monkeypatch.setattr(train_command, "_run", lambda *_: result)
    out = succeed(capsys, "train", "llm-demo", "--arm", "baseline", "--out", tmp_path / "run")
    assert ("the lowest was 2.0000 at step 4: train for fewer, or on more data" in out) == said


def test_runs_without_a_model_say_how_to_go_on(trained, capsys, tmp_path):
    folder, _ = trained
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(folder / "run" / "recipe.json", run)
    again = f"nlr train --config {run}/recipe.json --out"
    assert f"has not finished; resume with {again} {run} --resume" in refused(capsys, "evaluate", run)
    (run / "result.json").write_text("{}")
    assert f"has no model: it diverged, or its model was deleted; start over: {again} NEW" in refused(
        capsys, "generate", run, "--prompt", "x"
    )
    error = refused(capsys, "merge", folder / "run" / "model", tmp_path / "out")
    assert "holds a whole model and no adapter: there is nothing to merge" in error


@pytest.mark.parametrize("command", ["evaluate", "generate", "convert"])
def test_damaged_models_are_refused(trained, capsys, tmp_path, command):
    folder, _ = trained
    shutil.copytree(folder / "run" / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    before = sorted(tmp_path.rglob("*"))
    extra = [tmp_path / "out"] if command == "convert" else []
    assert "model" in refused(capsys, command, tmp_path / "model", *extra)
    assert sorted(tmp_path.rglob("*")) == before
