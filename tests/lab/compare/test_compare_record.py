"""The record and the report of finished runs: the training losses of image models, and what a diverged run leaves."""

import math

import pytest

from compare_helpers import a_record, an_arm
from compare_helpers import a_run as finished
from nlr_lab.compare.models.report import render_report, training_rows
from nlr_lab.compare.statistics import paired_mean

SEEDS = (1, 2, 3)
LOST = {"train": None, "plain": None, "loss": None}


def a_run(seed, train, plain, loss=2.0):
    return finished(seed, loss, train_loss=train, plain_loss=plain)


def rows(*arms):
    results = a_record(arms)
    assert "## Training loss" in render_report(results)
    return {name: cells for name, *cells in training_rows(results)}


def baseline():
    return an_arm("baseline", *(a_run(seed, 1.5 + 0.01 * seed, 1.4 + 0.02 * seed) for seed in SEEDS))


def test_both_training_losses_are_paired_by_seed():
    noble = an_arm("noble", *(a_run(seed, 1.4 + 0.012 * seed, 1.5 - 0.01 * seed**2) for seed in SEEDS))
    found = rows(baseline(), noble)
    assert found["baseline"] == ["1.5200", "reference", "-", "1.4400", "reference", "-"]
    for at, differences in (
        (1, [-0.1 + 0.002 * seed for seed in SEEDS]),
        (4, [0.1 - 0.01 * seed**2 - 0.02 * seed for seed in SEEDS]),
    ):
        delta = paired_mean(differences)
        assert found["noble"][at] == f"{delta.value:+.4f} [{delta.low:+.4f}, {delta.high:+.4f}]"


def test_an_arm_that_diverged_keeps_its_row():
    noble = an_arm("noble", a_run(1, 1.4, 1.3), a_run(2, **LOST), a_run(3, 1.4, 1.3))
    lost = "diverged in 1 of 3 seeds"
    assert rows(baseline(), noble)["noble"] == [lost, "it diverged", "-", lost, "it diverged", "-"]
    assert (
        rows(baseline(), an_arm("noble", choice=None))["noble"] == ["diverged at every choice", "it diverged", "-"] * 2
    )


def test_where_the_reference_diverged_the_others_say_so():
    reference = an_arm("baseline", a_run(1, 1.4, 1.3), a_run(2, **LOST), a_run(3, 1.4, 1.3))
    found = rows(reference, an_arm("noble", *(a_run(seed, 1.4, 1.3) for seed in SEEDS)))
    assert found["baseline"][0] == "diverged in 1 of 3 seeds"
    assert found["noble"] == ["1.4000", "the reference diverged", "-", "1.3000", "the reference diverged", "-"]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_loss_that_is_no_number_is_no_empty_cell(missing):
    noble = an_arm("noble", *(a_run(seed, missing if seed == 2 else 1.4 + 0.01 * seed**2, 1.3) for seed in SEEDS))
    assert rows(baseline(), noble)["noble"][1] == "it diverged"
