"""Shared by the tests of the workbench: a generator, and tiny checkpoints and data, made once a file."""

import pytest

import finetune_helpers
import seeds


@pytest.fixture
def rng():
    return seeds.rng()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return finetune_helpers.root(tmp_path_factory.mktemp("data"))
