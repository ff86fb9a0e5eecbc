"""The method that puts rational activations in the place of a model's own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Findings, Method, Role, Target, register

from .layer import RationalActivation, RationalConfig
from .sites import Site, formula_of, survey


@register
class RationalMethod(Method):
    """Rational activations."""

    name = RationalConfig.method
    config_class = RationalConfig
    layer_types = (RationalActivation,)
    kind = "activation"
    optimizable = True
    adapter = "nonlinear_lowrank.methods.rational.adapter"
    adapter_arms: ClassVar = {
        "nora": AdapterArm(
            config=(adapter, "NoraConfig"),
            fixed={"lora_r": 0},
            targets="",
            shown=("r", "groups", "degrees", "anchor", "tails"),
        ),
        "nora++": AdapterArm(
            config=(adapter, "NoraConfig"),
            default={"lora_r": 8},
            rank="lora_r",
            targets="lora_target_modules",
            shown=("r", "groups", "lora_r", "lora_target_modules", "lora_alpha", "plus"),
        ),
    }
    tensor_parallel = False  # a device's share of the channels has other groups
    float32 = tuple(f"rational_{base}{side}" for base in ("", "base_") for side in ("numerator", "denominator"))

    def is_target(self, module: nn.Module) -> bool:
        return formula_of(module) is not None or isinstance(module, RationalActivation)

    def find(self, model: nn.Module, config: Any) -> Findings:
        """Find every activation of a model; see `sites`."""
        seen = survey(model)
        if seen.adapters:
            raise UserError(
                f"{seen.adapters[0] or 'the model'} has adapters; augment the model before they go on, or tune "
                "activations as an adapter too (nlr.NoraConfig)"
            )
        targets = {name: _target(name, site, config) for name, site in seen.sites.items()}
        functions = {name: f"{what}; a function cannot be swapped" for name, what in seen.functional.items()}
        return Findings(targets=targets, skipped=seen.unfit | functions)

    def check(self, name: str, module: nn.Module, config: Any) -> None:
        if config.width is not None and config.width % config.groups:
            raise UserError(
                f"groups={config.groups} do not divide the {config.width} channels of {name}; choose groups that do, "
                "or leave it out with exclude="
            )

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        if config.activation is None:
            config = replace(config, activation=formula_of(module))
        return RationalActivation(config).train(module.training)

    def roles(self, layer: nn.Module) -> Mapping[str, Role]:
        return {
            "rational_numerator": Role("rational.numerator", decay=False),
            "rational_denominator": Role("rational.denominator", decay=False),
        }


def _target(name: str, site: Site, config: RationalConfig) -> Target:
    config = replace(
        config,
        activation=config.activation or site.formula,
        channel_dim=config.channel_dim or site.channel_dim,  # type: ignore[arg-type]
        width=config.width or site.width,
    )
    refused = f"{site.bypassed}, or leave it out with exclude=" if site.bypassed else ""
    if isinstance(site.module, RationalActivation):
        refused = f"{name} is rational already; start from the plain model, or leave it out with exclude="
    of = "" if config.activation == site.formula else f" in place of {site.formula}"
    return Target(
        config=config,
        details=f"{config.fit()}{of}, {config.groups} groups of {config.width or '?'} channels",
        device=_device(site),
        skipped=site.skipped,
        refused=refused,
    )


def _device(site: Site) -> torch.device | None:
    """Return the neighbour's device: an activation has no weight to tell its own."""
    weight = getattr(site.neighbour, "weight", None)
    return weight.device if isinstance(weight, Tensor) else None
