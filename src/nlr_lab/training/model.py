"""The model of a recipe's arm, and the optimizer that trains it."""

from typing import Any

import torch
from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.optim import MuonAdamW, param_groups

from .arms import Arm
from .recipe import Recipe
from .tuning import raise_up_rates, set_head_rate
from .weights import is_adapted


def build_model(recipe: Recipe, prepared: Any, arm: Arm | None = None) -> nn.Module:
    """Return the task's model before the arm changes it, drawn from the run's seed."""
    return recipe.task.build_model(prepared, (arm or recipe.arm).dense_init, seed=recipe.train.seed)


def apply_arm(recipe: Recipe, arm: Arm, model: nn.Module, *, verbose: bool = False) -> nn.Module:
    """Return the model with the arm's change, drawn from the run's seed.

    Raises:
        UserError: the arm does not fit the model or the task.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        drawn = getattr(getattr(recipe.task, "backbone", None), "dense_init", None)
        return arm.apply(model, recipe.task.adapter_setup(model), dense_init=drawn, verbose=verbose)


def count_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Return the parameters of a model, all or the trained ones."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad or not trainable)


def optimizer_groups(model: nn.Module, recipe: Recipe, arm: Arm, lr: float) -> list[dict[str, Any]]:
    """Return groups of what is trained: each role's learning rate and decay, LoRA+'s and the new head's own.

    Raises:
        UserError: Muon is asked for, and the arm trains an adapter or no dense matrix.
    """
    train, muon = recipe.train, uses_muon(recipe, arm)
    if muon and is_adapted(model):
        raise UserError(f"{arm.name} trains an adapter, whose factors are not Muon's to take; omit optimizer=muon")
    groups = param_groups(model, lr, train.weight_decay, muon=muon, verbose=False)
    if muon and {group["optimizer"] for group in groups} != {"muon", "adamw"}:
        raise UserError(f"{arm.name} trains no dense matrices, which are what Muon takes; omit optimizer=muon")
    if ratio := arm.settings.get("plus") if ":" not in arm.method else None:
        groups = raise_up_rates(groups, ratio)
    base: Any = model
    setup = recipe.task.adapter_setup(base.get_base_model() if is_adapted(model) else base)
    if train.head_lr is not None and setup is not None:
        groups = set_head_rate(groups, setup.head, train.head_lr / lr)
    return groups


def optimizer_settings(
    model: nn.Module, recipe: Recipe, arm: Arm, lr: float, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer's class and its arguments; fresh ones each time, since Trainer takes "params" out."""
    groups = optimizer_groups(model, recipe, arm, lr)
    shared = {"params": groups, "lr": lr, "weight_decay": recipe.train.weight_decay, "betas": recipe.train.betas}
    if uses_muon(recipe, arm):
        return MuonAdamW, shared
    return torch.optim.AdamW, {**shared, "fused": True} if device.type in ("cpu", "cuda") else shared


def uses_muon(recipe: Recipe, arm: Arm) -> bool:
    """Return whether dense matrices are trained by Muon."""
    return (arm.optimizer or recipe.train.optimizer) == "muon"
