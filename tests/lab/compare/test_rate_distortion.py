"""Bjontegaard deltas: against integration by hand, and the published table; what is refused."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.interpolate import Akima1DInterpolator

from nlr_lab.compare.field_report import bd_psnr, bd_rate
from refusals import assert_refused

# Published, never ours: sine_lowrank.txt, Table 3, PSNR on LLFF; the rates are the parameter counts that belong to the
# printed percentages. The averages are given to two digits there.
PUBLISHED_PARAMETERS = [7_565, 26_259, 48_674, 138_334, 272_824]  # k = 1, 5, 10, 30, 60
PUBLISHED_LOW_RANK = [14.00, 20.01, 22.12, 24.42, 25.59]
PUBLISHED_SINE = [19.77, 23.11, 24.39, 25.86, 26.36]


def curve(rng, points=5, start=20.0):
    rates = np.cumsum(rng.uniform(0.2, 1.0, points))
    qualities = start + np.cumsum(rng.uniform(0.3, 3.0, points))
    return list(zip(10**rates, qualities, strict=True))


def test_published_table_gives_the_published_deltas():
    anchor = list(zip(PUBLISHED_PARAMETERS, PUBLISHED_LOW_RANK, strict=True))
    test = list(zip(PUBLISHED_PARAMETERS, PUBLISHED_SINE, strict=True))
    assert round(bd_rate(anchor, test), 2) == -64.72
    assert round(bd_psnr(anchor, test), 2) == 2.72


def test_deltas_are_integrals_between_akima_curves(rng):
    anchor, test = curve(rng, 5), curve(rng, 6, start=20.5)

    def mean_gap(x_anchor, y_anchor, x_test, y_test):
        low, high = max(x_anchor[0], x_test[0]), min(x_anchor[-1], x_test[-1])
        first, second = Akima1DInterpolator(x_anchor, y_anchor), Akima1DInterpolator(x_test, y_test)
        knots = sorted(x for x in (*x_anchor, *x_test) if low < x < high)
        return quad(lambda x: second(x) - first(x), low, high, points=knots, limit=200)[0] / (high - low)

    rates = [np.log10([rate for rate, _ in each]) for each in (anchor, test)]
    qualities = [np.array([quality for _, quality in each]) for each in (anchor, test)]
    log_gap = mean_gap(qualities[0], rates[0], qualities[1], rates[1])
    assert bd_rate(anchor, test) == pytest.approx(100 * (10**log_gap - 1), rel=1e-6)
    assert bd_psnr(anchor, test) == pytest.approx(mean_gap(rates[0], qualities[0], rates[1], qualities[1]), rel=1e-6)


def test_finds_a_scaled_rate_and_a_shifted_quality_in_any_order(rng):
    anchor = curve(rng)
    assert bd_rate(anchor, [(0.6 * rate, quality) for rate, quality in anchor][::-1]) == pytest.approx(-40)
    assert bd_psnr(anchor[::-1], [(rate, quality + 0.2) for rate, quality in anchor]) == pytest.approx(0.2)
    assert bd_rate(anchor, anchor) == pytest.approx(0, abs=1e-9)


def test_quality_that_falls_has_a_bd_psnr_but_no_bd_rate(rng):
    anchor = [(1.0, 20.0), (2.0, 22.0), (3.0, 21.0), (4.0, 25.0)]
    better = [(rate, quality + 0.5) for rate, quality in anchor]
    assert bd_psnr(anchor, better) == pytest.approx(0.5)
    assert_refused("anchor goes from 22 at rate 2 to 21 at rate 3", bd_rate, anchor, better)


def test_refuses_a_rate_that_no_curve_has(rng):
    """Such curves were measured: two sizes that learn nothing, and one that does."""
    rates = [7_565, 26_259, 138_334]
    anchor = list(zip(rates, [12.64 + 0.01 * rng.random(), 16.5, 17.5], strict=True))
    flat = list(zip(rates, [12.661, 12.671, 16.3], strict=True))
    assert bd_psnr(anchor, flat) < -1
    assert_refused(r"more than the measured rates \(7565 to 138334\) allow.*report BD-PSNR", bd_rate, anchor, flat)


@pytest.mark.parametrize("delta", [bd_rate, bd_psnr])
@pytest.mark.parametrize(
    ("test", "words"),
    [
        ([(1, 20), (2, 21)], "at least 3 points; test has 2"),
        ([(1, 20), (2, float("nan")), (3, 22)], "test needs finite qualities at rates above 0, each rate once"),
        ([(1, 20), (2, 21), (float("inf"), 22)], "each rate once; it has .*inf"),
        ([(0, 20), (2, 21), (3, 22)], "at rates above 0"),
        ([(1, 20), (2, 21), (2, 22)], "each rate once"),
        ([(7, 70), (8, 71), (9, 72)], "the curves share no"),
    ],
)
def test_curves_without_a_delta_are_refused_in_one_line(delta, test, words):
    assert_refused(words, delta, [(1, 20), (2, 21), (3, 22)], test)
