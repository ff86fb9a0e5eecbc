"""Laws over rungs: known ones are found again; what few sizes, seeds and widths do not tell."""

import math

import numpy as np
import pytest
import torch

from nlr_lab.scale.fits import Laws, best_rate, transfer
from nlr_lab.scale.record import build_record
from nlr_lab.scale.report import tables

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


@pytest.mark.parametrize(("arm", "factor"), [(2.5, math.inf), (3.5, 0.0)])
def test_a_law_that_does_not_fall_says_the_side_alone(arm, factor):
    rising = {"plain": [np.full(2, 3.0), np.full(2, 3.1)], "arm": [np.full(2, 3.0), np.full(2, arm)]}
    assert Laws({"plain": COMPUTE[:2], "arm": COMPUTE[:2]}, rising).multiplier("arm", "plain").value == factor


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


# --- size and tokens -------------------------------------------------------------------------------------------------

CONSTANTS = {"E": 1.7, "A": 1.2, "B": 0.9, "a": 0.35, "b": 0.28}
GRID = [(width, tokens) for width in (48, 64, 128) for tokens in (5, 20)]
CROSS = [(32, 20), (48, 20), (64, 20), (96, 20), (64, 5), (64, 80)]


def joint_loss(size, tokens, first, E, A, B, a, b):
    return E + A * (size / first[0]) ** -a + B * (tokens / first[1]) ** -b


def joint_rungs(shape, noise=0.0, n=3):
    """An arm that needs 1.3 times fewer tokens than the reference, at 1.1 times the FLOPs."""
    sizes = {width: 12 * 4 * width**2 for width, _ in shape}
    first = sizes[shape[0][0]], shape[0][1] * sizes[shape[0][0]]
    rungs = []
    for width, ratio in shape:
        size, arms = sizes[width], {}
        for name, saving, cost in (("plain", 1.0, 1.0), ("arm", 1.3, 1.1)):
            level = joint_loss(size, saving * ratio * size, first, **CONSTANTS)
            losses = [level + noise * each for each in torch.randn(n).tolist()]
            arms[name] = {"compute": cost * 6 * ratio * size * size**0.95, "losses": losses, "against": None}
            arms[name] |= {"mean": level, "sd": noise, "lr": None, "flops_per_token": None}
        rung = {"rung": f"w{width}-t{ratio}", "width": width, "tokens": float(ratio), "n": n, "reference": "plain"}
        rungs.append({**rung, "trained_tokens": ratio * size, "arms": arms})
    return rungs


def record(rungs):
    return build_record(rungs, {}, {}, "")


@pytest.mark.parametrize("shape", [GRID, CROSS], ids=["grid", "cross"])
def test_a_joint_law_is_found_again_and_says_how_flops_are_best_spent(shape):
    rungs = joint_rungs(shape)
    found = record(rungs)["joint"]
    plain, arm = found["arms"]["plain"], found["arms"]["arm"]
    assert {name: plain[name]["value"] for name in CONSTANTS} == pytest.approx(CONSTANTS, rel=1e-8)
    assert arm["B"]["value"] == pytest.approx(CONSTANTS["B"] * 1.3 ** -CONSTANTS["b"], rel=1e-8)
    # The best of many sizes, each trained for as many tokens as the FLOPs allow.
    first = rungs[0]["trained_tokens"] / rungs[0]["tokens"], rungs[0]["trained_tokens"]
    sizes = np.geomspace(1e4, 1e8, 200_001)
    tokens = found["compute"] / (6 * sizes**0.95)
    losses = joint_loss(sizes, tokens, first, **CONSTANTS)
    best = losses.argmin()
    assert found["compute"] == max(rung["arms"]["plain"]["compute"] for rung in rungs)
    assert plain["size"]["value"] == pytest.approx(sizes[best], rel=1e-3)
    assert plain["tokens_per_parameter"]["value"] == pytest.approx(tokens[best] / sizes[best], rel=1e-3)
    assert plain["loss"]["value"] == pytest.approx(losses[best], rel=1e-9)
    assert (plain["speed"], arm["speed"]["value"]) == (None, pytest.approx(1.3 / 1.1))


def test_intervals_of_a_joint_law_hold_the_truth_and_grow_with_the_noise():
    widths, exact = [], record(joint_rungs(GRID))["joint"]["arms"]["arm"]
    for noise in (0.001, 0.01):
        found = record(joint_rungs(GRID, noise))["joint"]["arms"]["arm"]
        for name in ("E", "b", "size", "tokens_per_parameter", "speed"):
            assert found[name]["low"] < exact[name]["value"] < found[name]["high"], name
        widths.append(math.log(found["size"]["high"] / found["size"]["low"]))
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    "shape",
    [
        CROSS[:4],
        [*CROSS[:4], (128, 20)],
        [(width, tokens) for width in (48, 128) for tokens in (5, 20, 80)],
        CROSS[:5],
    ],
    ids=["few", "one length", "two widths", "one other length"],
)
def test_rungs_that_do_not_tell_a_joint_law_have_none(shape):
    results = record(joint_rungs(shape))
    assert results["joint"] is None
    assert "No joint law: it takes five rungs" in "\n".join(tables(results))


def test_an_arm_without_its_own_joint_law_is_named():
    rungs = joint_rungs(CROSS)
    del rungs[0]["arms"]["arm"], rungs[5]["arms"]["arm"]
    results = record(rungs)
    assert (results["joint"]["arms"]["arm"], results["joint"]["arms"]["plain"]["rungs"]) == (None, 6)
    page = "\n".join(tables(results))
    assert "No joint law of arm: it takes" in page
    assert "| plain | 1.7 [" in page
