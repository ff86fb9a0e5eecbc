"""Kernels that repeat their bits, and the state of a checkout."""

import os
import subprocess
from pathlib import Path

import torch

from nlr_lab.runtime.environment import determinism, deterministic, git_state


def git(folder: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env={**os.environ, **identity}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_deterministic_sets_every_switch_and_puts_all_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = determinism()
    assert before["algorithms"] is False  # conftest's warnings do not count
    with deterministic(True):
        cudnn = {"cudnn_deterministic": True, "cudnn_benchmark": False}
        assert determinism() == {"algorithms": True, **cudnn, "cublas_workspace": ":4096:8"}
    assert determinism() == before
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    with deterministic(False):
        assert determinism() == before
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert determinism()["cublas_workspace"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_git_state_runs_no_program_of_a_submodule(tmp_path):
    inner, outer, spy = (tmp_path / name for name in ("inner", "outer", "spy.sh"))
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    spy.chmod(0o755)
    for folder in (inner, outer):
        folder.mkdir()
        git(folder, "init", "-q")
        (folder / "a").write_text("1")
        git(folder, "add", "a")
        git(folder, "commit", "-qm", "one")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "part")
    git(outer, "commit", "-qm", "two")
    git(outer / "part", "config", "filter.spy.clean", str(spy))
    (outer / ".git/modules/part/info/attributes").write_text("a filter=spy\n")
    os.utime(outer / "part/a", (1, 1))
    assert git_state(outer) == {"commit": git(outer, "rev-parse", "HEAD"), "dirty": False}
    assert not (tmp_path / "ran").exists()


def test_git_state_of_any_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(tmp_path) is None  # no repository
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None  # no commit
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("1")
    spy = tmp_path / "spy.sh"
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    spy.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(spy))
    git(tmp_path, "config", "filter.spy.clean", str(spy))
    git(tmp_path, "config", "filter.spy.required", "true")
    (tmp_path / ".git/info/attributes").write_text("a filter=spy\n")
    os.utime(tmp_path / "a", (1, 1))  # so that git looks into it
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    assert not (tmp_path / "ran").exists(), "no program of the repository is started"
    git(tmp_path, "config", "filter.a=b.clean", str(spy))
    assert git_state(tmp_path) is None, "a filter that cannot be switched off"
    assert git_state(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert git_state(tmp_path) is None
