"""Pictures of model trainings: evaluation curves and learning-rate sweeps."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from nlr_lab.compare.report import by_loss
from nlr_lab.runtime.canvas import COLOURS, GREYS, new_figure, save

from .report import selection

_MARKERS = "osD^vP"
_FEW = 10  # evaluations: curves of fewer are shown whole


@dataclass(frozen=True, kw_only=True)
class ArmCurves:
    """The evaluation curves of one arm, one for each seed; `dashed` for baselines."""

    name: str
    dashed: bool
    curves: tuple[tuple[tuple[float, float], ...], ...]
    """Points (step, evaluation loss) of each seed."""


def draw(out: Path, results: Mapping[str, Any]) -> None:
    """Draw the pictures of a record: `curves.png`, and `rates.png` where learning rates were tuned."""
    of_loss, metric = by_loss(results), results["metric"]
    label = f"evaluation loss ({metric['unit']})" if of_loss else f"{metric['name']} on held-out examples"
    curves = []
    for arm in results["arms"]:
        runs = [run for run in arm["runs"] if run["seed"] in results["seeds"]]
        series = [run["curve" if of_loss else "metric_curve"] for run in runs]
        numbers = tuple(tuple((s, math.nan if value is None else value) for s, value in points) for points in series)
        curves.append(ArmCurves(name=arm["name"], dashed=arm["control"], curves=numbers))
    arms = {arm["name"]: arm for arm in results["arms"]}
    few = max((len(curve) for arm in curves for curve in arm.curves), default=0) < _FEW
    plot_curves(
        out / "curves.png",
        curves,
        target=arms[results["reference"]]["final_loss"]["mean"] if of_loss else None,
        skip=0 if few else 0.2,
        title=f"{results['recipe']['name']}, n = {results['n']}",
        y_label=label,
    )
    tuned = {name: arm for name, arm in arms.items() if arm["tuning"]}
    if tuned:
        plot_rate_sweep(
            out / "rates.png",
            {name: [(run["lr"], selection(run)) for run in arm["tuning"]] for name, arm in tuned.items()},
            chosen={name: arm["lr"] for name, arm in tuned.items() if arm["lr"] is not None},
            dashed=[name for name, arm in tuned.items() if arm["control"]],
            y_label=label,
        )


def mean_curve(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest loss over seeds on the union of their steps.

    Only the range of steps that every seed covers is kept; within it each curve is interpolated linearly.
    Non-finite losses (a run that diverged) cut that seed's range short.

    Returns:
        steps, mean, lowest, highest; four arrays of one length, empty when the seeds share no step.
    """
    kept = []
    for curve in curves:
        points = np.array(curve, dtype=np.float64).reshape(-1, 2)
        lost = ~np.isfinite(points[:, 1])
        kept.append(points[: np.argmax(lost)] if lost.any() else points)
    if not kept or any(len(points) == 0 for points in kept):
        empty = np.empty(0)
        return empty, empty, empty, empty
    first, last = max(points[0, 0] for points in kept), min(points[-1, 0] for points in kept)
    steps = np.unique(np.concatenate([points[:, 0] for points in kept]))
    steps = steps[(steps >= first) & (steps <= last)]
    losses = np.stack([np.interp(steps, points[:, 0], points[:, 1]) for points in kept])
    return steps, losses.mean(0), losses.min(0), losses.max(0)


def _colours(dashed: Iterable[bool]) -> Iterator[str]:
    """Greys for baselines, colours for other arms."""
    greys, colours = cycle(GREYS), cycle(COLOURS)
    return (next(greys if each else colours) for each in dashed)


def plot_curves(
    path: Path,
    arms: Sequence[ArmCurves],
    *,
    target: float | None = None,
    skip: float = 0.2,
    title: str = "",
    y_label: str = "evaluation loss (nats per token)",
) -> None:
    """Draw evaluation curves as in Figures 1 and 3 of noble.txt.

    Args:
        path: the PNG to write.
        arms: drawn in this order; baselines dashed, other arms solid; line = mean over seeds, band = lowest
            to highest seed.
        target: the reference's final loss (mean over seeds), a dotted horizontal line.
        skip: share of the steps that is left out at the beginning (the paper truncates 20 %).
        title: heading of the picture.
        y_label: with the unit of the loss.
    """
    figure, axes = new_figure(8.0, 5.0)
    last = max((point[0] for arm in arms for curve in arm.curves for point in curve), default=0.0)
    baselines = 0
    for arm, colour in zip(arms, _colours(arm.dashed for arm in arms), strict=False):
        # Several baselines are all dashed; the dash pattern tells them apart in print.
        style = (0, (5, 1 + 1.5 * baselines)) if arm.dashed else "-"
        baselines += arm.dashed
        steps, mean, low, high = mean_curve(arm.curves)
        shown = steps >= skip * last
        if not shown.any():
            continue
        axes.plot(steps[shown], mean[shown], color=colour, linestyle=style, linewidth=1.8, label=arm.name)
        if len(arm.curves) > 1:
            axes.fill_between(steps[shown], low[shown], high[shown], color=colour, alpha=0.15, linewidth=0)
    has_curves = bool(axes.lines)
    if target is not None and math.isfinite(target):
        axes.axhline(target, color="#444444", linestyle=":", linewidth=1.0)
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "color": "#444444"}
        axes.text(0.005, target, "final loss of the reference", ha="left", va="bottom", **place)
    axes.set_xlabel(f"step (first {skip:.0%} not shown)" if skip else "step")
    axes.set_ylabel(y_label)
    axes.set_title(title, parse_math=False)
    if has_curves:
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_rate_sweep(
    path: Path,
    sweeps: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    chosen: Mapping[str, float],
    dashed: Sequence[str] = (),
    y_label: str = "evaluation loss (nats per token)",
) -> None:
    """Draw final loss against learning rate, one line for each arm.

    Args:
        path: the PNG to write.
        sweeps: arm -> (learning rate, final loss), the loss None where the run diverged (a cross at the top edge).
        chosen: arm -> the learning rate it goes on with, ringed.
        dashed: the arms that are baselines.
        y_label: with the unit of the loss.
    """
    figure, axes = new_figure(7.0, 4.5)
    colours = _colours(name in dashed for name in sweeps)
    for index, ((name, sweep), colour) in enumerate(zip(sweeps.items(), colours, strict=False)):
        finite = sorted((rate, loss) for rate, loss in sweep if loss is not None)
        line: dict[str, Any] = {"color": colour, "linestyle": "--" if name in dashed else "-", "label": name}
        axes.plot(*_columns(finite), marker=_MARKERS[index % len(_MARKERS)], markersize=4, **line)
        # At 0.98 of the axes' height whatever the losses are; nudged by arm so that crosses do not overlap.
        lost = [(rate, 0.98 - 0.025 * index) for rate, loss in sweep if loss is None]
        axes.plot(*_columns(lost), "x", color=colour, markersize=6, transform=axes.get_xaxis_transform())
        ringed = [point for point in finite if math.isclose(point[0], chosen.get(name, math.nan), rel_tol=1e-9)]
        if ringed:
            axes.plot(*_columns(ringed), "o", markersize=11, markerfacecolor="none", color=colour)
    axes.set_xscale("log")
    axes.set_xticks(sorted({rate for sweep in sweeps.values() for rate, _ in sweep}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate (ring: chosen, cross: diverged)")
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
