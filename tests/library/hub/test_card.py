"""Model cards: what `nlr train`, `finetune`, `convert` and `merge` write beside the weights."""

import json
import re
import shlex
import shutil
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

import finetune_helpers
import nonlinear_lowrank as nlr
from cli_helpers import python_prints, succeed
from model_helpers import llama
from nlr_lab.recipes import RECIPES, get_recipe
from nlr_lab.training import run_training
from nlr_lab.training.run_folder import command_of
from nonlinear_lowrank.hub.card import shown_name, write_card
from nonlinear_lowrank.hub.verify import verify
from training_helpers import FakeText, make_recipe


def card_of(folder, *words):
    """The card, read by the hub's own class, which has these words and no path; the folder is whole with it."""
    assert verify(folder).faults == []
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"))
    assert str(folder.parent) not in str(card)
    assert [word for word in words if word not in card.text] == []
    return card


def test_a_strangers_names_are_no_markup():
    assert shown_name("a/b-c.d") == "a/b-c.d"
    assert shown_name("/models/x\x1b[1m](javascript:alert)<b>\n# y") == "x__1m__javascript:alert__b___ y"
    assert shown_name("/cache/models--a--b](c)/snapshots/1") == "a/b__c_"


def loading_lines(card):
    return re.search(r"## Loading\n\n```python\n(.*?)\n```", card.text, re.DOTALL)[1]


def test_training_writes_a_card(tmp_path):
    result = run_training(make_recipe(steps=4), tmp_path / "run", prepared=FakeText(), quiet=True)
    folder = tmp_path / "run" / "model"
    loss, version = f"| evaluation loss | {result.final_loss:.6g} |", f"| nonlinear-lowrank | {nlr.__version__} |"
    numbers = ("| rank | 4 |", "n = 1", loss, FakeText().fingerprint, '"train.batch_size": 4', version)
    card = card_of(folder, *numbers, "cannot be merged")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"nonlinear-lowrank", "noble"} <= set(card.data.tags)
    assert card.data.base_model is None
    assert "| made by | `run_training(recipe, out), a recipe 'tiny' of its own` |" in card.text
    with (folder / "README.md").open("a") as file:  # people add their own words: the folder stays whole
        file.write("Our own words.\n")
    assert verify(folder).faults == []
    # The three lines load it, in a process that has seen nothing of ours before.
    code = loading_lines(card).replace('"this folder"', repr(str(folder)))
    assert len(code.splitlines()) == 3
    assert int(python_prints(f"{code}\nprint(sum('noble_up' in name for name in model.state_dict()))").split()[-1]) > 0


def test_training_a_baseline_writes_a_card_without_an_import(tmp_path):
    run_training(make_recipe(arm="baseline", steps=2), tmp_path / "run", prepared=FakeText(), quiet=True)
    card = card_of(tmp_path / "run" / "model")
    assert "nonlinear_lowrank" not in loading_lines(card)
    assert "cannot be merged" not in card.text
    assert "Method" not in card.text


def test_finetuning_and_merging_write_cards(tmp_path, capsys):
    root = finetune_helpers.root(tmp_path / "data")
    out, merged = tmp_path / "out", tmp_path / "merged"
    succeed(capsys, *finetune_helpers.glue_command(root, out, "--arm", "sine-lora:r=2,omega=200"))
    record = json.loads((out / "data.json").read_text())
    about = (record["sources"]["glue.source"]["sha256"], "nlr finetune glue-minilm --arm sine-lora", "matthews")
    card = card_of(out / "model", "| omega | 200", "| base model | bert |", *about)
    assert "More Information Needed" not in card.text  # of peft's empty template
    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # it is a folder, which the hub would refuse
    assert loading_lines(card).startswith("import nonlinear_lowrank\n")
    succeed(capsys, "merge", out, merged)
    card = card_of(merged, "nlr merge", "max |difference|")
    assert card.data.library_name == "transformers"
    assert card.data.base_model is None
    assert "nonlinear_lowrank" not in loading_lines(card)


@pytest.mark.parametrize("name", [name for name, entry in RECIPES.items() if entry.command in ("train", "finetune")])
def test_command_of_a_recipe_as_it_is_names_no_setting(name):
    recipe = get_recipe(name)
    command = f"nlr {RECIPES[name].command} {name} --arm {shlex.quote(str(recipe.arm))}"
    assert command_of(recipe) == command
    changed = replace(recipe, train=replace(recipe.train, seed=3, bf16=not recipe.train.bf16))
    assert command_of(changed) == f"{command} --train.{'no-' if recipe.train.bf16 else ''}bf16 --train.seed=3"


def test_converting_writes_a_card(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "plain")
    cached = tmp_path / "models--org--tiny" / "snapshots" / "0a1b"
    shutil.copytree(tmp_path / "plain", cached)
    succeed(capsys, "convert", cached, tmp_path / "of-cache", "--rank", 3)
    card_of(tmp_path / "of-cache", "# org/tiny with", "| base model | org/tiny |")
    (tmp_path / "plain" / "README.md").write_text("mine")
    succeed(capsys, "convert", tmp_path / "plain", tmp_path / "out", "--rank", 3)
    card_of(tmp_path / "out", "bit-equal", "| base model | plain |", "| rank | 3 |")
    assert (tmp_path / "plain" / "README.md").read_text() == "mine"
    (tmp_path / "out" / "README.md").write_text("mine")
    write_card(tmp_path / "out", title="x", summary="y", command="z")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
