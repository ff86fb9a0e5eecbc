"""The two forms of NOBLE's up projection: one sum, chosen by what moves less."""

import random

import pytest
import torch

from nonlinear_lowrank import NobleConfig, NobleLinear, UserError
from nonlinear_lowrank.methods.noble.op import noble_linear_reference
from nonlinear_lowrank.methods.noble.up_form import chosen_form, numbers_moved, use_up_form
from rounding_helpers import assert_as_good_as_plain, jittered


def layer_and_input(dtype=torch.float32, bias=True):
    layer = NobleLinear(12, 40, bias, config=NobleConfig(rank=4, up_scale=1.0), dtype=dtype)
    return layer, torch.randn(3, 7, 12, dtype=dtype, requires_grad=True)


def branch_of(layer):
    parameters = dict(layer.named_parameters())
    return (
        [parameters["noble_mix1"]],
        [parameters["noble_frequency1"], parameters["noble_frequency2"]],
        [parameters["noble_phase1"], parameters["noble_phase2"]],
    )


def run(layer, x, dy, function=None):
    function = layer if function is None else function
    y = function(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_against_the_formula(dtype, bias):
    layer, x = layer_and_input(dtype, bias)
    dy = torch.randn(3, 7, 40)

    def plain(x, layer=layer):
        return noble_linear_reference(x, layer.weight, layer.bias, layer.noble_down, layer.noble_up, *branch_of(layer))

    reference = run(layer, x, dy, plain)
    with use_up_form("joined"):
        found = run(layer, x, dy)
        again = run(layer, x, dy)
    wide = NobleLinear(12, 40, bias, config=layer.noble_config, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    x64 = x.detach().double().requires_grad_()
    exact = run(wide, x64, dy, lambda x: plain(x, wide))
    with torch.no_grad():
        for each in wide.parameters():
            each.copy_(jittered([each])[0])
    moved = run(wide, jittered([x])[0], dy, lambda x: plain(x, wide))
    assert_as_good_as_plain(found, reference, exact, moved)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_joined_inside_a_compiled_graph():
    layer, x = layer_and_input()
    dy = torch.randn(3, 7, 40)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with use_up_form("accumulated"):
        want = run(layer, x, dy)
    with use_up_form("joined"):
        eager, found = run(layer, x, dy), run(layer, x, dy, compiled)
    for ours, same, other in zip(found, eager, want, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, other)
    assert not torch.equal(found[0], want[0])  # it was the other form


def test_a_branch_of_zero_leaves_the_output_to_the_bit_without_gradients():
    layer, x = layer_and_input()
    torch.nn.init.zeros_(layer.noble_up)
    with use_up_form("joined"), torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_the_rule_is_the_documented_one():
    seen = set()
    for _ in range(1000):
        tokens, d_in, d_out = (round(10 ** random.uniform(0, 5)) for _ in range(3))
        rank = random.randint(1, 512)
        moved = {form: numbers_moved(form, tokens, d_in, d_out, rank) for form in ("accumulated", "joined")}
        joined = (d_in + rank) * (tokens + d_out) < tokens * d_out
        assert (moved["joined"] < moved["accumulated"]) == joined
        seen.add(joined)
    assert seen == {True, False}


def test_where_it_is_taken():
    sizes = (16_384, 1024, 5504, 64)
    assert chosen_form(*sizes, device="cuda", dtype=torch.bfloat16) == "joined"
    assert chosen_form(*sizes, device="cpu", dtype=torch.bfloat16) == "accumulated"
    assert chosen_form(16_384, 1024, 1024, 64, device="cuda", dtype=torch.bfloat16) == "accumulated"
    assert chosen_form(16_384, 1024, 5504, 63, device="cuda", dtype=torch.bfloat16) == "accumulated"  # rows unaligned
    with use_up_form("joined"):
        assert chosen_form(4, 1024, 8, 3, device="cpu", dtype=torch.float32) == "joined"
    with pytest.raises(UserError, match="accumulated or joined"), use_up_form("fastest"):
        pass
