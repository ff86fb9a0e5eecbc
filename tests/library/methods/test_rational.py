"""Rational activations: fits, their errors, and the module."""

import itertools
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import erf, expit
from torch import nn
from transformers import activations as hf
from transformers.activations import ACT2FN

from nonlinear_lowrank import UserError
from nonlinear_lowrank.methods.rational import RationalActivation, RationalConfig
from nonlinear_lowrank.methods.rational import fit as solver
from nonlinear_lowrank.methods.rational.fit import KINDS, fit_rational
from nonlinear_lowrank.methods.rational.op import FORMS
from nonlinear_lowrank.methods.rational.reference import FORMULAS, KIND, activation
from nonlinear_lowrank.methods.rational.sites import formula_of
from refusals import assert_refused

# Written out again, so that a wrong formula cannot agree with itself.
EXACT = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * expit(1.702 * x),
    "silu": lambda x: x * expit(x),
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "sigmoid": expit,
}
# What is asked of degrees (5, 4), and what the others reach.
_ORDER = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh", "sigmoid")
LIMITS = {
    3.0: dict(zip(_ORDER, (2e-3, 2e-3, 2e-5, 1e-5, 1.3e-2, 1e-5, 1e-6), strict=True)),
    10.0: dict(zip(_ORDER, (1e-2, 1e-2, 1e-2, 2.5e-3, 4.3e-2, 1e-3, 3e-5), strict=True)),
}


def value(fit, x):
    p = sum(a * x**i for i, a in enumerate(fit.numerator))
    if fit.form == "abs_of_sum":
        return p / (1 + abs(sum(b * x**j for j, b in enumerate(fit.denominator))))
    return p / (1 + sum(abs(b) * abs(x) ** (j + 1) for j, b in enumerate(fit.denominator)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3.0, 10.0])
def test_fits_of_the_standard_ranges(kind, size, form):
    fit = fit_rational(kind, form=form, fit_range=size)
    x = np.linspace(-size, size, 50_001)
    error = np.abs(value(fit, x) - EXACT[kind](x)).max()
    assert error <= fit.error * 1.01 <= LIMITS[size][kind]
    assert fit.degrees == (5, 4)
    assert f"{fit.error:.1e} on [-{size:g}, {size:g}]" in str(fit)
    # The module says the same in float32.
    module = RationalActivation(RationalConfig(activation=kind, form=form, fit_range=size, groups=1))
    y = module(torch.from_numpy(x).float()[:, None])[:, 0]
    assert (y.double() - torch.from_numpy(EXACT[kind](x))).abs().max() <= fit.error * 1.01 + 1e-6


@pytest.mark.parametrize(("kind", "form"), list(itertools.product(KINDS, FORMS)))
def test_the_table_is_what_the_fit_gives(kind, form):
    fit, stored = solver.solve(kind, form, (5, 4), (-3.0, 3.0)), fit_rational(kind, form=form, fit_range=3.0)
    assert fit.error == pytest.approx(stored.error, rel=0.05, abs=1e-6)
    np.testing.assert_allclose(fit.numerator, stored.numerator, rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(fit.denominator, stored.denominator, rtol=1e-2, atol=1e-4)


def test_other_fits_need_scipy_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"scipy.optimize is needed here: pip install '.*\[lab\]'"):
        fit_rational("gelu", fit_range=7.25)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"fit_range": 6.0}, 4e-3),
        ({"fit_range": (-4.0, 12.0)}, 6e-3),
        ({"degrees": (9, 8)}, 2e-4),
        ({"degrees": (3, 2), "fit_range": 3.0}, 2e-2),
        ({"degrees": (2, 3), "fit_range": 2.0}, 7e-2),
    ],
)
def test_other_ranges_and_degrees(options, limit, form):
    fit = fit_rational("gelu", form=form, **options)
    low, high = fit.fit_range
    x = np.linspace(low, high, 30_001)
    assert np.abs(value(fit, x) - EXACT["gelu"](x)).max() <= 1.01 * fit.error <= limit
    assert fit_rational("gelu", form=form, **options) is fit  # kept in the process


def test_the_denominator_is_away_from_its_kink():
    for kind, size in itertools.product(KINDS, (3.0, 10.0)):
        fit = fit_rational(kind, fit_range=size)
        x = np.linspace(-size, size, 1001)
        assert np.polyval(fit.denominator[::-1], x).min() >= 1 - 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_straight_tails_stay_near_the_activation(kind, form):
    module = RationalActivation(RationalConfig(activation=kind, form=form, groups=1))
    x = torch.cat([torch.linspace(-1000, -10, 500), torch.linspace(10, 1000, 500)])
    off = (module(x[:, None])[:, 0].double() - torch.from_numpy(EXACT[kind](x.double().numpy()))).abs()
    assert off.max() <= LIMITS[10.0][kind] + 1e-3
    curved = RationalActivation(RationalConfig(activation=kind, form=form, groups=1, tails="rational"))
    if KIND[kind] not in ("tanh", "sigmoid"):
        assert (curved(torch.tensor([[100.0]])) - 100).abs() > 10


def test_every_activation_of_transformers_is_known_or_skipped():
    known = {name: formula_of(ACT2FN[name]) for name in ACT2FN if name not in ("prelu", "xielu")}
    without = {name for name, formula in known.items() if formula is None}
    assert without == {
        *("gelu_10", "hardswish", "laplace", "leaky_relu", "linear", "mish", "relu2", "relu6", "sqrtsoftplus")
    }
    assert formula_of(nn.Sequential()) is None

    class Own(nn.ReLU):
        """May compute anything."""

    assert formula_of(Own()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_round_like_the_modules_they_stand_for(dtype):
    x = (3 * torch.randn(4000)).to(dtype)
    modules = [ACT2FN[name] for name in ACT2FN if name not in ("prelu", "xielu")]
    modules += [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.ReLU(), nn.Tanh(), nn.Sigmoid()]
    modules += [hf.GELUActivation(use_gelu_python=True), hf.GELUTanh(use_gelu_tanh_python=True)]
    modules += [hf.AccurateGELUActivation(), hf.FastGELUActivation(), hf.SiLUActivation()]
    pairs = [(formula, module) for module in modules if (formula := formula_of(module)) is not None]
    assert {formula for formula, _ in pairs} == set(FORMULAS)
    for formula, module in pairs:
        assert torch.equal(activation(x, formula), module(x)), module


def test_channels_behind_the_batch():
    x = torch.randn(2, 8, 5, 3)
    first = RationalActivation(RationalConfig(activation="gelu", groups=4, channel_dim=1))
    last = RationalActivation(RationalConfig(activation="gelu", groups=4))
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    first.load_state_dict(last.state_dict())
    torch.testing.assert_close(first(x), last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@pytest.mark.parametrize("anchor", ["none", "exact"])
def test_coefficients_stay_float32_in_a_16_bit_model(anchor):
    model = nn.Sequential(nn.Linear(8, 16), RationalActivation(RationalConfig(activation="gelu", anchor=anchor)))
    before = {name: tensor.clone() for name, tensor in model[1].state_dict().items()}
    model.to(torch.bfloat16).half().bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    for name, tensor in model[1].state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])
    x = 3 * torch.randn(20, 16, dtype=torch.bfloat16)
    assert model[1](x).dtype == torch.bfloat16
    assert (model[1](x).float() - F.gelu(x.float())).abs().max() < 0.02 + 7e-3
    assert model.double()[1].rational_numerator.dtype == torch.float64
    assert model.bfloat16()[1].rational_numerator.dtype == torch.float32


def test_wrong_uses_are_one_line():
    assert_refused("no rational fit for 'mish'; there are fits for gelu", fit_rational, "mish")
    assert_refused("unknown denominator form", fit_rational, "gelu", form="kat")
    assert_refused("needs the function that it starts from", RationalActivation, RationalConfig())
    with pytest.raises(UserError, match=r"16 channels, but not in .* its input \(2, 16, 8\); leave it out"):
        RationalActivation(RationalConfig(activation="gelu", width=16))(torch.randn(2, 16, 8))


def test_the_better_of_two_fits_is_taken():
    """A numerator of degree 2 over one of 3 has no room for the even part of gelu alone, which leaves 0.06."""
    assert fit_rational("gelu", degrees=(2, 3), fit_range=2.0).error < 0.01


def test_coefficients_that_fsdp_has_rounded_are_refused():
    layer = RationalActivation(RationalConfig(groups=2, activation="gelu"))
    assert layer.bfloat16().rational_numerator.dtype == torch.float32
    layer.rational_numerator.data = layer.rational_numerator.data.bfloat16()
    assert_refused("FSDP has rounded rational coefficients.*param_dtype=torch.float32", layer, torch.randn(2, 8))
