"""Token files of nanoGPT, llm.c and Megatron, by their published layouts; columns of ids; mixtures; refusals."""

import json
import pickle
import struct
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nlr_lab.tasks.text import sources
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import EncoderBackbone, MaskedLanguageModelTask
from nlr_lab.tasks.text.sources import prepare_source
from nlr_lab.tasks.text.tokenizers import train_tokenizer
from refusals import assert_refused
from seeds import rng
from tokenizer_helpers import word_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

LENGTH, END = 16, 0
MEGATRON = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of tokenizers, by the size of their vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for size in (200, 70_000):
        words = word_tokenizer([f"w{index}" for index in range(size)], eos_token="w0", unk_token="w1")
        words.save_pretrained(folder / str(size))
    train_tokenizer("bpe", [chr(65 + i) * 9 + " the text" for i in range(50)], 270).save_pretrained(folder / "bytes")
    return folder


def make_documents(count=60, vocabulary=200, ended=True):
    generator = rng()
    made = [generator.integers(1, vocabulary, generator.integers(1, 50)) for _ in range(count)]
    return [np.append(each, END) if ended else each for each in made]


def write_nanogpt(path, documents, kind="<u2"):
    np.concatenate(documents).astype(kind).tofile(path)
    return path


def write_llm_c(path, documents, magic=20240520, version=1, kind="<u2", count=None):
    ids = np.concatenate(documents).astype(kind)
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.tobytes())
    return path


def write_megatron(path, documents, kind="u2", per_document=1):
    """Each document is cut into `per_document` sequences."""
    dtype = np.dtype(f"<{kind}")
    np.concatenate(documents).astype(dtype).tofile(path)
    lengths = [len(part) for each in documents for part in np.array_split(each, per_document)]
    pointers = np.cumsum([0, *lengths[:-1]]) * dtype.itemsize
    firsts = np.arange(len(documents) + 1) * per_document
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, MEGATRON[kind], len(lengths), len(firsts))
    body = np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + firsts.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
    return path


def config(source, tokenizer, **fields):
    sizes = {"sequence_length": LENGTH, "eval_sequences": 4, "valid_fraction": 0.1}
    return TextData(source=str(source), tokenizer=str(tokenizer), **sizes | fields)


def ids_of(blocks):
    return torch.cat([blocks[index]["input_ids"] for index in range(len(blocks))]).numpy()


LAYOUTS = {
    "nanogpt": (write_nanogpt, {}, 200),
    "nanogpt-uint32": (write_nanogpt, {"kind": "<u4"}, 70_000),
    "nanogpt-uint32-small-vocabulary": (write_nanogpt, {"kind": "<u4"}, 200),
    "llm.c-gpt2": (write_llm_c, {}, 200),
    "llm.c-llama3": (write_llm_c, {"magic": 20240801, "version": 7, "kind": "<u4"}, 70_000),
    "megatron": (write_megatron, {}, 200),
    "megatron-sentences": (write_megatron, {"kind": "i4", "per_document": 3}, 70_000),
    "megatron-uint8": (write_megatron, {"kind": "u1"}, 200),
    "megatron-int64": (write_megatron, {"kind": "i8"}, 70_000),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_every_layout_come_back(tmp_path, tokenizers, layout):
    write, settings, vocabulary = LAYOUTS[layout]
    documents = make_documents(vocabulary=vocabulary)
    path = write(tmp_path / "x.bin", documents, **settings)
    packed = prepare_source(config(path, tokenizers / str(vocabulary)), progress=False)
    assert packed.train.path == path, "mapped where it is"
    assert packed.vocab_size == vocabulary
    assert packed.valid_bytes_per_token is None, "words have no bytes of their own"
    whole, cut = np.concatenate(documents), packed.facts["train"]["tokens"]
    assert packed.facts["valid"]["tokens"] == len(whole) - cut
    assert whole[cut - 1] == END, "held out from the end of a document on"
    found = ids_of(packed.train)
    assert cut - len(found) < LENGTH
    np.testing.assert_array_equal(found, whole[: len(found)])
    np.testing.assert_array_equal(ids_of(packed.valid), whole[cut : cut + 4 * LENGTH])
    assert len(pickle.dumps(packed.train)) < 2000, "a worker maps the file anew"
    assert packed.facts["train"].get("documents") == (len(documents) if layout.startswith("megatron") else None)


def test_documents_of_megatron_without_an_end_get_one(tmp_path, tokenizers):
    documents = make_documents(ended=False)
    documents[7] = np.append(documents[7], END)  # has one
    path = write_megatron(tmp_path / "text_document.bin", documents, kind="u1")
    packed = prepare_source(config(tmp_path / "text_document", tokenizers / "200"), progress=False)
    assert packed.train.path == path
    assert packed.facts["train"]["ends_of_text_added"] == len(documents) - 1
    whole = np.concatenate([each if each[-1] == END else np.append(each, END) for each in documents])
    found = ids_of(packed.train)
    np.testing.assert_array_equal(found, whole[: len(found)])
    again = pickle.loads(pickle.dumps(packed.train))
    np.testing.assert_array_equal(ids_of(again), found)


@pytest.mark.parametrize("spelling", ["folder", "pattern"])
def test_shards_are_one_axis(tmp_path, tokenizers, spelling):
    documents, folder = make_documents(90), tmp_path / "shards"
    folder.mkdir()
    write_nanogpt(folder / "fine_train_0.bin", documents[:30])
    write_llm_c(folder / "fine_train_1.bin", documents[30:60])
    valid = write_llm_c(folder / "fine_val_0.bin", documents[60:])
    source, settings = folder / "fine_train_*.bin", {"valid_source": str(folder / "fine_val_*.bin")}
    if spelling == "folder":
        valid.rename(tmp_path / "fine_val_0.bin")
        source, settings = folder, {"valid_source": str(tmp_path / "fine_val_0.bin")}
    packed = prepare_source(config(source, tokenizers / "200", eval_sequences=10**6, **settings), progress=False)
    assert packed.facts["train"]["files"] == 2
    for blocks, part in ((packed.train, documents[:60]), (packed.valid, documents[60:])):
        whole, found = np.concatenate(part), ids_of(blocks)
        assert len(whole) - len(found) < LENGTH
        np.testing.assert_array_equal(found, whole[: len(found)])


def test_held_out_tokens_may_be_a_shard(tmp_path):
    ids = rng().integers(1, 200, 10 * LENGTH)
    for name, part in (("a", ids[:-LENGTH]), ("b", ids[-LENGTH:])):
        write_nanogpt(tmp_path / f"{name}.bin", [part])
    packed = prepare_source(config(tmp_path / "[ab].bin", "none", vocab_size=300), progress=False)
    np.testing.assert_array_equal(ids_of(packed.valid), ids[-LENGTH:])


def test_ids_without_a_tokenizer_need_the_size_of_their_vocabulary(tmp_path):
    documents = make_documents()
    for path in (write_nanogpt(tmp_path / "a.bin", documents), write_megatron(tmp_path / "b.bin", documents)):
        packed = prepare_source(config(path, "none", vocab_size=200), progress=False)
        assert packed.tokenizer is None
        assert packed.vocab_size == 200
        assert packed.valid_bytes_per_token is None
        np.testing.assert_array_equal(ids_of(packed.train), np.concatenate(documents)[: len(packed.train) * LENGTH])
        bigger = prepare_source(config(path, "none", vocab_size=256), progress=False)
        assert bigger.fingerprint != packed.fingerprint
        few = config(path, "none", vocab_size=150)
        assert_refused("vocabulary has 150; .* --vocab-size", lambda few=few: prepare_source(few, progress=False))


def test_fingerprint_is_of_the_content_and_bytes_are_of_the_text(tmp_path, tokenizers):
    documents = make_documents(vocabulary=250)
    path = write_nanogpt(tmp_path / "a.bin", documents)
    settings = config(path, tokenizers / "bytes")
    packed = prepare_source(settings, progress=False)
    tokens, tokenizer = ids_of(packed.valid).reshape(-1, LENGTH)[:, 1:], packed.tokenizer
    lengths = [0 if token == END else len(tokenizer.convert_ids_to_tokens(token)) for token in tokens.ravel().tolist()]
    assert packed.valid_bytes_per_token == pytest.approx(np.mean(lengths))
    moved = write_nanogpt(tmp_path / "b.bin", documents)
    assert prepare_source(config(moved, tokenizers / "bytes"), progress=False).fingerprint == packed.fingerprint
    documents[3][0] += 1
    write_nanogpt(path, documents)
    assert prepare_source(settings, progress=False).fingerprint != packed.fingerprint


def test_ids_of_a_source_that_is_too_long_to_scan_are_checked_when_read(tmp_path, tokenizers, monkeypatch):
    documents = make_documents()
    monkeypatch.setattr(sources, "_MOST_SCANNED", 100)
    monkeypatch.setattr(sources, "_ENDS", 50)
    path = write_nanogpt(tmp_path / "a.bin", documents)
    clean = prepare_source(config(path, tokenizers / "200"), progress=False)
    assert len(ids_of(clean.train)) == len(clean.train) * LENGTH
    ids = np.fromfile(path, "<u2")
    ids[len(ids) // 2] = 200
    write_nanogpt(path, [ids])
    packed = prepare_source(config(path, tokenizers / "200"), progress=False)
    assert_refused("a.bin has the id 200 and the tokenizer's vocabulary has 200", ids_of, packed.train)


def _raw(path, data):
    path.write_bytes(data)
    return path


def _with_index(path, change):
    write_megatron(path, make_documents())
    index = path.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    return path


def _both(folder, *names):
    for name in names:
        write_nanogpt(folder / name, make_documents())
    return folder


BAD = {
    "odd": (lambda t: _raw(t / "a.bin", b"abc"), "3 bytes, not a number of uint16 ids; it is empty, cut off"),
    "empty": (lambda t: _raw(t / "a.bin", b""), "0 bytes, not a number of uint16 ids"),
    "above": (lambda t: write_nanogpt(t / "a.bin", make_documents(vocabulary=300)), "the id 29. and .* has 200; name"),
    "negative": (lambda t: write_megatron(t / "a.bin", [np.full(400, -3)], kind="i2"), "the id -3"),
    "magic": (
        lambda t: write_llm_c(t / "a.bin", make_documents(), magic=20240522),
        "unknown magic 20240522; .*20240520",
    ),
    "version": (lambda t: write_llm_c(t / "a.bin", make_documents(), version=2), "version 2 .*; version 1 is known"),
    "count": (lambda t: write_llm_c(t / "a.bin", make_documents(), count=10**6), "should hold 1,000,000 ids .* holds"),
    "checkpoint": (lambda t: _raw(t / "a.bin", b"PK\x03\x04" + bytes(2000)), "not a token file"),
    "absent": (lambda t: t / "a.bin", "there is no file"),
    "no match": (lambda t: t / "train_*.bin", "there is no file .*or a pattern"),
    "index absent": (
        lambda t: write_nanogpt(t / "a_text_document.bin", make_documents()),
        "no .*a_text_document.idx; put",
    ),
    "prefix": (lambda t: write_nanogpt(t / "a.bin", make_documents()).with_suffix(""), "needs both a.bin and a.idx"),
    "index magic": (lambda t: _with_index(t / "a.bin", lambda d: b"X" + d[1:]), "does not begin with MMIDIDX"),
    "index type": (lambda t: _with_index(t / "a.bin", lambda d: d[:17] + b"\7" + d[18:]), "type code 7; known"),
    "index cut": (lambda t: _with_index(t / "a.bin", lambda d: d[:-8]), "is cut off"),
    "index other": (lambda t: _with_index(t / "a.bin", lambda d: d[:34] + b"\7\0\0\0" + d[38:]), "does not fit a.bin"),
    "train and val": (lambda t: _both(t, "train.bin", "val.bin"), r"files of train and of val; .*\*train\*.bin"),
    "text too": (
        lambda t: _raw(_both(t, "a.bin") / "a.txt", b"how").parent,
        "holds text and .bin files; name the latter",
    ),
    "short": (lambda t: _raw(t / "a.bin", bytes([5, 0] * 20)), "fewer than one sequence of 16; give more tokens"),
}
FIELDS = {
    "tokenizer": ({"tokenizer": "bpe"}, "needs the tokenizer that made its tokens: give --tokenizer"),
    "max_bytes": ({"max_bytes": 10}, "add --task.text.max-bytes None"),
    "valid_source": ({"valid_source": "stdlib"}, "give token files for both"),
    "same": ({"valid_source": "other.bin"}, "is in source and in valid_source"),
}


@pytest.mark.parametrize("kind", [*BAD, *FIELDS])
def test_wrong_token_files_are_one_clear_line(tmp_path, tokenizers, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "in").mkdir()
    fields, words = FIELDS.get(kind, ({}, ""))
    if kind in BAD:
        make, words = BAD[kind]
        source = make(folder)
    else:
        source = write_nanogpt(folder / "a.bin", make_documents())
        write_nanogpt(tmp_path / "other.bin", [np.fromfile(source, "<u2")])
    tokenizer = fields.pop("tokenizer", tokenizers / "200") if kind == "tokenizer" else tokenizers / "200"
    assert_refused(words, lambda: prepare_source(config(source, tokenizer, **fields), progress=False))


def write_columns(folder, kind, documents, column):
    rows = datasets.Dataset.from_dict({column: [each.tolist() for each in documents], "other": ["x"] * len(documents)})
    path = folder / f"rows.{kind}"
    if kind == "saved":
        rows.save_to_disk(path)
    else:
        getattr(rows, {"parquet": "to_parquet", "jsonl": "to_json"}[kind])(path)
    return path


@pytest.mark.parametrize("tokenizer", ["200", "bytes"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved"])
def test_columns_of_ids_are_packed_as_the_text_that_they_stand_for(tmp_path, tokenizers, kind, tokenizer):
    documents = make_documents(ended=False)
    mixed = [np.append(each, END) if number % 2 else each for number, each in enumerate(documents)]
    settings = {"eval_sequences": 10**6, "text_field": "text" if kind == "parquet" else "ids"}
    column = "input_ids" if kind == "parquet" else "ids"
    path = write_columns(tmp_path, kind, mixed, column)
    packed = prepare_source(config(path, tokenizers / tokenizer, **settings), progress=False)
    found = np.concatenate([np.load(blocks.path) for blocks in (packed.train, packed.valid)])
    ends = np.flatnonzero(found == END) + 1
    assert sorted(map(tuple, np.split(found, ends)[:-1])) == sorted((*each.tolist(), END) for each in documents)
    assert packed.facts["valid"]["documents"] == 6
    assert (packed.valid_bytes_per_token is None) == (tokenizer == "200")
    if tokenizer == "bytes":
        held_out = np.concatenate([packed.valid[i]["input_ids"][1:] for i in range(len(packed.valid))])
        sizes = [0 if each == END else len(packed.tokenizer.convert_ids_to_tokens(int(each))) for each in held_out]
        assert packed.valid_bytes_per_token == pytest.approx(np.mean(sizes))


def test_columns_of_ids_stream_and_mix_with_files_and_text(tmp_path, tokenizers):
    documents = make_documents()
    (tmp_path / "rows").mkdir()
    path = write_columns(tmp_path / "rows", "parquet", documents, "input_ids")
    plain = prepare_source(config(path, tokenizers / "bytes"), progress=False)
    streamed = prepare_source(config(path.parent, tokenizers / "bytes", streaming=True), progress=False)
    assert streamed.fingerprint == plain.fingerprint
    text = tmp_path / "a.txt"
    text.write_text("the text of a file\n" * 200, encoding="utf-8")
    tokens = write_nanogpt(tmp_path / "a.bin", documents)
    mixture = config(f"{path}:2,{text}:1,{tokens}:1", tokenizers / "bytes", eval_sequences=8)
    packed = prepare_source(mixture, progress=False)
    assert packed.train.weights == (0.5, 0.25, 0.25)
    assert [each["evaluated_sequences"] for each in packed.facts["sources"]] == [4, 2, 2]
    each = [packed.valid[index]["input_ids"] for index in range(8)]
    sizes = [[0 if i == END else len(packed.tokenizer.convert_ids_to_tokens(int(i))) for i in row[1:]] for row in each]
    assert packed.valid_bytes_per_token == pytest.approx(np.mean(sizes))


@pytest.mark.parametrize(
    ("row", "fields", "words"),
    [
        ([2, 250], {}, "a document has the id 250 and the tokenizer's vocabulary has 200"),
        ([1, -2], {}, "a document has the id -2"),
        ([1, 2], {"tokenizer": "bpe"}, "holds token ids; to train on them name their --tokenizer"),
        ([1, 2], {"max_bytes": 9}, "max_bytes counts text, and .* holds token ids; set it to None"),
        ([0.5], {}, "has no text in the field 'text'"),
        ([1, 2], {"text_field": "tokens"}, "has no text in the field 'tokens'"),
    ],
)
def test_wrong_columns_are_one_clear_line(tmp_path, tokenizers, row, fields, words):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i, *row]}) + "\n" for i in range(1, 41)))
    settings = {"tokenizer": tokenizers / "200", **fields}
    assert_refused(words, lambda: prepare_source(config(path, **settings), progress=False))


def test_a_folder_of_text_with_another_file_in_it_is_text(tmp_path, tokenizers):
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / "data" / f"{number}.txt").write_text(f"w{number + 7} w5 w6 " * 40)
    (tmp_path / "data" / "asset.bin").write_bytes(b"\0\1\2")
    packed = prepare_source(config(tmp_path / "data", tokenizers / "200"), progress=False)
    assert packed.facts["train"]["documents"] + packed.facts["valid"]["documents"] == 20


def make_mixture(folder, tokenizers, sizes=(400, 30), weights=(7, 3), **fields):
    """Two files whose ids tell them apart."""
    names = []
    for number, size in enumerate(sizes):
        ids = np.arange(size * LENGTH) % 90 + 1 + 100 * number
        ids[LENGTH - 1 :: LENGTH] = END
        names.append(f"{write_nanogpt(folder / f'{number}.bin', [ids])}:{weights[number]}")
    return config(",".join(names), tokenizers / "200", **fields)


def test_mixture_has_its_shares_in_every_pass_and_sees_all_of_each(tmp_path, tokenizers):
    packed = prepare_source(make_mixture(tmp_path, tokenizers, eval_sequences=10), progress=False)
    train = packed.train.seeded(3)
    sizes = [len(each) for each in train.parts]
    assert sizes[1] < len(train) // 10
    for done in range(2):
        seen = [train.locate(index + done * len(train))[0] for index in range(len(train))]
        assert np.bincount(seen).tolist() == [round(0.7 * len(train)), round(0.3 * len(train))]
    rows = [train.locate(index) for index in range(len(train))]
    for number, size in enumerate(sizes):
        mine = [row for source, row in rows if source == number]
        for first in range(0, len(mine) - size + 1, size):
            assert sorted(mine[first : first + size]) == list(range(size)), "each once before any twice"
    some = [row for source, row in rows if source == 0][:20]
    assert max(np.diff([0, *sorted(some), sizes[0]])) < sizes[0] / 5, "evenly spread"
    first = [train[index]["input_ids"].tolist() for index in range(50)]
    assert first == [packed.train.seeded(3)[index]["input_ids"].tolist() for index in range(50)]
    assert first != [packed.train.seeded(4)[index]["input_ids"].tolist() for index in range(50)]
    assert [each["weight"] for each in packed.facts["sources"]] == [0.7, 0.3]
    held_out = [int(packed.valid[index]["input_ids"][0]) > 100 for index in range(len(packed.valid))]
    assert sum(held_out) == packed.facts["sources"][1]["evaluated_sequences"]


def test_mixture_with_held_out_tokens_of_its_own(tmp_path, tokenizers):
    documents, text = make_documents(), tmp_path / "a.txt"
    valid = write_nanogpt(tmp_path / "valid.bin", documents)
    settings = {"valid_source": str(valid), "eval_sequences": 6}
    packed = prepare_source(make_mixture(tmp_path, tokenizers, **settings), progress=False)
    np.testing.assert_array_equal(ids_of(packed.valid), np.concatenate(documents)[: 6 * LENGTH])
    assert sum(map(len, packed.train.parts)) == 430, "nothing is held out of the sources"
    other = prepare_source(make_mixture(tmp_path, tokenizers, weights=(6, 4), **settings), progress=False)
    assert other.fingerprint != packed.fingerprint
    lines = [f"w{number} w{number + 1}\n<|endoftext|>\n" * 30 for number in range(2, 60)]
    for name, part in (("a", lines), ("b", lines[:20]), ("c", lines[10:30])):
        text.with_stem(name).write_text("".join(part), encoding="utf-8")
    both = f"{text}:1,{text.with_stem('b')}:1"
    shared = config(both, tokenizers / "200", valid_source=str(text.with_stem("c")))
    assert_refused("documents of .*c.txt are also in", prepare_source, shared, progress=False)


def test_no_text_of_a_mixture_trains_on_what_another_holds_out(tmp_path, tokenizers, capsys):
    lines = [f"w{number} w{number + 1} w7\n<|endoftext|>\n" for number in range(10, 110)]
    names = {name: tmp_path / f"{name}.txt" for name in "abc"}
    for name, part in (("a", lines[:60]), ("b", lines[30:] + lines[40:45]), ("c", lines[60:])):
        names[name].write_text("".join(part), encoding="utf-8")

    def prepare(*chosen, **fields):
        source = ",".join(f"{names[each]}:1" for each in chosen)
        settings = config(source, tokenizers / "200", sequence_length=4, valid_fraction=0.3, **fields)
        return prepare_source(settings, progress=True)

    def documents(blocks):
        return {tuple(each) for part in blocks.parts for each in np.load(part.path).reshape(-1, 4).tolist()}

    apart = prepare("a", "c")
    assert all("training_documents" not in name for each in apart.facts["sources"] for name in each)
    alone = prepare_source(replace(config(names["a"], tokenizers / "200"), sequence_length=4, valid_fraction=0.3))
    np.testing.assert_array_equal(np.load(apart.train.parts[0].path), np.load(alone.train.path))
    capsys.readouterr()
    packed = prepare("a", "b")
    assert not documents(packed.train) & documents(packed.valid)
    assert len(documents(packed.train) | documents(packed.valid)) == 100
    dropped = [
        each.get("training_documents_dropped_as_held_out_of_another_source", 0) for each in packed.facts["sources"]
    ]
    assert sum(dropped) > 0
    said = capsys.readouterr().out
    for name, count in zip("ab", dropped, strict=True):
        assert (f"{names[name]}: {count} training documents dropped" in said) == (count > 0)
    assert prepare("a", "b").fingerprint == packed.fingerprint, "out of the cache"


def test_masks_of_a_mixture_follow_its_passes(tmp_path, tokenizers):
    words = PreTrainedTokenizerFast.from_pretrained(tokenizers / "200")
    words.mask_token = "w199"
    words.save_pretrained(tmp_path / "masked")
    text = replace(make_mixture(tmp_path, tokenizers, eval_sequences=4), tokenizer=str(tmp_path / "masked"))
    backbone = EncoderBackbone(layers=1, width=16, heads=2, hidden=16)
    train = MaskedLanguageModelTask(text=text, backbone=backbone).prepare(progress=False).train.seeded(3)
    mixed = prepare_source(text, progress=False).train.seeded(3)
    for index in (5, len(mixed) - 1, len(mixed) + 5, 7 * len(mixed) + 2):
        item, plain = train[index], mixed[index]["input_ids"]
        seen = torch.where(item["labels"] == -100, item["input_ids"], item["labels"])
        assert torch.equal(seen, plain)
        assert (item["labels"] != -100).any()
    assert train.drawn(range(20)) == mixed.drawn(range(20))
    assert sum(each["sequences"] for each in mixed.drawn(range(20))) == 20


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a.bin:0.7,b.bin", "cannot read 'b.bin' in the mixture .*; give each source a weight above 0, as in"),
        ("a.bin:0.7,b.bin:-1", "cannot read 'b.bin:-1'"),
        ("a.bin:0.7,b.bin:x", "cannot read 'b.bin:x'"),
        ("a.bin:inf,b.bin:1", "cannot read 'a.bin:inf'"),
        ("a.bin:nan,b.bin:1", "cannot read 'a.bin:nan'"),
        ("a.bin:1,:1", "cannot read ':1'"),
        ("a.bin:1,a.bin:1", "'a.bin' occurs twice"),
    ],
)
def test_wrong_mixtures_are_one_clear_line(tokenizers, source, words):
    assert_refused(words, prepare_source, config(source, tokenizers / "200"))
    assert_refused("needs the tokenizer", prepare_source, config("a.bin:1,b.bin:1", "bpe"))


def test_bytes_of_a_mixture_are_of_all_that_is_evaluated(tmp_path, tokenizers):
    a, b = tmp_path / "a.bin", tmp_path / "b.bin"
    for path, size in ((a, 250), (b, 270)):
        write_nanogpt(path, make_documents(vocabulary=size))
    packed = prepare_source(config(f"{a}:0.8,{b}:0.2", tokenizers / "bytes", eval_sequences=10), progress=False)
    tokens, tokenizer = ids_of(packed.valid).reshape(-1, LENGTH)[:, 1:], packed.tokenizer
    lengths = [0 if token == END else len(tokenizer.convert_ids_to_tokens(token)) for token in tokens.ravel().tolist()]
    assert packed.valid_bytes_per_token == pytest.approx(np.mean(lengths))
