"""The arm `wide-mlp`: the plain model with a wider (or narrower) MLP, for asking whether a gain is more than more
parameters.

    wide-mlp:ratio=4.75                       4.75 times the model's width
    wide-mlp:hidden=408                       so wide
    wide-mlp:match=noble-r64                  the narrowest with at least the parameters of the arm of that name
    wide-mlp:match=noble-r64,by=flops         the same by FLOPs

The last two are resolved by a comparison that has the other arm, and are then written with the width that was found,
`wide-mlp:match=noble-r64,hidden=408`.

The MLPs are rebuilt with the init that the arm's other linears have, all else keeps its draws, and the config is told,
so that the model is saved and loaded as a plain one of that size. Known are pairs fc1, fc2 (OPT, ViT) and gated ones
(GLM's gate_up_proj, Llama's and EuroBERT's gate_proj and up_proj, each with down_proj).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nlr_lab.tasks.text.language_model import DenseInit, draw_linear
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_number

from .kinds import ArmContext, ArmKind, as_text

# Ends of names: those whose outputs are the MLP's width (times the number), and the one whose inputs are.
_SHAPES = (({"fc1": 1}, "fc2"), ({"gate_up_proj": 2}, "down_proj"), ({"gate_proj": 1, "up_proj": 1}, "down_proj"))
_FIELDS = ("ffn_dim", "intermediate_size")
_MEASURES = ("parameters", "flops")


class WideMlp(ArmKind):
    """Every MLP of another width."""

    name = "wide-mlp"
    control = True
    stage = 0

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        known = ({"ratio"}, {"hidden"}, {"match"}, {"match", "by"}, {"match", "hidden"}, {"match", "by", "hidden"})
        if set(settings) not in known:
            raise UserError(
                f"{self.name} needs the MLP's width over the model's, its width, or an arm to match: "
                f"{self.name}:ratio=4.75, {self.name}:hidden=512 or {self.name}:match=noble-r64 (with by=flops)"
            )
        if "ratio" in settings:
            check_number("ratio", settings["ratio"], above=0)
        if "hidden" in settings:
            check_integer("hidden", settings["hidden"], minimum=1)
        if "match" in settings and not isinstance(settings["match"], str):
            raise UserError(f"match must be the name of another arm, got {settings['match']!r}")
        if settings.get("by", "parameters") not in _MEASURES:
            raise UserError(f"by must be one of {', '.join(_MEASURES)}, got {settings['by']!r}")
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        if "match" in settings:
            return [self.name, "as", settings["match"], *(["flops"] if settings.get("by") == "flops" else [])]
        return [self.name, as_text(settings["ratio"])] if "ratio" in settings else [self.name, f"h{settings['hidden']}"]

    @torch.no_grad()
    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        """Return the model with MLPs of that width.

        Raises:
            UserError: the model is a pretrained one, its MLPs are not known, or the width is not resolved yet.
        """
        if context.setup is not None:
            raise UserError(f"{self.name} is for models that are trained from scratch")
        blocks = _blocks(model)
        config: Any = getattr(model, "config", None)
        name = next((each for each in _FIELDS if isinstance(getattr(config, each, None), int)), None)
        if not blocks or name is None:
            raise UserError(
                f"{self.name} does not know the MLPs of {type(model).__name__}; it knows fc1 and fc2, "
                "gate_up_proj or gate_proj and up_proj with down_proj"
            )
        if "match" in settings and "hidden" not in settings:
            raise UserError(
                f"{self.name}:match={settings['match']} is resolved by nlr compare, beside that arm; "
                f"elsewhere say how wide it is: {self.name}:hidden=512"
            )
        width = blocks[0][0].get_submodule(blocks[0][1][1]).out_features
        hidden = settings["hidden"] if "hidden" in settings else round(settings["ratio"] * width)  # type: ignore[operator]
        if hidden < 1:
            raise UserError(f"ratio {settings['ratio']!r} leaves no MLP at width {width}")
        for block, (outward, inward) in blocks:
            for each, times in outward.items():
                _replace(model, block, each, None, times * hidden, context.dense_init)
            _replace(model, block, inward, hidden, None, context.dense_init)
        setattr(config, name, hidden)
        for module in model.modules():  # some keep the width beside their linears
            if isinstance(getattr(module, "intermediate_size", None), int):
                module.intermediate_size = hidden  # type: ignore[assignment]
        if context.verbose:
            print(f"{self.name}: {len(blocks)} MLPs of width {hidden}")
        return model


def mlp_width(model: nn.Module) -> int:
    """Return the width of the MLPs of a model whose MLPs are known."""
    block, (_, inward) = _blocks(model)[0]
    width = block.get_submodule(inward).in_features
    assert isinstance(width, int)
    return width


def _blocks(model: nn.Module) -> list[tuple[nn.Module, tuple[dict[str, int], str]]]:
    """The modules that hold an MLP's linears, with the linears' names."""
    found = []
    for module in model.modules():
        own = {name for name, child in module.named_children() if type(child) is nn.Linear}
        found += [(module, shape) for shape in _SHAPES if {*shape[0], shape[1]} <= own][:1]
    return found


def _replace(
    model: Any, block: nn.Module, name: str, d_in: int | None, d_out: int | None, dense_init: DenseInit
) -> None:
    """Put a linear of another size in a linear's place, drawn as the old one was."""
    old: Any = block.get_submodule(name)
    sizes = d_in or old.in_features, d_out or old.out_features
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    new = nn.Linear(*sizes, bias=old.bias is not None, **where).train(old.training)
    if not old.weight.is_meta:
        model._init_weights(new)
        draw_linear(new, dense_init)
    setattr(block, name, new)
