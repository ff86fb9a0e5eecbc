"""NOBLE's operator: every bottleneck of Table 5 against the float64 formula."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from noble_helpers import BOTTLENECKS, changed, leaf, make_branch, make_linear, outputs_and_gradients, tensors
from nonlinear_lowrank import NobleConfig, NobleLinear
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.noble import op
from nonlinear_lowrank.methods.noble.op import noble_branch, noble_linear, noble_linear_reference, noble_linears
from rounding_helpers import assert_as_good_as_plain, cast, jittered


def assert_equal_to_reference(function, arguments, dy, **slack):
    expected = outputs_and_gradients(noble_linear_reference, arguments, dy)
    for ours, reference in zip(outputs_and_gradients(function, arguments, dy), expected, strict=True):
        torch.testing.assert_close(ours, reference, **slack)


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_operator_equals_the_plain_formula_in_float64(activation, depth, bias):
    arguments = make_linear(activation, depth, bias=bias)
    dy = torch.randn(3, 5, 10, dtype=torch.float64)
    assert_equal_to_reference(noble_linear, arguments, dy, rtol=1e-10, atol=1e-10)


def test_cosnet_is_the_papers_equation():
    x, weight, bias, branch = make_linear()
    with torch.no_grad():
        h = x @ branch.down.T
        c1 = torch.cos(branch.frequencies[0] * h + branch.phases[0])
        c2 = torch.cos(branch.frequencies[1] * (c1 @ branch.mixes[0].T) + branch.phases[1])
        expected = x @ weight.T + bias + c2 @ branch.up.T
        torch.testing.assert_close(noble_linear(x, weight, bias, branch), expected)


@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_gradients_pass_gradcheck(activation, depth):
    flat, spec = tree_flatten(make_linear(activation, depth, batch=(3,), d_in=5, d_out=4, r=2))
    assert torch.autograd.gradcheck(lambda *each: noble_linear(*tree_unflatten(each, spec)), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_error_is_at_most_twice_the_plain_formulas(activation, depth, dtype):
    arguments = make_linear(activation, depth, batch=(64,), d_in=48, d_out=40, r=8, dtype=dtype)
    dy = torch.randn(64, 40, dtype=torch.float64).to(dtype)
    wide = changed(lambda each: cast(each, torch.float64), arguments)
    exact = outputs_and_gradients(noble_linear_reference, wide, dy)
    lean = outputs_and_gradients(noble_linear, arguments, dy)
    plain = outputs_and_gradients(noble_linear_reference, arguments, dy)
    for ours, reference, truth in zip(lean, plain, exact, strict=True):
        scale = truth.abs().max()
        error, allowed = (ours - truth).norm() / scale, (reference - truth).norm() / scale
        assert error <= 2 * allowed + 1e-6


def test_noncontiguous_input_and_frozen_dense_weight():
    _, weight, bias, branch = make_linear(dtype=torch.float32)
    x = torch.randn(12, 5, 3, requires_grad=True)
    arguments = x.permute(2, 1, 0), weight.detach(), bias.detach(), branch
    y, expected = noble_linear(*arguments), noble_linear_reference(*arguments)
    torch.testing.assert_close(y, expected)
    found, wanted = (torch.autograd.grad(each.square().sum(), [x, branch.up]) for each in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_second_derivative_raises():
    arguments = make_linear()
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(noble_linear(*arguments).sum(), arguments[0], create_graph=True)


def test_autocast_gives_bfloat16_and_float32_gradients():
    arguments = make_linear(batch=(32,), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = noble_linear(*arguments)
        assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    torch.testing.assert_close(y.float(), noble_linear_reference(*arguments), rtol=0.05, atol=0.1)
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in tensors(arguments))


COMPILED = [*((*bottleneck, False) for bottleneck in BOTTLENECKS), ("cosine", 2, True), ("gelu", 1, True)]


@pytest.mark.parametrize(("activation", "depth", "compile"), COMPILED)
def test_branch_alone_is_the_linear_of_a_zero_weight(activation, depth, compile):
    x, _, _, branch = make_linear(activation, depth)
    dy, zero = torch.randn(3, 5, 10, dtype=torch.float64), torch.zeros(10, 12, dtype=torch.float64)
    function = compiled(noble_branch) if compile else noble_branch
    found = outputs_and_gradients(function, (x, branch), dy)
    wanted = outputs_and_gradients(lambda x, branch: noble_linear_reference(x, zero, None, branch), (x, branch), dy)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(function(x, branch), wanted[0].detach())


@pytest.mark.parametrize(("activation", "depth", "compile"), COMPILED)
def test_given_h_is_differentiated_in_place_of_the_down_projection(activation, depth, compile):
    x, weight, bias, branch = make_linear(activation, depth, down=False)
    h, dy = leaf(3, 5, 4), torch.randn(3, 5, 10, dtype=torch.float64)
    function = compiled(noble_linear) if compile else noble_linear
    assert_equal_to_reference(function, (x, weight, bias, branch, h), dy, rtol=1e-10, atol=1e-10)
    y = noble_branch(x, branch, h)
    torch.testing.assert_close(x @ weight.T + bias + y, noble_linear_reference(x, weight, bias, branch, h))
    dh = torch.autograd.grad(noble_linear_reference(x, weight, bias, branch, h), h, dy)
    torch.testing.assert_close(torch.autograd.grad(y, h, dy), dh)


# --- forms of the up and the down projection ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_up_projection_is_as_exact_as_the_formula(monkeypatch, dtype, bias):
    arguments, dy = make_linear(batch=(3, 7), d_out=40, bias=bias, dtype=dtype), torch.randn(3, 7, 40)
    accumulated = outputs_and_gradients(noble_linear, arguments, dy)
    monkeypatch.setattr(op, "JOIN_UP", True)
    found, again = (outputs_and_gradients(noble_linear, arguments, dy) for _ in range(2))
    assert not torch.equal(found[0], accumulated[0])  # it is the other form
    reference = outputs_and_gradients(noble_linear_reference, arguments, dy)
    exact, moved = (
        outputs_and_gradients(noble_linear_reference, changed(change, arguments), dy)
        for change in (lambda each: cast(each, torch.float64), jittered)
    )
    assert_as_good_as_plain(found, reference, exact, moved)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)
    in_graph = outputs_and_gradients(compiled(noble_linear), arguments, dy)
    for one, other in zip(found, in_graph, strict=True):
        assert torch.equal(one, other)


def test_branch_of_zero_leaves_the_output_to_the_bit_without_gradients(monkeypatch):
    monkeypatch.setattr(op, "JOIN_UP", True)
    layer, x = NobleLinear(12, 40, config=NobleConfig(rank=4)), torch.randn(21, 12)
    torch.nn.init.zeros_(layer.noble_up)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("tokens", "d_in", "d_out", "r", "device", "joined"),
    [
        (16_384, 1024, 5504, 64, "cuda", True),
        (16_384, 1024, 1300, 64, "cuda", True),
        (16_384, 1024, 1100, 64, "cuda", False),  # d_in + r >= T d_out / (T + d_out)
        (1024, 1024, 5504, 64, "cuda", False),
        (16_384, 1024, 5504, 63, "cuda", False),  # rows unaligned
        (16_384, 1024, 5504, 64, "cpu", False),
    ],
)
def test_up_projection_is_joined_where_that_moves_less(tokens, d_in, d_out, r, device, joined):
    with FakeTensorMode(), torch.device(device), torch.profiler.profile() as calls:
        x, u, weight, up = (torch.empty(*shape, dtype=torch.bfloat16) for shape in
                            ((tokens, d_in), (tokens, r), (d_out, d_in), (d_out, r)))  # fmt: skip
        op._main_plus_up(x, weight, None, u, up, training=True)
    assert ("aten::cat" in {each.key for each in calls.key_averages()}) == joined


@pytest.mark.parametrize(
    ("tokens", "d_in", "r", "dtype", "fused"),
    [
        (131 * 64 + 1, 1024, 64, torch.bfloat16, True),
        (131 * 64, 1024, 64, torch.bfloat16, False),  # a processor without a tile
        (16_384, 1024, 128, torch.float16, True),
        (16_384, 1024, 129, torch.bfloat16, False),
        (16_384, 1024, 64, torch.float32, False),
        (16_384, 1023, 64, torch.bfloat16, False),  # rows unaligned
    ],
)
def test_down_projection_is_in_the_kernel_where_it_fills_a_gpu(monkeypatch, tokens, d_in, r, dtype, fused):
    monkeypatch.setattr(op, "processors", lambda device: 132)
    monkeypatch.setattr(op, "kernels", lambda *_: True)
    with FakeTensorMode(), torch.device("cuda"):
        branch = changed(lambda each: [torch.empty(each[0].shape, dtype=dtype)], make_branch(d_in=d_in, r=r))
        found = op._down_kernel(torch.empty(tokens, d_in, dtype=dtype), branch)
    assert bool(found) == fused


# --- several linears that read one input ---------------------------------------------------------------------------

WIDTHS = (10, 6, 14)


def make_linears(activation="cosine", depth=2, shared=False, biases=True, dtype=torch.float64):
    """Return x, weights, biases and branches."""
    return (
        leaf(3, 5, 12, dtype=dtype),
        [leaf(width, 12, scale=0.5, dtype=dtype) for width in WIDTHS],
        [leaf(width, dtype=dtype) if biases else None for width in WIDTHS],
        [
            make_branch(activation, depth, d_out=width, dtype=dtype, down=not (shared and place))
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


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_group_equals_the_plain_formula_in_float64(activation, depth, shared, biases):
    arguments = make_linears(activation, depth, shared, biases)
    dys = [torch.randn(3, 5, width, dtype=torch.float64) for width in WIDTHS]
    expected = outputs_and_gradients(reference, arguments, dys)
    for found, want in zip(outputs_and_gradients(noble_linears, arguments, dys), expected, strict=True):
        torch.testing.assert_close(found, want)
    with torch.no_grad():
        for found, want in zip(noble_linears(*arguments), expected, strict=False):
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_group_saves_x_and_h_alone(shared, compile):
    x, *rest = make_linears(shared=shared, dtype=torch.float32)
    kept = saved_bytes(compiled(noble_linears) if compile else noble_linears, x, *rest, parameters=tensors(rest))
    assert kept == x.nbytes + 15 * 4 * (1 if shared else 3) * 4
