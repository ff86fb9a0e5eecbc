"""`nlr bench kernels`: what it says, and what it refuses."""

import json
import sys

import pytest

from nlr_lab.bench.kernels import KernelBenchConfig, KernelReport, summary
from nlr_lab.cli.main import main


def row(**changed):
    plain = {
        "name": "cosnet forward",
        "shape": {"R": 64, "FAST": True, "PRECISION": "ieee"},
        "warps": 4,
        "registers": 80,
        "stack": 0,
        "spill_stores": 0,
        "spill_loads": 0,
        "shared": 8192,
        "matrix_instructions": {"wgmma.mma_async": 4},
        "products": 1,
    }
    return KernelReport(**(plain | changed))


def test_problems_are_named():
    assert row().problems == []
    assert row(spill_loads=8).problems == ["8 bytes of spill loads"]
    assert row(stack=16).problems == ["16 bytes of stack"]
    assert row(matrix_instructions={}).problems == ["1 products without matrix instructions"]
    assert row(matrix_instructions={}, products=0).problems == []


def test_table_and_json_hold_the_verdict():
    versions = {"triton": "3.7.1", "ptxas": "12.9"}
    good = summary(KernelBenchConfig(), [row()], versions)
    assert "R=64 fast ieee" in str(good)
    assert "no spills, no stack" in str(good)
    bad = summary(KernelBenchConfig(), [row(), row(spill_stores=12)], versions)
    assert "cosnet forward: R=64 fast ieee: 12 bytes of spill stores" in str(bad)
    assert [each["problems"] for each in json.loads(bad.to_json())["rows"]] == [[], ["12 bytes of spill stores"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operators", "tanh"], "unknown operator 'tanh'; choose of cosnet, rational, sine"),
        (["--capability", "75"], "capability must be 80, 86, 89 or 90, got 75"),
        (["--output", "no/such/folder/x.json"], "no such folder"),
    ],
)
def test_wrong_inputs_give_one_line(arguments, message, capsys):
    assert main(["bench", "kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_triton_is_named_with_the_fix(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["bench", "kernels"]) == 2
    assert "pip install triton" in capsys.readouterr().err
