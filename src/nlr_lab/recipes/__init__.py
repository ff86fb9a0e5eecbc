"""Recipes by name. A recipe is a function that returns a `Recipe`; its docstring states command, hardware, time and the
number to expect. The table below is all that the command line imports before a recipe is chosen.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from nonlinear_lowrank.errors import UserError


class RecipeEntry(NamedTuple):
    """A recipe's command (`nlr compare` takes all), the module of its function, and its line in `nlr recipes`."""

    command: str
    module: str
    summary: str


KINDS = {"train": "trains a model from scratch", "finetune": "tunes a pretrained model", "fit": "fits a field"}
"""Commands with recipes of their own, and what such a recipe does."""

BASELINES = ("baseline", "baseline:init=noble", "baseline:init=kaiming")
"""The model without branches, with transformers' init of std 0.02, with NOBLE's dense init, and with PyTorch's Kaiming
init. Without these controls a gain of the init would be read as a gain of the branch."""

FAST: dict[str, Any] = {"bf16": True, "compile": True, "log_every": 50}
"""Training of models of the papers' sizes."""

EACH_EPOCH: dict[str, Any] = {"eval_every": 0, "save_every": 0}
"""Steps between evaluations and between checkpoints; 0: after each epoch."""


def as_published(task: Any, **settings: Any) -> Any:
    """Return the recipe of a model of noble.txt's own size: the paper's ranks beside the controls, one seed."""
    from nlr_lab.training.recipe import Recipe, TrainConfig

    train = TrainConfig(eval_every=2000, save_every=2000, **FAST, **settings)
    arms = (*BASELINES, "noble:rank=64", "noble:rank=128", "noble:rank=256")
    return Recipe(task=task, arm="noble:rank=64", train=train, arms=arms, seeds=1)


_TABLE = {
    "train": {
        "language": {
            "llm-demo": "tiny language model on Python sources; 2 CPU cores, minutes",
            "llm-moe-demo": "tiny language model with NOBLE, experts or a wider MLP; 2 CPU cores, minutes",
            "llm-small": "35M language model on OpenWebText; one small GPU, hours",
            "llm-base": "the paper's 250M language model on OpenWebText; 8 large GPUs",
            "llm-large": "the paper's 1.5B language model on OpenWebText; 8 large GPUs",
            "mlm-demo": "tiny masked language model on Python sources; 2 CPU cores, minutes",
            "mlm-base": "the paper's BERT on OpenWebText; large GPUs",
            "gpt3-demo": "tiny GPT-3 with nonlinear queries; 2 CPU cores, minutes",
            "gpt3-small": "GPT-3 small with nonlinear queries on OpenWebText; 8 large GPUs",
            "gpt3-small-best": "the same at the best learning rate and weight decay of its paper",
            "gpt3-stability": "which arm of GPT-3 small diverges at weight decay 0.05",
            "gpt3-stability-high-lr": "the same at weight decay 0.03 and five times the learning rate",
        },
        "images": {
            "vit-demo": "a tiny ViT from scratch on embedded digits; 2 CPU cores, minutes",
            "vit-small": "the paper's ViT-S/16 from scratch on ImageNet; several GPUs",
            "image-tokens-demo": "digits as image tokens; 2 CPU cores, a minute",
            "image-tokens-cifar10": "CIFAR-10 as image tokens; CPU or any GPU",
            "image-tokens-base": "the paper's image tokens on ImageNet; large GPUs",
            "sine-vit-demo": "a tiny ViT with sine low-rank MLPs; 2 CPU cores, minutes",
            "sine-vit-cifar100": "ViT-S/4 with sine low-rank MLPs on CIFAR-100; one GPU",
            "sine-vit-base": "ViT-B/16 with sine low-rank MLPs on ImageNet; large GPUs",
            "sine-convnext-demo": "a tiny ConvNeXt with sine low-rank weights; 2 CPU cores, minutes",
            "sine-convnext-cifar100": "ConvNeXt-Tiny with sine low-rank weights on CIFAR-100; one GPU",
        },
    },
    "finetune": {
        "tuning": {
            "glue-minilm": "MiniLM on a task of GLUE; 2 CPU cores, minutes an arm",
            **{
                f"glue-{name.lower().replace('-', '')}": f"DeBERTa-v3-base on {name}, as published; one GPU"
                for name in ("CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI", "QNLI", "RTE")
            },
            "vit-digits": "a tiny ViT on other digits, all embedded; 2 CPU cores, seconds",
            "vit-cifar10": "ViT-Tiny on CIFAR-10, as published; one GPU",
            "vit-cifar100": "ViT-Tiny on CIFAR-100, as published; one GPU",
            "instruct-small": "a model of nlr train on instructions; 2 CPU cores, a minute an arm",
            "instruct-smollm2": "SmolLM2-135M, a real language model, on instructions; 2 CPU cores, minutes an arm",
            "llama3-commonsense": "Llama-3-8B on commonsense-170k, as published; one large GPU",
            "llama3-alpaca": "Llama-3-8B on Alpaca, as published; one large GPU",
        }
    },
    "fit": {
        "fields": {
            "image-demo": "a piece of an embedded photograph; one CPU core, minutes",
            "image": "any photograph, whole; one GPU, or CPU cores and patience",
            "nerf-demo": "a radiance field of three balls in formulas; one CPU core, a minute",
            "nerf-fern": "a small scene in the paper's radiance field; 2 CPU cores, half an hour",
            "nerf-llff": "a scene of LLFF as published; one GPU, a day",
            "occupancy-demo": "a knot, inside or outside; one CPU core, minutes",
            "occupancy": "a mesh as published, on a 512^3 lattice; one GPU, or CPU hours",
        }
    },
}
"""By command and module: summaries by name."""

RECIPES = {
    name: RecipeEntry(command, module, summary)
    for command, modules in _TABLE.items()
    for module, recipes in modules.items()
    for name, summary in recipes.items()
}


def recipes_of(command: str) -> list[str]:
    """Names of the recipes that a command takes: those of its own, or all of them."""
    return [name for name, entry in RECIPES.items() if command not in KINDS or entry.command == command]


def check_name(name: str, command: str = "") -> None:
    """Raise UserError, with the nearest names, when there is no recipe of that name, or it is another command's."""
    known = recipes_of(command)
    if name not in RECIPES:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "nlr recipes lists them"
        raise UserError(f"unknown recipe {name!r}; {hint}")
    if name not in known:
        own = RECIPES[name].command
        raise UserError(f"{name} {KINDS[own]}: nlr {own} {name}")


def get_recipe(name: str) -> Any:
    """Build a recipe by name: a `training.recipe.Recipe`, or of a field a `fields.settings.FieldRecipe`; UserError
    names the nearest where there is none."""
    check_name(name)
    recipe = recipe_function(name)()
    # dataclasses.replace would read the arm, whose methods import torch.
    object.__setattr__(recipe, "name", name)
    object.__setattr__(recipe, "description", RECIPES[name].summary)
    return recipe


def recipe_function(name: str) -> Callable[[], Any]:
    """Return the function behind a known name, for its docstring."""
    module = importlib.import_module(f".{RECIPES[name].module}", __name__)
    function: Callable[[], Any] = getattr(module, name.replace("-", "_"))
    return function
