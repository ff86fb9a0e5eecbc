"""`nlr compare RECIPE` where the recipe fits a field: rank and method, rate and distortion."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tyro.conf import FlagCreatePairsOff

from .options import comparison_defaults, parse_recipe, seconds_of

Problem = TypeVar("Problem")
Train = TypeVar("Train")


@dataclass(frozen=True, kw_only=True)
class CompareFieldOptions(Generic[Problem, Train]):
    """Options of `nlr compare` for fields; the recipe's own settings are the nested ones."""

    out: str
    """Folder for the fits, results.json, the pictures and report.md; must be empty or new."""
    arms: tuple[str, ...]
    """What is compared: dense, low-rank:rank=5, sine:rank=5,omega=50 and the like. Each may add init= (otherwise both
    are tried), lr= (otherwise tuned), gain= and name=."""
    seeds: int
    """Seeds; on each, every arm gets the same batches."""
    tune_lr: tuple[float, ...]
    """Learning rates to try for each arm and init, on a seed of their own; where an arm's best is at the edge, more of
    them. Then every arm runs at its best."""
    timing_rounds: int = 20
    """Interleaved steps of each arm for the step times; 0 leaves them out."""
    max_minutes: float | None = None
    """End within so many minutes, the report included: no fit of the tuning and no seed is begun that would not, and
    where not even one seed would, all fits are shortened to fewer steps, which the report says."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on with the fits that are missing in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""
    problem: Problem
    """What is fitted, and the network."""
    train: Train
    """The optimization, shared by all arms."""


def run_fields(arguments: list[str]) -> None:
    """Compares and prints the table."""
    recipe, options = parse_recipe(
        CompareFieldOptions,
        arguments,
        command="compare",
        defaults=comparison_defaults,
        nested=("problem", "train"),
    )
    max_seconds = seconds_of(options.max_minutes)

    from nlr_lab.compare.field_plan import FieldArm
    from nlr_lab.compare.fields import compare_fields

    print(
        compare_fields(
            recipe,
            options.out,
            arms=[FieldArm.parse(arm) for arm in options.arms],
            seeds=options.seeds,
            tune_lr=options.tune_lr,
            resume=options.resume,
            overwrite=options.overwrite,
            timing_rounds=options.timing_rounds,
            max_seconds=max_seconds,
        )
    )
