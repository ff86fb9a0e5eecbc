"""Swap of a model's modules for a method's layers: targets, budgets, the swap, the report."""
