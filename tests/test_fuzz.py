"""Damaged files and settings: taken, or refused in words. Hundreds of cases here, more in studies/faults."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz_helpers import TARGETS, damage, try_one


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_input_is_refused_in_words(target, tmp_path):
    examples = target.examples(tmp_path)
    for example in examples:
        assert try_one(target, tmp_path, example), "a valid example was refused"

    @settings(
        max_examples=8 if target.name.startswith(("model", "adapter", "overrides")) else 25,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=st.sampled_from(examples), random=st.randoms(use_true_random=False))
    def search(example, random):
        try_one(target, tmp_path, damage(example, random))

    search()
