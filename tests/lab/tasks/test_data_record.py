"""The record of the files that a run read, and what has changed in them."""

from dataclasses import replace

from nlr_lab.tasks.task import changed_files, data_record
from nonlinear_lowrank.hub.storage import hash_file
from training_helpers import make_recipe


def test_data_are_recorded_file_by_file(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "inner" / "b.txt").write_text("three")
    (folder / ".hidden").write_text("no")
    task = make_recipe().task

    def record(source):
        return data_record(replace(task, text=replace(task.text, source=str(source))), "f")

    before = record(folder)
    entry = before["sources"]["text.source"]
    assert entry["name"] == "corpus"
    assert entry["bytes"] == 8
    assert entry["files"] == {
        "a.txt": {"bytes": 3, "sha256": hash_file(folder / "a.txt")},
        "inner/b.txt": {"bytes": 5, "sha256": hash_file(folder / "inner" / "b.txt")},
    }
    assert changed_files(before, record(folder)) == []
    (folder / "a.txt").write_text("two")
    (folder / "inner" / "b.txt").unlink()
    (folder / "c.txt").write_text("")
    assert changed_files(before, record(folder)) == [
        "text.source: corpus, a.txt has changed",
        "text.source: corpus, c.txt is new",
        "text.source: corpus, inner/b.txt is missing",
    ]
    assert record(folder / "c.txt")["sources"]["text.source"]["files"].keys() == {"c.txt"}
    assert record("owner/name")["sources"]["text.source"] == {"name": "owner/name", "fingerprint": "f"}
