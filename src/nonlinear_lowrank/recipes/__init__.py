"""Recipes by name. A recipe is a function that returns a `Recipe`; its docstring states command, hardware,
time and the number to expect.

The table below is all that the command line reads before a recipe is chosen: listing recipes, or refusing
an unknown one, must not wait for torch to be imported.
"""

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from ..training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """Where a recipe is, and what `nlr --help` says of it."""

    module: str
    """The module of this package that holds the function."""
    function: str
    """The function's name; it takes no arguments."""
    summary: str
    """One line for the listing: what is trained, and on what hardware."""


RECIPES: dict[str, RecipeEntry] = {
    "llm-demo": RecipeEntry(
        module="llm", function="llm_demo", summary="tiny language model on Python sources; 2 CPU cores, minutes"
    ),
    "llm-small": RecipeEntry(
        module="llm", function="llm_small", summary="35M language model on OpenWebText; one small GPU, hours"
    ),
    "llm-base": RecipeEntry(
        module="llm", function="llm_base", summary="the paper's 250M language model on OpenWebText; 8 large GPUs"
    ),
    "llm-large": RecipeEntry(
        module="llm", function="llm_large", summary="the paper's 1.5B language model on OpenWebText; 8 large GPUs"
    ),
}


def check_name(name: str) -> None:
    """Raises UserError, with the nearest names, when there is no recipe of that name."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {name!r}; {hint}")


def get_recipe(name: str) -> "Recipe":
    """Builds a recipe by name.

    Raises:
        UserError: there is no recipe of that name; the message names the nearest.
    """
    check_name(name)
    return recipe_function(name)()


def recipe_function(name: str):
    """The function behind a known name, for its docstring."""
    entry = RECIPES[name]
    return getattr(importlib.import_module(f".{entry.module}", __name__), entry.function)
