"""Paired runs, statistics, pictures, report: one pipeline (`run`) over kinds of trials (models, fields)."""

from .run import Comparison, compare

__all__ = ["Comparison", "compare"]
