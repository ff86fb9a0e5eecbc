"""NOBLE linears that read one input: against the plain formula in float64, leaner, and the same in every mode."""

import pytest
import torch

from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.noble.group_op import noble_group, noble_group_reference
from rounding_helpers import assert_as_good_as_plain, cast, jittered

WIDTHS = (10, 6, 14)


def make(activation="cosine", depth=2, shared=False, biases=True, dtype=torch.float64, d=12, r=4):
    """Fresh random arguments of `noble_group`, x first; all tensors require gradients."""

    def leaf(*shape, scale=0.5):
        return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()

    cosines = depth if activation == "cosine" else 0
    return (
        leaf(3, 5, d),
        [leaf(width, d) for width in WIDTHS],
        [leaf(width) if biases else None for width in WIDTHS],
        [leaf(r, d) for _ in range(1 if shared else len(WIDTHS))],
        [leaf(width, r) for width in WIDTHS],
        [[leaf(r, r) for _ in range(depth - 1)] for _ in WIDTHS],
        [[leaf(r, scale=1.0) for _ in range(cosines)] for _ in WIDTHS],
        [[leaf(r) for _ in range(cosines)] for _ in WIDTHS],
        activation,
    )


def flatten(arguments):
    leaves = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            leaves.append(each)
        elif isinstance(each, list):
            leaves += flatten(each)
    return leaves


def outputs_and_gradients(function, arguments, dys):
    ys = function(*arguments)
    return [*ys, *torch.autograd.grad(ys, flatten(arguments), dys)]


CASES = [("cosine", 2), ("cosine", 1), ("cosine", 3), ("tanh", 2), ("silu", 1)]


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("activation", "depth"), CASES)
def test_matches_the_plain_formula_in_float64(activation, depth, shared, biases):
    arguments = make(activation, depth, shared, biases)
    dys = [torch.randn(3, 5, width, dtype=torch.float64) for width in WIDTHS]
    expected = outputs_and_gradients(noble_group_reference, arguments, dys)
    for found, want in zip(outputs_and_gradients(noble_group, arguments, dys), expected, strict=True):
        torch.testing.assert_close(found, want)
    with torch.no_grad():
        for found, want in zip(noble_group(*arguments), expected, strict=False):
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("shared", [False, True])
def test_compiles_fullgraph_with_equal_gradients(shared):
    arguments = make(shared=shared)
    dys = [torch.randn(3, 5, width, dtype=torch.float64) for width in WIDTHS]
    torch.compiler.reset()
    compiled = torch.compile(noble_group, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(noble_group, arguments, dys)
    for found, want in zip(outputs_and_gradients(compiled, arguments, dys), expected, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_twice_the_plain_formulas_error(dtype):
    arguments = make(dtype=dtype, r=8)
    dys = [torch.randn(3, 5, width, dtype=torch.float64).to(dtype) for width in WIDTHS]

    def each_leaf(change, given):
        """`given` with every tensor changed, its lists as they are."""
        if isinstance(given, torch.Tensor):
            return change([given])[0]
        return [each_leaf(change, inner) for inner in given] if isinstance(given, list) else given

    def exact(change):
        moved = tuple(each_leaf(change, each) for each in arguments)
        return outputs_and_gradients(noble_group_reference, moved, [dy.detach() for dy in change(dys)])

    ours = outputs_and_gradients(noble_group, arguments, dys)
    plain = outputs_and_gradients(noble_group_reference, arguments, dys)
    truth = exact(lambda tensors: cast(tensors, torch.float64))
    slack = 1e-6 if dtype == torch.float32 else 4e-3
    assert_as_good_as_plain(ours, plain, truth, exact(jittered), slack)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("shared", [False, True])
def test_keeps_x_and_h_alone(shared, backend):
    arguments = make(shared=shared, dtype=torch.float32)
    torch.compiler.reset()
    run = noble_group if backend is None else torch.compile(noble_group, backend=backend, fullgraph=True)
    x, *rest = arguments
    kept = saved_bytes(run, *arguments, parameters=flatten(rest))
    assert kept == x.nbytes + 15 * 4 * (1 if shared else 3) * 4


def test_ops_pass_opcheck():
    x, weights, biases, downs, ups, *lists, activation = make(dtype=torch.float32)
    with torch.no_grad():
        flat = [each.detach() for kind in lists for own in kind for each in own]
        plain = [[each.detach() for each in kind] for kind in (weights, biases, downs, ups)]
        counts = [3, 3, 1, 2]
        ops = torch.ops.nonlinear_lowrank
        forward = (x.detach(), *plain, flat, counts, activation)
        torch.library.opcheck(ops.noble_group_forward.default, forward)
        *ys, h = ops.noble_group_forward(*forward)
        shared = (x.detach(), h, plain[0], plain[2], plain[3], flat, counts, activation)
        for wanted in ([True] * 7, [True] + [False] * 6, [False] * 4 + [True] * 3):
            torch.library.opcheck(
                ops.noble_group_backward.default, ([torch.randn_like(y) for y in ys], *shared, wanted)
            )


def test_frozen_weights_and_unused_outputs():
    arguments = make()
    x, weights, *_ = arguments
    for weight in weights:
        weight.requires_grad_(False)
    first, *_ = noble_group(*arguments)
    (dx,) = torch.autograd.grad(first.sum(), x)
    wanted = torch.autograd.grad(noble_group_reference(*arguments)[0].sum(), x)[0]
    torch.testing.assert_close(dx, wanted)


def test_second_derivatives_are_refused():
    arguments = make()
    ys = noble_group(*arguments)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(ys[0].sum(), arguments[0], create_graph=True)
