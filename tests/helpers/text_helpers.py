"""Texts of every kind of file, for the tests that read them."""

import gzip
import json
import lzma
import random

import datasets
import zstandard

from nlr_lab.tasks.text.data import END_OF_TEXT, TextData

SQUEEZE = {"xz": lzma.compress, "gz": gzip.compress, "zst": zstandard.compress}
WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "he", "with", "as", "her", "had", "for", "is", "not")


def make_documents(count=40, lines=12):
    """Fresh random documents, no two alike."""
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
