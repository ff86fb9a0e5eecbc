"""The pictures: that they hold what they are given, not how they look."""

import math
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from nlr_lab.compare import plots
from nlr_lab.compare.plots import mean_curve, plot_curves, plot_rate_sweep
from seeds import rng


@pytest.fixture
def drawn(monkeypatch):
    """The axes of each picture at the moment it is saved."""
    kept = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (kept.append(figure.axes[0]), save(figure, path)))
    return kept


def falling(speed, seeds=2, total=100):
    generator = rng()
    return tuple(
        tuple((float(s), 3 - speed * s / total + generator.normal(0, 0.01)) for s in range(0, total + 1, 10))
        for _ in range(seeds)
    )


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_curves_are_truncated_dashed_and_averaged(tmp_path, drawn):
    arms = {"baseline": falling(1.0), "noble": falling(1.3)}
    plot_curves(tmp_path / "curves.png", arms, ["baseline"], target=2.0, title="a test")
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0.01, "an empty picture"
    assert not list(tmp_path.glob(".tmp*"))
    baseline, noble = lines(drawn[0])["baseline"], lines(drawn[0])["noble"]
    assert baseline.is_dashed()
    assert not noble.is_dashed()
    assert min(noble.get_xdata()) == 20, "the first fifth of the steps is left out"
    expected = np.mean([[loss for step, loss in curve if step >= 20] for curve in arms["noble"]], axis=0)
    np.testing.assert_allclose(noble.get_ydata(), expected)
    assert any(np.allclose(line.get_ydata(), 2.0) for line in drawn[0].lines), "the reference's final loss"
    assert len(drawn[0].collections) == 2, "one band for each arm"


def test_mean_curve_of_seeds_with_different_steps():
    steps, mean, low, high = mean_curve([[(0, 4.0), (10, 2.0)], [(0, 2.0), (5, 2.0), (20, 2.0)]])
    np.testing.assert_array_equal(steps, [0, 5, 10])
    np.testing.assert_allclose(mean, [3.0, 2.5, 2.0])
    np.testing.assert_allclose(low, [2.0, 2.0, 2.0])
    np.testing.assert_allclose(high, [4.0, 3.0, 2.0])


def test_diverged_and_missing_curves_are_cut_not_drawn(tmp_path, drawn):
    steps, *_ = mean_curve([[(0, 4.0), (10, math.nan), (20, 3.0)]])
    np.testing.assert_array_equal(steps, [0])
    plot_curves(tmp_path / "curves.png", {"lost": [[(0.0, math.nan)]], "none": []}, ["none"])
    assert not drawn[0].lines
    assert (tmp_path / "curves.png").exists()


def test_rate_sweep_marks_choice_and_divergence(tmp_path, drawn):
    sweeps = {"baseline": [(2e-3, 2.0), (1e-3, 2.1), (4e-3, None)], "noble": [(1e-3, 1.9), (2e-3, 1.95)]}
    chosen = {"baseline": 2e-3, "noble": 1e-3}
    plot_rate_sweep(tmp_path / "rates.png", sweeps, chosen=chosen, dashed=["baseline"])
    axes = drawn[0]
    np.testing.assert_allclose(lines(axes)["baseline"].get_xdata(), [1e-3, 2e-3])
    assert axes.get_xscale() == "log"
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[4e-3]]
    rings = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert sorted(line.get_xdata()[0] for line in rings) == [1e-3, 2e-3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.002", "0.004"]


def test_drawing_leaves_pyplot_alone():
    code = "import sys, nlr_lab.compare.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
