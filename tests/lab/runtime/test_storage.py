"""Pruning deletes no checkpoint before a newer one has been read back."""

from pathlib import Path

import pytest

from nlr_lab.runtime.storage import newest_valid, prune, step_folders
from nonlinear_lowrank import UserError
from nonlinear_lowrank.hub.storage import staged_folder


def steps(folder: Path, *numbers: int) -> None:
    for step in numbers:
        with staged_folder(folder / f"step-{step:06d}", {}) as staged:
            (staged / "x").write_text(f"content {step}")


def test_prune_counts_no_damaged_checkpoint_as_kept(tmp_path):
    steps(tmp_path, 2, 4, 6, 8)
    (tmp_path / "step-000006" / "x").write_text("cut")
    prune(tmp_path, newest=8, keep=2)
    assert list(step_folders(tmp_path)) == [4, 8]


def test_prune_deletes_nothing_before_the_newest_reads_back(tmp_path):
    steps(tmp_path, 2, 4, 6)
    (tmp_path / "step-000006" / "x").write_text("contenT 6")  # of the same size
    with pytest.raises(UserError, match=r"step-000006.*damaged"):
        prune(tmp_path, newest=6, keep=1)
    assert list(step_folders(tmp_path)) == [2, 4, 6]
    assert newest_valid(tmp_path)[0].name == "step-000004"
