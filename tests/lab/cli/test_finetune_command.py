"""`nlr finetune`: what it prints and leaves, and wrong input."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForSequenceClassification

import finetune_helpers as kit
from cli_helpers import refused, run, succeed
from finetune_helpers import glue_command as options
from nlr_lab.recipes import get_recipe
from nlr_lab.training import run as training
from nonlinear_lowrank import UserError
from nonlinear_lowrank.hub import load_model
from seeds import rng


def test_finetune_prints_the_score_and_leaves_an_adapter(root, tmp_path, capsys):
    out = tmp_path / "out"
    lora = options(root, out, "--arm", "lora:r=2", "--lr", "1e-2")
    code, printed, err = run(capsys, *lora)
    assert code == 0, err
    assert "lora-r2: 290 of " in printed
    assert "matthews" in printed
    assert f'base = AutoModelForSequenceClassification.from_pretrained("{root / "bert"}", num_labels=2' in printed
    assert f'model = PeftModel.from_pretrained(base, "{out}/model")' in printed
    assert err.count("step 2/4") == err.count("step 4/4") == 1
    assert "matthews" in err
    assert (out / "model" / "adapter_config.json").is_file()
    assert (out / "model" / "tokenizer.json").is_file()
    assert "--overwrite" in refused(capsys, *lora)
    succeed(capsys, *lora, "--resume")
    succeed(capsys, *options(root, out, "--arm", "head", "--overwrite"))
    assert not (out / "model" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("folder", "head", "labels", "task"),
    [
        ("SST-2", "sentence\tlabel", ("0", "1"), "sst2"),
        ("MNLI", "sentence1\tsentence2\tgold_label", ("entailment", "neutral", "contradiction"), "mnli"),
    ],
)
def test_the_folder_tells_task_labels_and_metric(root, tmp_path, capsys, folder, head, labels, task):
    generator = rng()
    rows = ["\t".join([*(kit.sentence(generator) for _ in head.split("\t")[1:]), label]) for label in 8 * labels]
    (tmp_path / folder).mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / folder / name).write_text("\n".join([head, *rows]))
    out = tmp_path / "out"
    printed = succeed(capsys, *options(root, out, "--source", tmp_path / folder, "--arm", "head"))
    assert re.search(r"^last step: .*accuracy [01]\.", printed, re.MULTILINE)
    assert "matthews" not in printed
    assert json.loads((out / "recipe.json").read_text())["recipe"]["task"]["glue"]["task"] == task
    assert json.loads((out / "model" / "config.json").read_text())["id2label"] == dict(zip("012", labels, strict=False))
    printed = succeed(capsys, "evaluate", out)
    assert "of glue-minilm: accuracy " in printed
    err = refused(capsys, *options(root, tmp_path / "no", "--source", tmp_path / folder, "--glue.task", "cola"))
    assert f"is {folder}'s folder, and the task is CoLA: choose --glue.task {task}" in err
    assert not (tmp_path / "no").exists()


def test_wrong_input_is_one_line_and_leaves_nothing(root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kit.image_task(root)  # its model, which is none of language
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    cases = [
        (["finetune"], "name a recipe first", "glue-minilm"),
        (["finetune", "glue-minlm"], "unknown recipe", "'glue-minilm'"),
        (["finetune", "llm-demo"], "trains a model from scratch", "nlr train llm-demo"),
        (["train", "glue-minilm"], "tunes a pretrained model", "nlr finetune glue-minilm"),
        (options(root, out, "--arm", "baseline"), "baseline changes nothing", "lora"),
        (options(root, out, "--arm", "lora:r=2,grid=1e-3/1e-4"), "nlr compare"),
        (options(root, out, "--arm", "lora:r=2,head_lr=1e-3/1e-4"), "head_lr of several rates is for nlr compare"),
        (options(root, out, "--arm", "lora:r=2,lr=1e-3", "--lr", "1e-2"), "--lr does nothing beside the lr= of --arm"),
        (
            options(root, out, "--arm", "head", "--head-lr", "1e-2"),
            "--head-lr does nothing: the arm head trains",
        ),
        (
            options(root, out, "--arm", "lora:r=2,head_lr=1e-3", "--head-lr", "1e-2"),
            "--head-lr does nothing beside the head_lr= of --arm",
        ),
        (
            ["compare", *options(root, out, "--arms", "head", "lora:head_lr=1e-3", "--head-lr", "1e-2")[1:]],
            "--head-lr does nothing: every arm is head or has its own head_lr=",
        ),
        (
            ["finetune", "instruct-small", "--instructions.valid-source", "a.jsonl", "--held-out", "0.2"],
            "--task.instructions.held-out does nothing: --valid-source is held out whole",
        ),
        (options(root, out, "--arm", "lora:target_modules=nosuch"), "does not fit", "nosuch", "query"),
        (options(root, out, "--checkpoint", "./nowhere"), "no model in ./nowhere"),
        (["finetune", "instruct-small", "--out", out, "--checkpoint", root / "vit"], "vit is a vit"),
        (["finetune", "instruct-small", "--out", out], "runs/llm-demo", "--checkpoint"),
    ]
    for arguments, *words in cases:
        err = refused(capsys, *arguments)
        assert all(word in err for word in words), err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_rate_of_the_user_is_the_default_arms_too(tmp_path, capsys, monkeypatch):
    """On the command line and in a file of settings; a run's own file has its arm."""
    trained = []
    (tmp_path / "mine.toml").write_text("[train]\nlr = 1e-2\n")
    own = replace(get_recipe("instruct-small"), arm="sine-lora:r=4,omega=200,lr=3e-4")
    (tmp_path / "recipe.json").write_text(json.dumps(own.to_dict()))

    def stop(recipe, *_, **__):
        trained.append(recipe)
        raise UserError("stopped")

    monkeypatch.setattr(training, "run_training", stop)
    mine, runs = (["--config", tmp_path / name] for name in ("mine.toml", "recipe.json"))
    for more in ([], runs, ["--learning-rate", "1e-2"], mine):
        refused(capsys, "finetune", "instruct-small", *more)
    assert [(each.arm.lr, each.arm.method) for each in trained] == [
        *[(3e-4, "sine-lora")] * 2,
        *[(None, "sine-lora")] * 2,
    ]
    assert [each.train.lr for each in trained[2:]] == [1e-2, 1e-2]


def test_a_head_rate_that_an_arm_can_use_is_compared(root, tmp_path, capsys):
    arms = ["--arms", "head", "lora:r=2", "--head-lr", "1e-2", "--tune-lr", "--seeds", "1", "--timing-rounds", "0"]
    succeed(capsys, "compare", *options(root, tmp_path / "out", *arms)[1:])


def test_help_shows_the_recipes_settings(capsys):
    out = succeed(capsys, "finetune", "instruct-small", "--help")
    for option in ("--task.instructions.source", "--task.model.checkpoint", "--train.epochs", "--arm"):
        assert option in out


BASES = {  # (options, the base's name in the adapter's config)
    "own": (["--pooling", "own"], "./bert"),
    "mean": (["--pooling", "mean"], "./bert"),
    "packaged": (["--checkpoint", "minilm", "--pooling", "auto"], "minilm"),
}


@pytest.mark.parametrize(("more", "name"), BASES.values(), ids=BASES)
def test_a_moved_run_is_whole_and_names_no_path(root, tmp_path, capsys, more, name):
    """Alone in another place, only the card's last words are needed: where a base is that is a folder."""
    arm = ("--arm", "sine-lora:r=2,omega=200")
    succeed(capsys, *options(root, tmp_path / "out", *more, *arm))
    assert "; whole" in succeed(capsys, "verify", tmp_path / "out")
    scored = succeed(capsys, "evaluate", tmp_path / "out")
    folder = (tmp_path / "out").rename(tmp_path / "moved")
    for file in (each for each in folder.rglob("*") if each.suffix in (".json", ".md") and each.name != "recipe.json"):
        text = file.read_text()
        assert [path for path in (str(tmp_path), str(root), "site-packages") if path in text] == [], file
    assert json.loads((folder / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == name
    assert "; whole" in succeed(capsys, "verify", folder)
    assert succeed(capsys, "evaluate", folder) == scored
    succeed(capsys, "merge", folder, tmp_path / "merged")
    alone = (folder / "model").rename(tmp_path / "alone")
    if name.startswith("./"):
        assert "pass --base" in refused(capsys, "merge", alone, tmp_path / "again")
    succeed(capsys, "merge", alone, tmp_path / "again", *(("--base", root / "bert") if name.startswith("./") else ()))
    models = [load_model(tmp_path / each).state_dict() for each in ("merged", "again")]
    heads = [key for key in models[0] if key.startswith("classifier")]  # all else is the base's
    assert heads
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_base_below_the_working_directory_is_found_by_peft(root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(root)
    out = tmp_path / "out"
    succeed(capsys, *options(root, out, "--arm", "sine-lora:r=2,omega=200"))
    assert json.loads((out / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == "./bert"
    kwargs = {"num_labels": 2, "ignore_mismatched_sizes": True}
    model = AutoPeftModelForSequenceClassification.from_pretrained(out / "model", **kwargs)
    base = AutoModelForSequenceClassification.from_pretrained(root / "bert", **kwargs)
    given = PeftModel.from_pretrained(base, out / "model")
    ids = torch.arange(4, 16)[None]
    assert torch.equal(model(ids).logits, given(ids).logits)


def test_command_on_the_card_makes_the_run(root, tmp_path, capsys, monkeypatch):
    """With settings of every kind: numbers, lists, switches that are on and off, none."""
    more = ["--targets", "query", "key", "--betas", 0.8, 0.99, "--no-group-by-length", "--epochs", "None"]
    more += ["--save-every", 2, "--train-rows", 24, "--scored", "test", "--lr", 3e-3, "--eval-batch-size", 7]
    more += ["--gradient-checkpointing"]
    succeed(capsys, *options(root, tmp_path / "out", *more, "--arm", "sine-lora:r=2,omega=200,lora_dropout=0.1"))
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    command = shlex.split(re.search(r"\| made by \| `(.*)` \|", card)[1])
    assert command[0] == "nlr"
    monkeypatch.chdir(root)  # paths are written by their last part
    succeed(capsys, *command[1:], "--out", tmp_path / "again")
    first, second = (tmp_path / name / "model" / "adapter_model.safetensors" for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()
    recipes = [json.loads((tmp_path / name / "recipe.json").read_text())["recipe"] for name in ("out", "again")]
    for recipe in recipes:
        del recipe["task"]["glue"]["source"], recipe["task"]["model"]["checkpoint"]
    assert recipes[0] == recipes[1]
