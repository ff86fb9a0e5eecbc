"""The plan of a comparison: arms, seeds and learning rates, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .trial import Choice, Trials, tidy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checked arguments of `compare`."""

    arms: tuple[Any, ...]
    seeds: tuple[int, ...]
    tuning_seed: int
    grid: tuple[float, ...]
    choices: dict[str, list[Choice]] = field(repr=False)
    """Choices that each arm is tuned over, by name; one choice: it is not tuned."""
    reference: str
    max_extensions: int
    settings: dict[str, Any] = field(repr=False)
    """Settings that all runs share."""
    arm_settings: dict[str, dict[str, Any]] = field(repr=False)

    @classmethod
    def make(
        cls,
        trials: Trials,
        arms: Sequence[Any] | None,
        seeds: int | None,
        tune_lr: Sequence[float] | None,
        reference: str | None,
        max_extensions: int,
    ) -> "Plan":
        """Raise UserError for arms, seeds or learning rates that make no comparison."""
        recipe = trials.recipe
        given = recipe.arms if arms is None else arms
        chosen = tuple(trials.parse_arm(arm) if isinstance(arm, str) else arm for arm in given)
        count = recipe.seeds if seeds is None else seeds
        grid = tuple(sorted(map(tidy, recipe.tune_lr if tune_lr is None else tune_lr)))
        names = [arm.name for arm in chosen]
        if len(names) < 2:
            raise UserError(f"a comparison needs at least two arms, such as: {trials.example}")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two arms are called {name!r}; give one of them another with ,name=...")
        check_integer("seeds", count, minimum=1)
        check_integer("max_extensions", max_extensions, minimum=0)
        if any(not 0 < rate < float("inf") for rate in grid):
            raise UserError("every learning rate of tune_lr must be a finite number above 0")
        if len(grid) == 1 or len(set(grid)) < len(grid):
            raise UserError("tune_lr needs at least two different learning rates; to set one, set lr instead")
        if reference is not None and reference not in names:
            raise UserError(f"there is no arm {reference!r} to be the reference; there are {', '.join(names)}")
        chosen = trials.resolve(chosen)
        first = recipe.train.seed + 1
        return cls(
            arms=chosen,
            seeds=tuple(range(first, first + count)),
            tuning_seed=recipe.train.seed,
            grid=grid,
            choices={arm.name: trials.choices(arm, grid) for arm in chosen},
            reference=reference or trials.default_reference(chosen),
            max_extensions=max_extensions,
            settings=trials.shared_settings(),
            arm_settings={arm.name: trials.arm_settings(arm) for arm in chosen},
        )

    def tuned(self, arm: Any) -> list[Choice]:
        """Return what an arm is tuned over; empty where it is not tuned."""
        return self.choices[arm.name] if len(self.choices[arm.name]) > 1 else []
