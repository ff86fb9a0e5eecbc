"""The matched baseline: `wide-mlp:match=ARM` gets the width at which it has as many parameters, or FLOPs, as that arm.

Without it a gain may be nothing but more parameters (or more arithmetic) than the baseline has. The width is found
before anything is trained, on models without memory, and is the smallest integer that is not below the other arm's
count. Both counts grow with the MLP's width, along a line where the arm is a wider MLP alone: two widths give a guess,
two more models check it, and where methods that are joined to it bend the line the width is bisected. Such a method
may refuse widths: those that are too narrow for its rank are below the search, and groups that must divide the width
make its step. (A joined budget's integer ranks let the count dip now and then; the width is then the smallest up to
such a dip.)

Parameters are all of the model's. FLOPs are forward, per token, of `analysis.model_cost`; the backward pass costs twice
the forward in both arms, but for a branch's recomputed r x r products, so matched FLOPs are matched training FLOPs.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nlr_lab.training.arms import Arm
from nlr_lab.training.methods import WideMlp, mlp_width
from nlr_lab.training.recipe import Recipe
from nlr_lab.training.run import apply_arm, count_parameters
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.sine import SineLowRankLinear

_WIDE = WideMlp.name
_WIDEST = 4096  # times the plain width: so far a match is looked for beyond the guess


@dataclass(frozen=True, kw_only=True)
class Match:
    """The width of a matched arm, and its reason."""

    arm: str
    """The arm that was given its width."""
    target: str
    """The arm it is matched to."""
    by: str
    """"parameters" or "flops"."""
    hidden: int
    """The MLP's width."""
    plain_hidden: int
    """Width of the MLPs of the recipe's model."""

    def describe(self, counts: Mapping[str, float | None]) -> str:
        """Return a sentence for the report, with what was counted of both arms."""
        what = "parameters" if self.by == "parameters" else "FLOPs per token"
        own, other = counts[self.arm], counts[self.target]
        figures = f": {own:,.0f} for {other:,.0f}" if own is not None and other is not None else ""
        return (
            f"`{self.arm}` has MLPs of width {self.hidden} ({self.plain_hidden} in the recipe's model), the smallest "
            f"with no fewer {what} than `{self.target}`{figures}."
        )


def resolve_matches(recipe: Recipe, arms: Sequence[Arm]) -> tuple[tuple[Arm, ...], tuple[Match, ...]]:
    """Give every `wide-mlp:match=` of one comparison's arms its width.

    Raises:
        UserError: there is no such arm, it is a matched one itself, or it cannot be matched by width.
    """
    named = {arm.name: arm for arm in arms}
    resolved, matches = [], []
    for arm in arms:
        wanted = _own(arm).get("match")
        if wanted is None:
            resolved.append(arm)
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
            raise UserError(f"{arm.name} says hidden={given}, and {match.hidden} is what matches {wanted}; omit it")
        resolved.append(_with_hidden(arm, match.hidden))
        matches.append(match)
    return tuple(resolved), tuple(matches)


def _match(recipe: Recipe, arm: Arm, target: Arm) -> Match:
    by = _own(arm).get("by", "parameters")
    # Refused where the model's MLPs are not known, or it is a pretrained one.
    apply_arm(recipe, Arm(method=_WIDE, settings={"hidden": 1}), recipe.task.build_on_meta())
    plain, wanted = mlp_width(recipe.task.build_on_meta()), _count(recipe, target, by)

    @functools.cache
    def count(hidden: int) -> int:
        return _count(recipe, _with_hidden(arm, hidden), by)

    def allowed(hidden: int) -> bool:
        try:
            count(hidden)
        except UserError:
            if hidden > plain:
                raise
            return False  # too narrow for a method that is joined to it
        return True

    def enough(hidden: int) -> bool:
        return allowed(hidden) and count(hidden) >= wanted

    count(plain)  # what does not fit the model as it is says so here
    step = _step(count, plain)
    slope = count(plain + step) - count(plain)
    guess = plain + step * (-(-(wanted - count(plain)) // slope) if slope > 0 else 0)
    widths = range(plain % step or step, max(guess, _WIDEST * plain) + step, step)
    guess = max(guess, widths[0])
    exact = enough(guess) and (guess == widths[0] or not enough(guess - step))
    hidden = guess if exact else widths[min(bisect_left(widths, True, key=enough), len(widths) - 1)]
    narrower = hidden > widths[0] and allowed(hidden - step)
    if count(hidden) < wanted or (count(hidden) > wanted and not narrower):
        raise UserError(
            f"{arm.name} cannot match {target.name}: even with MLPs of width {hidden} it has {count(hidden):,} {by}, "
            f"and {target.name} has {wanted:,}"
        )
    return Match(arm=arm.name, target=target.name, by=by, hidden=hidden, plain_hidden=plain)


def _step(count: Callable[[int], int], plain: int) -> int:
    """Return how far apart the arm's widths are: groups that divide the plain width divide its step too."""
    for step in (each for each in range(1, plain) if plain % each == 0):
        try:
            count(plain + step)
        except UserError:
            continue
        return step
    return plain


def _count(recipe: Recipe, arm: Arm, by: str) -> int:
    """Parameters, or forward FLOPs per token, of an arm's model on the meta device."""
    plain, length = recipe.task.build_on_meta(), recipe.task.sequence_length
    known = set(model_cost(plain, length).notes) if by == "flops" else set()
    try:
        model = apply_arm(recipe, arm, plain)
    except UserError:
        raise
    except Exception as error:  # a user's function need not know of models without memory
        raise UserError(f"{arm.name} cannot be matched: {arm.method} fails on the meta device ({error})") from error
    if by == "parameters":
        return count_parameters(model)
    cost = model_cost(model, length)
    if set(cost.notes) - known or any(map(_forms_its_weight, model.modules())):
        raise UserError(f"{arm.name} cannot be matched by FLOPs: its cost is not one per token; match its parameters")
    return cost.flops


def _forms_its_weight(module: nn.Module) -> bool:
    """Return whether a layer makes its weight anew in each step, which costs by the batch."""
    return isinstance(module, SineLowRankLinear) and module.sine_config.activation != "identity"


def _own(arm: Arm) -> dict[str, Any]:
    """The settings of an arm's wider MLP; empty where it has none."""
    if arm.method == _WIDE:
        return arm.settings
    return arm.settings.get(_WIDE, {}) if _WIDE in arm.method.split("+") else {}


def _with_hidden(arm: Arm, hidden: int) -> Arm:
    settings = {**_own(arm), "hidden": hidden}
    return replace(arm, settings=settings if arm.method == _WIDE else {**arm.settings, _WIDE: settings})
