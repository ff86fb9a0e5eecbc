"""Rational activations of experts."""

from typing import Any

from torch import Tensor

from .core import EXPERT_LAYERS
from .experts import sort_rows
from .rational import RationalActivation


class RationalOfExperts(RationalActivation):
    """`RationalActivation` with coefficients for each of E experts, (E, G, .): rows (S, channels), sorted by expert."""

    expert_of_row: Any = None
    """(S), told by the experts before every call."""

    def forward(self, x: Tensor) -> Tensor:
        """(S, channels) -> the same."""
        rows = self.expert_of_row
        return self.evaluate(x, self.rational_numerator[rows], self.rational_denominator[rows])

    def sort_rows(self, model: Any, experts: str) -> None:
        """Make the experts around this activation tell it the rows."""
        sort_rows(model, [experts])


EXPERT_LAYERS["rational"] = RationalOfExperts
