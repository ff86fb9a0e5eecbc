"""The command line: options, errors and help."""

import importlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest

from cli_helpers import python_prints, run, run_python, succeed
from nlr_lab.cli import COMMANDS, convert
from nlr_lab.cli import main as cli
from nlr_lab.cli.bench import BENCHES
from nlr_lab.cli.options import parse
from nlr_lab.recipes import RECIPES
from nlr_lab.runtime.signals import StoppedBySignal
from nonlinear_lowrank import UserError
from nonlinear_lowrank.methods.base import all_methods
from nonlinear_lowrank.validation import install_hint
from refusals import assert_refused


def test_help_lists_every_command_and_recipes_every_recipe_in_one_line_each(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} .*{re.escape(command[1])}$", out, re.MULTILINE)
    assert run(capsys)[1] == out
    out = succeed(capsys, "recipes")
    for name, entry in RECIPES.items():
        assert re.search(rf"^  {name} +{re.escape(entry.summary)}$", out, re.MULTILINE)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_installed_command_runs(option):
    done = subprocess.run([sys.executable, "-m", "nlr_lab", option], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"nlr \d+\.\d+\.\d+\n", done.stdout)


def test_a_warning_is_one_line_and_names_no_code():
    script = "import warnings\nfrom nlr_lab.cli import main as cli\n"
    script += "cli._dispatch = lambda arguments: warnings.warn('cannot\\nread', stacklevel=1)\ncli.main(['train'])"
    assert run_python(script).stderr == "nlr: warning: cannot read\n"


def test_a_terminal_without_unicode_gets_the_rest(monkeypatch):
    script = "import sys\nfrom nlr_lab.cli import main as cli\n"
    script += "cli._dispatch = lambda arguments: print('\u2501 caf\u00e9')\nsys.exit(cli.main(['train']))"
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "? caf?\n")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--out=~/a b"], ["--out={home}/a b"]),
        (["--out", "~/a"], ["--out", "{home}/a"]),
        (["a~/b", "~"], ["a~/b", "~"]),
    ],
)
def test_a_tilde_that_the_shell_left_is_the_home_folder(monkeypatch, tmp_path, given, read):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cli, "_dispatch", seen := Mock())
    assert cli.main(["train", *given]) == 0
    seen.assert_called_once_with(["train", *(each.format(home=tmp_path) for each in read)])


def fail(monkeypatch, error):
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
def test_what_the_user_can_fix_is_one_line(capsys, monkeypatch, error, message):
    fail(monkeypatch, error)
    assert run(capsys, "train") == (2, "", message)


def test_a_missing_extra_is_named():
    script = "import sys; sys.modules[sys.argv[1]] = None; from nlr_lab.cli.main import main; sys.exit(main({}))"
    done = run_python(script.format("['verify', '.']"), "tyro")
    assert (done.returncode, done.stderr) == (2, f"nlr: tyro is needed here: {install_hint('lab')}\n")
    assert run_python(script.format("['--help']"), "tyro").returncode == 0


IMPORTS_NOTHING_HEAVY = """
import sys
import nonlinear_lowrank
from nlr_lab.cli.main import main

def heavy():
    return [name for name in ("torch", "transformers", "peft", "datasets", "scipy") if name in sys.modules]

assert nonlinear_lowrank.analysis.__name__ == "nonlinear_lowrank.analysis"
assert not heavy(), heavy()
for command in sys.argv[1:]:
    assert main(command.split()) == (0 if command.endswith("--help") else 2), command
    assert not heavy(), (command, heavy())
"""


def test_import_help_and_refusals_need_no_torch():
    """Measured: 0.3 s of CPU for `nlr compare llm-demo --help`, 5.4 s when it imported torch and transformers."""
    demos = {name: entry.command for name, entry in RECIPES.items() if "demo" in name or name.startswith("instruct")}
    commands = [*COMMANDS, "convert --method nonlinear-query", *(f"bench {name}" for name in BENCHES)]
    commands += [f"{command} {name}" for name, kind in demos.items() for command in (kind, "compare")]
    commands.append("finetune glue-minilm")
    refusals = [f"{command} --lrr 1" for command in (*commands, "generate x", "evaluate x", "merge a b")]
    refusals += ["convert a b", "watch nowhere", "evaluate", "evaluate /no/such", "generate /no/such", "compare"]
    refusals += ["trian", "llm-demo", "train llm-dem", "plan llm-dem", "plan llm-demo --hardware h1", "plan 1b --gpu 3"]
    refusals.append("train llm-demo --lr fast")
    out = python_prints(IMPORTS_NOTHING_HEAVY, "--help", *(f"{command} --help" for command in commands), *refusals)
    assert out.count("--picture") == len(BENCHES)
    assert out.count("--train.steps") >= 2 * len(demos)


def test_convert_has_the_options_of_each_method():
    for name in ("noble", "nonlinear-query", "rational"):
        ours, theirs = (fields(each) for each in (convert._find_settings(name), all_methods()[name].config_class))
        assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]


def test_a_bug_names_a_file_with_the_traceback(capsys, monkeypatch):
    fail(monkeypatch, ZeroDivisionError("by\nzero"))
    code, out, err = run(capsys, "train", "llm-demo")
    assert (code, out) == (1, "")
    text = Path(re.fullmatch(r"nlr: ZeroDivisionError: by zero \(traceback in (.*)\)\n", err).group(1)).read_text()
    assert text.startswith("nlr train llm-demo\n")
    assert "Traceback" in text
    monkeypatch.setenv("NLR_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


BUILDS = """
import torch
from nlr_lab.cli import main, train
from nonlinear_lowrank.ops.native import native
train.run_train = lambda arguments: native(torch.ones(1))
main.main(["train"])
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_that_operators_are_built(tmp_path, terminal):
    """By a compiler that fails at once."""
    read, write = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "NLR_CACHE": str(tmp_path), "CXX": "false"}
    subprocess.run([sys.executable, "-c", BUILDS], env=environment, stderr=write, check=True)
    os.close(write)
    lines = os.read(read, 10_000).decode().splitlines()
    os.close(read)
    note = "nlr: building the operators in C++, once: some twenty seconds, minutes on a busy machine"
    assert lines[:-1] == [note] * terminal
    assert lines[-1].startswith("nlr: warning: operators in C++ were not built")


def test_ctrl_c_says_how_to_resume(capsys, monkeypatch):
    fail(monkeypatch, KeyboardInterrupt())
    code, _, err = run(capsys, "compare", "llm-demo", "--out", "a b", "--overwrite")
    assert code == 130
    # --overwrite would delete what is to be continued, and --resume before that continue what was to be deleted.
    assert err == (
        "nlr: interrupted; resume from the last checkpoint with: nlr compare llm-demo --out 'a b' --resume (where no "
        "new run had begun, run the command itself again: --resume would take the former runs)\n"
    )
    fail(monkeypatch, StoppedBySignal(signal.SIGINT, " at step 3"))
    again = "stopped by SIGINT at step 3; resume from the last checkpoint with: nlr compare llm-demo --out a --resume"
    assert run(capsys, "compare", "llm-demo", "--out", "a", "--overwrite") == (130, "", f"nlr: {again}\n")
    assert "--resume" not in run(capsys, "inspect", "llm-demo")[2]


@pytest.mark.parametrize("command", ["scale", "reproduce"])
def test_errors_name_no_option_that_the_command_lacks(capsys, monkeypatch, command):
    error = UserError("no space left on the disk; make room and continue with --resume")
    monkeypatch.setattr(importlib.import_module(f"nlr_lab.cli.{command}"), f"run_{command}", Mock(side_effect=error))
    line = "nlr: no space left on the disk; make room and run the same command again\n"
    assert run(capsys, command) == (2, "", line)


@dataclass(frozen=True, kw_only=True)
class Optimization:
    lr: float = 1e-3
    """Peak learning rate."""
    seed: int = 0
    """Seed of the batches."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Which."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    compile: bool = True
    """Compile the model."""
    threads: int | None = None
    """CPU threads."""

    def __post_init__(self):
        if self.lr <= 0:
            raise UserError(f"lr must be above 0, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Words:
    source: str = "stdlib"
    """Source of the text."""
    seed: int = 0
    """Seed of the split."""


@dataclass(frozen=True, kw_only=True)
class Job:
    text: Words = field(default_factory=Words)
    """The text."""


@dataclass(frozen=True, kw_only=True)
class Options:
    out: str = "runs/x"
    """Output folder."""
    task: Job = field(default_factory=Job)
    """The task."""
    train: Optimization = field(default_factory=Optimization)
    """The training."""


DEFAULT = Options()


def read(*arguments):
    return parse(Options, arguments, command="train x", description="X.", default=DEFAULT)


def test_full_and_short_names_of_nested_fields_mean_the_same():
    assert read() == DEFAULT
    assert read("--out=--lr").out == "--lr", "a value that looks like an option"
    full = read("--train.lr", "2e-3", "--task.text.source=a.txt", "--train.no-compile", "--train.betas", "0", "0.5")
    short = read("--lr", "2e-3", "--source=a.txt", "--no-compile", "--betas", "0", "0.5")
    assert full == short
    assert full.train == Optimization(lr=2e-3, compile=False, betas=(0.0, 0.5))
    assert full.task.text.source == "a.txt"
    assert read("--text.seed", "3").task.text.seed == 3
    assert read("--threads", "2").train.threads == 2


@pytest.mark.parametrize(("text", "number"), [("7", 7), ("-2E2", -200), ("1.5e3", 1500), ("1e23", 10**23)])
def test_integers_may_be_in_scientific_notation(text, number):
    found = read("--train.seed", text).train.seed
    assert (found, type(found)) == (number, int)
    assert read("--threads", text).train.threads == number
    assert read("--lr", "1e3").train.lr == 1000.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1"], "--seed may be --task.text.seed or --train.seed"),
        (["--train.sed", "1"], "did you mean --train.seed"),
        (["--optimiser=sgd"], "did you mean --optimizer"),
        (["--lr", "fast"], "--train.lr: must be a number, got 'fast'"),
        (["--lr"], "--train.lr"),
        (["--train.seed", "1.5"], "--train.seed: must be an integer, got '1.5'"),
        (["--train.seed", "1e999999999"], "--train.seed: must be an integer, got '1e999999999'"),
        (["--threads", "inf"], "must be an integer, got 'inf'"),
        (["--lr", "-1"], "lr must be above 0, got -1.0"),
        (["--optimizer", "sgd"], "'adamw', 'muon'"),
        (["stray"], "stray"),
        (["--lr", "x" * 200], "x" * 200),
    ],
)
def test_what_cannot_be_read_is_one_line(capsys, arguments, message):
    assert_refused(re.escape(message), read, *arguments)
    assert capsys.readouterr().err == ""


def test_help_shows_defaults_and_docs_and_the_recipe_lines(capsys):
    description = "A model.\n\n    Command: nlr train x\n    Time: 3 minutes.\n    "
    with pytest.raises(SystemExit) as caught:
        parse(Options, ["--help"], command="train x", description=description, default=DEFAULT)
    assert not caught.value.code
    out = capsys.readouterr().out
    assert re.search(r"^Command: nlr train x$", out, re.MULTILINE)
    assert re.search(r"^Time: 3 minutes.$", out, re.MULTILINE)
    assert "Peak learning rate." in out
    assert "0.001" in out


COMPLETES = {  # what is run after a shell's script; a line for each word that may come next
    "bash": 'COMP_WORDS=(nlr "$@"); COMP_CWORD=$#; _nlr; printf "%s\\n" "${COMPREPLY[@]}"',
    # Where there is a terminal, compadd itself leaves out what does not begin as typed.
    "zsh": "words=(nlr $@) CURRENT=$(($# + 1)); compadd() { print -l -- ${(M)${(P)2}:#$words[-1]*} }; _nlr",
    "fish": 'complete -C "nlr $argv"',
}
BEFORE = {"zsh": "compdef() { }; _files() { }\n"}


@pytest.mark.parametrize("shell", COMPLETES)
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["com"], {"compare", "completion"}),
        (["train", "llm-m"], {"llm-moe-demo"}),
        (["compare", "image-demo", "--max-m"], {"--max-minutes"}),
        (["compare", "llm-demo", "--lr", "1e-3", "--train.warm"], {"--train.warmup-steps", "--train.warmup-share"}),
        (["bench", "step", "--seq"], {"--sequence-length"}),
        (["evaluate", "x", "--num"], {"--num-fewshot"}),
        (["fit", "nothing", "--"], set()),
    ],
)
def test_a_shell_completes_what_is_typed(tmp_path, capsys, shell, typed, words):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    command = tmp_path / "nlr"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m nlr_lab "$@"\n')
    command.chmod(0o755)
    script = f"{BEFORE.get(shell, '')}{succeed(capsys, 'completion', shell)}\n{COMPLETES[shell]}"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    start = [shell, "-c", script, *([shell] if shell != "fish" else []), *typed]
    done = subprocess.run(start, capture_output=True, text=True, check=True, env=environment)
    assert set(done.stdout.split()) == words, done.stderr
