"""Pictures of comparisons: curves and learning rates of models; score by size and frequency, and fits, of fields."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from nlr_lab.runtime.tables import COLOURS, GREYS, new_figure, save

from .report import by_loss, judged

Points = Sequence[tuple[float, float]]

_MARKERS = "osD^vP"
_FEW = 10  # evaluations: curves of fewer are shown whole
_SWEEP = 3  # frequencies that make a curve
_NAMES = {"bits_per_pixel": "bits per pixel (32 a parameter)", "parameters": "parameters"}
_METRICS = {"iou": "IoU", "psnr": "PSNR", "ssim": "SSIM"}
_STYLES = {"dense": (GREYS[0], "s"), "low-rank": (COLOURS[0], "o"), "sine": (COLOURS[1], "^")}


# --- model trainings ---------------------------------------------------------------------------------------------


def draw_models(out: Path, results: Mapping[str, Any]) -> None:
    """Draw the pictures of a record: `curves.png`, and `rates.png` where learning rates were tuned."""
    of_loss, metric = by_loss(results), results["metric"]
    label = f"evaluation loss ({metric['unit']})" if of_loss else f"{metric['name']} on held-out examples"
    arms = {arm["name"]: arm for arm in results["arms"]}
    dashed = {name for name, arm in arms.items() if arm["control"]}
    curves: dict[str, list[Points]] = {}
    for name, arm in arms.items():
        runs = [run for run in arm["runs"] if run["seed"] in results["seeds"]]
        series = [run["curve" if of_loss else "metric_curve"] for run in runs]
        curves[name] = [[(s, math.nan if value is None else value) for s, value in points] for points in series]
    few = max((len(curve) for each in curves.values() for curve in each), default=0) < _FEW
    target = arms[results["reference"]]["final_loss"]["mean"] if of_loss else None
    title = f"{results['recipe']['name']}, n = {results['n']}"
    plot_curves(out / "curves.png", curves, dashed, target, skip=0 if few else 0.2, title=title, y_label=label)
    tuned = {name: arm for name, arm in arms.items() if arm["tuning"]}
    if tuned:
        rates = {name: [(run["lr"], judged(run, "selection")) for run in arm["tuning"]] for name, arm in tuned.items()}
        chosen = {name: arm["lr"] for name, arm in tuned.items() if arm["lr"] is not None}
        plot_rate_sweep(out / "rates.png", rates, chosen, dashed, y_label=label)


def mean_curve(curves: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean, lowest and highest loss over seeds on the union of their steps; empty when they share none.

    Only the range of steps that every seed covers is kept; within it each curve is interpolated linearly.
    Non-finite losses (a run that diverged) cut that seed's range short.
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
    arms: Mapping[str, Sequence[Points]],
    dashed: Iterable[str],
    target: float | None = None,
    *,
    skip: float = 0.2,
    title: str = "",
    y_label: str = "evaluation loss (nats per token)",
) -> None:
    """Draw evaluation curves as in Figures 1 and 3 of noble.txt: the mean over seeds, with a band of lowest to highest.

    Args:
        path: the PNG to write.
        arms: name -> the curve (step, loss) of each seed.
        dashed: the arms that are baselines.
        target: the reference's final loss (mean over seeds), a dotted horizontal line.
        skip: share of the steps that is left out at the beginning (the paper truncates 20 %).
        title: heading of the picture.
        y_label: with the unit of the loss.
    """
    figure, axes = new_figure(8.0, 5.0)
    last = max((point[0] for curves in arms.values() for curve in curves for point in curve), default=0.0)
    baselines = 0
    for (name, curves), colour in zip(arms.items(), _colours(name in dashed for name in arms), strict=False):
        # Several baselines are all dashed; the dash pattern tells them apart in print.
        style = (0, (5, 1 + 1.5 * baselines)) if name in dashed else "-"
        baselines += name in dashed
        steps, mean, low, high = mean_curve(curves)
        shown = steps >= skip * last
        if not shown.any():
            continue
        axes.plot(steps[shown], mean[shown], color=colour, linestyle=style, linewidth=1.8, label=name)
        if len(curves) > 1:
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
    chosen: Mapping[str, float],
    dashed: Iterable[str] = (),
    *,
    y_label: str = "evaluation loss (nats per token)",
) -> None:
    """Draw final loss against learning rate, one line for each arm.

    Of each arm's (learning rate, final loss) the loss is None where the run diverged: a cross at the top edge. The
    chosen rate is ringed, arms that are baselines are dashed.
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


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


# --- neural fields -----------------------------------------------------------------------------------------------


def metric_name(metric: str) -> str:
    """Return a metric's name in words: PSNR for psnr."""
    return _METRICS.get(metric, metric.replace("_", " "))


def score_label(results: Mapping[str, Any]) -> str:
    """The score's name and unit, as it stands at axes and over columns."""
    name, unit = metric_name(results["metric"]["name"]), results["metric"]["unit"]
    return f"{name} ({unit})" if unit else name


def _finish(path: Path, figure: Figure, axes: Axes, results: Mapping[str, Any], x_label: str) -> None:
    """Name the axes of a plot of the score over something, and write it."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(score_label(results))
    axes.set_title(f"{results['problem']}, n = {results['n']}", parse_math=False)
    if axes.containers:
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def _scores(arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means, and standard deviations over seeds as error bars."""
    return {"y": [arm["score"]["mean"] for arm in arms], "yerr": [arm["score"]["sd"] or 0.0 for arm in arms]}


def plot_sizes(path: Path, results: Mapping[str, Any]) -> None:
    """Draw score against size, a curve for each kind of linears (as in Figure 5b of sine_lowrank.txt).

    Arms that are not on their kind's curve (other omegas) are pale.
    """
    figure, axes = new_figure(7.0, 4.5)
    for kind, (colour, marker) in _STYLES.items():
        arms = [arm for arm in results["arms"] if arm["settings"]["kind"] == kind and arm["score"]["mean"] is not None]
        arms.sort(key=lambda arm: arm["size"])
        names = results["rate_distortion"].get(kind, [arm["name"] for arm in arms])
        for on_curve in (True, False):
            chosen = [arm for arm in arms if (arm["name"] in names) == on_curve]
            if not chosen:
                continue
            line = "-" if on_curve and kind != "dense" else "none"
            style: dict[str, Any] = {"linestyle": line, "marker": marker, "alpha": 1.0 if on_curve else 0.35}
            sizes, label = [arm["size"] for arm in chosen], kind if on_curve else None
            axes.errorbar(sizes, **_scores(chosen), color=colour, capsize=3, label=label, **style)
        beside = (5, 5) if kind == "sine" else (5, -11)  # above and below: the kinds often end near each other
        for arm in arms:
            if arm["name"] in names and arm["settings"]["rank"] is not None:
                place: dict[str, Any] = {"textcoords": "offset points", "xytext": beside, "fontsize": 8}
                point = (arm["size"], arm["score"]["mean"])
                axes.annotate(f"k={arm['settings']['rank']}", point, color=colour, **place)
    axes.set_xscale("log")
    _finish(path, figure, axes, results, _NAMES[results["size"]])


def omega_sweeps(results: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
    """The arms, by frequency, of each rank that has sines of three frequencies or more with a score."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for arm in results["arms"]:
        if arm["omega"] is not None and arm["score"]["mean"] is not None:
            by_rank.setdefault(arm["settings"]["rank"], []).append(arm)
    return {
        rank: sorted(arms, key=lambda arm: arm["omega"])
        for rank, arms in sorted(by_rank.items())
        if len({arm["omega"] for arm in arms}) >= _SWEEP
    }


def plot_omegas(path: Path, results: Mapping[str, Any]) -> None:
    """Draw score against the sine's frequency, a curve for each rank (the sine paper, Figures 7, 9).

    Plain low rank is dashed, with a band of its standard deviation. Where no rank has such a sweep, a picture that was
    there goes.
    """
    sweeps = omega_sweeps(results)
    if not sweeps:
        path.unlink(missing_ok=True)
        return
    figure, axes = new_figure(7.0, 4.5)
    for (rank, arms), colour in zip(sweeps.items(), cycle(COLOURS)):
        omegas = [arm["omega"] for arm in arms]
        axes.errorbar(omegas, **_scores(arms), color=colour, marker="^", capsize=3, label=f"sine, k={rank}")
        for arm in results["arms"]:
            score, of_arm = arm["score"], (arm["settings"]["kind"], arm["settings"]["rank"])
            if of_arm == ("low-rank", rank) and score["mean"] is not None:
                axes.axhline(score["mean"], color=colour, linestyle="--", label=f"low-rank, k={rank}")
                low, high = (score["mean"] + sign * (score["sd"] or 0.0) for sign in (-1, 1))
                axes.axhspan(low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    ticks = sorted({arm["omega"] for arms in sweeps.values() for arm in arms})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    _finish(path, figure, axes, results, "omega")


def plot_strip(
    path: Path,
    results: Mapping[str, Any],
    truth: np.ndarray,
    shown: Sequence[tuple[Mapping[str, Any], float, np.ndarray]],
) -> None:
    """Ground truth above the dense fit, then low-rank above sine, rank by rank (Figures 6 and 8 of sine_lowrank.txt).

    Pictures are (height, width, 3) uint8; of each arm `shown` has its record, the score of its fit, and its picture.
    """
    unit = results["metric"]["unit"] and f" {results['metric']['unit']}"
    columns: list[list[tuple[str, np.ndarray] | None]] = [[("ground truth", truth), None]]
    by_rank: dict[int | None, tuple[list[Any], list[Any]]] = {}
    for record, value, picture in shown:
        method = record["settings"]
        cell = (f"{record['name']}\n{value:.4g}{unit}, {record['percent']:.3g} %", picture)
        if method["kind"] == "dense" and columns[0][1] is None:
            columns[0][1] = cell
        else:
            by_rank.setdefault(method["rank"], ([], []))[method["kind"] == "sine"].append(cell)
    for low, sine in by_rank.values():
        columns += [list(pair) for pair in zip_longest(low, sine)]
    rows = [row for row in zip(*columns, strict=True) if any(row)]
    height, width = truth.shape[:2]
    size = 2.2
    figure = Figure(figsize=(size * len(columns), len(rows) * (size * height / width + 0.45)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            if cell is not None:
                grid[row, column].set_title(cell[0], fontsize=8, parse_math=False)
                grid[row, column].imshow(cell[1], interpolation="nearest")
    save(figure, path)
