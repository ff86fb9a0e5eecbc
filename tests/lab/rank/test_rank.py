"""Ranks and spectra against plain SVDs; the paper's bounds where they hold, and counterexamples where they do not."""

import math
from types import SimpleNamespace

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


def a_matrix():
    """Any shape, any scale, sometimes with zeros, sometimes of low rank."""
    m, n, k = (int(each) for each in torch.randint(1, 9, (3,)))
    matrix = torch.randn(m, n, dtype=torch.float64)
    if torch.rand(()) < 0.4:
        matrix = torch.randn(m, k, dtype=torch.float64) @ torch.randn(k, n, dtype=torch.float64)
    if torch.rand(()) < 0.4:
        matrix = matrix * (torch.rand(m, n) < 0.5)
    matrix[0, 0] = matrix[0, 0] or 1.0
    return matrix * 10 ** float(torch.empty(()).uniform_(-4, 4))


def largest_omega(matrix):
    size = matrix.abs()
    return math.pi / (3 * float(size[size > 0].min()))


def sine_bounds(matrix, omega):
    """Both sides of the paper's inequalities (sine_lowrank.txt, 3.2.2 and A.1), as printed and as they hold.

    |A| and sqrt are entry by entry; (30) claims that equation (29) reaches k. Up to `largest_omega` all is stated.
    """
    size, sine = matrix.abs(), torch.sin(omega * matrix)
    a_min, root = float(size[size > 0].min()), float(torch.linalg.matrix_norm(size.sqrt(), 2))
    frobenius, operator = float(sine.square().sum()), float(torch.linalg.matrix_norm(sine, 2)) ** 2
    return SimpleNamespace(
        largest_omega=math.pi / (3 * a_min),
        frobenius_squared=frobenius,
        lemma_1=(omega * a_min) ** 2 / 4,  # bounds the above from below
        lemma_1_printed=omega**2 * a_min,
        operator_squared=operator,
        lemma_2=omega * root**2,  # bounds the above from above
        stable_rank=frobenius / operator if operator else math.nan,
        proposition_1=omega / 4 * (a_min / root) ** 2,
        proposition_1_printed=omega * (a_min / root) ** 2,
        equation_29=omega * a_min / root,
    )


def test_corrected_bounds_hold_up_to_the_stated_omega():
    for _ in range(200):
        matrix = a_matrix()
        bounds = sine_bounds(matrix, float(torch.rand(())) * largest_omega(matrix) or 1e-9)
        assert bounds.frobenius_squared >= bounds.lemma_1 * (1 - 1e-12)
        assert bounds.stable_rank >= bounds.proposition_1 * (1 - 1e-12)
        # And say nothing: a stable rank is never below 1.
        assert bounds.proposition_1 <= math.pi / 12 * (1 + 1e-12)
        assert bounds.proposition_1_printed <= math.pi / 3 * (1 + 1e-12)
        if (matrix != 0).all():
            assert bounds.proposition_1 <= math.pi / (12 * matrix.numel()) * (1 + 1e-12)
        # Lemma 2 holds at any omega.
        for omega in (bounds.largest_omega, largest_omega(matrix) * 10 ** float(torch.empty(()).uniform_(-2, 3))):
            bounds = sine_bounds(matrix, omega)
            assert bounds.operator_squared <= bounds.lemma_2 * (1 + 1e-12)


def test_printed_lemma_1_and_equation_29_fail_once_a_matrix_is_small():
    for _ in range(50):
        matrix = a_matrix()
        size = matrix.abs()
        # ||sin(omega A)||_F^2 <= omega^2 ||A||_F^2, below omega^2 A_min as soon as ||A||_F^2 < A_min.
        small = matrix * 0.5 * float(size[size > 0].min() / size.square().sum())
        bounds = sine_bounds(small, float(torch.rand(())) * largest_omega(small) or 1e-9)
        assert bounds.frobenius_squared < bounds.lemma_1_printed
        # (29) grows without limit as the matrix shrinks; no rank exceeds min(m, n).
        root = float(torch.linalg.matrix_norm(size.sqrt(), 2))
        small = matrix * (math.pi / (4 * min(matrix.shape) * root)) ** 2
        assert sine_bounds(small, largest_omega(small)).equation_29 > min(matrix.shape)


def test_other_printed_statements_fail():
    matrix = torch.rand(1, 1, dtype=torch.float64) + 0.1
    beyond = sine_bounds(matrix, math.pi / float(matrix))
    assert beyond.frobenius_squared < beyond.lemma_1, "lemma 1 beyond its range"
    matrix = torch.zeros(4, 6, dtype=torch.float64)
    matrix[2, 3] = torch.rand(()).double() + 0.1
    bounds = sine_bounds(matrix, largest_omega(matrix))
    assert bounds.stable_rank == pytest.approx(1)
    assert bounds.proposition_1_printed == pytest.approx(math.pi / 3)  # 1.047, and the rank is 1
    assert torch.linalg.matrix_rank(torch.sin(bounds.largest_omega * matrix)) == 1
    matrix = torch.rand(5, 7, dtype=torch.float64)
    assert matrix.sqrt().norm() > matrix.norm(), "equation (27) where entries are below one"
    row, x = torch.tensor([[0.25, 1.0]], dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64)
    assert (torch.sin(row) @ x).square() > (row.sqrt() @ x).square() == 0, "inequality (20) at omega = 1"
