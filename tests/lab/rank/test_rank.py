"""Ranks and spectra against plain SVDs."""

import math

import numpy as np
import pytest
import torch

from nlr_lab.rank.measures import (
    ACTIVATIONS,
    kaiming_factors,
    product_spectrum,
    random_stable_rank,
    spectrum,
)
from refusals import assert_refused


def decaying(m, n, power=1.0):
    left = torch.linalg.qr(torch.randn(m, min(m, n), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, min(m, n), dtype=torch.float64))[0]
    values = torch.arange(1, min(m, n) + 1, dtype=torch.float64) ** -power
    return left * values @ right.T


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (600, 530), (1, 9)])
def test_spectrum_equals_an_svd(shape):
    matrix = torch.randn(shape).to(torch.bfloat16)
    found, values = spectrum(matrix), np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(found.values.numpy(), values, rtol=1e-8)
    assert found.exact
    assert found.stable_rank == pytest.approx((values**2).sum() / values[0] ** 2)
    for tolerance in (0.5, 0.1, 1e-2):
        assert found.rank(tolerance) == (values > tolerance * values[0]).sum()
    assert float(found.normalised[0]) == 1


def test_gram_matrix_resolves_the_stated_tolerance():
    size = 520
    exponents = torch.linspace(0, -10, size, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    found = spectrum(basis * 10**exponents @ torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0])
    for tolerance in (1e-3, 1e-5, 1e-7):
        assert found.rank(tolerance) == pytest.approx(int((10**exponents > tolerance).sum()), abs=1)


def test_sketch_stays_below_the_svd_and_finds_the_stable_rank():
    for matrix in (decaying(560, 530), decaying(530, 560, 0.3), torch.randn(530, 600, dtype=torch.float64)):
        found, truth = spectrum(matrix, exact_up_to=0), spectrum(matrix)
        assert not found.exact
        assert (found.values <= truth.values[: len(found.values)] * (1 + 1e-5)).all()
        assert found.stable_rank == pytest.approx(truth.stable_rank, rel=0.03)
        assert found.frobenius == pytest.approx(truth.frobenius)


def test_product_spectrum_equals_that_of_the_product():
    up, down = torch.randn(90, 5, dtype=torch.float64), torch.randn(5, 60, dtype=torch.float64)
    found, formed = product_spectrum(up, down, -2.5), spectrum(-2.5 * up @ down)
    torch.testing.assert_close(found.values, formed.values[:5])
    assert found.stable_rank == pytest.approx(formed.stable_rank)
    assert found.rank(1e-6) == formed.rank(1e-6) == 5
    wide = product_spectrum(torch.randn(4, 9), torch.randn(9, 6))
    assert len(wide.values) == 4


def test_independent_entries_have_the_stable_rank_of_the_law():
    shape = (int(torch.randint(300, 500, ())), int(torch.randint(300, 500, ())))
    for draw in (torch.randn, lambda shape: torch.rand(shape) - 0.5):
        # One is 1.8 % above the law on average at these sizes, with a standard deviation of 1.5 %.
        mean = np.mean([spectrum(draw(shape)).stable_rank for _ in range(8)])
        assert mean == pytest.approx(random_stable_rank(shape), rel=0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_matrices_raise(bad):
    matrix = torch.randn(5, 4)
    matrix[2, 1] = bad
    for call, message in (
        (lambda: spectrum(matrix), "not finite"),
        (lambda: product_spectrum(matrix, torch.randn(4, 4)), "not finite"),
        (lambda: spectrum(torch.empty(3, 0)), r"not shape \(3, 0\)"),
        (lambda: spectrum(torch.randn(4, 4)).rank(1e-9), "tolerance must be"),
    ):
        assert_refused(message, call)
    assert math.isnan(spectrum(torch.zeros(3, 3)).stable_rank)


def test_sine_raises_the_rank_with_omega_and_relu_does_not():
    """relu(u v) = u+ v+ + u- v- has rank 2, whatever positive factor it has."""
    up, down = kaiming_factors((96, 96), 3, torch.Generator().manual_seed(0))
    product = up @ down
    assert spectrum(product).rank(1e-6) == 3
    ranks = [spectrum(torch.sin(omega * product)).rank(0.05) for omega in (1, 100, 3000)]
    assert ranks[0] <= 3 < ranks[1] < ranks[2]
    relu = [spectrum(torch.relu(omega * product)).normalised for omega in (1, 100)]
    torch.testing.assert_close(relu[0], relu[1])
    up, down = kaiming_factors((40, 40), 1, torch.Generator().manual_seed(0), init="kaiming_zero")
    assert spectrum(torch.relu(up @ down)).rank(1e-7) == 2
    assert min(spectrum(ACTIVATIONS[name](20 * up @ down)).rank(1e-7) for name in ("sine", "tanh", "sigmoid")) > 4
