"""Operators that several methods use, and what operators share."""
