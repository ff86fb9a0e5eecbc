"""NOBLE's operator: the paper's equation, and the forms of the up and the down projection."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nonlinear_lowrank import NobleConfig, NobleLinear
from nonlinear_lowrank.methods.noble import op
from nonlinear_lowrank.methods.noble.op import noble_linear
from op_helpers import compare, make_branch, noble


def test_cosnet_is_the_papers_equation():
    x, (weight,), (bias,), (branch,), _ = noble().arguments
    h = x @ branch.down.T
    c1 = torch.cos(branch.frequencies[0] * h + branch.phases[0])
    c2 = torch.cos(branch.frequencies[1] * (c1 @ branch.mixes[0].T) + branch.phases[1])
    torch.testing.assert_close(noble_linear(x, weight, bias, branch), x @ weight.T + bias + c2 @ branch.up.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["", "no-bias"])
@pytest.mark.parametrize(("constant", "sizes"), [("JOIN_UP", {"d_out": 40}), ("JOIN_DOWN", {"d_in": 40})])
def test_joined_projection_is_as_exact_as_the_formula(monkeypatch, dtype, form, constant, sizes):
    case = noble(form=form, batch=(3, 7), **sizes, dtype=dtype)
    dys = case.dys()
    accumulated = case.gradients(case.fast, dys)
    monkeypatch.setattr(op, constant, True)
    found = compare(case, dys)
    place = 0 if constant == "JOIN_UP" else 1  # y, dx
    assert not torch.equal(found[place], accumulated[place])  # it is the other form
    torch.compiler.reset()
    in_graph = case.gradients(torch.compile(case.fast, fullgraph=True, backend="aot_eager"), dys)
    assert all(torch.equal(one, other) for one, other in zip(found, in_graph, strict=True))


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
    ("d_in", "d_out", "wanted", "joined"),
    [
        (2752, 1024, True, True),
        (1024, 1024, True, False),
        (1024, 2752, True, False),
        (2752, 1024, False, False),  # a frozen weight has no gradient to share
    ],
)
def test_down_projection_is_joined_in_backward_where_that_moves_less(d_in, d_out, wanted, joined):
    tokens, r = 16_384, 64
    shapes = {"dy": (tokens, d_out), "x": (tokens, d_in), "h": (tokens, r), "weight": (d_out, d_in)}
    branch = [(r, d_in), (d_out, r), (r, r), (r,), (r,), (r,), (r,)]
    with FakeTensorMode(), torch.device("cuda"), torch.profiler.profile() as calls:
        dy, x, h, weight, *tensors = (
            torch.empty(*shape, dtype=torch.bfloat16) for shape in (*shapes.values(), *branch)
        )
        found = op._backward([dy], x, h, [weight], tensors, "cosine", [True, False, wanted, False])
    assert ("aten::cat" in {each.key for each in calls.key_averages()}) == joined
    shapes_found = [None if each is None else tuple(each.shape) for each in found]
    assert shapes_found == [shapes["x"], None, shapes["weight"] if wanted else None, None, *branch]


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
        branch = make_branch(d_in=d_in, r=r, dtype=dtype)
        found = op._down_kernel(torch.empty(tokens, d_in, dtype=dtype), branch)
    assert bool(found) == fused
