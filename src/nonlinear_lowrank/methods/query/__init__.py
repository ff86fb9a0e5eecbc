"""Nonlinear queries (nonlinear_queries.md)."""
