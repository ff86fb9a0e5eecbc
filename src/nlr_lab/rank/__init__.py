"""Stable and effective ranks of weights, and the theory's bounds on them."""
