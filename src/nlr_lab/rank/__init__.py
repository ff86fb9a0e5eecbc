"""Stable and effective ranks of weights."""
