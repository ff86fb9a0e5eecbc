"""Trials of neural fields (coordinate networks): dense, low-rank and sine low-rank, by rank and size."""
