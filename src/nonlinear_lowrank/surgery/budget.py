"""Ranks that fit a budget of added parameters or FLOPs.

All layers get the same share of their smaller width (`rank_ratio`), the largest that fits: the paper keeps width over
rank constant across sizes as well (noble.txt, Table 1).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*(?:of\s+)?(parameters|flops)?\s*", re.IGNORECASE)


def parse_budget(budget: str) -> tuple[float, str]:
    """Return the share and the quantity that it is of: "5%" and "5% parameters" -> (0.05, "parameters")."""
    match = _FORM.fullmatch(budget) if isinstance(budget, str) else None
    if match is None or float(match[1]) == 0:
        raise UserError(f"cannot read the budget {budget!r}; write '5%' (of the parameters) or '5% flops'")
    return float(match[1]) / 100, (match[2] or "parameters").lower()


def config_within(
    budget: str, method: Method, config: Any, modules: Mapping[str, nn.Module], parameters: int, flops: int
) -> Any:
    """Return the config with the largest `rank_ratio` whose branches beside `modules` stay within a budget.

    `parameters` are the plain model's, `flops` its linears', forward, per token. A method without ranks to choose, or
    a budget below rank 1 everywhere, raises UserError.
    """
    share, kind = parse_budget(budget)
    if not method.budgeted:
        raise UserError(f"{method.name} cannot choose ranks for a budget; give the rank itself")
    total = parameters if kind == "parameters" else flops
    allowed = share * total

    def added(ratio: float) -> int:
        return method.added(modules, replace(config, rank_ratio=ratio))[kind == "flops"]

    low, high = 1e-9, 1.0 - 1e-9  # rank 1 everywhere, and one below full
    least = added(low)
    if least > allowed:
        raise UserError(
            f"the budget {budget!r} cannot be met: rank 1 in {len(modules)} linears adds {100 * least / total:.3g} % "
            f"of the {kind}; raise it, or choose fewer linears with include="
        )
    if added(high) <= allowed:
        return replace(config, rank_ratio=high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if added(middle) <= allowed else (low, middle)
    return replace(config, rank_ratio=low)
