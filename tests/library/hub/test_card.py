"""Model cards: what `nlr train`, `finetune`, `convert` and `merge` write beside the weights."""

import json
import re

import pytest
from huggingface_hub import ModelCard

import finetune_helpers
import nonlinear_lowrank as nlr
from adapter_helpers import PEFT_WARNINGS
from cli_helpers import run, run_python
from model_helpers import llama
from nlr_lab.training import run_training
from nonlinear_lowrank.hub.card import write_card
from nonlinear_lowrank.hub.verify import verify
from training_helpers import FakeText, make_recipe

pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS, "ignore:.*is_gradient_checkpointing.*:FutureWarning")


def card_of(folder):
    """The card, read by the hub's own class; the folder is whole with it."""
    assert verify(folder).faults == []
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def loading_lines(card):
    return re.search(r"## Loading\n\n```python\n(.*?)\n```", card.text, re.DOTALL)[1]


def check_no_paths(card, *folders):
    for folder in folders:
        assert str(folder) not in str(card)


def test_training_writes_a_card(tmp_path):
    result = run_training(make_recipe(steps=4), tmp_path / "run", prepared=FakeText(), quiet=True)
    folder = tmp_path / "run" / "model"
    card = card_of(folder)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"nonlinear-lowrank", "noble"} <= set(card.data.tags)
    assert card.data.base_model is None
    assert "| rank | 4 |" in card.text
    assert "n = 1" in card.text
    assert f"| evaluation loss | {result.final_loss:.6g} |" in card.text
    assert FakeText().fingerprint in card.text
    assert '"train.batch_size": 4' in card.text
    assert "cannot be merged" in card.text
    assert f"| nonlinear-lowrank | {nlr.__version__} |" in card.text
    check_no_paths(card, tmp_path)
    with (folder / "README.md").open("a") as file:  # people add their own words: the folder stays whole
        file.write("Our own words.\n")
    assert verify(folder).faults == []
    # The three lines load it, in a process that has seen nothing of ours before.
    code = loading_lines(card).replace('"this folder"', repr(str(folder)))
    assert len(code.splitlines()) == 3
    done = run_python(f"{code}\nprint(sum('noble_up' in name for name in model.state_dict()))")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0


def test_training_a_baseline_writes_a_card_without_an_import(tmp_path):
    run_training(make_recipe(arm="baseline", steps=2), tmp_path / "run", prepared=FakeText(), quiet=True)
    card = card_of(tmp_path / "run" / "model")
    assert "nonlinear_lowrank" not in loading_lines(card)
    assert "cannot be merged" not in card.text
    assert "Method" not in card.text


def test_finetuning_and_merging_write_cards(tmp_path, capsys):
    root = finetune_helpers.root(tmp_path / "data")
    out, merged = tmp_path / "out", tmp_path / "merged"
    options = [
        *("finetune", "glue-minilm", "--checkpoint", root / "bert", "--source", root / "glue", "--steps", 2),
        *("--pooling", "own", "--eval-every", 2, "--batch-size", 4, "--max-length", 32, "--threads", 1),
        *("--tracker", "none", "--out", out, "--arm", "sine-lora:r=2,omega=200"),
    ]
    code, _, err = run(capsys, *options)
    assert code == 0, err
    card = card_of(out / "model")
    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # it is a folder, which the hub would refuse
    assert "| omega | 200" in card.text
    assert "| base model | bert |" in card.text
    assert "nlr finetune glue-minilm --arm sine-lora" in card.text
    record = json.loads((out / "data.json").read_text())
    assert record["sources"]["glue.source"]["sha256"] in card.text
    assert "matthews" in card.text
    assert "### Framework versions" in card.text  # peft's part is still there
    assert loading_lines(card).startswith("import nonlinear_lowrank\n")
    check_no_paths(card, tmp_path)

    code, _, err = run(capsys, "merge", out, merged)
    assert code == 0, err
    card = card_of(merged)
    assert card.data.library_name == "transformers"
    assert "nlr merge" in card.text
    assert "max |difference|" in card.text
    assert "nonlinear_lowrank" not in loading_lines(card)
    check_no_paths(card, tmp_path)


def test_converting_writes_a_card(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "README.md").write_text("mine")
    code, _, err = run(capsys, "convert", tmp_path / "plain", tmp_path / "out", "--rank", 3)
    assert code == 0, err
    card = card_of(tmp_path / "out")
    assert "bit-equal" in card.text
    assert "| base model | plain |" in card.text
    assert "| rank | 3 |" in card.text
    assert (tmp_path / "plain" / "README.md").read_text() == "mine"
    check_no_paths(card, tmp_path)
    (tmp_path / "out" / "README.md").write_text("mine")
    write_card(tmp_path / "out", title="x", summary="y", command="z")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
