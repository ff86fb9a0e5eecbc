"""Puts a method's layers into a model: targets, budgets, the swap, the report."""
