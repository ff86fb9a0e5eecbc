"""Shared by the tests of the workbench: a generator, and tiny checkpoints and data, made once a file."""

import pytest

import finetune_helpers
import seeds


@pytest.fixture
def rng():
    return seeds.rng()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return finetune_helpers.root(tmp_path_factory.mktemp("data"))
