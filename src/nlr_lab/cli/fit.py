"""`nlr fit RECIPE`: a coordinate network for an image, a shape or a scene."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tyro.conf import FlagCreatePairsOff

from .options import parse_recipe

Problem = TypeVar("Problem")
Train = TypeVar("Train")


@dataclass(frozen=True, kw_only=True)
class FitOptions(Generic[Problem, Train]):
    """Options of `nlr fit`; the recipe's own settings are the nested ones."""

    out: str
    """Folder for checkpoints, the fitted field, pictures and result.json; must be empty or new."""
    method: str
    """The linears: dense, low-rank:rank=5, or sine:rank=5,omega=50; each may add init=kaiming_sqrt5 or
    init=kaiming_zero, and sine gain=."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the newest whole checkpoint in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""
    problem: Problem
    """The signal that is fitted, and the network."""
    train: Train
    """The optimization."""


def run_fit(arguments: list[str]) -> None:
    """Fit and print the scores and where the files are."""
    recipe, options = parse_recipe(
        FitOptions,
        arguments,
        command="fit",
        defaults=lambda recipe: {"out": f"runs/{recipe.name}", "method": str(recipe.method)},
        nested=("problem", "train"),
    )

    from dataclasses import asdict

    from nlr_lab.fields.fit import fit
    from nlr_lab.fields.problem import FieldMethod

    method = FieldMethod.parse(options.method)
    result = fit(
        recipe.problem.prepare(),
        method,
        recipe.train,
        options.out,
        resume=options.resume,
        overwrite=options.overwrite,
        about=asdict(recipe.problem),
    )
    numbers = ", ".join(f"{each.replace('_', ' ')} {value:.4g}" for each, value in result.metrics.items())
    print(f"{numbers} after {result.steps} steps; {result.parameters:,} parameters, {method}")
    print(f"in {options.out}: model/model.safetensors, result.json, {', '.join(result.files)}")
