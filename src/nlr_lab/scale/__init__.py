"""Ladders of comparisons: widths x tokens a parameter x arms, fits over them, and predictions of the next size."""
