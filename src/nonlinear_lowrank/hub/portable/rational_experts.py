"""Rational activations of experts."""

from typing import Any

from torch import Tensor

from .core import EXPERT_LAYERS
from .experts import by_expert, sort_rows
from .rational import RationalActivation


class RationalOfExperts(RationalActivation):
    """`RationalActivation` with coefficients for each of E experts, (E, G, .): rows (S, channels), sorted by expert."""

    expert_ends: Any = None
    """Where the rows of each expert end, told by the experts before every call."""

    def forward(self, x: Tensor) -> Tensor:
        """(S, channels) -> the same."""
        return by_expert(self.evaluate, x, self.expert_ends, self.rational_numerator, self.rational_denominator)

    def sort_rows(self, model: Any, experts: str) -> None:
        """Make the experts around this activation tell it the rows."""
        sort_rows(model, [experts])


EXPERT_LAYERS["rational"] = RationalOfExperts
