"""cli.py and commands/: what the user types, what comes back, and what is refused."""

import ast
import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cli_helpers import run, run_python
from nlr_lab.cli import COMMANDS
from nlr_lab.cli import main as cli
from nlr_lab.cli.options import parse
from nlr_lab.cli.train import TrainOptions
from nlr_lab.recipes import RECIPES
from nonlinear_lowrank import UserError
from seeds import rng


def assert_refused(capsys, arguments, *words):
    """One line on stderr with all the words, exit code 2."""
    code, _, err = run(capsys, *arguments)
    assert code == 2, err
    assert err.startswith("nlr: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err


# --- the door ------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_recipe_in_one_line_each(capsys):
    code, out, err = run(capsys, "--help")
    assert code == 0
    assert err == ""
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} .*{re.escape(command[1])}$", out, re.MULTILINE)
    for name in RECIPES:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    assert run(capsys)[1] == out


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "nlr_lab", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"nlr \d+\.\d+\.\d+\n", done.stdout)


def test_a_warning_is_one_line_and_names_no_code(tmp_path):
    for index in range(24):
        picture = rng().integers(0, 256, (8, 8, 3), dtype=np.uint8)
        place = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place)
    (tmp_path / "images/a/broken.png").write_bytes(b"no image")
    small = ["--layers", 1, "--width", 16, "--heads", 2, "--hidden", 16, "--steps", 1, "--batch-size", 24]
    script = "import sys; from nlr_lab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    data = ["--source", tmp_path / "images", "--size", 8, "--out", tmp_path / "out"]
    done = run_python(script, "train", "vit-demo", *data, *small)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "broken.png" in line]
    assert len(said) == 1
    assert said[0].startswith("nlr: warning: cannot read the image ")
    assert ".py" not in done.stderr


def test_every_command_of_the_table_exists_and_the_other_way_round():
    folder = Path(cli.__file__).parent
    files = {path.stem: path for path in folder.glob("*.py")}
    commands = {
        name
        for name, path in files.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in ast.parse(path.read_text()).body)
    }
    assert commands == set(COMMANDS)


@pytest.mark.parametrize("module", ["cli.main", "recipes", "cli", "cli.options"])
def test_the_door_imports_nothing_slow_itself(module):
    """torch and the Trainer belong to the commands; a typo must not wait for them."""
    path = Path(cli.__file__).parents[1] / (module.replace(".", "/") + ".py")
    path = path if path.exists() else Path(cli.__file__).parents[1] / module / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not [name for name in names if re.match(r"torch|transformers|training|compare|hub|tasks", name)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "llm-demo"], ["trian", "'train'"]),
        (["zzzz"], ["zzzz", "compare"]),
        (["train"], ["name a recipe", "llm-demo"]),
        (["train", "llm-dmo"], ["llm-dmo", "'llm-demo'"]),
        (["compare", "qqq"], ["qqq", "llm-small"]),
        (["train", "--out", "x"], ["name a recipe"]),
        (["generate"], ["CHECKPOINT"]),
        (["generate", "/no/such/folder"], ["/no/such/folder"]),
        (["evaluate", "/no/such/folder"], ["/no/such/folder"]),
        (["convert", "/no/such/folder", "out"], ["/no/such/folder"]),
        (["generate", ".", "--promt", "x"], ["--promt", "--prompt"]),
    ],
    ids=" ".join,
)
def test_bad_input_gives_one_line_and_code_2(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, arguments, *words)
    assert list(tmp_path.iterdir()) == []


# --- how errors leave ----------------------------------------------------------------------------------------


def failing(monkeypatch, error):
    def dispatch(arguments):
        raise error

    monkeypatch.setattr(cli, "_dispatch", dispatch)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("rank must be\n  at least 1"), "nlr: rank must be at least 1\n"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "nlr: No such file or directory: a.txt\n"),
        (OSError("the hub\ncannot be reached"), "nlr: the hub cannot be reached\n"),
    ],
)
def test_user_and_system_errors_are_one_line(capsys, monkeypatch, error, message):
    failing(monkeypatch, error)
    assert run(capsys, "train") == (2, "", message)


def test_a_bug_names_a_file_with_the_traceback(capsys, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("by\nzero"))
    code, out, err = run(capsys, "train", "llm-demo")
    assert (code, out) == (1, "")
    log = Path(re.fullmatch(r"nlr: ZeroDivisionError: by zero \(traceback in (.*)\)\n", err).group(1))
    text = log.read_text()
    assert text.startswith("nlr train llm-demo\n")
    assert "Traceback" in text


def test_debugging_raises(monkeypatch):
    monkeypatch.setenv("NLR_DEBUG", "1")
    failing(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_ctrl_c_says_how_to_go_on(capsys, monkeypatch):
    failing(monkeypatch, KeyboardInterrupt())
    code, _, err = run(capsys, "compare", "llm-demo", "--out", "a b", "--overwrite")
    assert code == 130
    # --overwrite would delete what is to be continued.
    assert err.endswith("nlr compare llm-demo --out 'a b' --resume\n")
    assert err.count("\n") == 1
    assert "--resume" not in run(capsys, "inspect", "llm-demo")[2]


# --- options -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Optimization:
    lr: float = 1e-3
    """Peak learning rate."""
    seed: int = 0
    """Of the batches."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Which."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    compile: bool = True
    """Whether to compile."""
    threads: int | None = None
    """CPU threads."""

    def __post_init__(self):
        if self.lr <= 0:
            raise UserError(f"lr must be above 0, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Words:
    source: str = "stdlib"
    """Where from."""
    seed: int = 0
    """Of the split."""


@dataclass(frozen=True, kw_only=True)
class Job:
    text: Words = field(default_factory=Words)
    """The text."""


DEFAULT = TrainOptions(out="runs/x", arm="baseline", task=Job(), train=Optimization())


def read(*arguments):
    return parse(TrainOptions[Job, Optimization], arguments, command="train x", description="X.", default=DEFAULT)


def test_nothing_given_is_the_default():
    assert read() == DEFAULT


def test_full_and_short_names_of_nested_fields_mean_the_same():
    full = read("--train.lr", "2e-3", "--task.text.source=a.txt", "--train.no-compile", "--train.betas", "0", "0.5")
    short = read("--lr", "2e-3", "--source=a.txt", "--no-compile", "--betas", "0", "0.5")
    assert full == short
    assert full.train == Optimization(lr=2e-3, compile=False, betas=(0.0, 0.5))
    assert full.task.text.source == "a.txt"
    assert read("--text.seed", "3").task.text.seed == 3
    assert read("--threads", "2").train.threads == 2


@pytest.mark.parametrize(
    ("text", "number"), [("1e3", 1000), ("-2E2", -200), ("1.5e3", 1500), ("1e18", 10**18), ("1e23", 10**23), ("7", 7)]
)
def test_integers_may_be_in_scientific_notation(text, number):
    found = read("--train.seed", text).train.seed
    assert (found, type(found)) == (number, int)
    assert read("--threads", text).train.threads == number
    assert read("--lr", "1e3").train.lr == 1000.0


def test_integers_of_a_command_without_a_recipe_too(capsys):
    assert_refused(capsys, ["evaluate", "/no/such/folder", "--batch-size", "1e1"], "no such folder")
    assert_refused(capsys, ["evaluate", "/no/such/folder", "--batch-size", "1e-1"], "--batch-size", "got '1e-1'")


def test_a_value_that_looks_like_an_option_of_ours_is_not_touched():
    assert read("--out=--lr").out == "--lr"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1"], "--seed may be --task.text.seed or --train.seed"),
        (["--train.sed", "1"], "did you mean --train.seed"),
        (["--lr", "fast"], "--train.lr: could not convert string to float: 'fast'"),
        (["--lr"], "--train.lr"),
        (["--train.seed", "1.5"], "--train.seed: must be an integer, got '1.5'"),
        (["--train.seed", "1e-3"], "--train.seed: must be an integer, got '1e-3'"),
        (["--train.seed", "1e999999999"], "--train.seed: must be an integer, got '1e999999999'"),
        (["--train.seed", "1e-999999999"], "--train.seed: must be an integer"),
        (["--threads", "inf"], "must be an integer, got 'inf'"),
        (["--lr", "-1"], "lr must be above 0, got -1.0"),
        (["--optimizer", "sgd"], "'adamw', 'muon'"),
        (["stray"], "stray"),
        (["--lr", "x" * 200], "x" * 200),
    ],
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_what_cannot_be_read_is_one_line_at_any_width(monkeypatch, capsys, arguments, message, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UserError) as caught:
        read(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not re.search("[\u2500-\u257f]", str(caught.value))
    assert capsys.readouterr().err == ""


def test_help_shows_defaults_and_docs_and_the_recipe_lines(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(
            TrainOptions[Job, Optimization],
            ["--help"],
            command="train x",
            description="A model.\n\n    Command: nlr train x\n    Time: 3 minutes.\n    ",
            default=DEFAULT,
        )
    assert not caught.value.code
    out = capsys.readouterr().out
    assert re.search(r"^Command: nlr train x$", out, re.MULTILINE)
    assert re.search(r"^Time: 3 minutes.$", out, re.MULTILINE)
    assert "Peak learning rate." in out
    assert "0.001" in out


# --- the whole way -------------------------------------------------------------------------------------------

SIZES = [
    *("--layers", "1", "--width", "32", "--heads", "2", "--hidden", "48", "--vocab-size", "280"),
    *("--sequence-length", "16", "--eval-sequences", "4", "--tracker", "none", "--threads", "1"),
    *("--steps", "4", "--batch-size", "2", "--warmup-steps", "1", "--eval-every", "2", "--save-every", "2"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a corpus, the options that train on it, and a run of NOBLE in `run`."""
    folder = tmp_path_factory.mktemp("cli")
    words = ["tree", "river", "stone", "light", "water", "grass", "cloud", "house"]
    order = random.Random(0)
    lines = [" ".join(order.choices(words, k=8)) for _ in range(400)]
    (folder / "corpus.txt").write_text("\n<|endoftext|>\n".join(lines))
    options = ["--source", folder / "corpus.txt", "--cache-dir", folder / "cache", *SIZES]
    code = cli.main(
        [str(each) for each in ["train", "llm-demo", "--out", folder / "run", "--arm", "noble:rank=4", *options]]
    )
    assert code == 0
    return folder, options


def test_train_leaves_a_run_that_evaluate_repeats(trained, capsys, tmp_path):
    folder, _ = trained
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["arm"] == "noble-r4"
    code, out, err = run(capsys, "evaluate", folder / "run", "--output", tmp_path / "score.json")
    assert code == 0, err
    assert "held-out text of llm-demo" in out
    score = json.loads((tmp_path / "score.json").read_text())["text"]
    # Two ways to the same number: Trainer's evaluation, and a loaded model on the packed text.
    assert score["loss"] == pytest.approx(result["final_loss"], rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)
    # A checkpoint in the middle of the run is a model too, and knows its run.
    code, out, err = run(capsys, "evaluate", folder / "run" / "checkpoints" / "step-000004")
    assert code == 0, err
    assert f"loss {result['final_loss']:.4f}" in out


def test_evaluate_scores_any_text(trained, capsys):
    folder, _ = trained
    code, out, err = run(capsys, "evaluate", folder / "run", "--text", folder / "corpus.txt")
    assert code == 0, err
    assert re.search(r"perplexity \d.* bits per byte \d", out)


def test_generate_continues_a_prompt(trained, capsys):
    folder, _ = trained
    arguments = ["generate", folder / "run", "--prompt", "tree river", "--max-new-tokens", "5", "--seed", "1"]
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith("tree river")
    assert len(out) > len("tree river\n")
    assert run(capsys, *arguments)[1] == out


def test_a_finished_run_resumes_to_the_same_and_is_not_overwritten_unasked(trained, capsys):
    folder, options = trained
    again = ["train", "llm-demo", "--out", folder / "run", "--arm", "noble:rank=4", *options]
    before = (folder / "run" / "result.json").read_bytes()
    assert_refused(capsys, again, "--resume", "--overwrite")
    assert run(capsys, *again, "--resume")[0] == 0
    assert (folder / "run" / "result.json").read_bytes() == before


def test_compare_writes_table_picture_and_report(trained, capsys, tmp_path):
    _, options = trained
    arms = ["--arms", "baseline", "noble:rank=4", "--seeds", "2", "--timing-rounds", "2"]
    # `make demo` always resumes, the first time too.
    code, out, err = run(capsys, "compare", "llm-demo", "--out", tmp_path / "c", "--resume", *arms, *options)
    assert code == 0, err
    assert "n = 2" in out
    assert "noble-r4" in out
    for name in ("results.json", "report.md", "curves.png"):
        assert (tmp_path / "c" / name).stat().st_size > 0
    assert_refused(capsys, ["compare", "llm-demo", "--out", tmp_path / "c", *arms, *options], "--resume")


def test_convert_makes_a_model_with_the_same_outputs(trained, capsys, tmp_path):
    _, options = trained
    plain = ["train", "llm-demo", "--out", tmp_path / "plain", "--arm", "baseline", *options]
    assert run(capsys, *plain)[0] == 0
    code, out, err = run(capsys, "convert", tmp_path / "plain", tmp_path / "up", "--rank", "4")
    assert code == 0, err
    assert "bit-equal" in out
    code, out, err = run(capsys, "convert", tmp_path / "plain", tmp_path / "paper", "--rank", "4", "--up-init", "paper")
    assert code == 0, err
    assert "bit-equal" not in out
    assert run(capsys, "generate", tmp_path / "up", "--prompt", "tree", "--max-new-tokens", "2")[0] == 0
    assert_refused(capsys, ["convert", tmp_path / "plain", tmp_path / "big", "--rank", "32"], "rank")
    exact = ["--method", "rational", "--groups", "4", "--anchor", "exact"]
    code, out, err = run(capsys, "convert", tmp_path / "plain", tmp_path / "rational", *exact)
    assert code == 0, err
    assert "bit-equal" in out
    assert "activations swapped" in out
    refused = ["convert", tmp_path / "plain", tmp_path / "s", "--method", "rational", "--rank", "4"]
    assert_refused(capsys, refused, "--rank is not of --method rational")
    assert_refused(capsys, ["convert", tmp_path / "plain", tmp_path / "s", "--groups", "4"], "--groups is not of")
    assert not (tmp_path / "big").exists()


def test_inspect_counts_recipes_folders_and_configs_alike(trained, capsys):
    folder, _ = trained
    saved = load_file(folder / "run" / "model" / "model.safetensors")
    counts = []
    for model in (folder / "run", folder / "run" / "model", folder / "run" / "model" / "config.json"):
        code, out, err = run(capsys, "inspect", model, "--json")
        assert code == 0, err
        counts.append(json.loads(out)["parameters"])
    assert counts == [sum(tensor.numel() for tensor in saved.values())] * 3
    code, out, err = run(capsys, "inspect", folder / "run")
    assert code == 0, err
    assert f"{counts[0]:,}" in out
    assert "saved bytes" in out

    plain = json.loads(run(capsys, "inspect", "llm-demo", "--arm", "baseline", "--json")[1])
    noble = json.loads(run(capsys, "inspect", "llm-demo", "--rank", "8", "--json")[1])
    # One branch on each of q, k, v, o (128 -> 128), gate-up (128 -> 688) and down (344 -> 128) of 4 layers.
    widths = [256, 256, 256, 256, 816, 472]
    assert noble["parameters"] - plain["parameters"] == 4 * sum(8 * width + 8 * 8 + 4 * 8 for width in widths)
    assert noble["kept_bytes"] > plain["kept_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llm-dem"], ["'llm-demo'"]),
        (["nowhere/config.json"], ["nowhere/config.json"]),
        (["llm-demo", "--rank", "0"], ["rank"]),
        (["llm-demo", "--rank", "128"], ["rank", "128"]),
        (["llm-demo", "--rank", "8", "--arm", "baseline"], ["--rank", "--arm"]),
        (["llm-demo", "--sequence-length", "0"], ["sequence_length"]),
        (["broken.json"], ["broken.json"]),
        (["other.json"], ["other.json", "model_type"]),
        (["strange.json"], ["strange.json", "no_such_type"]),
        (["wrong.json"], ["wrong.json"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_inspect_refuses_what_is_no_model(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "strange.json").write_text('{"model_type": "no_such_type"}')
    (tmp_path / "wrong.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    assert_refused(capsys, ["inspect", *arguments], *words)


def test_bench_step_measures_and_records(capsys, tmp_path):
    small = ["--width", "32", "--heads", "2", "--hidden", "48", "--layers", "1", "--sequence-length", "8"]
    options = ["--ranks", "4", "--modes", "eager", "--rounds", "3", "--warmup", "1", "--output", tmp_path / "b.json"]
    options += ["--device", ""]  # the one there is
    code, out, err = run(capsys, "bench", "step", *small, *options, "--picture", tmp_path / "b.png")
    assert code == 0, err
    assert "step / FLOPs" in out
    assert (tmp_path / "b.png").is_file()
    assert len(json.loads((tmp_path / "b.json").read_text())["times"]["eager"]["baseline"]) == 3
    assert_refused(capsys, ["bench", "stop"], "stop", "nlr bench step")
    assert_refused(capsys, ["bench"], "nlr bench step")
    assert_refused(capsys, ["bench", "step", "--ranks", "0"], "rank")
    assert_refused(capsys, ["bench", "step", "--device", "tpu9"], "tpu9")
    assert_refused(capsys, ["bench", "step", "--output", "/no/such/folder/b.json"], "/no/such/folder")
    assert_refused(capsys, ["bench", "memory", "--picture", "/no/such/folder/b.png"], "/no/such/folder")
    assert_refused(capsys, ["bench", "kernels", "--picture", str(tmp_path / "k.png")], "draws no picture")
    assert_refused(capsys, ["bench", "op", "--operators", "magic"], "magic")
    assert_refused(capsys, ["bench", "decode", "--modes"], "modes must be different, and at least one, got none")
    assert_refused(capsys, ["bench", "decode", "--modes", "eager", "eager"], "modes must be different")
    assert_refused(capsys, ["bench", "op", "--operators", "noble", "noble"], "operators must be different")
    assert_refused(capsys, ["bench", "decode", "--output", str(tmp_path)], "is a folder; name a file (--output)")
    several = ["bench", "decode", "--methods", "nonlinear-query", "--fuse-shared-inputs"]
    assert_refused(capsys, several, "fuse_shared_inputs is NOBLE's; omit it, or add noble to the methods")
    assert_refused(
        capsys, ["convert", "in", "out", "--rank", "12", "--rank-ratio", "0.25"], "takes the place of --rank"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arm", "noble:rank=0"], ["rank"]),
        (["--arm", "noble:rank=-3"], ["rank"]),
        (["--arm", "noble:rank=32"], ["rank"]),
        (["--arm", "noble:activation=relu6"], ["relu6", "cosine"]),
        (["--arm", "nobel"], ["nobel"]),
        (["--arm", "no_such_module:change"], ["no_such_module"]),
        (["--source", "missing.txt"], ["missing.txt"]),
        (["--source", "empty.txt"], ["empty"]),
        (["--source", "binary.txt"], ["binary"]),
        (["--source", "short.txt"], ["short"]),
        (["--tokenizer", "no/such/tokenizer"], ["no/such/tokenizer"]),
        (["--steps", "0"], ["steps"]),
        (["--optimiser", "sgd"], ["--optimiser"]),
        (["--width", "33"], ["33"]),
        (["--resume", "--overwrite"], ["overwrite"]),
    ],
    ids=lambda value: "-".join(value),
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_wrong_runs_are_refused_with_nothing_written(trained, capsys, monkeypatch, tmp_path, command, options, words):
    _, usual = trained
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "short.txt").write_text("too few words")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    if command == "compare" and options[0] == "--arm":
        options = ["--arms", "baseline", options[1]]
    assert_refused(capsys, [command, "llm-demo", "--out", "out", *usual, *options], *words)
    assert sorted(tmp_path.rglob("*")) == before


def damage_truncate(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


def damage_drop(model):
    tensors = load_file(model / "model.safetensors")
    tensors.pop(next(name for name in tensors if "noble_up" in name))
    (model / "manifest.json").unlink()  # or their hash would be what is wrong
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def damage_add(model):
    tensors = load_file(model / "model.safetensors")
    (model / "manifest.json").unlink()
    save_file({**tensors, "model.stray": torch.zeros(2)}, model / "model.safetensors", metadata={"format": "pt"})


def damage_config(model):
    (model / "config.json").write_text('{"name": "not a config"}')


def damage_json(model):
    (model / "config.json").write_text("{")


@pytest.mark.parametrize("damage", [damage_truncate, damage_drop, damage_add, damage_config, damage_json])
@pytest.mark.parametrize("command", ["evaluate", "generate", "convert"])
def test_damaged_models_are_refused(trained, capsys, tmp_path, command, damage):
    folder, _ = trained
    shutil.copytree(folder / "run" / "model", tmp_path / "model")
    damage(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    extra = [tmp_path / "out"] if command == "convert" else []
    assert_refused(capsys, [command, tmp_path / "model", *extra], "model")
    assert sorted(tmp_path.rglob("*")) == before
