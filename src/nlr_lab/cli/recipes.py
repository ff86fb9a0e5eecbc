"""`nlr recipes`: what there is to train, a line each."""

from dataclasses import dataclass

from nlr_lab.recipes import KINDS, RECIPES

from .options import parse


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """List the recipes by command, a line each. nlr COMMAND RECIPE --help lists its settings, all of them options;
    nlr compare takes every recipe."""


def run_recipes(arguments: list[str]) -> None:
    """Print the names and summaries."""
    parse(RecipesOptions, arguments, command="recipes")
    width = max(map(len, RECIPES))
    for kind, does in KINDS.items():
        print(f"nlr {kind} RECIPE {does}:")
        print("\n".join(f"  {name:<{width}}  {each.summary}" for name, each in RECIPES.items() if each.command == kind))
