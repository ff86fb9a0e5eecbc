"""Recipes by name. A recipe is a function that returns a `Recipe`; its docstring states command, hardware,
time and the number to expect.

The table below is all that the command line reads before a recipe is chosen: listing recipes, or refusing
an unknown one, must not wait for torch to be imported.
"""

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from nonlinear_lowrank.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """Where a recipe is, and what `nlr --help` says of it."""

    module: str
    """The module of this package that holds the function."""
    function: str
    """The function's name; it takes no arguments."""
    summary: str
    """One line for the listing: what is trained, and on what hardware."""
    command: str = "train"
    """"train" from scratch, "finetune" a pretrained model, or "fit" a field; `nlr compare` takes all."""


def _tuning(module: str, function: str, summary: str) -> RecipeEntry:
    return RecipeEntry(module=module, function=function, summary=summary, command="finetune")


def _field(module: str, function: str, summary: str) -> RecipeEntry:
    return RecipeEntry(module=module, function=function, summary=summary, command="fit")


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
    "mlm-demo": RecipeEntry(
        module="mlm", function="mlm_demo", summary="tiny masked language model on Python sources; 2 CPU cores, minutes"
    ),
    "mlm-base": RecipeEntry(module="mlm", function="mlm_base", summary="the paper's BERT on OpenWebText; large GPUs"),
    "gpt3-demo": RecipeEntry(
        module="gpt3", function="gpt3_demo", summary="tiny GPT-3 with nonlinear queries; 2 CPU cores, minutes"
    ),
    "gpt3-small": RecipeEntry(
        module="gpt3", function="gpt3_small", summary="GPT-3 small with nonlinear queries on OpenWebText; 8 large GPUs"
    ),
    "gpt3-stability": RecipeEntry(
        module="gpt3", function="gpt3_stability", summary="which arm of GPT-3 small diverges at weight decay 0.05"
    ),
    "gpt3-stability-high-lr": RecipeEntry(
        module="gpt3",
        function="gpt3_stability_high_lr",
        summary="the same at weight decay 0.03 and five times the rate",
    ),
    "vit-demo": RecipeEntry(
        module="vit", function="vit_demo", summary="a tiny ViT from scratch on embedded digits; 2 CPU cores, minutes"
    ),
    "vit-small": RecipeEntry(
        module="vit", function="vit_small", summary="the paper's ViT-S/16 from scratch on ImageNet; several GPUs"
    ),
    "image-tokens-demo": RecipeEntry(
        module="image_tokens", function="image_tokens_demo", summary="digits as image tokens; 2 CPU cores, a minute"
    ),
    "image-tokens-cifar10": RecipeEntry(
        module="image_tokens", function="image_tokens_cifar10", summary="CIFAR-10 as image tokens; CPU or any GPU"
    ),
    "image-tokens-base": RecipeEntry(
        module="image_tokens", function="image_tokens_base", summary="the paper's image tokens on ImageNet; large GPUs"
    ),
    "sine-vit-demo": RecipeEntry(
        module="sine_vit", function="sine_vit_demo", summary="a tiny ViT with sine low-rank MLPs; 2 CPU cores, minutes"
    ),
    "sine-vit-cifar100": RecipeEntry(
        module="sine_vit", function="sine_vit_cifar100", summary="ViT-S/4 with sine low-rank MLPs on CIFAR-100; one GPU"
    ),
    "sine-vit-base": RecipeEntry(
        module="sine_vit",
        function="sine_vit_base",
        summary="ViT-B/16 with sine low-rank MLPs on ImageNet; large GPUs",
    ),
    "sine-convnext-demo": RecipeEntry(
        module="sine_convnext",
        function="sine_convnext_demo",
        summary="a tiny ConvNeXt with sine low-rank weights; 2 CPU cores, minutes",
    ),
    "sine-convnext-cifar100": RecipeEntry(
        module="sine_convnext",
        function="sine_convnext_cifar100",
        summary="ConvNeXt-Tiny with sine low-rank weights on CIFAR-100; one GPU",
    ),
    "glue-minilm": _tuning("glue", "glue_minilm", "MiniLM on a task of GLUE; 2 CPU cores, minutes an arm"),
    **{
        f"glue-{task}": _tuning("glue", f"glue_{task}", f"DeBERTa-v3-base on {name}, as published; one GPU")
        for task, name in (
            *(("cola", "CoLA"), ("sst2", "SST-2"), ("mrpc", "MRPC"), ("qqp", "QQP")),
            *(("stsb", "STS-B"), ("mnli", "MNLI"), ("qnli", "QNLI"), ("rte", "RTE")),
        )
    },
    "vit-digits": _tuning("vision", "vit_digits", "a tiny ViT on other digits, all embedded; 2 CPU cores, seconds"),
    "vit-cifar10": _tuning("vision", "vit_cifar10", "ViT-Tiny on CIFAR-10, as published; one GPU"),
    "vit-cifar100": _tuning("vision", "vit_cifar100", "ViT-Tiny on CIFAR-100, as published; one GPU"),
    "instruct-small": _tuning(
        "instruct", "instruct_small", "a model of nlr train on instructions; 2 CPU cores, a minute an arm"
    ),
    "llama3-commonsense": _tuning(
        "instruct", "llama3_commonsense", "Llama-3-8B on commonsense-170k, as published; one large GPU"
    ),
    "llama3-alpaca": _tuning("instruct", "llama3_alpaca", "Llama-3-8B on Alpaca, as published; one large GPU"),
    "image-demo": _field("fields", "image_demo", "a piece of an embedded photograph; one CPU core, minutes"),
    "image": _field("fields", "image", "any photograph, whole; one GPU, or CPU cores and patience"),
    "nerf-demo": _field("nerf", "nerf_demo", "a radiance field of three balls in formulas; one CPU core, a minute"),
    "nerf-fern": _field("nerf", "nerf_fern", "a small scene in the paper's radiance field; 2 CPU cores, half an hour"),
    "nerf-llff": _field("nerf", "nerf_llff", "a scene of LLFF as published; one GPU, a day"),
    "occupancy-demo": _field("occupancy", "occupancy_demo", "a knot, inside or outside; one CPU core, minutes"),
    "occupancy": _field("occupancy", "occupancy", "a mesh as published, on a 512^3 lattice; one GPU, or CPU hours"),
}


KINDS = {"train": "trains a model from scratch", "finetune": "tunes a pretrained model", "fit": "fits a field"}
"""Commands with recipes of their own, and what such a recipe does."""


def recipes_of(command: str) -> list[str]:
    """Names of the recipes that a command takes: those of its own, or all of them."""
    return [name for name, entry in RECIPES.items() if command not in KINDS or entry.command == command]


def check_name(name: str, command: str = "") -> None:
    """Raises UserError, with the nearest names, when there is no recipe of that name, or it is another command's."""
    if name not in RECIPES:
        known = recipes_of(command)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"unknown recipe {name!r}; {hint}")
    if name not in recipes_of(command):
        own = RECIPES[name].command
        raise UserError(f"{name} {KINDS[own]}: nlr {own} {name}")


def get_recipe(name: str) -> Any:
    """Builds a recipe by name: a `training.recipe.Recipe`, or of a field a `fields.recipe.FieldRecipe`.

    Raises:
        UserError: there is no recipe of that name; the message names the nearest.
    """
    check_name(name)
    return recipe_function(name)()


def recipe_function(name: str):
    """The function behind a known name, for its docstring."""
    entry = RECIPES[name]
    return getattr(importlib.import_module(f".{entry.module}", __name__), entry.function)
