"""Text that unpacks to too much, and datasets whose connection drops."""

import datasets
import psutil
import pytest

from nlr_lab.tasks.text.corpus import Corpus
from nlr_lab.tasks.text.packed import prepare_text
from nonlinear_lowrank import UserError
from text_helpers import SQUEEZE, bad_file, make_documents, small, write


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("packed", ["gz", "xz", "zst"])
def test_a_bomb_stops_at_half_of_the_memory(tmp_path, monkeypatch, kind, packed):
    """One document, in one line or in many, that unpacks to a thousand times its file."""

    class Memory:
        available = 16 << 20

    line = b"a" * (1 << 20)
    whole = b'{"text": "' + line * 10 + b'"}\n' if kind == "jsonl" else (line + b"\n") * 10
    path = bad_file(tmp_path, f"bomb.{kind}.{packed}", SQUEEZE[packed](whole))
    assert path.stat().st_size < 100_000
    assert [len(each) for each in Corpus(source=str(path)).documents()] == [len(whole) - (13 if kind == "jsonl" else 0)]
    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(UserError, match="unpacks to more than 8,388,608 bytes"):
        list(Corpus(source=str(path)).documents())


def test_a_dataset_whose_connection_drops_leaves_nothing_and_is_read_again(tmp_path, monkeypatch):
    documents = make_documents(60)
    rows = [{"text": each} for each in documents]

    def broken():
        yield from rows[:20]
        raise ConnectionError("the server has gone away")

    folder = tmp_path / "rows"
    write(folder, "jsonl", documents)
    data = small(folder, streaming=True)
    with monkeypatch.context() as dropped:
        gone = datasets.IterableDataset.from_generator(broken)
        dropped.setattr(datasets, "load_dataset", lambda *args, **kwargs: gone)
        with pytest.raises(UserError, match=r"reading the dataset .* failed: .*the server has gone away"):
            prepare_text(data, progress=False)
    assert not list((tmp_path / "cache" / "text").glob("*/text.json"))
    packed = prepare_text(data, progress=False)
    assert packed.fingerprint == prepare_text(small(folder / "corpus.jsonl"), progress=False).fingerprint
