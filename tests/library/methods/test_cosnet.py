"""The NOBLE operator: every bottleneck of Table 5 against the float64 formula."""

import pytest
import torch

from nonlinear_lowrank.methods.noble.op import noble_branch, noble_linear, noble_linear_reference

BOTTLENECKS = [
    *((activation, depth) for activation in ("cosine", "tanh", "leaky_relu", "gelu", "silu") for depth in (1, 2)),
    ("cosine", 3),
]


def make_inputs(activation, depth, *, batch=(3, 5), d_in=12, d_out=10, r=4, bias=True, dtype=torch.float64):
    """A fresh random case; tensors are leaves that require grad."""

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()

    cosine = activation == "cosine"
    return {
        "x": leaf(*batch, d_in),
        "weight": leaf(d_out, d_in, scale=d_in**-0.5),
        "bias": leaf(d_out) if bias else None,
        "down": leaf(r, d_in, scale=d_in**-0.5),
        "up": leaf(d_out, r, scale=r**-0.5),
        "mixes": [leaf(r, r, scale=r**-0.5) for _ in range(depth - 1)],
        "frequencies": [leaf(r) for _ in range(depth if cosine else 0)],
        "phases": [leaf(r) for _ in range(depth if cosine else 0)],
    }


def tensors(case):
    flat = []
    for value in case.values():
        flat += value if isinstance(value, list) else [] if value is None else [value]
    return flat


def cast(case, dtype):
    def one(tensor):
        return tensor.detach().to(dtype).requires_grad_()

    return {
        name: [one(each) for each in value] if isinstance(value, list) else None if value is None else one(value)
        for name, value in case.items()
    }


def outputs_and_gradients(function, case, activation, dy):
    y = function(**case, activation=activation)
    return [y, *torch.autograd.grad(y, tensors(case), dy.to(y.dtype))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_matches_the_plain_formula_in_float64(activation, depth, bias):
    case = make_inputs(activation, depth, bias=bias)
    dy = torch.randn(3, 5, 10, dtype=torch.float64)
    lean = outputs_and_gradients(noble_linear, case, activation, dy)
    plain = outputs_and_gradients(noble_linear_reference, case, activation, dy)
    for ours, reference in zip(lean, plain, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


def test_cosnet_is_the_papers_equation():
    case = make_inputs("cosine", 2)
    with torch.no_grad():
        h = case["x"] @ case["down"].T
        c1 = torch.cos(case["frequencies"][0] * h + case["phases"][0])
        c2 = torch.cos(case["frequencies"][1] * (c1 @ case["mixes"][0].T) + case["phases"][1])
        expected = case["x"] @ case["weight"].T + case["bias"] + c2 @ case["up"].T
        torch.testing.assert_close(noble_linear(**case), expected)


@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_gradcheck(activation, depth):
    case = make_inputs(activation, depth, batch=(3,), d_in=5, d_out=4, r=2)
    lists = {name: len(value) for name, value in case.items() if isinstance(value, list)}

    def function(*flat):
        rest = iter(flat)
        rebuilt = {name: [next(rest) for _ in range(lists[name])] if name in lists else next(rest) for name in case}
        return noble_linear(**rebuilt, activation=activation)

    assert torch.autograd.gradcheck(function, tensors(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_no_worse_than_twice_the_plain_formulas_error(activation, depth, dtype):
    case = make_inputs(activation, depth, batch=(64,), d_in=48, d_out=40, r=8, dtype=dtype)
    dy = torch.randn(64, 40, dtype=torch.float64).to(dtype)
    exact = outputs_and_gradients(noble_linear_reference, cast(case, torch.float64), activation, dy)
    lean = outputs_and_gradients(noble_linear, case, activation, dy)
    plain = outputs_and_gradients(noble_linear_reference, case, activation, dy)
    for ours, reference, truth in zip(lean, plain, exact, strict=True):
        scale = truth.abs().max()
        error, allowed = (ours - truth).norm() / scale, (reference - truth).norm() / scale
        assert error <= 2 * allowed + 1e-6


@pytest.mark.parametrize(("activation", "depth"), [("cosine", 2), ("gelu", 1)])
def test_compiles_fullgraph_with_equal_gradients(activation, depth):
    torch.compiler.reset()
    case = make_inputs(activation, depth, dtype=torch.float32)
    dy = torch.randn(3, 5, 10)
    compiled = torch.compile(noble_linear, fullgraph=True, backend="aot_eager")
    eager = outputs_and_gradients(noble_linear, case, activation, dy)
    for ours, reference in zip(outputs_and_gradients(compiled, case, activation, dy), eager, strict=True):
        torch.testing.assert_close(ours, reference)
    with torch.no_grad():  # the inference path is the plain formula
        torch.testing.assert_close(compiled(**case, activation=activation), eager[0].detach())


def test_custom_ops_pass_opcheck():
    case = make_inputs("cosine", 2, dtype=torch.float32)
    with torch.no_grad():
        arguments = dict(case.items()) | {"activation": "cosine"}
        torch.library.opcheck(torch.ops.nonlinear_lowrank.noble_forward.default, tuple(arguments.values()))
        given = {**arguments, "down": None, "h": torch.randn(3, 5, 4)}
        torch.library.opcheck(torch.ops.nonlinear_lowrank.noble_forward.default, tuple(given.values()))


def test_noncontiguous_input_and_frozen_dense_weight():
    case = make_inputs("cosine", 2, dtype=torch.float32)
    case["weight"], case["bias"] = case["weight"].detach(), case["bias"].detach()
    x = torch.randn(12, 5, 3, requires_grad=True)
    case["x"] = x.permute(2, 1, 0)
    y = noble_linear(**case)
    torch.testing.assert_close(y, noble_linear_reference(**case))
    gradient, dup = torch.autograd.grad(y.square().sum(), [x, case["up"]])
    expected = torch.autograd.grad(noble_linear_reference(**case).square().sum(), [x, case["up"]])
    torch.testing.assert_close((gradient, dup), expected, rtol=1e-4, atol=1e-4)


def test_second_derivative_is_refused_not_wrong():
    case = make_inputs("cosine", 2)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(noble_linear(**case).sum(), case["x"], create_graph=True)


def test_autocast_gives_bfloat16_and_float32_gradients():
    case = make_inputs("cosine", 2, batch=(32,), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = noble_linear(**case)
        assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    reference = noble_linear_reference(**case)
    torch.testing.assert_close(y.float(), reference, rtol=0.05, atol=0.1)
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in tensors(case))


def test_same_loss_curve_as_the_reference_in_float64():
    """50 AdamW steps of a small regression: relative 1e-4, and the loss really falls."""
    x = torch.randn(64, 12, dtype=torch.float64)
    target = torch.sin(2 * x @ torch.randn(12, 10, dtype=torch.float64))
    start = make_inputs("cosine", 2)
    curves = []
    for function, dtype in ((noble_linear, torch.float32), (noble_linear_reference, torch.float64)):
        case = cast(start, dtype)
        case.pop("x")
        optimizer = torch.optim.AdamW(tensors(case), lr=1e-2)
        curve = []
        for _ in range(50):
            loss = (function(x.to(dtype), **case) - target.to(dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve, dtype=torch.float64))
    assert curves[1][-1] < 0.9 * curves[1][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("activation", "depth", "compiled"),
    [*((*bottleneck, False) for bottleneck in BOTTLENECKS), ("cosine", 2, True), ("gelu", 1, True)],
)
def test_branch_alone_is_the_linear_without_its_weight(activation, depth, compiled):
    torch.compiler.reset()
    case = make_inputs(activation, depth, bias=False)
    dy = torch.randn(3, 5, 10, dtype=torch.float64)
    zero = case | {"weight": torch.zeros(10, 12, dtype=torch.float64, requires_grad=True)}
    y, dx, _, *dbranch = outputs_and_gradients(noble_linear_reference, zero, activation, dy)
    alone = {name: value for name, value in case.items() if name not in ("weight", "bias")}
    function = torch.compile(noble_branch, fullgraph=True, backend="aot_eager") if compiled else noble_branch
    for ours, reference in zip(outputs_and_gradients(function, alone, activation, dy), [y, dx, *dbranch], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(function(**alone, activation=activation), y.detach())


@pytest.mark.parametrize(
    ("activation", "depth", "compiled"),
    [*((*bottleneck, False) for bottleneck in BOTTLENECKS), ("cosine", 2, True), ("silu", 2, True)],
)
def test_a_product_that_is_given_is_differentiated_in_place_of_the_projection(activation, depth, compiled):
    torch.compiler.reset()
    case = make_inputs(activation, depth)
    case |= {"down": None, "h": torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)}
    dy = torch.randn(3, 5, 10, dtype=torch.float64)
    lean = torch.compile(noble_linear, fullgraph=True, backend="aot_eager") if compiled else noble_linear
    ours = outputs_and_gradients(lean, case, activation, dy)
    plain = outputs_and_gradients(noble_linear_reference, case, activation, dy)
    for left, right in zip(ours, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    alone = {name: value for name, value in case.items() if name not in ("weight", "bias")}
    dense = case["x"] @ case["weight"].T + case["bias"]
    torch.testing.assert_close(noble_branch(**alone, activation=activation), plain[0] - dense)
    dh = torch.autograd.grad(noble_branch(**alone, activation=activation), case["h"], dy)[0]
    torch.testing.assert_close(dh, plain[-1])
