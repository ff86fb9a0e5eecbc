"""Normalized queries and keys: a control for nonlinear queries."""
