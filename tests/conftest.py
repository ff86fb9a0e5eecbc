"""Shared by all tests: one thread, seeds, and NaN in memory that nobody wrote."""

import gc
import os
import random
import zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import numpy as np
import pytest
import torch

FUZZ = os.environ.get("NLR_FUZZ", "")
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SLOW = tuple(line for line in Path(__file__).with_name("slow.txt").read_text().splitlines() if line[0] != "#")


hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("default" if FUZZ else "repeatable")


def pytest_report_header() -> str:
    return f"seeds: NLR_FUZZ={FUZZ}" if FUZZ else "seeds: from each test's name"


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # torch.empty gives NaN from here on: reading memory that was never written shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # torch queues the seeds of devices that are not there, each with its stack as text: milliseconds a call.
    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        names, files = [item.nodeid for item in items], {item.nodeid.partition("::")[0] for item in items}
        for case in SLOW:
            if case.partition("::")[0] in files and not any(name.startswith(case) for name in names):
                raise LookupError(f"tests/slow.txt: there is no case {case}")
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
        if item.get_closest_marker("shared_data") and not SHARED_DATA.is_dir():
            item.add_marker(pytest.mark.skip(reason="../shared/data is absent"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish() -> None:
    """Keep imported objects out of garbage collection, which every run of a Trainer asks for."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    """Seed from the names of the fixture and of what it is for."""
    _seed(f"{request.node.name}:{fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed from the test's own name: neither the order of tests nor who set up a shared fixture changes a number."""
    _seed(item.name)


def _seed(name: str) -> None:
    seed = zlib.crc32(f"{name}{FUZZ}".encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@pytest.fixture
def shared_data() -> Path:
    return SHARED_DATA
