"""Text end to end: every kind of source, three kinds of tokenizer, packing, splits, cache, wrong input."""

import codecs
import gzip
import itertools
import json
import lzma
import os
import pickle
import random
import re
import shutil
import types
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import psutil
import pytest
import torch
import zstandard
from tokenizers import pre_tokenizers
from torch.utils.data import DataLoader

from nlr_lab.tasks.text import packed as packing
from nlr_lab.tasks.text.data import END_OF_TEXT, Corpus, TextData
from nlr_lab.tasks.text.packed import prepare_text
from nlr_lab.tasks.text.shards import token_files
from nlr_lab.tasks.text.sources import prepare_source
from nlr_lab.tasks.text.tokenizers import load_tokenizer
from nonlinear_lowrank import UserError
from refusals import assert_refused
from tokenizer_helpers import word_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

SQUEEZE = {"xz": lzma.compress, "gz": gzip.compress, "zst": zstandard.compress}
WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "he", "with", "as", "her", "had", "for", "is", "not")


def make_documents(count=40, lines=12):
    rng = random.Random(random.getrandbits(32))
    words = [*WORDS, *("".join(rng.choices("abcdefghij\u00e9\u4e2d", k=5)) for _ in range(300))]
    return ["\n".join(" ".join(rng.choices(words, k=9)) for _ in range(lines)) for _ in range(count)]


def small(source, **fields):
    return TextData(**{"source": str(source), "vocab_size": 300, "sequence_length": 16, "eval_sequences": 8} | fields)


def write(folder, kind, documents):
    """The documents as one file of a kind; returns its path."""
    folder.mkdir(exist_ok=True, parents=True)
    base, *packed = kind.split(".")
    path = folder / f"corpus.{kind}"
    if base == "parquet":
        datasets.Dataset.from_dict({"text": documents}).to_parquet(path.with_name("corpus.parquet"))
        data = path.with_name("corpus.parquet").read_bytes()
    elif base == "jsonl":
        data = "".join(json.dumps({"text": each}) + "\n" for each in documents).encode()
    else:
        data = f"\n{END_OF_TEXT}\n".join(documents).encode()
    for each in packed:
        data = SQUEEZE[each](data)
    path.write_bytes(data)
    return path


def bad_file(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def tokens_of(blocks):
    return np.load(blocks.path)


def texts_of(packed, blocks):
    tokens = tokens_of(blocks)
    ends = np.flatnonzero(tokens == packed.tokenizer.eos_token_id) + 1
    return [packed.tokenizer.decode(part[:-1].tolist()).strip() for part in np.split(tokens, ends)[:-1]]


BYTES = [*pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT]


def write_gpt2(folder, vocabulary, merges=(), names=("vocab.json", "merges.txt")):
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / names[1]).write_text("\n".join(lines), encoding="utf-8")


KINDS = ["txt", "md", "py", "jsonl", "parquet", "txt.xz", "jsonl.gz", "txt.zst", "parquet.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path, kind):
    documents, (base, *packed) = make_documents(5), kind.split(".")
    path = write(tmp_path / "data", kind, documents)
    assert [each.strip() for each in Corpus(source=str(path)).documents()] == documents
    if base == "parquet":
        return
    # A byte-order mark is no text; parallel compressors write frames that follow each other.
    data = codecs.BOM_UTF8 + write(tmp_path / "base", base, documents).read_bytes()
    for squeeze in (SQUEEZE[each] for each in packed):
        data = b"".join(squeeze(data[i : i + 1000]) for i in range(0, len(data), 1000))
    path.write_bytes(data)
    assert [each.strip() for each in Corpus(source=str(path)).documents()] == documents
    first = documents[0].encode()[:5].decode("utf-8", "ignore")
    assert list(Corpus(source=str(path), max_bytes=5).documents()) == [first]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_null_rows_are_as_blank_ones(tmp_path, kind):
    rows = datasets.Dataset.from_dict({"text": ["one", None, " ", "two"]})
    save = {"jsonl": rows.to_json, "parquet": rows.to_parquet, "saved": rows.save_to_disk}[kind]
    save(str(path := tmp_path / f"data.{kind}"))
    assert list(Corpus(source=str(path)).documents()) == ["one", "two"]


@pytest.mark.parametrize("run", ["train", "compare"])
def test_runs_inside_the_source_are_not_read(tmp_path, monkeypatch, run):
    documents = make_documents(3)
    for index, document in enumerate(documents):
        (tmp_path / f"{index}.txt").write_text(document, encoding="utf-8")
    marker, beside = {"train": ("recipe.json", "checkpoints"), "compare": ("compare.json", "runs")}[run]
    (tmp_path / "out" / beside).mkdir(parents=True)
    (tmp_path / "out" / marker).write_text("{}")
    (tmp_path / "out" / beside / "README.md").write_text("not for training")
    (tmp_path / "dishes").mkdir()
    (tmp_path / "dishes" / "recipe.json").write_text("{}")  # of another kind
    (tmp_path / "dishes" / "soup.txt").write_text("boil it")
    monkeypatch.chdir(tmp_path)
    for source in (".", "./", str(tmp_path)):
        assert token_files(source) is None
        assert list(Corpus(source=source).documents()) == [*documents, "boil it"]


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path, capsys, kind):
    folder = tmp_path / "data"
    folder.mkdir()
    suffixes = ("pdf", "csv", "a", "b", "c", "d")
    for name in ("1.pdf", "2.pdf", "LICENSE", ".hidden", *(f"3.{suffix}" for suffix in suffixes)):
        (folder / name).write_bytes(b"x")
    if kind == "text":
        path, settings = write(folder, "txt", make_documents(9)), {}
    else:
        path, settings = folder / "1.bin", {"tokenizer": "none"}
        np.arange(200, dtype=np.uint16).repeat(40).tofile(path)
    prepare_source(small(folder, **settings))
    prepare_source(small(path, **settings))
    said = capsys.readouterr().err
    assert said.count("note: ") == 1
    assert f"note: not read in {folder}: 3 .pdf, 1 " in said
    assert ", ...\n" in said


def test_folders_saved_datasets_and_the_standard_library(tmp_path):
    documents, folder = make_documents(6), tmp_path / "data"
    (folder / ".hidden").mkdir(parents=True)
    for index, document in enumerate(documents):
        (folder / f"{index}.txt").write_text(document, encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\0\1")
    (folder / ".hidden" / "notes.txt").write_text("not for training")
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(tmp_path / "saved")
    write(rows := tmp_path / "rows", "jsonl", documents)
    for source, streaming in ((folder, False), (tmp_path / "saved", False), (rows, True)):
        assert list(Corpus(source=str(source), streaming=streaming).documents()) == documents
    limit = len("".join(documents[:2]).encode()) + 1
    assert list(Corpus(source=str(rows), streaming=True, max_bytes=limit).documents()) == documents[:2]
    files = Corpus(source="stdlib").files()
    assert len(files) > 300
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)
    assert "def dumps(" in next(path for path in files if path.parts[-2:] == ("json", "__init__.py")).read_text()


def test_datasets_by_name_configuration_and_split(tmp_path, monkeypatch):
    """`datasets` takes a folder for a name, so that names are tested without a network."""
    monkeypatch.chdir(tmp_path)
    folder, lines = tmp_path / "owner" / "rows", ["---", "configs:"]
    for language, splits in (("en", ("train", "test")), ("de", ("train",))):
        lines += [f"- config_name: {language}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {language}-{split}/*.jsonl"]
    sides = {name: make_documents(4) for name in ("en-train", "en-test", "de-train")}
    for name, documents in sides.items():
        write(folder / name, "jsonl", documents)
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
    seen = set()
    for source, name in (("rows:en", "en-train"), ("rows:en@test", "en-test"), ("rows:de", "de-train")):
        for streaming in (False, True):
            corpus = Corpus(source=f"owner/{source}", streaming=streaming)
            assert list(corpus.documents()) == sides[name]
            seen.add(corpus.identity())
    assert len(seen) == 3
    write(folder / "en-train", "jsonl", make_documents(4))
    assert Corpus(source="owner/rows:en").identity() not in seen
    assert_refused("cannot load the dataset", list, Corpus(source="owner/rows:fr").documents())


def test_streamed_dataset_is_read_once_and_packs_like_its_files(tmp_path, monkeypatch):
    documents = make_documents()
    path = write(tmp_path / "rows", "jsonl", documents)
    plain, config = prepare_text(small(path), progress=False), small(path.parent, streaming=True)

    def broken():
        yield from [{"text": each} for each in documents[:20]]
        raise ConnectionError("the server has gone away")

    with monkeypatch.context() as dropped:
        gone = datasets.IterableDataset.from_generator(broken)
        dropped.setattr(datasets, "load_dataset", lambda *args, **kwargs: gone)
        with pytest.raises(UserError, match=r"reading the dataset .* failed: .*the server has gone away"):
            prepare_text(config, progress=False)
    asked = []
    rows = Corpus._rows
    monkeypatch.setattr(Corpus, "_rows", lambda self: asked.append(1) or rows(self))
    streamed = prepare_text(config, progress=False)
    assert streamed.fingerprint == plain.fingerprint
    assert len(asked) == 1
    names = {each.name for each in streamed.train.path.parent.iterdir()}
    arrays = {"train.npy", "valid.npy", "valid_bytes.npy", "hashes.npz"}
    assert names == arrays | {"tokenizer", "text.json", "manifest.json"}
    write(path.parent, "jsonl", make_documents())  # a folder that has changed is another source
    assert prepare_text(config, progress=False).fingerprint != plain.fingerprint


def test_separators_and_max_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(f"one\r\n{END_OF_TEXT}\r\ntwo {END_OF_TEXT} two\n{END_OF_TEXT}  \nthree\n%%\nfour".encode())
    read = [each.strip() for each in Corpus(source=str(path)).documents()]
    assert read == ["one", f"two {END_OF_TEXT} two", "three\n%%\nfour"]
    assert [each.strip() for each in Corpus(source=str(path), document_separator="%%").documents()][1:] == ["four"]
    assert list(Corpus(source=str(path), document_separator="").documents()) == [path.read_bytes().decode()]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in ("ab\u4e2d", "cde", "f")), encoding="utf-8")
    # Documents stay whole, but a first one that is longer is cut.
    for limit, expected in ((9, ["ab\u4e2d", "cde", "f"]), (8, ["ab\u4e2d", "cde"]), (7, ["ab\u4e2d"]), (4, ["ab"])):
        assert list(Corpus(source=str(path), max_bytes=limit).documents()) == expected


def test_packing_keeps_every_token_and_marks_every_document(tmp_path):
    documents = [f"{each} say {END_OF_TEXT} now" for each in make_documents()]  # which stays text
    packed = prepare_text(small(write(tmp_path, "jsonl", documents)), progress=False)
    assert sorted(texts_of(packed, packed.train) + texts_of(packed, packed.valid)) == sorted(documents)
    assert tokens_of(packed.valid)[-1] == packed.tokenizer.eos_token_id
    facts = packed.describe()
    assert facts["train"]["documents"] + facts["valid"]["documents"] == len(documents)
    item = packed.train[1]
    assert item["input_ids"].tolist() == tokens_of(packed.train)[16:32].tolist()
    assert torch.equal(item["labels"], item["input_ids"])
    assert item["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        packed.train[len(packed.train)]
    assert len(pickle.dumps(packed.train)) < 1000, "a worker maps the file anew"
    batches = list(DataLoader(packed.train, batch_size=4, num_workers=1))
    assert torch.equal(torch.cat([each["input_ids"] for each in batches])[5], packed.train[5]["input_ids"])


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_bytes_per_token_are_those_of_the_text(tmp_path, kind):
    documents = make_documents()
    path, words = write(tmp_path, "jsonl", [f"{each}\n" for each in documents]), tmp_path / "words"
    known = sorted({word for document in documents for word in document.split()})
    word_tokenizer([*known, "[UNK]", "[END]"], unk_token="[UNK]", sep_token="[END]").save_pretrained(words)
    config = small(path, tokenizer=str(words) if kind == "words" else "bpe", valid_fraction=0.2, eval_sequences=10**6)
    packed = prepare_text(config, progress=False)
    names = packed.tokenizer.convert_ids_to_tokens(tokens_of(packed.valid).tolist())
    # In GPT-2's alphabet every character stands for a byte. Words drop white space: it counts with the word behind it,
    # and a document's last new line with the boundary.
    sizes = [0 if name == END_OF_TEXT else len(name) for name in names]
    if kind == "words":
        after = itertools.pairwise(["[END]", *names])
        sizes = [1 if name == "[END]" else len(name.encode()) + (before != "[END]") for before, name in after]
    assert sum(sizes) == packed.describe()["valid"]["bytes"]
    blocks = np.array(sizes[: len(packed.valid) * 16]).reshape(-1, 16)[:, 1:]
    assert packed.valid_bytes_per_token == blocks.mean()
    assert prepare_text(config, progress=False).valid_bytes_per_token == blocks.mean()


def test_train_and_held_out_never_share_a_document(tmp_path):
    documents = make_documents()
    twice = [*documents, *documents]  # equal documents land on one side
    packed = prepare_text(small(write(tmp_path, "jsonl", twice), valid_fraction=0.2), progress=False)
    train, valid = set(texts_of(packed, packed.train)), set(texts_of(packed, packed.valid))
    assert not train & valid
    assert len(valid) == 8
    # A document is the same wherever it stands: in a file's middle before a new line, on Windows with two bytes.
    fresh = ["qzx" * 50 + str(i) for i in range(30)]
    other = write(tmp_path / "valid", "txt", [*fresh, *documents[:7]])
    other.write_bytes(other.read_bytes().replace(b"\n", b"\r\n"))
    config = small(tmp_path / "corpus.jsonl", valid_source=str(other), vocab_size=330)
    packed = prepare_text(config, progress=False)
    facts = packed.describe()
    assert facts["held_out_documents_dropped_as_also_in_train"] == 7
    assert facts["valid"]["documents"] == 30
    assert not any("qz" in token or "zx" in token for token in packed.tokenizer.get_vocab()), "learned from training"
    same = small(write(tmp_path, "txt", documents), valid_source=str(tmp_path / "corpus.txt"))
    assert_refused(r"all 40 documents of .* are also in", prepare_text, same)


@pytest.mark.parametrize("count", [2, 12])
def test_few_documents_are_held_out_whole_and_one_is_divided(tmp_path, count):
    documents = make_documents(count)
    documents[0] *= 5 * count  # most of the text stays for training, whatever its hash
    packed = prepare_text(small(write(tmp_path, "jsonl", documents)), progress=False)
    (valid,) = texts_of(packed, packed.valid)
    assert valid in documents[1:]
    assert not packed.describe()["divided_documents"]
    path = tmp_path / "book.txt"
    path.write_text("\n".join(make_documents(60)), encoding="utf-8")
    facts = prepare_text(small(path, valid_fraction=0.1), progress=False).describe()
    assert facts["divided_documents"]
    assert facts["train"]["bytes"] + facts["valid"]["bytes"] == path.stat().st_size
    assert 0.02 < facts["valid"]["bytes"] / path.stat().st_size < 0.3


def test_cache_is_found_by_content_and_rebuilt_when_damaged(tmp_path):
    path = write(tmp_path, "txt", make_documents())
    config = small(path)
    first = prepare_text(config, progress=False)
    file, stamp = first.train.path, first.train.path.stat().st_mtime_ns
    path.touch()
    assert prepare_text(config, progress=False).train.path.stat().st_mtime_ns == stamp
    assert prepare_text(small(path, sequence_length=8), progress=False).train.path == file
    assert prepare_text(small(path, vocab_size=310), progress=False).train.path != file
    left = file.parent.with_name(f".tmp-{file.parent.name}")
    for damage in (
        lambda: file.write_bytes(file.read_bytes()[:-2]),
        lambda: file.write_bytes(file.read_bytes()[:-2] + b"\1\0"),
        lambda: os.truncate(file.parent / "tokenizer" / "tokenizer.json", 1000),
        lambda: (file.parent / "text.json").write_text("{"),
        lambda: (shutil.rmtree(file.parent), left.mkdir(), (left / "train.npy").write_bytes(b"half a header")),
    ):
        damage()
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda _: prepare_text(config, progress=False).fingerprint, range(2)))
        assert set(found) == {first.fingerprint}
        assert file.stat().st_mtime_ns != stamp
        stamp = file.stat().st_mtime_ns
        assert not left.exists()
    path.write_text(path.read_text() + "more words", encoding="utf-8")
    assert prepare_text(config, progress=False).fingerprint != first.fingerprint


def test_tokenizers_from_files(tmp_path):
    path, folder = write(tmp_path, "txt", make_documents()), tmp_path / "tokenizer"
    packed = prepare_text(small(path), progress=False)
    packed.tokenizer.save_pretrained(folder)
    run = tmp_path / "run"
    shutil.copytree(folder, run / "model")
    (run / "recipe.json").write_text("{}")
    places = [folder, folder / "tokenizer.json", run]
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        places.append(tmp_path / vocabulary)
        write_gpt2(places[-1], model["vocab"], model["merges"], (vocabulary, merges))
    for place in places:
        again = prepare_text(small(path, tokenizer=str(place)), progress=False)
        assert again.tokenizer.eos_token == END_OF_TEXT
        assert torch.equal(again.train[0]["input_ids"], packed.train[0]["input_ids"])
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s"]
    (tmp_path / "vocab.txt").write_text("\ufeff" + "\n".join(tokens), encoding="utf-8")
    loaded = load_tokenizer(str(tmp_path / "vocab.txt"))  # whose byte-order mark is no token
    assert loaded.get_vocab() == {token: index for index, token in enumerate(tokens)}
    assert loaded("thes")["input_ids"] == [5, 6]


def test_ids_with_gaps_and_more_than_two_bytes(tmp_path):
    path, folder = write(tmp_path, "txt", make_documents()), tmp_path / "gaps"
    write_gpt2(folder, {token: 70_000 + 3 * i for i, token in enumerate(BYTES)}, names=("encoder.json", "vocab.bpe"))
    packed = prepare_text(small(path, tokenizer=str(folder)), progress=False)
    assert packed.vocab_size == 70_000 + 3 * 256 + 1
    assert tokens_of(packed.train).dtype == np.uint32
    assert 70_000 <= int(packed.train[0]["input_ids"].min()) <= int(packed.train[0]["input_ids"].max())
    assert packed.valid_bytes_per_token <= 1  # single bytes, and boundaries that have none
    assert packed.valid_bytes_per_token > 0.95


def test_long_text_is_sampled_from_all_over_for_the_vocabulary(monkeypatch):
    monkeypatch.setattr(packing, "_TRAINING_BYTES", 10_000)
    monkeypatch.setattr(packing, "_PIECE", 100)
    lines = "\n".join(f"{i:07d} words of a long text" for i in range(5000))
    kept = packing._sample([lines])
    assert 2500 < sum(map(len, kept)) <= 10_000
    numbers = [int(each) for each in re.findall(r"\b\d{7}\b", "".join(kept))]
    assert max(np.diff([0, *numbers, 5000])) < 500


def _flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 255 for byte in data[middle : middle + 40]) + data[middle + 40 :]


def _saved(tmp_path, **splits):
    path = tmp_path / "saved"
    datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()}).save_to_disk(path)
    return path


LONG, ROW = b"word " * 900, b'{"text": "a"}\n'
BROKEN = [
    ("a.bin", b"abc", "no file of a known kind"),
    ("a.txt", b"   \n\n", "holds no text"),
    ("a.txt.gz", gzip.compress(b""), "holds no text"),
    ("a.txt", b"good\n" * 30_000 + b"b\0d", "line 30001 is binary"),
    ("a.txt", b"abc\xff\xfedef", "line 1 is not UTF-8"),
    ("a.txt", "abc".encode("utf-16"), "is UTF-16; convert it to UTF-8 first"),
    ("a.txt", b"one line", "too few to hold some out"),
    ("a.txt", (b"a" * 999 + b"\n") * 90, "one document .* too few to hold some out"),
    ("a.jsonl", b'{"text": "hello world"}\n' * 3000, "one document of 11 characters, or copies of one: too few"),
    ("a.txt.xz", lzma.compress(LONG)[:-20], "cannot read .*a.txt.*; it is damaged or"),
    ("a.txt.gz", b"not gzip", "cannot read .*a.txt.*; it is damaged or"),
    ("a.txt.gz", _flip(gzip.compress(bytes(range(256)) * 40)), "cannot read .*a.txt.*; it is damaged or"),
    ("a.txt.zst", zstandard.compress(LONG)[:-5], "cannot read .*a.txt.*; it is damaged or"),
    ("a.parquet", b"PAR1 no", "cannot read .*a.parquet.*; it is damaged or"),
    ("a.jsonl", ROW + b'{"tex\n', r"a\.jsonl, line 2 is not JSON: .*; correct or remove it"),
    ("a.jsonl", b'{"text": "a \\ud800 b"}\n', r"a\.jsonl, line 1 is not JSON: .*surrogates"),
    ("a.jsonl", ROW + b'{"body": "b"}\n', "line 2 has no text in the field 'text': {'body': 'b'}; .* set text_field"),
    ("a.jsonl", ROW + b'\n{"text": 3}\n', "line 3 has no text in the field 'text': {'text': 3}; drop such rows"),
    ("a.jsonl", b'{"text": null}\n', "holds no text, or only blank and null documents"),
    ("a.jsonl", b"[1]\n", r"a\.jsonl, line 1 has no text"),
]
DOCUMENTS = lambda t: write(t, "txt", make_documents(5))  # noqa: E731
WRONG = [
    (lambda t: t / "absent.txt", {}, "no file or folder"),
    (lambda t: "owner/absent-dataset-of-nobody", {}, "cannot load the dataset"),
    (lambda t: t, {}, "holds no file of a known kind"),
    (lambda t: write(t, "parquet", make_documents(3)), {"text_field": "body"}, "no text in the field 'body': {'text':"),
    (DOCUMENTS, {"sequence_length": 10**6}, "fewer than one sequence"),
    (DOCUMENTS, {"sequence_length": 1200}, "raise valid_fraction"),
    (DOCUMENTS, {"vocab_size": 10**5}, "too small, or repeats .* for a vocabulary"),
    (DOCUMENTS, {"tokenizer": "no/such-tokenizer"}, "no tokenizer"),
    (DOCUMENTS, {"valid_source": "/absent.txt"}, "no file or folder"),
    (DOCUMENTS, {"max_bytes": 10}, "too few to hold some out"),
    (lambda t: _saved(t, train={"text": [1, 2]}), {}, "row 0 of .* has no text .*1.*; drop such rows"),
    (lambda t: _saved(t, dev={"text": ["a"]}), {}, "cannot load the dataset .*'train'"),
    (lambda t: bad_file(t, "state.json", b"{").parent, {}, "cannot load the dataset"),
    (lambda t: bad_file(t, "a.weird", b"a").parent, {"streaming": True}, "cannot load the dataset"),
    *((lambda t, name=name, data=data: bad_file(t, name, data), {}, words) for name, data, words in BROKEN),
]


@pytest.mark.parametrize(("make", "fields", "words"), WRONG)
def test_wrong_text_is_one_clear_line(tmp_path, make, fields, words):
    folder = tmp_path / "in"
    folder.mkdir()
    assert_refused(words, lambda: prepare_text(small(make(folder), **fields), progress=False))
    built = tmp_path / "cache" / "text"
    assert not built.exists() or "sequence_length" in fields or not list(built.glob("*/"))


def test_tokenizers_that_do_not_fit(tmp_path):
    path, vocabulary = write(tmp_path, "txt", make_documents()), {token: i for i, token in enumerate(BYTES)}
    gpt2, words, lossy = (tmp_path / name for name in ("gpt2", "words", "lossy"))

    def refused(folder, why):
        assert_refused(why, prepare_text, small(path, tokenizer=str(folder)), progress=False)

    for entries, merges, why in (
        ({"a": 0, "b": 1}, ["qz"], "no tokenizer .* could be loaded"),
        ({"a": 0, "b": 1}, [], r"no <\|endoftext\|> .*not GPT-2's vocabulary"),
        ({token: i for token, i in vocabulary.items() if token != "e"}, [], "has no e; this is not GPT-2's vocabulary"),
    ):
        write_gpt2(gpt2, entries, merges)
        refused(gpt2, why)
    write_gpt2(gpt2, vocabulary)
    prepare_text(small(path, tokenizer=str(gpt2)), progress=False).tokenizer.save_pretrained(lossy)
    whole = json.loads((lossy / "tokenizer.json").read_text(encoding="utf-8"))
    del whole["model"]["vocab"]["e"]
    (lossy / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    refused(lossy, r"does not fit the text: .* bytes are lost")
    tokenizer = word_tokenizer(["the", "[UNK]", "[END]"], unk_token="[UNK]")
    tokenizer.save_pretrained(words)
    refused(words, "no end-of-text token")
    tokenizer.eos_token = "[END]"
    tokenizer.save_pretrained(words)
    refused(words, r"does not fit the text: .* tokens are unknown")


@pytest.mark.parametrize("kind", ["txt.gz", "txt.xz", "jsonl.zst"])
def test_bombs_stop_at_half_of_the_memory(tmp_path, monkeypatch, kind):
    """One document, in one line or in many, that unpacks to a thousand times its file."""
    line, (base, packed) = b"a" * (1 << 20), kind.split(".")
    whole = b'{"text": "' + line * 10 + b'"}\n' if base == "jsonl" else (line + b"\n") * 10
    path = bad_file(tmp_path, f"bomb.{kind}", SQUEEZE[packed](whole))
    assert path.stat().st_size < 100_000
    assert [len(each) for each in Corpus(source=str(path)).documents()] == [len(whole) - (13 if base == "jsonl" else 0)]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=16 << 20))
    assert_refused("unpacks to more than 8,388,608 bytes", list, Corpus(source=str(path)).documents())


@pytest.mark.slow
@pytest.mark.shared_data
def test_gpt2_files_give_the_known_counts(shared_data):
    """The held-out novels' published count has the four separators among five novels as text, 8 tokens each."""
    source, tokenizer = str(shared_data / "eltec_eng" / "valid.txt.xz"), str(shared_data / "gpt2_bpe")
    config = TextData(source=source, tokenizer=tokenizer, valid_fraction=0.1)
    packed = prepare_text(config, progress=False)
    facts = packed.describe()
    assert facts["train"]["documents"] + facts["valid"]["documents"] == 5
    assert facts["train"]["tokens"] + facts["valid"]["tokens"] - 5 == 696_449 - 4 * 8
    assert packed.vocab_size == 50257
    assert packed.tokenizer.eos_token_id == 50256
    assert packed.tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert 3.9 < packed.valid_bytes_per_token < 4.4


def test_most_of_the_text_is_never_held_out(tmp_path):
    for salt in range(8):  # by its hash, the long document would be held out in about half of these
        documents = make_documents(2, lines=20)
        documents[0] *= 9
        packed = prepare_text(small(write(tmp_path / f"{salt}", "jsonl", documents)), progress=False)
        assert texts_of(packed, packed.valid) == documents[1:]
