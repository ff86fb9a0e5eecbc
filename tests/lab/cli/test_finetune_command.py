"""`nlr finetune`: what it prints and leaves, and wrong input."""

import json
import re

import pytest

import finetune_helpers as kit
from cli_helpers import refused, run, succeed
from seeds import rng

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Tiny checkpoints and data, made once."""
    return kit.root(tmp_path_factory.mktemp("data"))


def options(root, out, *more):
    return [
        *("finetune", "glue-minilm", "--checkpoint", root / "bert", "--source", root / "glue", "--steps", 4),
        *("--pooling", "own", "--eval-every", 2, "--batch-size", 4, "--max-length", 32, "--threads", 1),
        *("--tracker", "none", "--out", out, *more),
    ]


def test_finetune_prints_the_score_and_leaves_an_adapter(root, tmp_path, capsys):
    out = tmp_path / "out"
    lora = options(root, out, "--arm", "lora:r=2", "--lr", "1e-2")
    code, printed, err = run(capsys, *lora)
    assert code == 0, err
    assert "lora-r2: 290 of " in printed
    assert "matthews" in printed
    assert f'AutoPeftModelForSequenceClassification.from_pretrained("{out}/model", num_labels=2' in printed
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
    bad = tmp_path / "bad" / "CoLA"
    bad.mkdir(parents=True)
    (bad / "train.tsv").write_text("id\ttext\n1\tA\n")
    (tmp_path / "bad.jsonl").write_text('{"instruction": "x", "output": "y"}\n{"instruction": "x"}\n')
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    small = ["--checkpoint", root / "llama", "--out", out, "--arm", "lora:r=2"]
    cases = [
        (["finetune"], "name a recipe first", "glue-minilm"),
        (["finetune", "glue-minlm"], "unknown recipe", "'glue-minilm'"),
        (["finetune", "llm-demo"], "trains a model from scratch", "nlr train llm-demo"),
        (["train", "glue-minilm"], "tunes a pretrained model", "nlr finetune glue-minilm"),
        (options(root, out, "--arm", "loro:r=2"), "unknown arm 'loro:r=2'", "sine-lora"),
        (options(root, out, "--arm", "baseline"), "baseline changes nothing", "lora"),
        (options(root, out, "--arm", "lora:r=2,grid=1e-3/1e-4"), "nlr compare"),
        (options(root, out, "--arm", "lora:target_modules=nosuch"), "does not fit", "nosuch", "query"),
        (options(root, out, "--source", tmp_path / "bad"), "train.tsv", "sentence, label", "id, text"),
        (options(root, out, "--checkpoint", "./nowhere"), "no model in ./nowhere"),
        (options(root, out, "--glue.task", "colla"), "unknown GLUE task"),
        (["finetune", "instruct-small", "--source", tmp_path / "bad.jsonl", *small], "line 2", "output"),
        (["finetune", "instruct-small", "--out", out, "--checkpoint", root / "vit"], "vit is a vit"),
        (["finetune", "instruct-small", "--out", out], "runs/llm-demo", "--checkpoint"),
    ]
    for arguments, *words in cases:
        err = refused(capsys, *arguments)
        assert all(word in err for word in words), err
        assert sorted(tmp_path.rglob("*")) == before


def test_help_shows_the_recipes_settings(capsys):
    out = succeed(capsys, "finetune", "instruct-small", "--help")
    for option in ("--task.instructions.source", "--task.model.checkpoint", "--train.epochs", "--arm"):
        assert option in out
