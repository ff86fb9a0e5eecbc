"""`nlr bench kernels`: what it says of compiled code (`test_kernels_compiled.py` compiles)."""

import sys

import pytest

from cli_helpers import refused
from nlr_lab.bench.kernels import summary
from nlr_lab.bench.result import Row
from nlr_lab.bench.settings import KernelBenchConfig

GOOD = {"warps": 4, "registers": 80, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 8192}
GOOD |= {"products": 2, "wgmma": 4, "mma": 0}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "no spills, no stack"),
        ({"spill_loads": 8}, "R=64 fast ieee: 8 bytes of spill loads"),
        ({"spill_stores": 12}, "R=64 fast ieee: 12 bytes of spill stores"),
        ({"stack": 16}, "R=64 fast ieee: 16 bytes of stack"),
        ({"wgmma": 0, "mma": 1}, "R=64 fast ieee: 2 products without matrix instructions"),
        ({"wgmma": 0, "products": 0}, "no spills, no stack"),
    ],
)
def test_problems_are_named(changed, said):
    row = Row(panel="sm_90", arm="cosnet forward: R=64 fast ieee", figures=GOOD | changed)
    result = summary(KernelBenchConfig(), [row], {"triton": "3.7.1", "ptxas": "12.9"})
    assert said in str(result)
    assert "8,192" in str(result)
    assert said in result.to_json()


def test_missing_triton_is_named_with_the_fix(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in refused(capsys, "bench", "kernels")
