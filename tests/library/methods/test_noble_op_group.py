"""NOBLE linears that read one input: against the plain formula in float64, leaner, and the same in every mode."""

import pytest
import torch

from noble_helpers import leaf, make_branch, outputs_and_gradients, tensors
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.noble.op import noble_linear_reference, noble_linears

WIDTHS = (10, 6, 14)
both = pytest.mark.parametrize("shared", [False, True])


def make(activation="cosine", depth=2, shared=False, biases=True, dtype=torch.float64, r=4):
    """Return x, weights, biases and branches."""
    return (
        leaf(3, 5, 12, dtype=dtype),
        [leaf(width, 12, scale=0.5, dtype=dtype) for width in WIDTHS],
        [leaf(width, dtype=dtype) if biases else None for width in WIDTHS],
        [
            make_branch(activation, depth, d_out=width, r=r, dtype=dtype, down=not (shared and place))
            for place, width in enumerate(WIDTHS)
        ],
    )


def reference(x, weights, biases, branches):
    """Return `noble_linear_reference` of each layer."""
    downs = [branches[0].down if branch.down is None else branch.down for branch in branches]
    return [
        noble_linear_reference(x, weight, bias, branch._replace(down=down))
        for weight, bias, branch, down in zip(weights, biases, branches, downs, strict=True)
    ]


def gradients_of_outputs(dtype=torch.float64):
    return [torch.randn(3, 5, width, dtype=torch.float64).to(dtype) for width in WIDTHS]


CASES = [("cosine", 2), ("cosine", 1), ("cosine", 3), ("tanh", 2), ("silu", 1)]


@pytest.mark.parametrize("biases", [True, False])
@both
@pytest.mark.parametrize(("activation", "depth"), CASES)
def test_group_equals_the_plain_formula_in_float64(activation, depth, shared, biases):
    arguments, dys = make(activation, depth, shared, biases), gradients_of_outputs()
    expected = outputs_and_gradients(reference, arguments, dys)
    for found, want in zip(outputs_and_gradients(noble_linears, arguments, dys), expected, strict=True):
        torch.testing.assert_close(found, want)
    with torch.no_grad():
        for found, want in zip(noble_linears(*arguments), expected, strict=False):
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@both
def test_group_saves_x_and_h_alone(shared, backend):
    arguments = make(shared=shared, dtype=torch.float32)
    torch.compiler.reset()
    run = noble_linears if backend is None else torch.compile(noble_linears, backend=backend, fullgraph=True)
    x, *rest = arguments
    kept = saved_bytes(run, *arguments, parameters=tensors(rest))
    assert kept == x.nbytes + 15 * 4 * (1 if shared else 3) * 4
