"""Paired runs, statistics, pictures, report."""

from .plots import ablation_bars
from .run import Comparison, compare

__all__ = ["Comparison", "ablation_bars", "compare"]
