"""`nlr bench op` at toy sizes: every arm computes what it stands for, and the report says what was measured."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nlr_lab.bench.op import OpBenchConfig, bench_op, kat_rational, op_arms
from nlr_lab.bench.result import draw
from nlr_lab.bench.timing import paired_ratio
from nonlinear_lowrank import UserError
from nonlinear_lowrank.methods.rational.reference import rational_reference

TINY = OpBenchConfig(
    width=24,
    hidden=32,
    tokens=20,
    ranks=(4,),
    modes=("eager",),
    rounds=2,
    warmup=1,
    clock="wall",  # steps of this size can be shorter than the process clock's tick
)


def test_report_holds_what_was_timed(tmp_path):
    lines = []
    result = bench_op(TINY, progress=lines.append)
    data = json.loads(result.to_json())
    for row in result.rows:
        times = data["times"][row.panel]
        assert row.step == paired_ratio(times[row.arm], times[row.over])
        assert str(row.step) in str(result)
    assert len(result.rows) == 2 + 5 + 4 + 2
    saved = {row.arm: row.figures["saved_bytes"] for row in result.rows}
    over = {row.arm: row.figures["saved_by_over_bytes"] for row in result.rows}
    assert saved["NOBLE r=4"] - over["NOBLE r=4"] == 20 * 4 * 4
    assert saved["sine-LoRA r=4"] == 20 * 24 * 4
    assert saved["rational"] == over["rational"] == 20 * 32 * 4
    assert saved["gated rational"] == 2 * 20 * 32 * 4
    for row in result.rows:
        if row.arm.startswith(("plain", "KAT")):
            assert row.figures["saved_bytes"] > row.figures["saved_by_over_bytes"]
    assert lines
    draw(result, tmp_path / "op.png")
    assert (tmp_path / "op.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("operator", ["noble", "sine", "rational", "gated"])
def test_plain_formula_equals_the_operator(operator):
    arms = {arm.name: arm for arm in op_arms(operator, TINY)}
    plain = next(arm for name, arm in arms.items() if name.startswith("plain"))
    ours = {"noble": "NOBLE r=4", "sine": "sine-LoRA r=4", "rational": "rational", "gated": "gated rational"}[operator]
    if operator == "sine":  # its weight is its own: both start at a delta of zero
        x = plain.inputs[0]
        torch.testing.assert_close(plain.function(x), F.linear(x, plain.parameters[0]))
        return
    torch.testing.assert_close(plain.function(*plain.inputs), arms[ours].function(*arms[ours].inputs))


def test_kats_way_is_the_sum_of_abs():
    x = torch.randn(3, 5, 8, dtype=torch.float64).float().requires_grad_()
    a, b = torch.randn(4, 6).requires_grad_(), torch.randn(4, 4).requires_grad_()
    found = kat_rational(x, a, b)
    wanted = rational_reference(x.double(), a.double(), b.double(), "sum_of_abs")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(found)
    for got, want in zip(
        torch.autograd.grad(found, (x, a, b), dy), torch.autograd.grad(wanted, (x, a, b), dy.double()), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operators": ("magic",)}, "unknown operators 'magic'"),
        ({"operators": ()}, "operators must be different, and at least one, got none"),
        ({"ranks": (24,)}, "rank 24 is not low"),
        ({"groups": 7}, "7 groups do not divide 32"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"modes": ("fast",)}, "unknown modes 'fast'"),
        ({"tokens": 0}, "tokens must be"),
    ],
)
def test_bad_settings_raise(change, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **change)
