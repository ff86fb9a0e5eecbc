"""Learning rates as comparisons use them: in order, of six digits, and the next one of a grid that must grow."""

from collections.abc import Iterable, Sequence


def tidy_grid(rates: Iterable[float]) -> tuple[float, ...]:
    """Rates in order, each `tidy`."""
    return tuple(sorted(tidy(rate) for rate in rates))


def tidy(rate: float) -> float:
    """Six digits, so that a rate and its folder's name are one to one."""
    return float(f"{rate:.6g}")


def rate_beyond(rates: Sequence[float], best: float | None) -> float | None:
    """The rate by which a grid grows when its best is at an edge, by the ratio found there; None if it is not.

    Args:
        rates: at least two, all different.
        best: of the rates; None where all diverged: then the grid grows downwards.
    """
    ordered = sorted(rates)
    if best is None or best == ordered[0]:
        return tidy(ordered[0] * ordered[0] / ordered[1])
    if best == ordered[-1]:
        return tidy(ordered[-1] * ordered[-1] / ordered[-2])
    return None
