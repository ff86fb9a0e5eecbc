"""`nlr fit RECIPE`: a coordinate network for an image, a shape or a scene."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tyro.conf import FlagCreatePairsOff

from ..errors import UserError
from .options import parse, take_recipe

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
    """What is fitted, and the network."""
    train: Train
    """The optimization."""


def run(arguments: list[str]) -> None:
    """Fits and prints the scores and where the files are."""
    name, rest = take_recipe(arguments, "fit")

    from ..recipes import get_recipe, recipe_function

    recipe = get_recipe(name)
    default: FitOptions[Any, Any] = FitOptions(
        out=f"runs/{name}", method=str(recipe.method), problem=recipe.problem, train=recipe.train
    )
    kind: Any = FitOptions[type(recipe.problem), type(recipe.train)]  # type: ignore[misc]
    options = parse(kind, rest, command=f"fit {name}", description=recipe_function(name).__doc__ or "", default=default)

    from dataclasses import asdict

    from ..fields.fit import fit
    from ..fields.problem import FieldMethod

    method = FieldMethod.parse(options.method)
    if options.resume and options.overwrite:
        raise UserError("--resume keeps what is in --out and --overwrite deletes it; choose one")
    result = fit(
        options.problem.prepare(),
        method,
        options.train,
        options.out,
        resume=options.resume,
        overwrite=options.overwrite,
        about=asdict(options.problem),
    )
    numbers = ", ".join(f"{each.replace('_', ' ')} {value:.4g}" for each, value in result.metrics.items())
    print(f"{numbers} after {result.steps} steps; {result.parameters:,} parameters, {method}")
    print(f"in {options.out}: model/model.safetensors, result.json, {', '.join(result.files)}")
