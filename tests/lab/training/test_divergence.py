"""The rule for losses that rise and stay finite: what is a divergence, what a spike, what noise; and runs that stop."""

import json

import numpy as np
import pytest

from nlr_lab.training import DivergedError, run_training
from nlr_lab.training.result import rises, stability
from seeds import rng
from training_helpers import FakeText, make_recipe

STEPS, EVERY = 2000, 10
TEXT = FakeText()
BLOWN = {"dropout": 0.0, "steps": 60, "lr": 3e-3, "log_every": 1, "eval_every": 20, "save_every": 10}


def learning(rng, noise=0.03, first=10.8, last=3.0):
    """(steps, losses) of a power law with noise, an entry every ten steps."""
    steps = np.arange(EVERY, STEPS + 1, EVERY)
    return steps, last + (first - last) * (steps / EVERY) ** -0.5 + rng.normal(0, noise, len(steps))


def read(steps, losses):
    return rises(list(zip(steps.tolist(), losses.tolist(), strict=True)), STEPS)


def diverged(found):
    return [rise for rise in found if rise.diverged]


def test_ordinary_training_is_neither():
    """Smooth or very noisy, with a plateau first, with a bump of the warm-up, or learning nothing."""
    up, generator = 0, rng()
    for noise in (0.0, 0.01, 0.1, 0.5, 2.0):
        for _ in range(15):
            steps, losses = learning(generator, noise)
            plateau = np.where(steps < 400, 10.8 + generator.normal(0, noise, len(steps)), losses)
            bump = losses + np.where((steps > 60) & (steps < 120), 0.5, 0.0)
            flat = 20 + generator.normal(0, noise, len(steps))
            for curve in (losses, plateau, bump, flat, np.full(len(steps), 2.0)):
                found = read(steps, curve)
                assert not diverged(found), (noise, found)
                up += sum(rise.entries for rise in found)
    assert up <= 8, "on average 0.4 of these 60,000 entries"


@pytest.mark.parametrize("start", [300, 1000, 1800])
@pytest.mark.parametrize("to", [6.5, 7.6, 12.0, 1e6])
def test_loss_that_stays_up_diverged_where_it_rose(start, to):
    steps, losses = learning(rng())
    losses = np.where(steps >= start, to + rng().normal(0, 0.03, len(steps)), losses)
    (rise,) = read(steps, losses)
    assert (rise.start, rise.end, rise.diverged) == (start, None, True)
    assert rise.peak == losses[steps >= start].max()


def test_one_that_comes_back_spiked_however_late_and_diverged_until_then():
    steps, losses = learning(rng())
    late = (steps >= 1200) & (steps < 1400)
    losses = np.where(late, 8.0, losses)
    (spike,) = read(steps, losses)
    assert (spike.start, spike.end, spike.entries, spike.peak, spike.diverged) == (1200, 1400, 20, 8.0, False)
    assert diverged(read(steps[steps < 1350], losses[steps < 1350]))[0].start == 1200
    # A curve that is logged seldom is not judged by one entry.
    coarse = rises([(step, 4.0 if step == 1600 else 10 - step / 400) for step in range(200, 2001, 200)], STEPS)
    assert not diverged(coarse)


def test_unit_does_not_matter_and_it_is_known_as_soon_as_patience_is_over():
    steps, losses = learning(rng())
    losses = np.where(steps >= 900, 7.0, losses)
    for scale, shift in ((1, 0), (1 / 64, 0), (1, 100)):
        assert diverged(read(steps, scale * losses + shift))[0].start == 900
    known = [step for step in steps if diverged(read(steps[steps <= step], losses[steps <= step]))]
    assert known[0] == 1000
    worse = 10.8 + 0.01 * np.sqrt(steps) + rng().normal(0, 0.001, len(steps))  # from the first step on
    assert diverged(read(steps, worse))[0].start < 250  # 3,000 draws: from 150 to 210


def test_explosion_does_not_hide_itself():
    """Curves of `nlr compare llm-demo --arms baseline:lr=10`, every second step, and every step with a way back."""
    seldom = [(2, 5.712), (4, 100.4), (6, 539.0), (8, 410.2), (10, 250.7), (12, 141.3)]
    (rise,) = rises(seldom, 12)
    assert (rise.start, rise.diverged) == (4, True)
    falling = [5.71, 5.70, *np.geomspace(18, 576, 10), *np.geomspace(500, 12.5, 28)]
    assert stability(tuple(enumerate(falling, 1)), 40) == {"diverged_at": 3, "spikes": 0}
    back = [*falling[:-4], 5.2, 5.1, 5.0, 4.9]
    assert stability(tuple(enumerate(back, 1)), 40) == {"diverged_at": None, "spikes": 1}


def test_end_above_the_beginning_diverged_though_logged_seldom():
    assert [rise.start for rise in rises([(10, 4.3e7), (20, 9.5e7)], 20) if rise.diverged] == [20]
    blown = [(10, 9.9e30), (20, 9.8e30), (30, 5.7e30), (40, 2.6e30)]
    assert [rise.start for rise in rises(blown, 40, 1.6) if rise.diverged] == [10]
    assert not rises([(10, 5.70), (20, 5.75)], 20)  # a short run that learned nothing yet
    overfits = tuple((step, 2.3 * 0.5 ** (step / 50)) for step in range(10, 201, 10))
    assert stability(overfits, 200) == {"diverged_at": None, "spikes": 0}


def run(out, arm="training_helpers:blow_up,at=25", **settings):
    return run_training(make_recipe(arm, **BLOWN | settings), out, prepared=TEXT, quiet=True, resume=out.exists())


def test_run_that_goes_on_says_where_it_diverged(tmp_path):
    result = run(tmp_path / "out")
    assert (result.status, result.steps, result.diverged_at) == ("done", 60, 25)
    calm = run(tmp_path / "calm", "noble:rank=4")
    assert (calm.diverged_at, calm.spikes) == (None, 0)


def test_run_that_is_to_stop_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(DivergedError, match=r"rose to .* and did not recover at step 25; .*step-000020") as caught:
        run(tmp_path / "out", stop_diverged=True)
    assert caught.value.step == 25
    assert "\n" not in str(caught.value)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["status"], result["steps"], result["diverged_at"]) == ("diverged", 25, 25)
    assert len(result["train_curve"]) < 40, "patience is 3 steps of 60"
    with pytest.raises(DivergedError, match="diverged at step 25"):
        run(tmp_path / "out", stop_diverged=True)
    # Patience is 10 steps and a checkpoint is written in each, of which one is kept.
    with pytest.raises(DivergedError, match="step-000024"):
        run(tmp_path / "one", stop_diverged=True, steps=200, save_every=1, keep_checkpoints=1)
    assert (tmp_path / "one" / "checkpoints" / "step-000024").is_dir()


def test_edges_of_the_rule():
    """Few changes say little of the noise; an entry counts as lost above the first; three of them are a divergence."""
    assert not rises([(1, 5.0), (2, 4.9), (3, 4.8), (4, 4.75), *((step, 5.9) for step in (5, 6, 7, 8))], 8)
    curve = [(10 * i, 10.8 - 7 * i / 100 + 0.01 * (i % 3)) for i in range(1, 101)]
    (last,) = rises([*curve[:-1], (1000, 8.0)], 1000)
    assert (last.start, last.diverged) == (1000, False)
    for up in (2, 3):
        (found,) = rises([*curve[:-up], *((step, 10.0) for step, _ in curve[-up:])], 1000)
        assert found.diverged == (up == 3)
