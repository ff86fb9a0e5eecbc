"""Text end to end: every kind of source, three kinds of tokenizer, packing, splits, cache, wrong input."""

import gzip
import json
import lzma
import pickle
import random

import datasets
import numpy as np
import pytest
import torch
import zstandard
from torch.utils.data import DataLoader

from nonlinear_lowrank import UserError
from nonlinear_lowrank.tasks.corpus import Corpus
from nonlinear_lowrank.tasks.text import TextData, prepare_text
from nonlinear_lowrank.tasks.tokenizers import END_OF_TEXT

WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "he", "with", "as", "her", "had", "for", "is", "not")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))


def make_documents(count=40, lines=12):
    """Fresh random documents, no two alike."""
    rng = random.Random()
    words = [*WORDS, *("".join(rng.choices("abcdefghij\u00e9\u4e2d", k=5)) for _ in range(300))]
    return ["\n".join(" ".join(rng.choices(words, k=9)) for _ in range(lines)) for _ in range(count)]


def small(source, **fields):
    return TextData(**{"source": str(source), "vocab_size": 300, "sequence_length": 16, "eval_sequences": 8} | fields)


def write(folder, kind, documents):
    """The documents as one file of a kind; returns its path."""
    folder.mkdir(exist_ok=True)
    base, *packed = kind.split(".")
    path = folder / f"corpus.{kind}"
    if base == "parquet":
        datasets.Dataset.from_dict({"text": documents}).to_parquet(path.with_name("corpus.parquet"))
        data = path.with_name("corpus.parquet").read_bytes()
    elif base == "jsonl":
        data = "".join(json.dumps({"text": each}) + "\n" for each in documents).encode()
    else:
        data = f"\n{END_OF_TEXT}\n".join(documents).encode()
    squeeze = {"xz": lzma.compress, "gz": gzip.compress, "zst": zstandard.compress}
    for each in packed:
        data = squeeze[each](data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["txt", "md", "py", "jsonl", "parquet", "txt.xz", "jsonl.gz", "txt.zst", "parquet.gz"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, kind):
    documents = make_documents(5)
    path = write(tmp_path / "data", kind, documents)
    assert [each.strip() for each in Corpus(source=str(path)).documents()] == documents


def test_folder_and_saved_dataset_and_streamed_folder(tmp_path):
    documents = make_documents(6)
    folder = tmp_path / "data"
    folder.mkdir()
    for index, document in enumerate(documents):
        (folder / f"{index}.txt").write_text(document, encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\0\1")
    assert list(Corpus(source=str(folder)).documents()) == documents
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(tmp_path / "saved")
    assert list(Corpus(source=str(tmp_path / "saved")).documents()) == documents
    rows = tmp_path / "rows"
    write(rows, "jsonl", documents)
    assert list(Corpus(source=str(rows), streaming=True).documents()) == documents
    limit = len("".join(documents[:2]).encode()) + 1
    assert list(Corpus(source=str(rows), streaming=True, max_bytes=limit).documents()) == documents[:2]


def test_packing_keeps_every_token_and_marks_every_document(tmp_path):
    documents = make_documents()
    packed = prepare_text(small(write(tmp_path, "txt", documents)), progress=False)
    eos = packed.tokenizer.eos_token_id
    found = []
    for name in ("train", "valid"):
        tokens = np.fromfile(getattr(packed, name).path, dtype="<u2")
        assert tokens[-1] == eos
        pieces = np.split(tokens, np.flatnonzero(tokens == eos) + 1)[:-1]
        found += [packed.tokenizer.decode(piece[:-1].tolist()).strip() for piece in pieces]
    assert sorted(found) == sorted(documents)
    facts = packed.describe()
    assert facts["train"]["documents"] + facts["valid"]["documents"] == len(documents)
    item = packed.train[1]
    tokens = np.fromfile(packed.train.path, dtype="<u2")
    assert item["input_ids"].tolist() == tokens[16:32].tolist()
    assert torch.equal(item["labels"], item["input_ids"])
    assert item["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        packed.train[len(packed.train)]


def test_bytes_per_token_is_exact(tmp_path):
    packed = prepare_text(small(write(tmp_path, "txt", make_documents())), progress=False)
    backend, size, count = packed.tokenizer.backend_tokenizer, 0, 0
    for item in packed.valid:
        for token in item["input_ids"][1:].tolist():
            count += 1
            if token != packed.tokenizer.eos_token_id:
                size += len(backend.id_to_token(token))  # one character of the byte alphabet a byte
        if len(packed.valid) == 1:
            break
    assert packed.valid_bytes_per_token == pytest.approx(size / count)
    whole = packed.describe()["valid"]
    assert packed.valid_bytes_per_token == pytest.approx(whole["bytes"] / whole["tokens"], rel=0.3)


def test_train_and_held_out_never_share_a_document(tmp_path):
    documents = make_documents()
    twice = [*documents, *documents]  # equal documents land on one side
    packed = prepare_text(small(write(tmp_path, "jsonl", twice), valid_fraction=0.2), progress=False)
    sides = []
    for blocks in (packed.train, packed.valid):
        text = packed.tokenizer.decode(np.fromfile(blocks.path, dtype="<u2").tolist())
        sides.append({each.strip() for each in text.split(END_OF_TEXT) if each.strip()})
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 8
    valid = write(tmp_path / "valid", "jsonl", [*make_documents(30), *documents[:7]])
    packed = prepare_text(small(tmp_path / "corpus.jsonl", valid_source=str(valid)), progress=False)
    facts = packed.describe()
    assert facts["held_out_documents_dropped_as_also_in_train"] == 7
    assert facts["valid"]["documents"] == 30


def test_one_long_document_is_divided(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(make_documents(60)), encoding="utf-8")
    packed = prepare_text(small(path, valid_fraction=0.1), progress=False)
    facts = packed.describe()
    assert facts["divided_documents"]
    assert facts["train"]["bytes"] + facts["valid"]["bytes"] == path.stat().st_size
    assert 0.02 < facts["valid"]["bytes"] / path.stat().st_size < 0.3


def test_cache_is_found_by_content_and_rebuilt_when_damaged(tmp_path):
    path = write(tmp_path, "txt", make_documents())
    first = prepare_text(small(path), progress=False)
    stamp = first.train.path.stat().st_mtime_ns
    path.touch()
    assert prepare_text(small(path), progress=False).train.path.stat().st_mtime_ns == stamp
    assert prepare_text(small(path, sequence_length=8), progress=False).train.path == first.train.path
    assert prepare_text(small(path, vocab_size=310), progress=False).train.path != first.train.path
    first.train.path.write_bytes(first.train.path.read_bytes()[:-2])
    again = prepare_text(small(path), progress=False)
    assert again.fingerprint == first.fingerprint
    assert again.train.path.stat().st_mtime_ns != stamp
    path.write_text(path.read_text() + "more words", encoding="utf-8")
    assert prepare_text(small(path), progress=False).fingerprint != first.fingerprint


def test_workers_read_the_same_sequences(tmp_path):
    packed = prepare_text(small(write(tmp_path, "txt", make_documents())), progress=False)
    copy = pickle.loads(pickle.dumps(packed.train))
    assert torch.equal(copy[2]["input_ids"], packed.train[2]["input_ids"])
    batches = list(DataLoader(packed.train, batch_size=4, num_workers=1, multiprocessing_context="spawn"))
    assert torch.equal(torch.cat([each["input_ids"] for each in batches])[5], packed.train[5]["input_ids"])


def test_tokenizers_from_files(tmp_path):
    path = write(tmp_path, "txt", make_documents())
    packed = prepare_text(small(path), progress=False)
    folder = tmp_path / "tokenizer"
    packed.tokenizer.save_pretrained(folder)
    again = prepare_text(small(path, tokenizer=str(folder)), progress=False)
    assert torch.equal(again.train[0]["input_ids"], packed.train[0]["input_ids"])
    again = prepare_text(small(path, tokenizer=str(folder / "tokenizer.json")), progress=False)
    assert torch.equal(again.train[0]["input_ids"], packed.train[0]["input_ids"])
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        gpt2 = tmp_path / names[0]
        gpt2.mkdir()
        (gpt2 / names[0]).write_text(json.dumps(model["vocab"]), encoding="utf-8")
        merges = "\n".join(" ".join(pair) for pair in model["merges"])
        (gpt2 / names[1]).write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
        again = prepare_text(small(path, tokenizer=str(gpt2)), progress=False)
        assert torch.equal(again.train[0]["input_ids"], packed.train[0]["input_ids"])


def test_text_that_looks_like_a_special_token_stays_text(tmp_path):
    documents = [f"{each} say {END_OF_TEXT} now" for each in make_documents(30)]
    packed = prepare_text(small(write(tmp_path, "jsonl", documents)), progress=False)
    ends = sum(
        int((np.fromfile(blocks.path, dtype="<u2") == packed.tokenizer.eos_token_id).sum())
        for blocks in (packed.train, packed.valid)
    )
    assert ends == len(documents)


def test_the_standard_library_is_real_code():
    files = Corpus(source="stdlib").files()
    assert len(files) > 300
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)
    assert "def dumps(" in next(path for path in files if path.parts[-2:] == ("json", "__init__.py")).read_text()


def _bad(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (lambda t: t / "absent.txt", {}, "no file or folder"),
        (lambda t: "owner/absent-dataset-of-nobody", {}, "no dataset of that name"),
        (lambda t: _bad(t, "a.bin", b"abc"), {}, "unknown kind of file"),
        (lambda t: _bad(t, "a.txt", b""), {}, "holds no text"),
        (lambda t: _bad(t, "a.txt", b"   \n\n"), {}, "holds no text"),
        (lambda t: _bad(t, "a.txt", b"abc\0def"), {}, "binary .*offset 3"),
        (lambda t: _bad(t, "a.txt", b"abc\xff\xfedef"), {}, "not UTF-8 .*offset 3"),
        (lambda t: _bad(t, "a.txt.xz", lzma.compress(b"word " * 900)[:-20]), {}, "damaged or cut off"),
        (lambda t: _bad(t, "a.txt.gz", b"not gzip"), {}, "damaged or cut off"),
        (lambda t: _bad(t, "a.txt.zst", zstandard.compress(b"word " * 900)[:-5]), {}, "damaged or cut off"),
        (lambda t: _bad(t, "a.parquet", b"PAR1 no"), {}, "not a whole parquet file"),
        (lambda t: _bad(t, "a.jsonl", b'{"text": "a"}\n{"tex\n'), {}, r"a\.jsonl:2 is not JSON"),
        (lambda t: _bad(t, "a.jsonl", b'{"text": "a"}\n{"body": "b"}\n'), {}, r"a\.jsonl:2 has no text .*'text'"),
        (lambda t: write(t, "parquet", make_documents(3)), {"text_field": "body"}, "no column 'body'; it has text"),
        (lambda t: write(t, "txt", make_documents()), {"sequence_length": 10**6}, "fewer than one sequence"),
        (lambda t: write(t, "txt", make_documents()), {"vocab_size": 10**5}, "too small for a vocabulary"),
        (lambda t: write(t, "txt", make_documents()), {"tokenizer": "no/such-tokenizer"}, "no tokenizer"),
        (lambda t: write(t, "txt", make_documents()), {"valid_source": "/absent.txt"}, "no file or folder"),
        (lambda t: t, {}, "holds no file of a known kind"),
    ],
)
def test_wrong_text_is_one_clear_line(tmp_path, make, fields, words):
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(UserError, match=words) as caught:
        prepare_text(small(make(folder), **fields), progress=False)
    assert "\n" not in str(caught.value)
    built = tmp_path / "cache" / "text"
    assert not built.exists() or "fewer than one" in str(caught.value) or not list(built.glob("*/"))


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_length": 1},
        {"eval_sequences": 0},
        {"valid_fraction": 0.0},
        {"valid_fraction": 0.9},
        {"vocab_size": 100},
        {"max_bytes": 0},
        {"source": ""},
    ],
)
def test_wrong_settings(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        TextData(**fields)


def test_tokenizers_that_do_not_fit(tmp_path):
    path = write(tmp_path, "txt", make_documents())
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}', encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nq z\n", encoding="utf-8")
    with pytest.raises(UserError, match="do not fit"):
        prepare_text(small(path, tokenizer=str(folder)), progress=False)
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    with pytest.raises(UserError, match="not GPT-2's files"):
        prepare_text(small(path, tokenizer=str(folder)), progress=False)

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"the": 0, "[UNK]": 1, "[END]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match="no end-of-text token"):
        prepare_text(small(path, tokenizer=str(tmp_path / "words")), progress=False)
    words.eos_token = "[END]"
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match="does not fit the text"):
        prepare_text(small(path, tokenizer=str(tmp_path / "words")), progress=False)


@pytest.mark.shared_data
def test_gpt2_files_give_the_known_counts(shared_data, tmp_path):
    """The held-out novels are 696,449 GPT-2 tokens without boundaries."""
    novels = shared_data / "eltec_eng" / "valid.txt.xz"
    with lzma.open(novels, "rt", encoding="utf-8") as file:
        parts = file.read(1_200_000)
    path = tmp_path / "novels.txt"
    path.write_text(parts, encoding="utf-8")
    packed = prepare_text(
        TextData(source=str(path), tokenizer=str(shared_data / "gpt2_bpe"), sequence_length=64), progress=False
    )
    assert packed.vocab_size == 50257
    assert packed.tokenizer.eos_token_id == 50256
    assert packed.tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert 3.5 < packed.valid_bytes_per_token < 4.7
