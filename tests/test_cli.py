"""cli.py and commands/: what the user types, what comes back, and what is refused."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from nonlinear_lowrank import UserError, cli
from nonlinear_lowrank.commands import COMMANDS
from nonlinear_lowrank.commands.options import parse
from nonlinear_lowrank.commands.train import TrainOptions
from nonlinear_lowrank.recipes import RECIPES


def run(capsys, *arguments):
    """Exit code, stdout, stderr of one command in this process."""
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


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
        assert re.search(rf"^  {name} .*{re.escape(command.summary)}$", out, re.MULTILINE)
    for name in RECIPES:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    assert run(capsys)[1] == out


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "nonlinear_lowrank.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"nlr \d+\.\d+\.\d+\n", done.stdout)


def test_every_command_of_the_table_exists_and_the_other_way_round():
    folder = Path(cli.__file__).parent / "commands"
    files = {path.stem: path for path in folder.glob("*.py")}
    commands = {
        name
        for name, path in files.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in ast.parse(path.read_text()).body)
    }
    assert commands == set(COMMANDS)


@pytest.mark.parametrize("module", ["cli", "recipes", "commands", "commands.options"])
def test_the_door_imports_nothing_slow_itself(module):
    """torch and the Trainer belong to the commands; a typo must not wait for them."""
    path = Path(cli.__file__).parent / (module.replace(".", "/") + ".py")
    path = path if path.exists() else Path(cli.__file__).parent / module / "__init__.py"
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
            raise UserError(f"lr must be above 0, not {self.lr}")


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


def test_a_value_that_looks_like_an_option_of_ours_is_not_touched():
    assert read("--out=--lr").out == "--lr"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1"], "--seed may be --task.text.seed or --train.seed"),
        (["--train.sed", "1"], "did you mean --train.seed"),
        (["--lr", "fast"], "--train.lr: could not convert string to float: 'fast'"),
        (["--lr"], "--train.lr"),
        (["--lr", "-1"], "lr must be above 0, not -1.0"),
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
