"""A field to fit and what it is compared with, by name (`recipes`)."""

from dataclasses import dataclass
from typing import Any

from .problem import FieldMethod
from .step import FitConfig


@dataclass(frozen=True, kw_only=True)
class FieldRecipe:
    """A problem, and the methods that `nlr compare` compares on it."""

    name: str
    description: str = ""
    problem: Any
    """Settings with `prepare()` (`problem.ProblemSettings`)."""
    method: FieldMethod
    """What `nlr fit` fits unless it is told otherwise."""
    train: FitConfig
    arms: tuple[str, ...] = ()
    """Short forms of the methods that are compared (`arm.FieldArm`)."""
    seeds: int = 3
    tune_lr: tuple[float, ...] = ()
    """Learning rates that every arm is tuned over; empty: the recipe's."""
