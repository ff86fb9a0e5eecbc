"""Each arm's choice: its learning rate, of a neural field its init too, tried on a seed of their own."""

from collections.abc import Sequence
from typing import Any

from nlr_lab.runtime.processes import on_rank_0
from nlr_lab.runtime.time_limit import OutOfTimeError
from nlr_lab.tasks.task import LOSS, Measure

from .runs import Runs
from .trial import Choice, Run, tidy

Tried = dict[str, list[Run]]


def tune(runs: Runs, notes: list[str], *, all_at_once: bool) -> Tried:
    """Run every choice of each arm on the tuning seed, and go beyond its grid where the best is at the edge.

    Choice by choice, so that all arms have as many when time is up; where that does not matter, workers may begin
    `all_at_once`. Time is kept for the first seed of every arm.

    Raises:
        OutOfTimeError: not even the first choice of every arm ends in time.
    """
    plan = runs.plan
    first_seed = on_rank_0(lambda: runs.missing(plan.seeds[:1], 0))
    choices = {arm: plan.tuned(arm) for arm in plan.arms if plan.tuned(arm)}
    longest = max(map(len, choices.values()), default=0)
    tried: Tried = {arm.name: [] for arm in choices}
    if all_at_once:
        runs.run_ahead([(arm, choice, plan.tuning_seed) for arm in choices for choice in choices[arm]])
    for index in range(longest):
        now = [(arm, own[index]) for arm, own in choices.items() if index < len(own)]
        missing = [arm for arm, choice in now if runs.find(arm, choice, plan.tuning_seed) is None]
        try:
            if index > 0 and missing and not runs.have_time_for([*missing, *first_seed]):
                raise OutOfTimeError("no time for another choice of every arm")
            runs.run_ahead([(arm, choice, plan.tuning_seed) for arm, choice in now])
            for place, (arm, choice) in enumerate(now, 1):
                after = [*(later for later, _ in now[place:] if later in missing), *first_seed]
                where = f"tuning {index + 1} of {len(choices[arm])}"
                run = runs.get(arm, choice, plan.tuning_seed, where, after=after, needed=index == 0)
                tried[arm.name].append(run)
        except OutOfTimeError:
            if index == 0:
                raise
            notes.append(f"Tuning stopped for time after {index} of {longest} choices of every arm.")
            return {name: found[:index] for name, found in tried.items()}
    _extend(runs, list(choices), tried, first_seed)
    return tried


def _extend(runs: Runs, growing: list[Any], tried: Tried, first_seed: Sequence[Any]) -> None:
    """Try learning rates beyond the grids, all arms in turn, as often as the plan says or time allows."""
    seed = runs.plan.tuning_seed
    for _ in range(runs.plan.max_extensions):
        beyond = {arm: next_choices(tried[arm.name], runs.trials.measure) for arm in growing}
        growing = []
        for arm, choices in beyond.items():
            missing = [arm for choice in choices if runs.find(arm, choice, seed) is None]
            if choices and (not missing or runs.have_time_for([*missing, *first_seed])):
                growing.append(arm)
        try:
            runs.run_ahead([(arm, choice, seed) for arm in growing for choice in beyond[arm]])
        except OutOfTimeError:
            return
        for arm in list(growing):
            try:
                for choice in beyond[arm]:
                    place = f"tuning, grid extended to {choice.lr:g}"
                    tried[arm.name].append(runs.get(arm, choice, seed, place, after=first_seed))
            except OutOfTimeError:
                growing.remove(arm)


def best_run(tried: Sequence[Run], measure: Measure = LOSS) -> Run | None:
    """Return the run with the best selection, of equals the one with the lower loss, then the smaller learning rate.

    Correlations of a classifier that knows the commonest class alone are all 0, and the loss still tells them apart.
    """
    sign = -1 if measure.higher_is_better else 1
    finite = [(sign * run.chosen_by, run.final_loss, run.lr, run) for run in tried if run.chosen_by is not None]
    return min(finite, key=lambda each: each[:3], default=(0, 0, 0, None))[3]


def next_choices(tried: Sequence[Run], measure: Measure = LOSS) -> list[Choice]:
    """Return what an arm tries next: its best init at the learning rate beyond the edge that its best is at.

    Where every choice diverged: every init, at the next lower one.
    """
    best = best_run(tried, measure)
    found = []
    for init in dict.fromkeys(run.init for run in tried) if best is None else (best.init,):
        rates = sorted({run.lr for run in tried if run.init == init})
        if len(rates) > 1 and (best is None or best.lr == rates[0]):
            found.append(Choice(lr=tidy(rates[0] * rates[0] / rates[1]), init=init))
        elif len(rates) > 1 and best is not None and best.lr == rates[-1]:
            found.append(Choice(lr=tidy(rates[-1] * rates[-1] / rates[-2]), init=init))
    return found


def choose(runs: Runs, arm: Any, tried: Sequence[Run], notes: list[str]) -> tuple[Choice | None, str]:
    """Return the arm's choice (None: it diverged at all of them) and where it comes from; note what clouds it."""
    choices = runs.plan.choices[arm.name]
    if len(choices) == 1 or not tried:
        return choices[0], "the recipe's" if arm.lr is None else "set by the arm"
    best = best_run(tried, runs.trials.measure)
    if best is None:
        notes.append(f"`{arm.name}` diverged at every choice tried, and was left out of the comparison.")
        return None, "none trains"
    if next_choices(tried, runs.trials.measure):
        more = max(0, len(tried) - len(choices))
        notes.append(
            f"`{arm.name}`: the best learning rate {best.lr:g} is still at the edge of its grid after {more} "
            "extensions, so it may do better than shown."
        )
    return best.choice, "tuned"
