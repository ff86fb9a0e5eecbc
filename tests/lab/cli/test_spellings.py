"""Names that transformers, trl and peft have for settings; lengths of training that say what others mean."""

import dataclasses
import json
import re

import pytest
from transformers import TrainingArguments

from cli_helpers import refused, succeed
from nlr_lab.cli.compare import CompareOptions
from nlr_lab.cli.options import parse_recipe
from nlr_lab.cli.spellings import DIFFERENT, SAME
from nlr_lab.cli.train import TrainOptions
from nlr_lab.recipes import get_recipe

VALUES = {"out": "runs/mine", "tracker": "none", "compile_mode": "default", "tokenizer": "gpt2", "compile": None}
VALUES["label_smoothing"] = "0.25"
SCRIPTS = {"block_size", "tokenizer_name", "warmup_ratio"}  # of transformers' example scripts, and of its version 4


def read(*arguments, command="train"):
    options = TrainOptions if command == "train" else CompareOptions
    out = {"out": "runs/x", **({"arm": "baseline"} if command == "train" else {})}
    if command == "compare":
        out |= {"timing_rounds": 0, "seeds": 1, "tune_lr": (), "arms": ("baseline",)}
    recipe, chosen = parse_recipe(options, [*map(str, arguments)], command=command, defaults=lambda recipe: out)
    return recipe.train, recipe.task, chosen.out


def given(name, value):
    option = "--" + name.replace("_", "-")
    return [option] if value is None else [option, value]


@pytest.mark.parametrize("word", SAME)
def test_a_name_of_transformers_acts_as_ours(word):
    assert word in SCRIPTS or word in {each.name for each in dataclasses.fields(TrainingArguments)}
    value = VALUES.get(SAME[word], "0.25" if "ratio" in word else "40")
    more = ("--compile",) if SAME[word] == "compile_mode" else ()
    plain = read("llm-demo")
    theirs, ours = (read("llm-demo", *given(name, value), *more) for name in (word, SAME[word]))
    assert theirs == ours
    assert SAME[word] == "compile_mode" or ours != plain
    assert read("llm-demo", *[f"--{word}"] if value is None else [f"--{word}={value}"], *more) == ours


@pytest.mark.parametrize("word", DIFFERENT)
def test_a_name_of_another_tool_is_answered_by_ours(capsys, word):
    ours, how = DIFFERENT[word]
    option = given(ours.rpartition(".")[2], None)[0]
    command = ["inspect", "--spectrum", "x"] if ours == "picture" else ["finetune", "instruct-small"]
    err = refused(capsys, *command, *given(word, "1"))
    assert err == f"nlr: {given(word, None)[0]}: {how.format(option)}\n"
    if ours == "arm":
        assert how.format("--arms") in refused(capsys, "compare", "llm-demo", *given(word, "1"))
    # Where there is no such setting, it is as any other word.
    assert "unrecognized argument" in refused(capsys, "verify", "x", *given(word, "1"))


def test_warmup_of_one_kind_replaces_that_of_the_other(tmp_path):
    for recipe, option, expected in (
        ("vit-demo", ("--warmup-steps", "2"), (2, 0.0)),
        ("llm-demo", ("--warmup-ratio", "0.25"), (0, 0.25)),
        ("vit-demo", ("--warmup-steps", "0"), (0, 0.0)),
    ):
        train, _, _ = read(recipe, *option)
        assert (train.warmup_steps, train.warmup_share) == expected
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nwarmup_steps = 7\n")
    train, _, _ = read("vit-demo", "--config", file, "--warmup-share", "0.5")
    assert (train.warmup_steps, train.warmup_share) == (0, 0.5)


def test_settings_of_other_commands_are_named_and_ignored(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('name = "llm-demo"\nseeds = 5\n[train]\nlr = 0.5\n')
    assert read("--config", file)[0].lr == 0.5
    said = f"--config {file}: seeds is not a setting of this command, and is ignored\n"
    assert capsys.readouterr().err == said, "the name is not ignored"
    file = tmp_path / "recipe.json"
    file.write_text('{"recipe": {"seeds": 5, "train": {"lr": 0.25}}}')
    assert read("llm-demo", "--config", file)[0].lr == 0.25
    assert capsys.readouterr().err == ""


def test_a_file_may_have_names_of_transformers(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text("learning_rate: 3e-3\nmax_steps: 60\nreport_to: none\noutput_dir: runs/y\n")
    train, _, out = read("llm-demo", "--config", file)
    assert (train.lr, train.steps, train.tracker, out) == (3e-3, 60, "none", "runs/y")
    file.write_text("per_device_train_batch_size: 4\n")
    assert "--batch-size" in refused(capsys, "train", "llm-demo", "--config", file)


@pytest.mark.parametrize(
    ("options", "steps", "epochs", "warmup", "share"),
    [
        ([], 300, None, 30, 0.0),
        (["--steps", "20"], 20, None, 2, 0.0),
        (["--steps", "3"], 3, None, 1, 0.0),
        (["--steps", "1"], 1, None, 0, 0.0),
        (["--steps", "600"], 600, None, 30, 0.0),
        (["--steps=20", "--warmup-steps=15"], 20, None, 15, 0.0),
        (["--steps=20", "--warmup-share", "0.5"], 20, None, 0, 0.5),
        (["--steps=20", "--warmup-steps=0", "--warmup-share", "0.5"], 20, None, 0, 0.5),
        (["--epochs", "2"], 0, 2.0, 0, 0.1),
        (["--epochs", "2", "--warmup-steps", "7"], 0, 2.0, 7, 0.0),
    ],
)
def test_a_length_says_what_the_others_are(capsys, options, steps, epochs, warmup, share):
    train, _, _ = read("llm-demo", *options)
    assert (train.steps, train.epochs, train.warmup_steps, train.warmup_share) == (steps, epochs, warmup, share)
    note = capsys.readouterr().err
    expected = f"note: warm-up shortened from 30 to {warmup} steps (--warmup-steps)\n"
    assert note == (expected if options in (["--steps", "20"], ["--steps", "3"], ["--steps", "1"]) else "")


def test_a_length_is_that_of_the_file_that_it_changes(tmp_path, capsys):
    file = tmp_path / "recipe.json"
    whole = dataclasses.replace(get_recipe("llm-demo").train, steps=1000, warmup_steps=200)
    file.write_text(json.dumps({"recipe": {"name": "llm-demo", "train": dataclasses.asdict(whole)}}))
    assert read("--config", file)[0].warmup_steps == 200
    assert read("--config", file, "--steps", "500")[0].warmup_steps == 100
    assert read("--config", file, "--epochs", "3")[0].warmup_share == 0.2
    file.write_text('{"train": {"steps": 500, "warmup_steps": 0}}')
    assert read("llm-demo", "--config", file, "--steps", "50")[0].warmup_steps == 0
    file.write_text('{"train": {"epochs": 2}}')
    train = read("llm-demo", "--config", file)[0]
    assert (train.steps, train.epochs, train.warmup_share) == (0, 2, 0.1)
    assert read("llm-demo", "--config", file, "--steps", "50")[0].steps == 50
    assert re.search("omit one", refused(capsys, "train", "llm-demo", "--steps", "50", "--epochs", "2"))


@pytest.mark.parametrize(
    "command", ["compare llm-demo", "compare image-demo", "evaluate", "generate", "inspect", "plan"]
)
def test_help_shows_kinds_of_values_and_none(capsys, command):
    out = succeed(capsys, *command.split(), "--help")
    assert "{None}" not in out
    assert "default: None" not in out


@pytest.mark.parametrize("text", ["none", "None"])
def test_what_may_be_left_open_takes_none(text):
    assert read("llm-demo", "--threads", text)[0].threads is None
    assert read("llm-demo", "--max-bytes", text)[1].text.max_bytes is None
    assert read("llm-demo", "--threads", "2")[0].threads == 2
