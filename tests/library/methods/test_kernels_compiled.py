"""Every Triton kernel compiled for sm_90, with no GPU: no spills, no stack, products on the tensor cores."""

import pytest
import torch

from nlr_lab.bench.kernels import OPERATORS, problems, report
from nonlinear_lowrank.ops.kernels import load

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)
pytestmark = pytest.mark.kernels

# Compiling takes seconds each: in every run the kernels of the default settings, in slow ones every block shape.
QUICK = {
    "cosnet": {("cosnet forward", 64), ("cosnet with down", 64), ("cosnet backward", 64), ("cosnet backward", 128)},
    "rational": {("rational forward", 384), ("rational backward", 384), ("rational backward", 1)},
    "sine": {("sine weight", 16), ("sine factors", 16)},
}


def key(name, variant):
    return variant.name, variant.constants["WIDTH" if name == "rational" else "R"]


def cases():
    for name, quick in QUICK.items():
        missing = set(quick)
        for variant in load(OPERATORS[name]).variants():
            chosen = key(name, variant) in missing and "fp32" not in str(variant.signature.get("h"))
            missing -= {key(name, variant)} if chosen else set()
            shape = "-".join(str(value) for value in variant.constants.values())
            yield pytest.param(variant, id=f"{variant.name}-{shape}", marks=[] if chosen else [pytest.mark.slow])
        assert not missing


@pytest.mark.parametrize("variant", list(cases()))
def test_no_spills_and_tensor_cores(variant):
    figures = report(variant).figures
    assert problems(figures) == []
    assert 0 < figures["registers"] <= 255
    assert figures["shared"] <= 227 * 1024


def test_a_kernel_that_spills_is_said_to():
    variant = load("rational").backward_variant(384, (6, 5), "abs_of_sum", True, False, True, torch.bfloat16)
    row = report(variant._replace(registers=48))
    assert any("spill" in problem for problem in problems(row.figures))
