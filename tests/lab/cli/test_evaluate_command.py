"""`nlr evaluate` on plain models, ours, and adapters of peft: numbers, the JSON file, and every wrong input."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from cli_helpers import refused, run, succeed
from nlr_lab.evaluation import losses
from nlr_lab.evaluation.harness import score_tasks
from nlr_lab.evaluation.local_tasks import CATEGORIES, find_local_tasks
from nlr_lab.evaluation.losses import score_documents
from nonlinear_lowrank import NobleConfig, augment
from nonlinear_lowrank.validation import install_hint
from task_helpers import byte_tokenizer, commonsense_rows, mmlu_rows, tiny_model, write_lines

# peft 0.21 reads a name that transformers 5.23 has renamed.

TEXT = "The stone falls under the quiet river."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base (plain), ours (augmented), adapter (on base), adapter_ours (on ours), data, text.txt."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text(TEXT)
    tokenizer = byte_tokenizer()
    for name in ("base", "ours"):
        model = tiny_model(tokenizer, dtype=torch.float32)
        if name == "ours":
            augment(model, NobleConfig(rank=4), verbose=False)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, base in (("adapter", "base"), ("adapter_ours", "ours")):
        targets = [f"{each}{'.dense' if base == 'ours' else ''}" for each in ("q_proj", "down_proj")]
        config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
        model = hf.AutoModelForCausalLM.from_pretrained(folder / base)
        peft.get_peft_model(model, config).save_pretrained(folder / name)
    subjects = ["anatomy", "astronomy", "philosophy", "sociology"]
    write_lines(folder / "data" / "mmlu" / "test.jsonl", mmlu_rows(subjects, 3))
    write_lines(folder / "data" / "mmlu" / "dev.jsonl", mmlu_rows(subjects, 5))
    for stem in ("piqa", "boolq"):
        write_lines(folder / "data" / "commonsense" / f"{stem}.jsonl", commonsense_rows(stem, 6))
    return folder


def test_former_numbers_stay_until_the_new_ones_are_on_the_disk(folder, capsys, tmp_path, monkeypatch):
    out, link = tmp_path / "out.json", tmp_path / "link.json"
    out.write_text("former")
    link.symlink_to(out)
    command = ["evaluate", folder / "base", "--source", folder / "text.txt", "--out"]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, error = run(capsys, *command, out)
    assert (code, error) == (
        2,
        f"nlr: cannot write {out}: no space left on the disk; make room, or name another --out\n",
    )
    assert out.read_text() == "former"
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "link.json"}
    succeed(capsys, *command, link)
    assert link.is_symlink()
    assert json.loads(out.read_text())["text"]["loss"] > 0


@pytest.mark.parametrize("name", ["base", "ours", "adapter", "adapter_ours"])
def test_tasks_of_any_checkpoint_are_scored_printed_and_written(folder, capsys, tmp_path, name):
    tasks = ["mmlu_local", "mmlu_local_anatomy", "piqa_local"]
    arguments = [folder / name, "--tasks", *tasks, "--data", folder / "data", "--out", tmp_path / "out.json"]
    out = succeed(capsys, "evaluate", *arguments)
    if name.startswith("adapter"):
        model = peft.AutoPeftModelForCausalLM.from_pretrained(folder / name)
    else:
        model = hf.AutoModelForCausalLM.from_pretrained(folder / name)
    expected = score_tasks(model, byte_tokenizer(), local=find_local_tasks(tasks, folder / "data"), batch_size=16)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["tasks"] == json.loads(json.dumps(expected))
    assert written["tasks"]["mmlu_local"]["n"] == 12
    assert written["settings"]["format"] == "choices"
    raw = (folder / "data" / "mmlu" / "dev.jsonl").read_bytes()
    dev = {"name": "dev.jsonl", "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "rows": 20}
    assert dev in written["data"]
    assert {"torch", "transformers", "lm_eval", "peft"} <= written["versions"].keys()
    line = next(line for line in out.split("\n") if line.startswith("mmlu_local "))
    value, error, n = line.split()[-3:]
    assert (value, n) == (f"{expected['mmlu_local']['acc,none']:.4f}", "12")
    assert error == f"{expected['mmlu_local']['acc_stderr,none']:.4f}"
    rows = {line.split()[0].removeprefix("mmlu_local_") for line in out.split("\n") if line.startswith("mmlu_local_")}
    assert rows - CATEGORIES.keys() == {"anatomy"}, "the subject that was named"


def test_generated_answers_and_lm_eval_in_one_call(folder, capsys, tmp_path):
    arguments = ["--tasks", "boolq_local", "mmlu_local_anatomy", "--data", folder / "data", "--format", "generate"]
    more = ["--beams", "1", "--prompt", "alpaca", "--out", tmp_path / "out.json"]
    out = succeed(capsys, "evaluate", folder / "adapter", *arguments, *more)
    written = json.loads((tmp_path / "out.json").read_text())
    assert "answered,none" in written["tasks"]["boolq_local"]
    assert "answered,none" not in written["tasks"]["mmlu_local_anatomy"]
    assert written["settings"] | {"format": "generate", "prompt": "alpaca", "beams": 1} == written["settings"]
    assert "mmlu_local_anatomy" in out


def test_an_adapter_may_find_its_base_elsewhere(folder, capsys, tmp_path):
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/no/such/base"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    text = ["--source", folder / "text.txt"]
    arguments = [tmp_path / "adapter", *text]
    assert "/no/such/base" in refused(capsys, "evaluate", *arguments)
    out = succeed(capsys, "evaluate", *arguments, "--base", folder / "base")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    score = score_documents(model, byte_tokenizer(), [TEXT], sequence_length=1024, separator="<end>")
    assert f"loss {score.loss:.4f}" in out
    plain = succeed(capsys, "evaluate", folder / "base", *text)
    assert f"loss {score.loss:.4f}" not in plain, "the adapter is on"
    assert "is for adapters" in refused(capsys, "evaluate", folder / "base", *text, "--base", folder / "base")


def test_tokens_that_were_added_for_tuning_have_rows(folder, capsys, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "base")
    model.resize_token_embeddings(len(tokenizer))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with pytest.warns(UserWarning, match="has been resized"):
        adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    (tmp_path / "text.txt").write_text("a <new> stone <new>")
    out = succeed(capsys, "evaluate", tmp_path / "adapter", "--source", tmp_path / "text.txt")
    score = score_documents(adapted, tokenizer, ["a <new> stone <new>"], sequence_length=1024, separator="<end>")
    assert f"loss {score.loss:.4f}" in out


WEIGHTS = "adapter_model.safetensors"


def drop_a_tensor(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, folder / WEIGHTS)
    (folder / "manifest.json").unlink(missing_ok=True)  # or its hash would be what is wrong


def change(**fields):
    def damage(folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_tensor, "adapter_model.safetensors is not whole: Found missing adapter keys"),
        (change(r=3), "does not fit"),
        (change(task_type="SEQ_CLS"), "is an adapter for SEQ_CLS, not for a causal language model"),
        (change(peft_type="NO_SUCH_TYPE"), "NO_SUCH_TYPE"),
    ],
)
def test_a_damaged_adapter_is_refused(folder, capsys, tmp_path, damage, message):
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    damage(tmp_path / "adapter")
    err = refused(capsys, "evaluate", tmp_path / "adapter", "--tasks", "piqa_local", "--data", folder / "data")
    assert message in err


def test_a_model_of_few_positions_is_refused_in_one_line(folder, capsys, tmp_path):
    tokenizer = byte_tokenizer()
    tiny_model(tokenizer, positions=8, dtype=torch.float32).save_pretrained(tmp_path / "few")
    tokenizer.save_pretrained(tmp_path / "few")
    tasks = ["--tasks", "piqa_local", "--data", folder / "data"]
    err = refused(capsys, "evaluate", tmp_path / "few", *tasks)
    assert "has 8 positions, and the answer ' " in err
    assert "evaluate a model with more, or leave its task out of --tasks" in err
    assert run(capsys, "evaluate", tmp_path / "few", "--source", folder / "text.txt")[0] == 0
    write_lines(tmp_path / "rows.jsonl", [{"text": "stone"}])
    (tmp_path / "writes.yaml").write_text(
        "task: writes\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: x\n"
        "generation_kwargs: {max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n"
    )
    code, _, err = run(capsys, "evaluate", tmp_path / "few", "--tasks", "writes", "--include-path", tmp_path)
    assert code == 2
    assert "nlr: the model has 8 positions, and writes asks for 8 new tokens: evaluate a model with more" in err


def test_positions_that_are_an_embedding_bound_the_window(folder, capsys, tmp_path):
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 1}
    config = hf.OPTConfig(vocab_size=len(tokenizer), num_attention_heads=2, max_position_embeddings=8, **sizes)
    hf.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    tokenizer.save_pretrained(tmp_path / "opt")
    arguments = ["evaluate", tmp_path / "opt", "--source", folder / "text.txt", "--sequence-length"]
    assert "the model has 8 positions; lower --sequence-length 16" in refused(capsys, *arguments, 16)
    assert run(capsys, *arguments, 8)[0] == 0


@pytest.mark.parametrize(("way", "room"), [("text", 2_000_000), ("choices", 600_000), ("generate", 4_000_000)])
def test_a_batch_that_does_not_fit_memory_is_refused_before_it_runs(folder, capsys, tmp_path, monkeypatch, way, room):
    (tmp_path / "text.txt").write_text(TEXT * 40)
    tasks = ["--tasks", "piqa_local", "--data", folder / "data", "--format", way]
    arguments = ["--source", tmp_path / "text.txt", "--sequence-length", 32] if way == "text" else tasks
    whole = run(capsys, "evaluate", folder / "base", *arguments, "--batch-size", 999_999)
    assert whole[0] == 0, "bounded by the number of requests"
    monkeypatch.setattr(losses, "free_memory", lambda: losses.RESERVE + room)
    ran = []
    monkeypatch.setattr(hf.LlamaForCausalLM, "forward", lambda *_, **__: ran.append(1))
    err = refused(capsys, "evaluate", folder / "base", *arguments, "--batch-size", 999_999)
    found = re.search(r"a batch of \d+ rows .* 0\.0 GB are free; lower the batch size .*to at most (\d+)$", err.strip())
    assert not ran
    monkeypatch.undo()
    monkeypatch.setattr(losses, "free_memory", lambda: losses.RESERVE + room)
    assert run(capsys, "evaluate", folder / "base", *arguments, "--batch-size", found[1])[0] == 0


def test_a_model_that_does_not_continue_text_is_refused(folder, capsys, tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save_pretrained(tmp_path / "bert")
    arguments = ["--tasks", "piqa_local", "--data", folder / "data"]
    message = "is not a causal language model: its config.json names BertForSequenceClassification"
    assert message in refused(capsys, "evaluate", tmp_path / "bert", *arguments)
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    assert message in refused(capsys, "evaluate", tmp_path / "adapter", "--base", tmp_path / "bert", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tasks mmlu_local", "name their folder with --data FOLDER"),
        ("--tasks mmlu_lokal --data DATA", "--data does nothing without a local task"),
        ("--tasks piqa_local --data DATA/none", "no such folder: DATA/none (--data)"),
        ("--data DATA", "--data does nothing without --tasks"),
        ("--format generate", "--format does nothing without --tasks"),
        ("--tasks piqa_local --data DATA --num-fewshot 3", "asked without examples"),
        ("--tasks mmlu_local --data DATA --format generate", "--format does nothing without a local commonsense test"),
        ("--tasks piqa_local --data DATA --include-path DATA", "--include-path does nothing without a task of"),
        ("--tasks piqa_local --data DATA --prompt alpaca", "--prompt does nothing without --format generate"),
        ("--beams 4", "--beams does nothing without --format generate"),
        ("--tasks piqa_local --data DATA --text-field body", "--text-field does nothing without --source"),
        ("--sequence-length 16", "--sequence-length does nothing without --source"),
        ("--split test --source text.txt", "--split is for the run of nlr finetune"),
        ("--tasks piqa_local --data DATA --format generate --beams 0", "--beams must be a positive integer, got 0"),
        ("--tasks piqa_local --data DATA --format guess", "--format"),
        ("--tasks piqa_local --data DATA --out DATA", "DATA is a folder; name a file (--out)"),
    ],
)
def test_options_that_make_no_sense_are_refused(folder, capsys, arguments, message):
    data = str(folder / "data")
    err = refused(capsys, "evaluate", folder / "base", *arguments.replace("DATA", data).split())
    assert message.replace("DATA", data) in err


def test_tasks_without_lm_eval_name_the_extra(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    err = refused(capsys, "evaluate", folder / "base", "--tasks", "piqa_local", "--data", folder / "data")
    assert install_hint("eval") in err


def test_a_file_that_is_read_is_not_written_over(folder, capsys):
    before = (folder / "text.txt").read_bytes()
    command = ["evaluate", folder / "base", "--source", folder / "text.txt", "--out"]
    for out, read in ((folder / "text.txt", "text.txt"), (folder / "base" / "config.json", "base")):
        assert f"{read}, which is read; name another file (--out)" in refused(capsys, *command, out)
    assert (folder / "text.txt").read_bytes() == before


def test_other_commands_take_or_refuse_an_adapter(folder, capsys, tmp_path):
    assert "merge it first: nlr merge" in refused(capsys, "convert", folder / "adapter", tmp_path / "out")
    out = succeed(capsys, "generate", folder / "adapter", "--prompt", "stone", "--max-new-tokens", "4")
    assert out.startswith("stone")
