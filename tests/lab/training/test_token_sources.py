"""Runs on token files and mixtures: killed, resumed, recorded."""

import json
import os

import numpy as np
import pytest

from cli_helpers import refused, run, succeed
from nlr_lab.runtime.storage import step_folders
from nlr_lab.tasks.text.data import TextData
from seeds import rng
from tokenizer_helpers import word_tokenizer
from training_helpers import LENGTH, VOCABULARY, TrainingServer

pytestmark = pytest.mark.usefixtures("own_cache")

BATCH = 4


def write_shards(root, names, sequences=30):
    """Files of learnable noise and the tokenizer that made them."""
    words = word_tokenizer([f"w{index}" for index in range(VOCABULARY)], eos_token="w0", unk_token="w1")
    words.save_pretrained(root / "words")
    (root / "data").mkdir()
    generator = rng()
    for name in names:
        ids = generator.integers(1, VOCABULARY, sequences * LENGTH)
        ids[1::2] = (ids[::2] * 5 + 1) % VOCABULARY
        ids.astype("<u2").tofile(root / "data" / name)
    return root / "data"


SPELLINGS = {"shards": "{}", "mixture": "{0}/a.bin:0.75,{0}/b.bin:0.25"}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_killed_run_on_token_files_has_the_same_bits(tmp_path, kind):
    """Batches go through the files twice, and once more through the smaller weight's."""
    folder = write_shards(tmp_path, ("a.bin", "b.bin"))
    source = SPELLINGS[kind].format(folder)
    text = TextData(source=source, tokenizer=str(tmp_path / "words"), sequence_length=LENGTH, eval_sequences=4)
    settings = {"text": text, "steps": 32, "save_every": 2, "eval_every": 16}
    server, whole, killed = TrainingServer(), tmp_path / "whole", tmp_path / "killed"
    assert server.run(whole, **settings) == {"exit": 0, "error": ""}
    for reached in (4, 20):
        server.start(killed, **settings)
        assert server.kill_when(lambda goal=reached: max(step_folders(killed / "checkpoints"), default=0) >= goal)
    assert server.run(killed, **settings, dataloader_workers=1) == {"exit": 0, "error": ""}
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (whole, killed)]
    assert weights[0] == weights[1]
    results = [json.loads((out / "result.json").read_text()) | {"seconds": 0} for out in (whole, killed)]
    assert results[0] == results[1]
    data, record = results[0]["data"], json.loads((whole / "data.json").read_text())["sources"]
    if kind == "shards":
        assert "drawn" not in data
        assert list(record["text.source"]["files"]) == ["a.bin", "b.bin"]
    else:
        assert sum(each["sequences"] for each in data["drawn"]) == 32 * BATCH
        assert [round(each["sequences"] / (32 * BATCH), 1) for each in data["drawn"]] == [0.8, 0.2]
        assert record["text.source.1"]["files"]["b.bin"]["bytes"] == (folder / "b.bin").stat().st_size
    card = (whole / "model" / "README.md").read_text()
    assert str(tmp_path) not in card
    if kind == "mixture":
        assert "a.bin:0.75,b.bin:0.25" in card
        assert f"| drawn from b.bin | {data['drawn'][1]['sequences']} sequences, " in card


@pytest.mark.parametrize("tokenizer", ["words", "none"])
def test_commands_take_token_files(tmp_path, capsys, tokenizer):
    folder = write_shards(tmp_path, ("a.bin", "b.bin"))
    sizes = [*("--layers", 1, "--width", 16, "--heads", 2, "--hidden", 16, "--steps", 4, "--warmup-steps", 1)]
    sizes += ["--batch-size", 4, "--sequence-length", LENGTH, "--eval-sequences", 4, "--arm", "noble:rank=2"]
    named = [tmp_path / "words"] if tokenizer == "words" else ["none", "--vocab-size", VOCABULARY]
    source = ["--source", folder / "*.bin", "--tokenizer", *named]
    out = tmp_path / "its out"
    assert f"next: nlr evaluate '{out}'" in succeed(capsys, "train", "llm-demo", *source, *sizes, "--out", out)
    assert "loss" in succeed(capsys, "evaluate", out)
    about, ids = (folder / "b.bin").stat(), np.fromfile(folder / "b.bin", "<u2")
    ids[::-1].tofile(folder / "b.bin")
    os.utime(folder / "b.bin", ns=(about.st_atime_ns, about.st_mtime_ns))
    (out / "result.json").unlink()
    command = ["train", "llm-demo", *source, *sizes, "--out", out, "--resume"]
    assert "no longer the one that the run" in run(capsys, *command)[2]
    if tokenizer == "none":
        assert "tokenizer" in refused(capsys, "generate", out, "--prompt", "w5")
    np.full(64, VOCABULARY, "<u2").tofile(folder / "b.bin")
    error = refused(capsys, "train", "llm-demo", *source, *sizes, "--out", tmp_path / "new")
    assert f"b.bin has the id {VOCABULARY} and the tokenizer's vocabulary has {VOCABULARY}" in error
    assert not (tmp_path / "new").exists()
