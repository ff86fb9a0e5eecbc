"""Folders are whole or absent; pruning deletes nothing before a newer one has been read back; one process at a time."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nlr_lab.runtime.storage import (
    newest_valid,
    opened,
    prune,
    read_manifest,
    remove_temporaries,
    step_folders,
    write_json,
)
from nonlinear_lowrank import UserError
from nonlinear_lowrank.hub.storage import MANIFEST, staged_folder
from refusals import assert_refused, refuse_to_open


def steps(folder: Path, *numbers: int) -> None:
    for step in numbers:
        with staged_folder(folder / f"step-{step:06d}", {}) as staged:
            (staged / "x").write_text(f"content {step}")


def test_prune_counts_no_damaged_checkpoint_as_kept(tmp_path):
    steps(tmp_path, 2, 4, 6, 8, 10)
    (tmp_path / "step-000006" / "x").write_text("cut")
    prune(tmp_path, newest=8, keep=2)  # 10 is of before a resume from 8
    assert list(step_folders(tmp_path)) == [4, 8]


def test_prune_deletes_nothing_before_the_newest_reads_back(tmp_path):
    steps(tmp_path, 2, 4, 6)
    (tmp_path / "step-000006" / "x").write_text("contenT 6")  # of the same size
    assert_refused(r"step-000006.*damaged", prune, tmp_path, newest=6, keep=1)
    assert list(step_folders(tmp_path)) == [2, 4, 6]
    assert newest_valid(tmp_path)[0].name == "step-000004"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", [MANIFEST, "x"])
def test_checkpoints_that_cannot_be_read_are_not_damaged(tmp_path, monkeypatch, name, code):
    steps(tmp_path, 2, 4, 6)
    refuse_to_open(monkeypatch, code, tmp_path / "step-000006" / name, tmp_path / "step-000004" / MANIFEST)
    refusal = rf"cannot read .*step-000006/{name}: {os.strerror(code)}; no checkpoint was removed.*--resume"
    assert_refused(refusal, newest_valid, tmp_path)
    assert_refused(refusal, prune, tmp_path, newest=6, keep=1)
    steps(tmp_path, 8)
    assert_refused(r"cannot read .*step-000006|cannot read .*step-000004", prune, tmp_path, newest=8, keep=1)
    assert list(step_folders(tmp_path)) == [2, 4, 6, 8]


def test_staged_folder_is_whole_or_absent(tmp_path):
    def fail() -> None:
        with staged_folder(tmp_path / "a", {}) as folder:
            (folder / "x").write_text("1")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert not list(tmp_path.iterdir())
    with staged_folder(tmp_path / "a", {"step": 3}) as folder:
        (folder / "b").mkdir()
        (folder / "b" / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert read_manifest(tmp_path / "a")["step"] == 3
    with staged_folder(tmp_path / "a", {"step": 4}) as folder:
        (folder / "y").write_text("2")
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == [MANIFEST, "y"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_was_being_replaced_comes_back(tmp_path, monkeypatch):
    steps(tmp_path, 2)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == ".tmp-step-000002":
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="broken"):
            steps(tmp_path, 2)
    assert list(step_folders(tmp_path)) == [2]
    (tmp_path / "step-000002").rename(tmp_path / ".tmp-old-step-000002")  # as a kill between the two renames leaves it
    (tmp_path / ".tmp-step-000002").mkdir()
    remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert newest_valid(tmp_path)[0].name == "step-000002"


def test_folder_lets_one_process_in_until_it_ends(tmp_path):
    hold = "import sys; from nlr_lab.runtime.storage import opened; from pathlib import Path\n"
    hold += "with opened(Path(sys.argv[1]), overwrite=False): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process is writing"), opened(tmp_path, overwrite=False):
            pass
        other.kill()
    for _ in range(100):  # the system lets go of a killed process's lock
        with contextlib.suppress(UserError), opened(tmp_path, overwrite=False):
            return
        time.sleep(0.05)
    pytest.fail("the lock outlived its process")


def test_what_is_renamed_is_on_the_disk_before(tmp_path, monkeypatch):
    done, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_ino) or fsync(file))
    for name in ("rename", "replace"):
        move = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda self, target, move=move: done.append("moved") or move(self, target))
    steps(tmp_path, 2)
    write_json(tmp_path / "a.json", {})
    folder, file, parent = tmp_path / "step-000002", tmp_path / "a.json", tmp_path.stat().st_ino
    assert set(done[:3]) == {each.stat().st_ino for each in (folder, folder / "x", folder / MANIFEST)}
    assert done[3:] == ["moved", parent, file.stat().st_ino, "moved", parent]


def test_a_checkpoint_that_is_being_removed_has_no_name_of_one(tmp_path, monkeypatch):
    steps(tmp_path, 2, 4)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prune(tmp_path, newest=4, keep=1)
    assert list(step_folders(tmp_path)) == [4]
    remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]
