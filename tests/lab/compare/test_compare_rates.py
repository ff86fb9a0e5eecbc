"""How a learning rate is chosen from the runs that tried some."""

from dataclasses import replace

import pytest

from nlr_lab.compare.trial import Run
from nlr_lab.compare.tuning import next_choices
from nlr_lab.tasks.task import Measure


@pytest.mark.parametrize(("losses", "expected"), [((0.63, 0.62), 9e-3), ((0.62, 0.63), 1e-3 / 3)])
def test_where_the_metric_says_nothing_the_loss_chooses(losses, expected):
    """Matthews correlation is 0 of every classifier that knows the commonest class alone."""
    tried = [
        Run(
            seed=0,
            lr=rate,
            final_loss=loss,
            steps=9,
            seconds=1.0,
            curve=(),
            score=0.1,
            selection=0.0,
        )
        for rate, loss in zip((1e-3, 3e-3), losses, strict=True)
    ]
    measure = Measure(name="matthews", higher_is_better=True, unit="")
    (choice,) = next_choices(tried, measure)
    assert choice.lr == pytest.approx(expected, rel=1e-5)
    better = replace(tried[0], selection=0.1, final_loss=9.0)
    (choice,) = next_choices([better, *tried[1:]], measure)
    assert choice.lr == pytest.approx(1e-3 / 3, rel=1e-5), "only where it says nothing"
