"""The list of long cases names tests that exist."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = [line for line in (HERE / "slow.txt").read_text().splitlines() if line[0] != "#"]


@pytest.mark.parametrize("case", CASES)
def test_long_case_is_of_a_test(case):
    file, _, name = case.partition("::")
    assert f"def {name.partition('[')[0]}(" in (HERE.parent / file).read_text()
