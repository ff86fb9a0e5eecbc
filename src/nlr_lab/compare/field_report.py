"""Records, reports and pictures of neural fields, and Bjontegaard's deltas: how far apart the kinds' curves are.

    BD-rate = 100 (10^mean(log10 r_test(q) - log10 r_anchor(q)) - 1)  %, mean over the qualities q that both reach
    BD-PSNR = mean(q_test(log10 r) - q_anchor(log10 r))               in q's unit, mean over the rates that both span

A curve is a list of points (rate, quality), such as parameters and PSNR. Between points it is Akima's interpolation, as
in sine_lowrank.txt, section 4.3. Nothing is extrapolated.

Source: G. Bjontegaard, VCEG-M33, 2001; C. Herglotz et al., Beyond Bjontegaard, ICIP 2022.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.interpolate import Akima1DInterpolator

from nlr_lab.runtime.tables import COLOURS, GREYS, new_figure, save
from nonlinear_lowrank.errors import UserError

from .report import (
    DELTA_HEAD,
    NONE,
    Record,
    Row,
    delta_cells,
    delta_sentence,
    graded,
    last_sections,
    lr_text,
    markdown_table,
    pairs_of,
)
from .statistics import late_change

Curve = Sequence[tuple[float, float]]
"""Points (rate, quality), in any order."""

KINDS = ("low-rank", "sine")
LEAST_POINTS = 3
"""Number that Akima's interpolation needs; with two it is a straight line."""
_SWEEP = 3  # frequencies that make a curve
_SIZES = {"bits_per_pixel": "bits per pixel (32 a parameter)", "parameters": "parameters"}
_METRICS = {"iou": "IoU", "psnr": "PSNR", "ssim": "SSIM"}
_STYLES = {"dense": (GREYS[0], "s"), "low-rank": (COLOURS[0], "o"), "sine": (COLOURS[1], "^")}


def bd_rate(anchor: Curve, test: Curve, *, names: tuple[str, str] = ("anchor", "test")) -> float:
    """Mean change of the rate at equal quality, in percent: -64.7 says that `test` needs 64.7 % less.

    Args:
        anchor: the curve to compare with, at least `LEAST_POINTS` points.
        test: the curve in question; it need not have as many points, or the same rates.
        names: of the two, in errors.

    Raises:
        UserError: too few points, a number that is not finite, a rate that is not above 0, a rate given twice, a
            quality that does not rise with the rate, no common quality, or curves so flat somewhere that the
            interpolation between their points leaves all measured rates.
    """
    rising = _checked(names, anchor, test)
    for name, curve in zip(names, rising, strict=True):
        for (low, worse), (high, better) in pairwise(curve):
            if better <= worse:
                raise UserError(
                    f"BD-rate needs a quality that rises with the rate; {name} goes from {worse:g} at rate {low:g} "
                    f"to {better:g} at rate {high:g}: leave such points out, or report BD-PSNR"
                )
    change = 10 ** _mean_gap("quality", names, [[(quality, rate) for rate, quality in curve] for curve in rising], 1)
    rates = [rate for curve in rising for rate, _ in curve]
    most = max(rates) / min(rates)
    if not 1 / most <= change <= most:
        raise UserError(
            f"BD-rate would be {100 * (change - 1):.3g} %, more than the measured rates ({min(rates):g} to "
            f"{max(rates):g}) allow: between two points of nearly one quality the interpolation leaves them; leave "
            "one out, or report BD-PSNR"
        )
    return 100 * (change - 1)


def bd_psnr(anchor: Curve, test: Curve, *, names: tuple[str, str] = ("anchor", "test")) -> float:
    """Mean gain of the quality at equal rate, in the quality's unit (dB for PSNR).

    Unlike `bd_rate`, whose arguments it has, it is defined for a quality that falls somewhere.

    Raises:
        UserError: as in `bd_rate`, except for the quality and its interpolation, or no common rate.
    """
    return _mean_gap("rate", names, _checked(names, anchor, test), 0)


def _mean_gap(what: str, names: tuple[str, str], curves: Sequence[Sequence[tuple[float, float]]], rate: int) -> float:
    """Mean of test(x) - anchor(x) over the x that both span; points (x, y) with x increasing.

    Of `what` x is; logarithms are taken of the coordinate that is the rate.
    """
    (first, last), (begin, end) = ((curve[0][0], curve[-1][0]) for curve in curves)
    if max(first, begin) >= min(last, end):
        raise UserError(
            f"the curves share no {what}: {names[0]} has {first:g} to {last:g}, {names[1]} {begin:g} to {end:g}; "
            "measure points in between"
        )
    points = [np.array(curve, dtype=np.float64).T for curve in curves]
    for each in points:
        each[rate] = np.log10(each[rate])
    low, high = max(each[0, 0] for each in points), min(each[0, -1] for each in points)
    anchor, test = (Akima1DInterpolator(*each).integrate(low, high) for each in points)
    return float((test - anchor) / (high - low))


def _checked(names: tuple[str, str], *curves: Curve) -> list[list[tuple[float, float]]]:
    """The points of both curves by rising rate."""
    rising = [sorted((float(rate), float(quality)) for rate, quality in curve) for curve in curves]
    for name, points in zip(names, rising, strict=True):
        if len(points) < LEAST_POINTS:
            raise UserError(f"a Bjontegaard delta needs at least {LEAST_POINTS} points; {name} has {len(points)}")
        good = all(0 < rate < math.inf and math.isfinite(quality) for rate, quality in points)
        if not good or len(dict(points)) < len(points):
            listed = ", ".join(f"({rate:g}, {quality:g})" for rate, quality in points)
            raise UserError(f"{name} needs finite qualities at rates above 0, each rate once; it has {listed}")
    return rising


# --- the record --------------------------------------------------------------------------------------------------


def field_sections(results: dict[str, Any], dense: int, omegas: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the record with the additions for fields.

    Sizes are shares of the `dense` network's parameters. The frequencies, by arm, are as the network has them: also
    where the method leaves them to a published table.
    """
    metrics: Mapping[str, float] = next(
        (run["metrics"] for arm in results["arms"] for run in arm["runs"] if run["metrics"]), {}
    )
    size = "bits_per_pixel" if "bits_per_pixel" in metrics else "parameters"
    arms = []
    for arm in results["arms"]:
        runs = [] if arm["score"]["mean"] is None else [run for run in arm["runs"] if run["seed"] in results["seeds"]]
        late = [change for run in runs if (change := late_change(run["metric_curve"])) is not None]
        means = {name: float(np.mean([run["metrics"][name] for run in runs])) for name in metrics if runs}
        own = {
            "omega": omegas[arm["name"]],
            "percent": 100 * arm["parameters"] / dense,
            "size": float(arm["parameters"]) if size == "parameters" else means.get(size),
            "metrics": means,
            "late_gain": float(np.mean([gain for gain, _ in late])) if late else None,
            "late_share": max(share for _, share in late) if late else None,
            "seconds": float(np.mean([run["seconds"] for run in runs])) if runs else None,
        }
        arms.append(arm | own)
    distances = _rate_distortion(arms, results["seeds"])
    return results | {"arms": arms, "dense_parameters": dense, "size": size, "rate_distortion": distances}


def _rate_distortion(arms: Sequence[Record], seeds: Sequence[int]) -> dict[str, Any]:
    """The two kinds' curves and how far apart they are: of the means, and seed by seed."""
    sizes = {kind: _sizes(arms, kind) for kind in KINDS}
    curves = {kind: [_best(equal) for equal in sizes[kind]] for kind in KINDS}
    several = (equal for kind in KINDS for equal in sizes[kind] if len(equal) > 1)
    picked = [arm["name"] for equal in several if not all(arm["tuning"] for arm in equal) for arm in equal]
    lost = [arm["name"] for curve in curves.values() for arm in curve if arm["score"]["mean"] is None]

    def points(score: Callable[[Record], float]) -> list[list[tuple[float, float]]]:
        return [[(arm["size"], score(arm)) for arm in curves[kind]] for kind in KINDS]

    def of_seed(seed: int) -> Callable[[Record], float]:
        return lambda arm: next(run["score"] for run in arm["runs"] if run["seed"] == seed)

    found: dict[str, Any] = {kind: [arm["name"] for arm in curve] for kind, curve in curves.items()}
    for name, delta in (("bd_rate", bd_rate), ("bd_score", bd_psnr)):
        by_seed: list[float | None] = []
        try:
            if lost:  # without its worst point a curve flatters
                raise UserError(f"{' and '.join(lost)} diverged")
            value, note = delta(*points(lambda arm: arm["score"]["mean"]), names=KINDS), ""
            if picked:  # the best of several scores flatters too
                raise UserError(f"one of {', '.join(picked)} is picked by these scores, not by tuning")
            for seed in seeds:
                try:
                    by_seed.append(delta(*points(of_seed(seed))))
                except UserError:
                    by_seed.append(None)
        except UserError as error:
            value, note = None, str(error)
        found |= {name: value, f"{name}_note": note, f"{name}_by_seed": by_seed}
    return found


def _sizes(arms: Sequence[Record], kind: str) -> list[list[Record]]:
    """Arms of a kind by rising size; several at one size have other omegas.

    An arm that diverged is one of them, without a score to drop it by.
    """
    by_size: dict[int, list[Record]] = {}
    for arm in arms:
        diverged = any(run["status"] == "diverged" for run in (*arm["runs"], *(arm["tuning"] if not arm["lr"] else ())))
        if arm["settings"]["kind"] == kind and (arm["score"]["mean"] is not None or diverged):
            by_size.setdefault(arm["parameters"], []).append(arm)
    return [equal for _, equal in sorted(by_size.items())]


def _best(equal: Sequence[Record]) -> Record:
    """The arm that tuning found best; where one was not tuned, the one that ended best."""
    values = [_or_lowest(arm["score"]["mean"]) for arm in equal]
    if all(arm["tuning"] for arm in equal):
        values = [max(_or_lowest(run["score"]) for run in arm["tuning"]) for arm in equal]
    return equal[values.index(max(values))]


def _or_lowest(value: float | None) -> float:
    return -math.inf if value is None else value


# --- the report --------------------------------------------------------------------------------------------------


def tables(results: Record) -> list[str]:
    """The console's table, as Markdown, below its heading."""
    head = f"## {results['problem']}, n = {results['n']}"
    return [head, markdown_table(*_arm_table(results, all_metrics=False))]


def render_report(results: Record) -> str:
    """`report.md` from the record in `results.json`."""
    shares = [arm["late_share"] for arm in results["arms"] if arm["late_share"] is not None]
    seeds = ", ".join(map(str, results["seeds"])) or "none yet"
    rows = [(name, other, *delta_cells(pair)) for name, other, pair in pairs_of(results)]
    parts = [
        f"# {results['recipe']['name']}: {results['problem']}",
        f"Score: {score_label(results)}, mean and standard deviation over n = {results['n']} seeds ({seeds}). "
        "Where an arm had a choice of init and learning rate, it runs at its best "
        f"of seed {results['tuning_seed']} by this score. "
        f"`late` is what the last {100 * max(shares, default=0.2):.0f} % of the steps added to the score. "
        f"Sizes are shares of the dense network's {results['dense_parameters']:,} parameters.",
        markdown_table(*_arm_table(results)),
        "## Sine against plain low rank, at equal parameters",
        markdown_table(("arm", "over", *DELTA_HEAD), rows) if rows else "No rank has both.",
        "\n".join(f"- {line}" for line in findings(results)),
        "![score against size](rate.png)",
        *(["![score against omega](omega.png)"] if omega_sweeps(results) else []),
        f"![ground truth and fits, seed {results['seeds'][0] if results['seeds'] else NONE}](strip.png)",
        *last_sections(results),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def findings(results: Record) -> list[str]:
    """Say what was found for each pair, and how far apart the kinds' curves are."""
    metric = results["metric"]
    lines = [graded(delta_sentence(name, other, pair, metric), pair) for name, other, pair in pairs_of(results)]
    if not results["against"]:
        lines.append("Nothing is compared: no sine could be with a low rank of its size.")
    return lines + _distance_sentences(results) + list(results["notes"])


def _distance_sentences(results: Record) -> list[str]:
    curves, score, unit = results["rate_distortion"], results["metric"]["name"], results["metric"]["unit"]
    if not (curves["low-rank"] and curves["sine"]):
        return []
    lines = []
    bd_score = "BD-PSNR" if score == "psnr" else f"BD-{score}"
    for key, name, form, of in (
        ("bd_rate", "BD-rate", "+.2f", " %"),
        ("bd_score", bd_score, "+.3g", unit and f" {unit}"),
    ):
        if curves[key] is None:
            lines.append(f"{name} of sine over low rank: none, since {curves[f'{key}_note']}.")
            continue
        seeds = curves[f"{key}_by_seed"]
        each = ", ".join(NONE if value is None else format(value, form) for value in seeds)
        spread = f" (seed by seed: {each})" if len(seeds) > 1 else ""
        lines.append(f"{name} of sine over low rank: {curves[key]:{form}}{of}{spread}.")
    return lines


def _arm_table(results: Record, *, all_metrics: bool = True) -> tuple[Row, list[Row]]:
    score = results["metric"]["name"]
    known: Record = next((arm["metrics"] for arm in results["arms"] if arm["metrics"]), {})
    others = [name for name in known if all_metrics and name != score]
    timed = any(arm["step_time_ratio"] for arm in results["arms"])
    sines = any(arm["omega"] is not None for arm in results["arms"])
    head = ("arm", *(("omega",) if sines else ()), "init", "lr", "parameters", "%", score_label(results), "n", "late")
    head += (*map(metric_name, others), *((f"step time over {results['reference']}'s",) if timed else ()))
    rows = []
    for arm in results["arms"]:
        omega = NONE if arm["omega"] is None else f"{arm['omega']:g}"
        cells = (*((omega,) if sines else ()), arm["init"] or NONE, lr_text(arm), f"{arm['parameters']:,}")
        late = NONE if arm["late_gain"] is None else f"{arm['late_gain']:+.2g}"
        cells += (f"{arm['percent']:.3g}", _score_text(arm["score"]), str(arm["score"]["n"]), late)
        cells += tuple(f"{arm['metrics'][name]:.4g}" if arm["metrics"] else NONE for name in others)
        rows.append((arm["name"], *cells, *((f"{arm['step_time_ratio']['median']:.3f}",) if timed else ())))
    return head, rows


def _score_text(score: Record) -> str:
    if score["mean"] is None:
        return score["note"]
    return f"{score['mean']:.4g}" + ("" if score["sd"] is None else f" +- {score['sd']:.2g}")


# --- pictures ----------------------------------------------------------------------------------------------------


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
    _finish(path, figure, axes, results, _SIZES[results["size"]])


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
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            if cell is not None:
                grid[row, column].set_title(cell[0], fontsize=8, parse_math=False)
                grid[row, column].imshow(cell[1], interpolation="nearest")
    save(figure, path)
