"""Generators for tests, seeded as the tests are (`conftest.py`)."""

import numpy as np


def rng() -> np.random.Generator:
    return np.random.default_rng(np.random.randint(2**31))  # noqa: NPY002
