"""Laws over rungs: known ones are found again; what few sizes, seeds and widths do not tell."""

import math

import numpy as np
import pytest

from nlr_lab.scale.fits import Laws, best_rate, transfer

COMPUTE = np.array([1e12, 4e12, 2e13])


def loss(compute, E=2.0, A=1.5, b=0.3):
    return E + A * (compute / COMPUTE[0]) ** -b


def laws(noise=0.0, compute=COMPUTE, saving=2.0, n=3):
    """An arm that needs `saving` times fewer FLOPs than the reference, each rung with so many seeds."""
    apart = noise * np.linspace(-1, 1, n)
    reference = [loss(each) + apart for each in compute]
    arm = [loss(saving * each) + apart for each in compute]
    return Laws({"plain": compute, "arm": compute}, {"plain": reference, "arm": arm})


def test_finds_a_known_law_again():
    fits = laws().fits("plain")
    assert fits["E"].value == pytest.approx(2, abs=0.02)
    assert fits["A"].value == pytest.approx(1.5, abs=0.02)
    assert fits["b"].value == pytest.approx(0.3, abs=0.01)
    assert laws().predict("plain", 1e14).value == pytest.approx(loss(1e14), abs=0.01)
    assert laws().multiplier("arm", "plain").value == pytest.approx(2, rel=0.02)


def test_intervals_hold_the_truth_and_grow_with_the_noise():
    widths = []
    for noise in (0.005, 0.02):
        found = laws(noise).predict("plain", 5e13)
        assert found.holds(loss(5e13))
        assert not found.holds(loss(5e13) + 10 * noise)
        widths.append(found.high - found.low)
    assert widths[0] < widths[1]


def test_a_difference_of_paired_arms_is_known_better_than_either():
    both, at = laws(0.02), 5e13
    delta = both.predict("arm", at, ("plain", at))
    alone = both.predict("arm", at)
    assert delta.value == pytest.approx(loss(2 * at) - loss(at), abs=0.01)
    assert delta.high - delta.low < 0.5 * (alone.high - alone.low)


def test_two_sizes_leave_the_floor_out_and_one_seed_the_intervals():
    two = laws(0.01, COMPUTE[:2])
    assert (two.form, two.fits("arm")["E"].value) == ("A C^-b", 0)
    one = laws(n=1)
    assert one.form == "E + A C^-b"
    assert one.predict("arm", 1e14).low is None
    assert one.predict("arm", 1e14).holds(2.5) is None


def test_a_loss_below_the_references_floor_is_never_reached():
    below = Laws({"plain": COMPUTE, "arm": COMPUTE}, {"plain": [loss(c) * np.ones(2) for c in COMPUTE], "arm": [
        np.full(2, level) for level in (1.9, 1.7, 1.0)]})  # fmt: skip
    assert math.isinf(below.multiplier("arm", "plain").value)


def test_the_best_rate_is_the_least_of_a_parabola():
    tried = [(rate, (math.log(rate) - math.log(5e-3)) ** 2) for rate in (2e-3, 4e-3, 8e-3, 1.6e-2)]
    assert best_rate(tried) == pytest.approx(5e-3)
    assert best_rate([*tried, (3.2e-2, None)]) == pytest.approx(5e-3)
    assert best_rate(tried[:2]) == 4e-3
    assert best_rate([(1e-3, None)]) is None


def test_rates_follow_a_power_law_of_the_width_within_a_factor_of_two():
    found = transfer([(48, 8e-3), (64, 8e-3 * (64 / 48) ** -0.5)], 128)
    assert found["exponent"] == pytest.approx(-0.5)
    assert found["lr"] == pytest.approx(8e-3 * (128 / 48) ** -0.5, rel=0.05)
    steep = transfer([(48, 1.6e-2), (64, 4e-3)], 256)
    assert steep["law"] < steep["lr"] == 2e-3
    assert transfer([(64, 1e-3), (64, 2e-3)], 128) is None
