"""The matched baseline: `wide-mlp:match=ARM` gets the width at which it has as many parameters, or FLOPs, as that arm.

Without it a gain may be nothing but more parameters (or more arithmetic) than the baseline has. The width is found
before anything is trained, on models without memory: both counts are affine in the MLP's width, so two models give
the line. The width taken is the smallest whole one that is not below the other arm's count; two more models check it.

Parameters are all of the model's. FLOPs are forward, per token, of `analysis.model_cost`; the backward pass costs twice
the forward in both arms, but for a branch's recomputed r x r products, so matched FLOPs are matched training FLOPs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..analysis.cost import model_cost
from ..errors import UserError
from ..layers import SineLowRankLinear
from ..tasks.task import tokens_per_example
from ..training.recipe import Arm, Recipe
from ..training.run import apply_arm, count_parameters
from ..training.widening import WideMlp, mlp_width

_WIDE = WideMlp.name


@dataclass(frozen=True, kw_only=True)
class Match:
    """How wide a matched arm is, and why."""

    arm: str
    """The arm that was given its width."""
    target: str
    """The arm it is matched to."""
    by: str
    """"parameters" or "flops"."""
    hidden: int
    """The MLP's width."""
    plain_hidden: int
    """That of the recipe's model."""

    def describe(self, counts: Mapping[str, float | None]) -> str:
        """A sentence for the report, with what was counted of both arms."""
        what = "parameters" if self.by == "parameters" else "FLOPs per token"
        own, other = counts[self.arm], counts[self.target]
        figures = f": {own:,.0f} for {other:,.0f}" if own is not None and other is not None else ""
        return (
            f"`{self.arm}` has MLPs of width {self.hidden} ({self.plain_hidden} in the recipe's model), the smallest "
            f"with no fewer {what} than `{self.target}`{figures}."
        )


def settle_matches(recipe: Recipe, arms: Sequence[Arm]) -> tuple[tuple[Arm, ...], tuple[Match, ...]]:
    """The arms with every `wide-mlp:match=` given its width.

    Args:
        recipe: whose model the arms change.
        arms: of one comparison.

    Raises:
        UserError: there is no such arm, it is a matched one itself, or it cannot be matched by width.
    """
    named = {arm.name: arm for arm in arms}
    settled, matches = [], []
    for arm in arms:
        wanted = _own(arm).get("match")
        if wanted is None:
            settled.append(arm)
            continue
        target = named.get(wanted)
        if target is None:
            others = ", ".join(name for name in named if name != arm.name)
            raise UserError(f"{arm.name} is to match an arm {wanted!r}, and there is none; there are {others}")
        if "match" in _own(target):
            raise UserError(f"{arm.name} is to match {wanted}, which is matched itself; name the arm that is not")
        match = _match(recipe, arm, target)
        given = _own(arm).get("hidden", match.hidden)
        if given != match.hidden:
            raise UserError(
                f"{arm.name} says hidden={given}, and {match.hidden} is what matches {wanted}; leave it out"
            )
        settled.append(_with_hidden(arm, match.hidden))
        matches.append(match)
    return tuple(settled), tuple(matches)


def _match(recipe: Recipe, arm: Arm, target: Arm) -> Match:
    by = _own(arm).get("by", "parameters")

    def count(hidden: int) -> int:
        return _count(recipe, _with_hidden(arm, hidden), by)

    first, wanted = count(1), _count(recipe, target, by)
    step = count(2) - first
    if wanted < first:
        raise UserError(
            f"{arm.name} cannot match {target.name}: even with MLPs of width 1 it has {first:,} {by}, "
            f"and {target.name} has {wanted:,}"
        )
    hidden = 1 + -(-(wanted - first) // step)
    assert count(hidden) >= wanted, "the count is not affine in the width"
    assert hidden == 1 or count(hidden - 1) < wanted, "a smaller width would do"
    plain = mlp_width(recipe.task.build_on_meta())
    return Match(arm=arm.name, target=target.name, by=by, hidden=hidden, plain_hidden=plain)


def _count(recipe: Recipe, arm: Arm, by: str) -> int:
    """Parameters, or forward FLOPs per token, of an arm's model on the meta device."""
    plain = recipe.task.build_on_meta()
    known = set(model_cost(plain, tokens_per_example(recipe.task)).notes) if by == "flops" else set()
    try:
        model = apply_arm(recipe, arm, plain)
    except UserError:
        raise
    except Exception as error:  # a user's function need not know of models without memory
        raise UserError(f"{arm.name} cannot be matched: {arm.method} fails on the meta device ({error})") from error
    if by == "parameters":
        return count_parameters(model)
    cost = model_cost(model, tokens_per_example(recipe.task))
    if set(cost.notes) - known or any(_forms_its_weight(module) for module in model.modules()):
        raise UserError(f"{arm.name} cannot be matched by FLOPs: its cost is not one per token; match its parameters")
    return cost.flops


def _forms_its_weight(module: nn.Module) -> bool:
    """Whether a layer makes its weight anew in each step, which costs by the batch."""
    return isinstance(module, SineLowRankLinear) and module.sine_config.activation != "identity"


def _own(arm: Arm) -> dict[str, Any]:
    """The settings of an arm's wider MLP; empty where it has none."""
    if arm.method == _WIDE:
        return arm.settings
    return arm.settings.get(_WIDE, {}) if _WIDE in arm.method.split("+") else {}


def _with_hidden(arm: Arm, hidden: int) -> Arm:
    settings = {**_own(arm), "hidden": hidden}
    return replace(arm, settings=settings if arm.method == _WIDE else {**arm.settings, _WIDE: settings})
