"""Bjontegaard deltas: how much smaller, or how much better, one rate-distortion curve is than another.

    BD-rate = 100 (10^mean(log10 r_test(q) - log10 r_anchor(q)) - 1)  %, mean over the qualities q that both reach
    BD-PSNR = mean(q_test(log10 r) - q_anchor(log10 r))               in q's unit, mean over the rates that both span

A curve is a list of points (rate, quality): parameters, bytes, bits per pixel or a share of the full size, and PSNR in
dB or another figure that is better when higher. Between points it is Akima's interpolation, as in sine_lowrank.txt,
section 4.3. Nothing is extrapolated: points outside the common range count only through the shape of the curve at its
edge.

Source: G. Bjontegaard, VCEG-M33, 2001; C. Herglotz et al., Beyond Bjontegaard, ICIP 2022.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.interpolate import Akima1DInterpolator

from nonlinear_lowrank.errors import UserError

Curve = Sequence[tuple[float, float]]
"""Points (rate, quality), in any order."""

LEAST_POINTS = 3
"""Akima's interpolation needs so many; with two it is a straight line."""


def bd_rate(anchor: Curve, test: Curve, *, names: tuple[str, str] = ("anchor", "test")) -> float:
    """Mean change of the rate at equal quality, in percent: -64.7 says that `test` needs 64.7 % less.

    Args:
        anchor: the curve to compare with, at least `LEAST_POINTS` points.
        test: the curve in question; it need not have as many points, or the same rates.
        names: of the two, in errors.

    Raises:
        UserError: too few points, a number that is not finite, a rate that is not above 0, a rate given twice, a
            quality that does not rise with the rate, no common quality, or curves so flat somewhere that the
            interpolation between their points leaves all measured rates.
    """
    anchor, test = _checked(names[0], anchor), _checked(names[1], test)
    for name, curve in zip(names, (anchor, test), strict=True):
        for (low, worse), (high, better) in pairwise(curve):
            if better <= worse:
                raise UserError(
                    f"BD-rate needs a quality that rises with the rate; {name} goes from {worse:g} at rate {low:g} "
                    f"to {better:g} at rate {high:g}: leave such points out, or report BD-PSNR"
                )
    _check_overlap("quality", names, [quality for _, quality in anchor], [quality for _, quality in test])
    curves = ([(quality, np.log10(rate)) for rate, quality in curve] for curve in (anchor, test))
    change = 100 * (10 ** _mean_gap(*curves) - 1)
    rates = [rate for rate, _ in (*anchor, *test)]
    most = max(rates) / min(rates)
    if not 1 / most <= 1 + change / 100 <= most:
        raise UserError(
            f"BD-rate would be {change:.3g} %, more than the measured rates ({min(rates):g} to {max(rates):g}) allow: "
            f"between two points of nearly one quality the interpolation leaves them; leave one out, or report BD-PSNR"
        )
    return change


def bd_psnr(anchor: Curve, test: Curve, *, names: tuple[str, str] = ("anchor", "test")) -> float:
    """Mean gain of the quality at equal rate, in the quality's unit (dB for PSNR).

    Unlike `bd_rate`, whose arguments it has, it is defined for a quality that falls somewhere.

    Raises:
        UserError: as in `bd_rate`, but for the quality and its interpolation, and where there is no common rate.
    """
    anchor, test = _checked(names[0], anchor), _checked(names[1], test)
    _check_overlap("rate", names, [rate for rate, _ in anchor], [rate for rate, _ in test])
    return _mean_gap(*([(np.log10(rate), quality) for rate, quality in curve] for curve in (anchor, test)))


def _mean_gap(anchor: Curve, test: Curve) -> float:
    """Mean of test(x) - anchor(x) over the x that both span; points (x, y) with x increasing."""
    low, high = max(anchor[0][0], test[0][0]), min(anchor[-1][0], test[-1][0])
    first, second = (Akima1DInterpolator(*zip(*curve, strict=True)).integrate(low, high) for curve in (anchor, test))
    return float((second - first) / (high - low))


def _checked(name: str, curve: Curve) -> list[tuple[float, float]]:
    """The points by rising rate."""
    if len(curve) < LEAST_POINTS:
        raise UserError(f"a Bjontegaard delta needs at least {LEAST_POINTS} points; {name} has {len(curve)}")
    points = sorted((float(rate), float(quality)) for rate, quality in curve)
    for rate, quality in points:
        if not (math.isfinite(rate) and math.isfinite(quality)):
            raise UserError(f"{name} has a point that is not finite: rate {rate:g}, quality {quality:g}; leave it out")
        if rate <= 0:
            raise UserError(f"{name} has rate {rate:g}; rates must be above 0, for their logarithm is taken")
    for (low, _), (high, _) in pairwise(points):
        if low == high:
            raise UserError(f"{name} has rate {low:g} twice; give one point for each rate, such as the mean over seeds")
    return points


def _check_overlap(what: str, names: tuple[str, str], anchor: list[float], test: list[float]) -> None:
    if max(min(anchor), min(test)) >= min(max(anchor), max(test)):
        raise UserError(
            f"the curves share no {what}: {names[0]} has {min(anchor):g} to {max(anchor):g}, {names[1]} "
            f"{min(test):g} to {max(test):g}; measure points in between"
        )
