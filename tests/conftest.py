"""Shared by all tests: one thread, seeds, and NaN in memory that nobody wrote."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # torch.empty gives NaN from here on: reading memory that was never written shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("shared_data") and not SHARED_DATA.is_dir():
            item.add_marker(pytest.mark.skip(reason="../shared/data is absent"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def _fresh_seed(request: pytest.FixtureRequest) -> None:
    """A new seed each run, printed with a failing test."""
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    print(f"torch seed {seed}")


@pytest.fixture
def shared_data() -> Path:
    return SHARED_DATA
