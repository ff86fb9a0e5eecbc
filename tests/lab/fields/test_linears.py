"""Linears of fields: sizes, draws, refusals."""

import math

import pytest
import torch
from torch import nn

from nlr_lab.fields.problem import FieldMethod, dense_linear
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.sine.layer import SineLowRankLinear


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("init", ["kaiming_sqrt5", "kaiming_zero"])
@pytest.mark.parametrize("kind", ["dense", "low-rank", "sine"])
def test_draws_a_linear_from_its_generator_within_kaimings_bounds(kind, init):
    rank = None if kind == "dense" else 3
    method = FieldMethod(kind=kind, rank=rank, omega=50.0 if kind == "sine" else None, init=init)
    torch.manual_seed(0)
    one = method.linear(40, 60, generator=_generator(5))
    torch.manual_seed(1)
    same, other = method.linear(40, 60, generator=_generator(5)), method.linear(40, 60, generator=_generator(6))
    slope = {"kaiming_sqrt5": 5, "kaiming_zero": 0}[init]
    fans = {"weight": 40, "sine_up": 3, "sine_down": 40}
    for name, value in one.named_parameters():
        assert torch.equal(value, same.get_parameter(name))
        assert not torch.equal(value, other.get_parameter(name))
        bound = 1 / math.sqrt(40) if name == "bias" else math.sqrt(6 / ((1 + slope) * fans[name]))
        assert 0.7 * bound < value.abs().max() <= bound


def test_linear_computes_what_its_kind_says():
    x = torch.randn(7, 20, dtype=torch.float64)
    sine = FieldMethod(kind="sine", rank=2, omega=30.0).linear(20, 24, generator=_generator(1)).double()
    weight = torch.sin(30.0 * sine.sine_up @ sine.sine_down) / math.sqrt(20)
    torch.testing.assert_close(sine(x), x @ weight.T + sine.bias, rtol=1e-10, atol=1e-12)
    low = FieldMethod(kind="low-rank", rank=2).linear(20, 24, generator=_generator(1)).double()
    torch.testing.assert_close(low(x), x @ (low.sine_up @ low.sine_down).T + low.bias, rtol=1e-10, atol=1e-12)


def test_dense_linear_has_the_spread_of_torchs_own():
    layer = dense_linear(300, 200, generator=_generator(2))
    reference = nn.Linear(300, 200)
    assert layer.weight.std().item() == pytest.approx(reference.weight.std().item(), rel=0.02)
    assert layer.bias.std().item() == pytest.approx(reference.bias.std().item(), rel=0.2)


def test_keeps_a_linear_dense_where_factors_are_no_smaller():
    method = FieldMethod(kind="sine", rank=2, omega=10.0)
    assert not method.factors(4, 4)
    assert type(method.linear(4, 4, generator=_generator(0))) is nn.Linear
    assert method.factors(4, 5)
    assert isinstance(method.linear(4, 5, generator=_generator(0)), SineLowRankLinear)


def test_takes_omega_from_a_published_table():
    open_one = FieldMethod(kind="sine", rank=5)
    assert open_one.resolved("nerf").omega == 800
    assert open_one.resolved("occupancy").omega == 50
    assert FieldMethod(kind="sine", rank=5, omega=7.0).resolved("nerf").omega == 7
    assert FieldMethod(kind="sine", rank=5, omega="nerf").resolved("occupancy").omega == 800
    assert FieldMethod(kind="low-rank", rank=5).resolved("nerf").omega is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "fourier"}, "unknown kind 'fourier'"),
        ({"init": "xavier"}, "unknown init"),
        ({"kind": "sine"}, "sine linears need a rank"),
        ({"kind": "dense", "rank": 3}, "rank has no meaning"),
        ({"kind": "low-rank", "rank": 3, "omega": 3.0}, "omega has no meaning"),
        ({"kind": "sine", "rank": 0}, "rank must be a positive integer"),
        ({"kind": "sine", "rank": 2, "omega": -1.0}, "omega must be a finite number above 0"),
        ({"kind": "sine", "rank": 2, "omega": "nurf"}, "omega must be a number or one of"),
    ],
)
def test_refuses_bad_methods(settings, message):
    with pytest.raises(UserError, match=message):
        FieldMethod(**settings)


@pytest.mark.parametrize(
    "text",
    ["dense", "dense:init=kaiming_zero", "low-rank:rank=5", "sine:rank=1,omega=200,gain=12.5,init=kaiming_zero",
     "sine:rank=3,omega=nerf", "sine:rank=3"],
)  # fmt: skip
def test_reads_and_writes_the_short_form(text):
    assert str(FieldMethod.parse(text)) == text
    assert FieldMethod.parse(str(FieldMethod.parse(text))) == FieldMethod.parse(text)


def test_reads_a_short_form_with_spaces():
    found = FieldMethod.parse("sine: rank=5, omega=50, init=kaiming_zero")
    assert found == FieldMethod(kind="sine", rank=5, omega=50.0, init="kaiming_zero")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sinus:rank=1", "unknown kind 'sinus'"),
        ("sine:rank", "settings are key=value"),
        ("sine:rnk=1", "no setting 'rnk'"),
        ("sine:rank=1.5,omega=3", "rank must be a positive integer"),
        ("sine:rank=1,gain=big", "gain must be a number"),
        ("low-rank", "need a rank"),
    ],
)
def test_refuses_short_forms_of_methods_that_make_no_sense(text, message):
    with pytest.raises(UserError, match=message):
        FieldMethod.parse(text)
