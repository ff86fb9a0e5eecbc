"""GLUE: every layout of its files, what is refused, the splits, the scores, and the new heads."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import finetune_helpers as kit
from cli_helpers import run_python
from nlr_lab.tasks.finetune.classification import GLUE, GlueData, GlueTask, find_task, read_split, read_tsv
from nlr_lab.tasks.finetune.pretrained import Pretrained, head_modules
from nlr_lab.tasks.finetune.sequences import PadRight, TokenExamples
from nlr_lab.tasks.task import hold_out, scores
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.pooled import MeanPooledForSequenceClassification
from refusals import assert_refused
from seeds import rng

# Quotation marks that never close, and a break that str.splitlines would split at.
ODD, BREAK = 'he said "no', "a\u2028b"
OFFICIAL = f"\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t{ODD}\tB\n0\t9\t10\tC\t{ODD}\n"
STS = "index\tgenre\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n0\tg\t1\tn\tn\tA\tB\t3.800\n"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tQ\tR\t1\n"
MNLI = "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tP\tH\tneutral\tcontradiction\n"
PAIRS = "index\tsentence1\tsentence2\tlabel\n0\tP\tH\t"
LAYOUTS = {
    # task, file, contents, texts, labels, and the tasks that its columns and labels fit where it is not one alone
    "cola-bare": ("cola", "train.tsv", f"g\t1\t\tA {ODD}\ng\t0\t*\t{BREAK}\n", [(f"A {ODD}",), (BREAK,)], [1, 0], ""),
    "cola": ("cola", "train.tsv", "source\tlabel\tsentence\nx\t0\tHello\n", [("Hello",)], [0], "cola or sst2"),
    "sst2": ("sst2", "dev.tsv", "sentence\tlabel\nA\t1\r\nB\t0\r\n", [("A",), ("B",)], [1, 0], "cola or sst2"),
    "mrpc-official": ("mrpc", "msr_paraphrase_train.txt", OFFICIAL, [(ODD, "B"), ("C", ODD)], [1, 0], ""),
    "mrpc": ("mrpc", "test.tsv", f"{PAIRS}1\n", [("P", "H")], [1], "mrpc or stsb or mnli or rte or wnli"),
    "stsb": ("stsb", "train.tsv", STS, [("A", "B")], [3.8], ""),
    "stsb-bare": ("stsb", "sts-test.csv", "g\tf\t2012\t0001\t5.000\tA\tB\n", [("A", "B")], [5.0], ""),
    "qqp": ("qqp", "train.tsv", QQP, [("Q", "R")], [1], ""),
    "mnli": ("mnli", "dev_matched.tsv", MNLI, [("P", "H")], [2], ""),
    "qnli": ("qnli", "dev.tsv", "question\tsentence\tlabel\nQ\tS\tnot_entailment\n", [("Q", "S")], [1], ""),
    "rte": ("rte", "train.tsv", f"{PAIRS}entailment\n", [("P", "H")], [0], "mnli or rte"),
    "wnli": ("wnli", "train.tsv", f"{PAIRS}1\n", [("P", "H")], [1], "mrpc or stsb or mnli or rte or wnli"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_and_tells_its_task(tmp_path, name, monkeypatch):
    task, file, text, texts, labels, unclear = LAYOUTS[name]
    own, mine = tmp_path / GLUE[task].folder, tmp_path / "mine"
    own.mkdir()
    (own / file).write_bytes(text.encode())
    split = "test" if "test" in file else "train" if "train" in file else "dev"
    for source in (tmp_path, own):  # the folder of all tasks, and the task's own
        rows = read_split(task, str(source), split)
        assert rows.texts == texts
        assert rows.labels.tolist() == pytest.approx(labels)
        assert rows.labels.dtype == (np.float32 if task == "stsb" else np.int64)
    train = file if file.startswith("msr") else "train.tsv"
    (own / file).rename(own / train)
    assert find_task(str(own)) == task
    monkeypatch.chdir(own)
    assert GlueData(task="auto", source=".").name == task
    shutil.copytree(own, mine)
    if unclear:
        assert_refused(rf"mine may be {unclear}; name the task, e\.g\. --glue\.task", find_task, str(mine))
    else:
        assert find_task(str(mine)) == task
    assert read_split(task, str(mine), "train").texts == texts, "named, it is read"


def test_a_folder_tells_its_task_by_what_is_in_it(tmp_path):
    assert find_task("nyu-mll/glue") == "cola"
    (tmp_path / "imdb").mkdir()
    file = tmp_path / "imdb" / "train.tsv"
    file.write_text("text\tstars\nfine\t1\n")
    for folder in (tmp_path, tmp_path / "imdb"):
        assert_refused(r"holds no task of GLUE .*--glue\.task cola", find_task, str(folder))
    for label, task in (("not_entailment", "rte"), ("neutral", "mnli")):  # labels tell what columns do not
        file.write_text(f"{PAIRS}entailment\n1\tA\tB\t{label}\n")
        assert find_task(str(file.parent)) == task
    (tmp_path / "SST-2").mkdir()
    assert find_task(str(tmp_path)) == "sst2"
    (tmp_path / "mnli").mkdir()
    assert_refused("may be mnli or sst2", find_task, str(tmp_path))
    (tmp_path / "CoLA").mkdir()
    assert find_task(str(tmp_path)) == "cola"


@pytest.mark.parametrize(
    ("task", "text", "words"),
    [
        ("cola", "source\tlabel\ttext\nx\t1\tA\n", ["train.tsv", "sentence, label", "source, label, text"]),
        ("cola", "a\tb\tc\td\n", ["line 1", "'b'", "CoLA has 0, 1"]),
        ("mrpc", "Quality\t#1 String\n1\tA\n", ["sentence2/#2 String", "line 1"]),
        ("rte", "sentence1\tsentence2\tlabel\nA\tB\tentailment\nA\tB\n", ["line 3", "2 fields", "3 columns"]),
        ("rte", f"{PAIRS}maybe\n", ["line 2", "'maybe'", "entailment, not_entailment"]),
        ("rte", f"{PAIRS}-1\n", ["line 2", "'-1'", "without labels"]),
        ("stsb", f"{PAIRS}5.5\n", ["line 2", "'5.5'", "numbers from 0 to 5"]),
        ("stsb", f"{PAIRS}very\n", ["line 2", "'very'"]),
        ("cola", "", ["empty"]),
        ("cola", "sentence\tlabel\n", ["no rows"]),
        ("cola", b"sentence\tlabel\n\xff\xfe\t1\n", ["line 2 is not UTF-8"]),
    ],
)
def test_files_that_do_not_fit_are_one_line(tmp_path, task, text, words):
    path = tmp_path / "train.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for word in words:
        assert_refused(re.escape(word), read_tsv, path, task)


def test_licences_behind_the_sentences_of_the_sts_benchmark_are_left_out(tmp_path):
    path, row = tmp_path / "sts-test.csv", "g\tf\t2012\t0001\t5.000\tA\tB"
    for first, second in (("", "\tL\tM"), ("\tL\tM", "")):
        path.write_text(f"{row}{first}\n{row}{second}\n")
        assert read_tsv(path, "stsb").texts == [("A", "B")] * 2
    path.write_text(f"{row}\ng\tf\t2012\t0001\t5.000\tA\n")
    assert_refused("line 2: 6 fields where the file has 7 columns", read_tsv, path, "stsb")
    path.write_text(f"{STS.splitlines()[0]}\n{STS.splitlines()[1]}\tL\n")
    assert_refused("line 2: 9 fields where the file has 8 columns", read_tsv, path, "stsb")


def test_sources_that_do_not_fit(tmp_path):
    nowhere, sst2 = str(tmp_path / "nowhere"), tmp_path / "SST-2"
    sst2.mkdir()
    (sst2 / "train.tsv").write_text("sentence\tlabel\nfine\t1\n")  # CoLA's columns: it would be scored by a correlation
    for task, source, words in (
        ("rte", str(tmp_path), "no train split of RTE"),
        ("rte", nowhere, "is not a folder"),
        ("rte", "no/such", "cannot load the dataset 'no/such'"),
        ("cola", str(sst2), r"is SST-2's folder, and the task is CoLA: choose --glue\.task sst2, or give"),
    ):
        assert_refused(words, read_split, task, source, "train")
    assert_refused("is not a folder", find_task, nowhere)


def test_a_dataset_gives_the_same_as_a_file(monkeypatch):
    from datasets import Dataset

    asked = []
    found = Dataset.from_dict({"premise": ["P"], "hypothesis": ["H"], "label": [1], "idx": [0]})
    monkeypatch.setattr("datasets.load_dataset", lambda *words, split: asked.append((*words, split)) or found)
    rows = read_split("mnli", "nyu-mll/glue", "dev")
    assert (rows.texts, rows.labels.tolist()) == ([("P", "H")], [1])
    assert asked == [("nyu-mll/glue", "mnli", "validation_matched")]


SIZES = {
    "cola": {"train": 8551, "dev": 1043},
    "mrpc": {"train": 3668, "dev": 408, "test": 1725},
    "rte": {"train": 2490, "dev": 277},
    "stsb": {"train": 5749, "dev": 1500, "test": 1379},
}


@pytest.mark.shared_data
@pytest.mark.parametrize("task", SIZES)
def test_the_published_numbers_of_rows(shared_data, task):
    for split, size in SIZES[task].items():
        rows = read_split(task, str(shared_data / "glue"), split)
        assert len(rows.texts) == len(rows.labels) == size
        assert all(text.strip() for row in rows.texts for text in row)


def texts_of(task, examples):
    tokenizer = task.model.tokenizer()
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in examples.ids]


def test_three_sets_apart(tmp_path):
    task = kit.glue_task(tmp_path, held_out=0.25)
    prepared = task.prepare()
    rows = read_split("cola", task.glue.source, "train")
    assert prepared.describe()["rows"] == {"train": 30, "held out": 10, "dev": 20}
    assert (len(prepared.train), len(prepared.valid), len(prepared.test)) == (30, 10, 20)
    train, valid = texts_of(task, prepared.train), texts_of(task, prepared.valid)
    known = {text: label for (text,), label in zip(rows.texts, rows.labels.tolist(), strict=True)}
    assert sorted(train + valid) == sorted(text for (text,) in rows.texts)
    for texts, examples in ((train, prepared.train), (valid, prepared.valid)):
        assert [known[text] for text in texts] == [int(label) for label in examples.labels]
    dev = read_split("cola", task.glue.source, "dev")
    assert sorted(texts_of(task, prepared.test)) == sorted(text for (text,) in dev.texts)
    whole = kit.glue_task(tmp_path, held_out=0.0).prepare()
    assert (len(whole.train), len(whole.valid), whole.test) == (40, 20, None)
    fewer = kit.glue_task(tmp_path, train_rows=10)
    assert len(chosen := texts_of(fewer, fewer.prepare().train)) == 9
    assert chosen != texts_of(fewer, kit.glue_task(tmp_path).prepare().train)[:9]


def test_what_is_seen_is_in_the_fingerprint(tmp_path):
    task = kit.glue_task(tmp_path)
    changed = [kit.glue_task(tmp_path, **each) for each in ({"held_out": 0.2}, {"train_rows": 30}, {"task": "stsb"})]
    prints = [each.prepare().fingerprint for each in (task, task, *changed)]
    path = tmp_path / "glue" / "CoLA" / "dev.tsv"
    path.write_text(path.read_text().replace("\t0\t", "\t1\t", 1))
    prints.append(task.prepare().fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


def test_pairs_are_told_apart_and_cut(tmp_path):
    task = kit.glue_task(tmp_path, "stsb")
    item = task.prepare().train[0]
    first = int((item["input_ids"] == 3).nonzero()[0])
    assert item["token_type_ids"].tolist() == [int(place > first) for place in range(len(item["input_ids"]))]
    assert item["labels"].dtype == torch.float32
    short = replace(task, glue=replace(task.glue, max_length=8)).prepare()
    assert max(len(ids) for ids in short.train.ids) == 8
    assert short.describe()["rows_of_max_length"] > 0


def test_padding_is_on_the_right_and_masked():
    ids = [np.array([5, 6, 7], dtype=np.int32), np.array([8], dtype=np.int32)]
    examples = TokenExamples(ids, np.array([1, 0]), token_type_ids=[np.array([0, 1, 1]), np.array([0])])
    batch = PadRight(pad_id=9)([examples[0], examples[1]])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "token_type_ids": [[0, 1, 1], [0, 0, 0]],
        "labels": [1, 0],
    }
    tokens = TokenExamples(ids, ids)
    batch = PadRight(pad_id=9, multiple=4)([tokens[0], tokens[1]])
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert PadRight(pad_id=0, length=6)([tokens[1]])["input_ids"].shape == (1, 6)


def test_scores_are_their_formulas():
    generator = rng()
    labels, logits = generator.integers(0, 2, 200), generator.normal(size=(200, 2))
    logits[np.arange(200), labels] += 0.5
    guess, target = logits.argmax(-1), generator.uniform(0, 5, 200)
    found = scores(("matthews", "accuracy", "f1"))(logits, labels)
    both = 2 * (guess & labels).sum() / (guess.sum() + labels.sum())
    expected = {"matthews": np.corrcoef(guess, labels)[0, 1], "accuracy": (guess == labels).mean(), "f1": both}
    assert found == pytest.approx(expected)
    near = target + generator.normal(size=200)
    ranks = np.corrcoef(*(np.argsort(np.argsort(each)) for each in (near, target)))[0, 1]
    expected = {"pearson": np.corrcoef(near, target)[0, 1], "spearman": ranks}
    assert scores(("pearson", "spearman"))(near[:, None], target) == pytest.approx(expected)
    constant, labels = np.array([[1.0, 0.0]] * 3), np.array([0, 1, 1])
    assert set(scores(("matthews", "f1", "pearson", "spearman"))(constant, labels).values()) == {0.0}


@pytest.mark.parametrize("pooling", ["own", "mean"])
def test_the_head_is_drawn_from_the_seed_alone(tmp_path, pooling):
    task = kit.glue_task(tmp_path, pooling=pooling)
    prepared, state = task.prepare(), torch.get_rng_state()
    one = task.build_model(prepared, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    torch.manual_seed(2)
    two, other = (task.build_model(prepared, seed=seed).classifier.weight for seed in (3, 4))
    assert head_modules(one) == ("classifier",)
    assert torch.equal(one.classifier.weight, two)
    assert not torch.equal(one.classifier.weight, other)
    assert 0.005 < one.classifier.weight.std() < 0.05
    assert not one.classifier.bias.any()
    assert one.config.id2label == {0: "0", 1: "1"}


def test_the_own_head_of_a_checkpoint_is_drawn_anew(tmp_path):
    """A regression head on a classifier's checkpoint, whose problem type must not stay."""
    from transformers import AutoModelForSequenceClassification

    kit.encoder(tmp_path / "bert")
    old = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", num_labels=2)
    with torch.no_grad():
        old.classifier.weight.fill_(7.0)
    old.config.problem_type = "single_label_classification"
    kit.save(old, tmp_path / "tuned")
    for labels in (2, 1):
        model = Pretrained(checkpoint=str(tmp_path / "tuned"), pooling="own").load("text", labels, 0)
        assert model.classifier.weight.shape == (labels, 16)
        assert model.classifier.weight.abs().max() < 1
        assert torch.equal(model.bert.embeddings.word_embeddings.weight, old.bert.embeddings.word_embeddings.weight)
    target = torch.tensor([0.5, 4.0])
    output = model(input_ids=torch.tensor([[2, 5, 3], [2, 6, 3]]), labels=target)
    assert output.loss.item() == pytest.approx(((output.logits[:, 0] - target) ** 2).mean().item(), rel=1e-5)


def test_an_untrained_pooler_counts_as_head(tmp_path):
    """A language model's checkpoint has none, and a frozen random one would be in the way of every arm."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig.from_pretrained(kit.encoder(tmp_path / "bert"))
    kit.save(BertForMaskedLM(config), tmp_path / "mlm")
    task = GlueTask(glue=GlueData(task="cola"), model=Pretrained(checkpoint=str(tmp_path / "mlm"), pooling="own"))
    one, two = (task.model.load("text", 2, 5) for _ in range(2))
    assert task.adapter_setup(one).head == ("classifier", "bert.pooler")
    assert torch.equal(one.bert.pooler.dense.weight, two.bert.pooler.dense.weight)


def test_mean_pooling_is_the_mean_over_tokens_and_padding_is_nothing(tmp_path):
    task = kit.glue_task(tmp_path, pooling="mean")
    model = task.build_model(task.prepare()).eval()
    assert isinstance(model, MeanPooledForSequenceClassification)
    assert not any("pooler" in name for name, _ in model.named_parameters())
    ids, padded = torch.tensor([[2, 5, 6, 7, 3]]), torch.tensor([[2, 5, 6, 7, 3, 0, 0]])
    mask = (torch.arange(7) < 5).long()[None]
    with torch.no_grad():
        hidden = model.encoder(input_ids=ids).last_hidden_state[0].double()
        expected = hidden.mean(0) @ model.classifier.weight.double().T + model.classifier.bias.double()
        for logits in (model(input_ids=ids).logits, model(input_ids=padded, attention_mask=mask).logits):
            assert logits[0].double().numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-6)


def test_a_mean_pooled_base_is_found_by_a_folder_of_one_file(tmp_path):
    from transformers import AutoModelForSequenceClassification

    kit.encoder(tmp_path / "bert")
    pretrained = Pretrained(checkpoint=str(tmp_path / "bert"), pooling="mean")
    model = pretrained.load("text", 3, 0)
    model.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    model.write_base(tmp_path / "base")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["config.json"]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", attn_implementation="eager")
    assert (again.num_labels, again.config.id2label) == (3, {0: "no", 1: "maybe", 2: "yes"})
    assert again.encoder.config._attn_implementation == "eager"
    for (name, one), two in zip(model.encoder.named_parameters(), again.encoder.parameters(), strict=True):
        assert torch.equal(one, two), name
    kit.save(model, tmp_path / "whole")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert torch.equal(whole.classifier.weight, model.classifier.weight)
    meta = pretrained.on_meta("text", 3)
    shapes = [{name: each.shape for name, each in found.named_parameters()} for found in (meta, model)]
    assert shapes[0] == shapes[1]
    (tmp_path / "bert").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"was in \./bert; run where"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    # A process without this package fails by the type.
    code = "from transformers import AutoConfig; import sys; AutoConfig.from_pretrained(sys.argv[1])"
    done = run_python(code, tmp_path / "base")
    assert done.returncode != 0
    assert "nlr_mean_pooled" in done.stderr


def test_checkpoints_that_do_not_fit(tmp_path):
    kit.encoder(tmp_path / "bert")
    kit.vision_model(tmp_path / "vit")
    shutil.copy(tmp_path / "vit" / "model.safetensors", tmp_path / "bert" / "model.safetensors")
    for checkpoint, message in (
        ("./nowhere", "no model in ./nowhere"),
        ("runs/none", "train one there first"),
        ("no/such", "cannot load the checkpoint 'no/such'"),
        ("", "checkpoint is empty"),
        # transformers would draw what is missing and go on.
        (str(tmp_path / "bert"), "lacks weights"),
    ):
        assert_refused(message, lambda each=checkpoint: Pretrained(checkpoint=each, pooling="own").load("text", 2, 0))


@pytest.mark.parametrize(
    ("checkpoint", "kind", "parameters", "head"),
    [
        # Backbone and a head of its own: 128,100 x 768 embeddings, 12 layers; pooler and 2 labels.
        ("microsoft/deberta-v3-base", "text", 183_831_552 + 768 * 769 + 2 * 769, ("pooler", "classifier")),
        ("meta-llama/Meta-Llama-3-8B", "causal", 8_030_261_248, ()),
    ],
)
def test_published_sizes_are_known_without_a_download(checkpoint, kind, parameters, head):
    model = Pretrained(checkpoint=checkpoint).on_meta(kind, 2)
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert head_modules(model) == head


def test_one_row_is_held_out_at_least():
    kept, held = hold_out(10, 0.01)
    assert len(held) == 1
    assert sorted(kept + held) == list(range(10))
