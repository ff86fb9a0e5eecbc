"""Paired runs, statistics, pictures, report: one pipeline (`run`) over the kinds of trials in `models` and `fields`."""

from .run import Comparison, compare

__all__ = ["Comparison", "compare"]
