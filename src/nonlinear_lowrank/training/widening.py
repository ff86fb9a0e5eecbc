"""The arm `wide-mlp`: the plain model with a wider MLP, for asking whether a gain is more than more parameters.

The MLPs are rebuilt with transformers' own init, and the config is told, so that the model is saved and loaded as a
plain one of that size. Known are pairs fc1, fc2 (OPT, ViT) and gated ones (GLM's gate_up_proj, Llama's gate_proj and
up_proj, each with down_proj).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from ..tasks.task import AdapterSetup
from .values import as_text, check_number

# Ends of names: those whose outputs are the MLP's width (times the number), and the one whose inputs are.
_SHAPES = (
    ({"fc1": 1}, "fc2"),
    ({"gate_up_proj": 2}, "down_proj"),
    ({"gate_proj": 1, "up_proj": 1}, "down_proj"),
)
_FIELDS = ("ffn_dim", "intermediate_size")


@dataclass(frozen=True)
class WideMlp:
    """Every MLP `ratio` times as wide as the model."""

    name: str = "wide-mlp"
    control: bool = True
    own_init: bool = False

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        if set(settings) != {"ratio"}:
            raise UserError(f"{self.name} needs one setting, the MLP's width over the model's: {self.name}:ratio=4.75")
        check_number("ratio", settings["ratio"], above=0)
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        return [self.name, as_text(settings["ratio"])]

    @torch.no_grad()
    def apply(
        self, model: nn.Module, settings: Mapping[str, Any], setup: AdapterSetup | None, verbose: bool
    ) -> nn.Module:
        if setup is not None:
            raise UserError(f"{self.name} is for models that are trained from scratch")
        blocks = [(module, shape) for module in model.modules() if (shape := _shape_of(module)) is not None]
        config: Any = getattr(model, "config", None)
        name = next((each for each in _FIELDS if isinstance(getattr(config, each, None), int)), None)
        if not blocks or name is None:
            raise UserError(
                f"{self.name} does not know the MLPs of {type(model).__name__}; it knows fc1 and fc2, "
                "gate_up_proj or gate_proj and up_proj with down_proj"
            )
        width = blocks[0][0].get_submodule(blocks[0][1][1]).out_features
        hidden = round(settings["ratio"] * width)  # type: ignore[operator]
        if hidden < 1:
            raise UserError(f"ratio {settings['ratio']!r} leaves no MLP at width {width}")
        for block, (outward, inward) in blocks:
            for each in (*outward, inward):
                _check_stock(config, block.get_submodule(each).weight)  # type: ignore[arg-type]
        for block, (outward, inward) in blocks:
            for each, times in outward.items():
                _replace(model, block, each, None, times * hidden)
            _replace(model, block, inward, hidden, None)
        setattr(config, name, hidden)
        for module in model.modules():  # some keep the width beside their linears
            if isinstance(getattr(module, "intermediate_size", None), int):
                module.intermediate_size = hidden  # type: ignore[assignment]
        if verbose:
            print(f"{self.name}: {len(blocks)} MLPs of width {hidden}")
        return model


def _shape_of(module: nn.Module) -> tuple[dict[str, int], str] | None:
    """The names of a module's own MLP linears, or None."""
    own = {name for name, child in module.named_children() if type(child) is nn.Linear}
    return next((shape for shape in _SHAPES if {*shape[0], shape[1]} <= own), None)


def _replace(model: Any, block: nn.Module, name: str, d_in: int | None, d_out: int | None) -> None:
    """Puts a linear of another size in a linear's place, drawn by the model's own init (in its own order)."""
    old: Any = block.get_submodule(name)
    sizes = d_in or old.in_features, d_out or old.out_features
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    new = nn.Linear(*sizes, bias=old.bias is not None, **where).train(old.training)
    if not old.weight.is_meta:
        model._init_weights(new)
    setattr(block, name, new)


def _check_stock(config: Any, weight: torch.Tensor) -> None:
    """The new linears are transformers' own draws, and the others of the model must be so too."""
    std = getattr(config, "init_std", None) or getattr(config, "initializer_range", None)
    if weight.is_meta or std is None:
        return
    slack = 6 / (2 * weight.numel()) ** 0.5
    if abs(weight.std().item() / std - 1) > slack:
        raise UserError("wide-mlp draws transformers' own init; leave init= of the arm and --dense-init away")
