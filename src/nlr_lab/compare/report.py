"""Reports, made from `results.json` alone: what all kinds share, and report and pictures of model trainings.

A difference is claimed only where its 95 % interval excludes zero (a ratio: one); anything else reads "no difference
shown", with the n.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from nlr_lab.runtime.tables import COLOURS, GREYS, new_figure, new_panels, save

from .grade import FASTER, grade_text

Record = Mapping[str, Any]
Row = tuple[str, ...]
Points = Sequence[tuple[float, float]]
NONE = "-"
DELTA_HEAD = ("delta [95 %]", "p", "p (Holm)")
_SAME = 1.002  # norms and biases alone do not count
_FEW = 10  # evaluations: curves of fewer are shown whole
_SKIPPED = 0.2  # share of the steps that is not shown at the beginning of a curve, as in noble.txt
_MARKERS = "osD^vP"
_SPEED_HEAD = ("arm", "step time [quartiles]", "step speedup [95 %]", "p", "wall-clock speedup [95 %]", "p")
_MATCHED_HEAD = ("arm", "matched speedup, steps [95 %]", "p", "wall clock [95 %]", "p")
_TRAINING_HEAD = ("arm", "as trained", "delta [95 %]", "p", "without augmentation", "delta [95 %]", "p")


def percent(value: float | None) -> str:
    """`+5.70 %`, or a dash where nothing was measured."""
    return NONE if value is None else f"{value:+.2f} %"


def p_text(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.0001" if value < 1e-4 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def _p_clause(value: float | None) -> str:
    text = p_text(value)
    return f"p {text[0]} {text[1:]}" if text[0] == "<" else f"p = {text}"


def estimate_text(estimate: Record, form: str = "+.4f", unit: str = "") -> str:
    """`-0.0402 [-0.0511, -0.0293]`; without a value the reason stands in its place."""
    if estimate["value"] is None:
        return str(estimate["note"])
    text = format(estimate["value"], form) + unit
    if estimate["low"] is None:
        return text + (" (n = 1)" if estimate["n"] == 1 else " (no interval)")
    return f"{text} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def ratio_text(estimate: Record) -> str:
    """`1.26x [1.18, 1.35]`."""
    return estimate_text(estimate, ".3f", "x")


def lr_text(arm: Record) -> str:
    head = "" if arm["head_lr"] is None else f", head {arm['head_lr']:g}"
    return NONE if arm["lr"] is None else f"{arm['lr']:g}{head}"


def delta_cells(pair: Record) -> Row:
    """The cells under `DELTA_HEAD`."""
    return estimate_text(pair["delta"]), p_text(pair["delta"]["p_value"]), p_text(pair["p_holm"])


def judged(run: Record, name: str = "score") -> float | None:
    """Return what a run is compared by; "selection": chosen by."""
    return run["final_loss"] if run[name] is None or run["final_loss"] is None else run[name]


def by_loss(results: Record) -> bool:
    return results["metric"]["name"] == "loss"


def score_name(results: Record) -> str:
    """Name of the number that runs are compared by."""
    return "final loss" if by_loss(results) else results["metric"]["name"]


# --- tables --------------------------------------------------------------------------------------------------


def markdown_table(head: Row, rows: Sequence[Row]) -> str:
    """A table as Markdown has it; the cells' bars are escaped."""

    def line(cells: Row) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|---|" + "---:|" * (len(head) - 1), *(line(row) for row in rows)])


def run_table(results: Record) -> str:
    """Every run's score, by arm and seed."""
    seeds = sorted({run["seed"] for arm in results["arms"] for run in arm["runs"]})

    def cell(run: Record | None) -> str:
        if run is None:
            return "not run"
        score = judged(run)
        return f"diverged at step {run['diverged_at']}" if score is None else f"{score:.4f}"

    rows = []
    for arm in results["arms"]:
        runs = {run["seed"]: run for run in arm["runs"]}
        sd = arm["score"]["sd"]
        rows.append((arm["name"], *(cell(runs.get(seed)) for seed in seeds), NONE if sd is None else f"{sd:.4f}"))
    return markdown_table((score_name(results), *(f"seed {seed}" for seed in seeds), "sd"), rows)


def last_sections(results: Record) -> list[str]:
    """The end of every report: the runs, settings and versions, and how to repeat it."""
    lines = [f"arm {arm['name']}: `{arm['settings']}`" for arm in results["arms"]]
    lines += [f"{key}: `{value}`" for key, value in results["recipe"]["settings"].items()]
    lines += [f"data.{key}: `{value}`" for key, value in results["data"].items()]
    lines += [f"{key}: `{value}`" for part in ("machine", "versions") for key, value in results[part].items()]
    listed = "\n".join(f"- {line}" for line in lines)
    again = " with `--resume`" if str(results["command"]).startswith("nlr ") else ""
    return [
        *("## Every run", run_table(results), "## Settings"),
        f"<details><summary>every setting, version and the machine</summary>\n\n{listed}\n\n</details>",
        *("## How to repeat", f"```\n{results['command']}\n```"),
        f"The same command{again} continues where it stopped and reuses every finished run.",
    ]


# --- sentences -----------------------------------------------------------------------------------------------


def delta_sentence(name: str, reference: str, pair: Record, metric: Record) -> str:
    """Say what the difference from the reference shows."""
    delta, n = pair["delta"], pair["n"]
    if delta["value"] is None:
        return f"`{name}`: no {metric['name']} difference from `{reference}` can be given ({delta['note']})."
    if delta["value"] == 0 and delta["low"] is None:
        return f"`{name}`: the same {metric['name']} as `{reference}` (n = {n}), so no difference is shown."
    size = f"{abs(delta['value']):.4f} {metric['unit'] or 'of ' + metric['name']}"
    side = "lower" if delta["value"] < 0 else "higher"
    if delta["low"] is None:
        return (
            f"`{name}`: {size} {side} than `{reference}` in what was run, but {delta['note']} "
            f"(n = {n}), so no difference is shown."
        )
    interval = f"95 % interval {delta['low']:+.4f} to {delta['high']:+.4f}, {_p_clause(delta['p_value'])}"
    if not delta["shown"]:
        return f"`{name}`: no difference from `{reference}` shown at n = {n} (delta {delta['value']:+.4f}, {interval})."
    worth = "" if not metric["higher_is_better"] else ", better" if delta["value"] > 0 else ", worse"
    text = f"`{name}` ended {size} **{side}** than `{reference}`{worth} ({interval}, n = {n})."
    if pair["p_holm"] is not None and pair["p_holm"] >= 0.05:
        text += f" After Holm's correction for the number of arms {_p_clause(pair['p_holm'])}: a hint, not a finding."
    return text


def graded(text: str, pair: Record) -> str:
    """The text, followed where it claims something by what its curves do not bear, and by its grade."""
    if not claims(pair):
        return text
    caution = f" **Caution**: {'; '.join(pair['cautions'].values())}." if pair["cautions"] else ""
    return f"{text}{caution} {grade_text(pair['grade'])}"


def claims(pair: Record) -> bool:
    """Return whether any of a pair's differences is shown."""
    return any(pair[name]["shown"] for name in ("delta", "step_speedup", "wall_clock_speedup"))


def pairs_of(results: Record) -> Iterator[tuple[str, str, Record]]:
    """Arm, the arm it is compared with, and what was found."""
    for other, pairs in results["against"].items():
        for name, pair in pairs.items():
            yield name, other, pair


def _main_pairs(results: Record) -> Record:
    """Pairs by arm, against the reference."""
    return results["against"].get(results["reference"], {})


def _has_speed(results: Record) -> bool:
    """Return whether speedups can be read: losses, and more of each curve than its end."""
    return by_loss(results) and any(len(run["curve"]) > 1 for arm in results["arms"] for run in arm["runs"])


def _is_tuning(results: Record) -> bool:
    """Return whether pretrained models are tuned: then what counts is how many parameters are trained."""
    return any((arm["trainable"] or arm["parameters"]) < arm["parameters"] for arm in results["arms"])


# --- the tables of model trainings ------------------------------------------------------------------------------


def _score_row(arm: Record, results: Record) -> Row:
    """The arm's row of the main table; its number of trained parameters where pretrained models are tuned."""
    cost: Row = (percent(arm["parameters_percent"]), percent(arm["flops_percent"]))
    if _is_tuning(results):
        cost = (f"{arm['trainable']:,}",)
    score = arm["score"]
    text = str(score["note"]) if score["mean"] is None else f"{score['mean']:.4f}"
    best = NONE if arm["best_score"] is None else f"{arm['best_score']:.4f}"
    shown = () if by_loss(results) else (best,)
    delta: Row = ("reference" if arm["name"] == results["reference"] else NONE, NONE, NONE)
    if arm["name"] in _main_pairs(results):
        delta = delta_cells(_main_pairs(results)[arm["name"]])
    return (arm["name"], lr_text(arm), *cost, text, *shown, *delta)


def _time_text(time: Record | None) -> str:
    if time is None:
        return NONE
    low, high = 100 * (time["lower_quartile"] - 1), 100 * (time["upper_quartile"] - 1)
    return f"{100 * (time['median'] - 1):+.1f} %" + (f" [{low:+.1f}, {high:+.1f}]" if time["n"] > 1 else " (n = 1)")


def _ratio_cells(pair: Record, *names: str) -> Row:
    return tuple(cell for name in names for cell in (ratio_text(pair[name]), p_text(pair[name]["p_value"])))


def training_rows(results: Record) -> list[Row]:
    """The rows under `_TRAINING_HEAD`; none where the training examples are not augmented."""

    def cells(arm: Record, which: str) -> Row:
        loss, delta = arm[f"{which}_loss"], arm[f"{which}_delta"]
        text = str(arm["final_loss"]["note"]) or NONE if loss is None else f"{loss:.4f}"
        if delta is None:
            return text, "reference" if arm["name"] == results["reference"] else NONE, NONE
        return text, estimate_text(delta), p_text(delta["p_value"])

    if all(arm["plain_loss"] is None for arm in results["arms"]):
        return []
    return [(arm["name"], *cells(arm, "train"), *cells(arm, "plain")) for arm in results["arms"]]


def tables(results: Record) -> list[str]:
    """The tables that there are numbers for, as Markdown, below their headings."""
    metric, reference, pairs = results["metric"], results["reference"], _main_pairs(results)
    speeds = _has_speed(results)
    name = metric["name"].capitalize()
    intro = f"Reference: `{reference}`. Loss in {metric['unit']}; a delta below 0 is better."
    if not by_loss(results):
        side = "above" if metric["higher_is_better"] else "below"
        intro = (
            f"Reference: `{reference}`. {name} after the last step; a delta {side} 0 is better. "
            "Best step: the score at the evaluation at which the held-out examples scored best."
        )
    costs = ("trainable",) if _is_tuning(results) else ("params", "FLOPs")
    head = ("arm", "lr", *costs, score_name(results), *(() if by_loss(results) else ("best step",)), *DELTA_HEAD)
    parts = [f"## {name}", intro, markdown_table(head, [_score_row(arm, results) for arm in results["arms"]])]
    if training := training_rows(results):
        parts += ["## Training loss", _TRAINING_TEXT, markdown_table(_TRAINING_HEAD, training)]
    times = {arm["name"]: _time_text(arm["step_time_ratio"]) for arm in results["arms"]}
    names = ("step_speedup", "wall_clock_speedup") if speeds else ()
    rows = [(name, times[name], *_ratio_cells(pair, *names)) for name, pair in pairs.items()]
    if any(cell != NONE for row in rows for cell in row[1:]):
        parts += ["## Speed", markdown_table(_SPEED_HEAD if speeds else _SPEED_HEAD[:2], rows)]
    if speeds and any(pair["reached"] < pair["n"] for pair in pairs.values()):
        rows = [(name, *_ratio_cells(p, "matched_speedup", "matched_wall_clock_speedup")) for name, p in pairs.items()]
        parts += ["At the lowest loss that both reach (below 1x is slower):", markdown_table(_MATCHED_HEAD, rows)]
    return parts


# --- sentences of a training's differences -------------------------------------------------------------------


def _speed_sentence(pair: Record, reference: str) -> str:
    steps, matched, wall, n = pair["step_speedup"], pair["matched_speedup"], pair["wall_clock_speedup"], pair["n"]
    if pair["diverged"] or not pair["seeds"]:
        return ""
    if pair["reached"] < n:
        text = f"It reached the final loss of `{reference}` in {pair['reached']} of {n} seeds: no step speedup."
        if matched["value"] is None:
            return text
        return f"{text} At the lowest loss that both reach, its speed in steps is {ratio_text(matched)}."
    if steps["value"] is None:
        return f"No step speedup: {steps['note']}."
    text = f"Step speedup {ratio_text(steps)}: no difference shown."
    if steps["shown"]:
        how = "fewer" if steps["value"] > 1 else "more"
        text = f"It reached that model's final loss in {how} steps, by a factor of {ratio_text(steps)}."
    if wall["value"] is None:
        return f"{text} Hours: {wall['note']}."
    return f"{text} In hours {ratio_text(wall)}: {_hours_verdict(wall, pair['grade'])}."


def _hours_verdict(ratio: Record, met: Sequence[str]) -> str:
    """Say "faster" only where the grade allows it."""
    if not ratio["shown"]:
        return "no difference shown"
    if ratio["value"] < 1:
        return "**slower** along the curves, which read it before its learning rate has decayed"
    missing = [each for each in FASTER if each not in met]
    return "**faster**" if not missing else f"ahead in this run, not shown to be faster ({', '.join(missing)})"


def findings(results: Record) -> list[str]:
    """Say what was found, an item for each arm that is not a control, then the caveats."""
    metric, reference, n = results["metric"], results["reference"], results["n"]
    lines = []
    if n == 0:
        lines.append("No seed was finished by all arms: there is nothing to compare yet.")
    elif n == 1:
        lines.append("One seed was run (n = 1): no interval and no p-value, so nothing is shown either way.")

    def verdict(name: str, other: str, pair: Record, before: str = "") -> str:
        speed = _speed_sentence(pair, other) if _has_speed(results) else ""
        return graded(f"{before}{delta_sentence(name, other, pair, metric)} {speed}".rstrip(), pair)

    arms, sign = {arm["name"]: arm for arm in results["arms"]}, -1 if metric["higher_is_better"] else 1
    controls = [arm for arm in results["arms"] if arm["control"] and arm["score"]["mean"] is not None]
    best = min(controls, key=lambda arm: sign * arm["score"]["mean"], default=arms[reference])["name"]
    for name, pair in _main_pairs(results).items() if n else ():
        lines.append(verdict(name, reference, pair))
        # The gain over the strongest control is what the branch itself brings.
        if best != reference and not arms[name]["control"]:
            lines.append(verdict(name, best, results["against"][best][name], "Against the strongest control: "))
    return lines + list(results["notes"]) + _clouds(results)


def _clouds(results: Record) -> list[str]:
    """State caveats of a gain: learning rates that were not tuned, an init or a size without its control."""
    lines = []
    arms = results["arms"]
    untuned = [arm["name"] for arm in arms if arm["lr"] is not None and not arm["tuning"]]
    if untuned and results["n"]:
        who = "Learning rates were not tuned" if len(untuned) == len(arms) else f"Not tuned: {', '.join(untuned)}"
        lines.append(f"{who}: one that suits one arm better can pass for a gain of the method (--tune-lr).")
    if _is_tuning(results) or results["recipe"]["settings"].get("task.init_from"):
        return lines
    own = results["recipe"]["settings"].get("task.backbone.dense_init")
    inits = {arm["settings"]["dense_init"] or own for arm in arms if arm["control"]}
    if any("noble" in arm["settings"]["method"].split("+") for arm in arms) and "noble" not in inits:
        lines.append("No control has NOBLE's dense init (baseline:init=noble): part of a difference may be the init's.")
    largest = max((arm["parameters"] for arm in arms if arm["control"]), default=0)
    larger = [arm["name"] for arm in arms if not arm["control"] and arm["parameters"] > _SAME * largest]
    if larger:
        lines.append(
            f"No control has as many parameters as {', '.join(larger)} (wide-mlp:match={larger[-1]}): part of a "
            "difference may be theirs."
        )
    return lines


# --- the report and its pictures -----------------------------------------------------------------------------


def render_report(results: Record) -> str:
    """`report.md` from the record in `results.json`."""
    parts = [f"# {results['recipe']['name']}: {len(results['arms'])} arms, n = {results['n']}"]
    parts += [results["recipe"]["summary"], "## What was found", "\n".join(f"- {line}" for line in findings(results))]
    parts += tables(results)
    parts += ["![evaluation curves](curves.png)", _curve_caption(results)]
    parts += ["![training loss](training.png)"] if _has_training(results) else []
    controls = [each for each in pairs_of(results) if each[1] != results["reference"]]
    if controls:
        speeds = ("step_speedup", "matched_speedup") if _has_speed(results) else ()
        rows = [
            (name, other, *delta_cells(p), *(ratio_text(p[each]) for each in speeds)) for name, other, p in controls
        ]
        head = ("arm", "against", *DELTA_HEAD, *(f"{each.replace('_', ' ')} [95 %]" for each in speeds))
        parts += ["## Against each control", markdown_table(head, rows)]
    if any(arm["tuning"] for arm in results["arms"]):
        picture = f"![{results['metric']['name']} against learning rate](rates.png)"
        parts += ["## Learning rates", *_tuning_text(results), picture]
    return "\n\n".join([*parts, *last_sections(results), "## How to read it, and limits", _LIMITS]) + "\n"


def _curve_caption(results: Record) -> str:
    band = " Lines are means over seeds, bands run from the lowest to the highest seed." if results["n"] > 1 else ""
    longest = max((len(run["curve"]) for arm in results["arms"] for run in arm["runs"]), default=0)
    skipped = f"; the first {100 * _SKIPPED:.0f} % of the steps are not shown" if longest >= _FEW else ""
    return f"Baselines dashed, other arms solid{skipped}.{band}"


def _tuning_text(results: Record) -> list[str]:
    rates = sorted({run["lr"] for arm in results["arms"] for run in arm["tuning"]})
    rows = []
    for arm, head in [(each, head) for each in results["arms"] for head in _head_rates(each)]:
        tried = {run["lr"]: judged(run, "selection") for run in arm["tuning"] if run["head_lr"] == head}
        cells = [NONE if lr not in tried else "diverged" if tried[lr] is None else f"{tried[lr]:.4f}" for lr in rates]
        best = arm["lr"] if head == arm["head_lr"] and tried else None
        bold = [f"**{cell}**" if lr == best else cell for lr, cell in zip(rates, cells, strict=True)]
        name = arm["name"] if head is None else f"{arm['name']}, head {head:g}"
        rows.append((name, *bold, f"{lr_text(arm)} ({arm['lr_source']})"))
    what = "Final loss" if by_loss(results) else f"{results['metric']['name'].capitalize()} on held-out examples"
    intro = f"{what} on the tuning seed ({results['tuning_seed']}) by learning rate; the best is in bold."
    return [intro, markdown_table(("arm", *(f"{lr:g}" for lr in rates), "chosen"), rows)]


def _head_rates(arm: Record) -> list[float | None]:
    """The rates of the head that were tried with an arm's own; of an arm without such, None alone."""
    return sorted({run["head_lr"] for run in arm["tuning"]} or {arm["head_lr"]}, key=lambda rate: rate or 0.0)


_TRAINING_TEXT = """\
Nats an image; means over seeds. As trained: on augmented images, over the last tenth of the steps. Without \
augmentation: on some of the training images as they are, after the last step. A delta (paired by seed) below 0 fits \
them better."""

_LIMITS = """\
- Seeds are the sample: the intervals speak of other seeds of this recipe, not of other texts, sizes or lengths of \
training. Every seed gives all arms the same batches in the same order and the same evaluation data.
- p is of the paired t-test over seeds, p (Holm) corrected for the number of arms in the table. Speedups \
are corrected only where "faster" is said; a number is given only when every seed reached the reference's final loss.
- Learning rates are tuned on one seed of their own, so the best one is uncertain by about one step of the grid.
- A grade counts the conditions of nlr_lab/compare/grade.py that a claim meets; "faster" is said only where all but a \
downstream score are met.
- Every number is defined in docs/compare.md, "What is printed"."""


def draw_models(out: Path, results: Record) -> None:
    """Draw the pictures of a record: `curves.png`; `training.png` where there are training losses; `rates.png` where
    learning rates were tuned."""
    metric = results["metric"]
    label = f"evaluation loss ({metric['unit']})" if by_loss(results) else f"{metric['name']} on held-out examples"
    _plot_curves(out / "curves.png", results, label, "curve" if by_loss(results) else "metric_curve")
    for name in ("training.png", "rates.png"):  # of a call before, which tuned
        (out / name).unlink(missing_ok=True)
    if _has_training(results):
        _plot_curves(out / "training.png", results, "training loss", "train_curve")
    if any(arm["tuning"] for arm in results["arms"]):
        _plot_rates(out / "rates.png", results, label)


def _has_training(results: Record) -> bool:
    return any(run.get("train_curve") for arm in results["arms"] for run in arm["runs"])


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
        return (np.empty(0),) * 4
    first, last = max(points[0, 0] for points in kept), min(points[-1, 0] for points in kept)
    steps = np.unique(np.concatenate([points[:, 0] for points in kept]))
    steps = steps[(steps >= first) & (steps <= last)]
    losses = np.stack([np.interp(steps, points[:, 0], points[:, 1]) for points in kept])
    return steps, losses.mean(0), losses.min(0), losses.max(0)


def _lines(arms: Sequence[Record]) -> Iterator[tuple[Record, str, Any]]:
    """Yield arms with their colours and line styles: baselines grey and dashed, each of another dash pattern, others
    solid, and dotted or dash-dotted where the colours are used up."""
    grey = zip(cycle(GREYS), ((0, (5, 1 + 1.5 * index)) for index in count()))
    colours = ((colour, style) for style in cycle(("-", ":", "-.")) for colour in COLOURS)
    return ((arm, *next(grey if arm["control"] else colours)) for arm in arms)


def _plot_curves(path: Path, results: Record, label: str, which: str) -> None:
    """Draw curves as in Figures 1, 3 and 4 of noble.txt: the mean over seeds, with a band of lowest to highest.

    `which` of each run's: "curve" and "metric_curve" are evaluations, "train_curve" the training loss. One plot is
    against steps (and tokens), others against FLOPs and time where these are known. In the first the reference's final
    loss (mean over seeds) is a dotted horizontal line.
    """
    scales = _scales(results)
    figure, panels = new_panels(8.0 if len(scales) == 1 else 5.5, 5.0, len(scales))
    runs = {arm["name"]: [run for run in arm["runs"] if run["seed"] in results["seeds"]] for arm in results["arms"]}
    curves = [run.get(which, ()) for of_arm in runs.values() for run in of_arm]
    skip = 0 if max(map(len, curves), default=0) < _FEW else _SKIPPED
    last = max((step for curve in curves for step, _ in curve), default=0)
    for arm, colour, style in _lines(results["arms"]):
        steps, mean, low, high = mean_curve([run.get(which, ()) for run in runs[arm["name"]]])
        shown = steps >= skip * last
        if not shown.any():
            continue
        for axes, by_arm in zip(panels, scales.values(), strict=True):
            x = steps[shown] * by_arm[arm["name"]]
            axes.plot(x, mean[shown], color=colour, linestyle=style, linewidth=1.8, label=arm["name"])
            if len(runs[arm["name"]]) > 1:
                axes.fill_between(x, low[shown], high[shown], color=colour, alpha=0.15, linewidth=0)
    target = next(arm["final_loss"]["mean"] for arm in results["arms"] if arm["name"] == results["reference"])
    has_curves = bool(panels[0].lines)
    if which == "curve" and target is not None and math.isfinite(target):
        for axes in panels:
            axes.axhline(target, color="#444444", linestyle=":", linewidth=1.0)
        place: dict[str, Any] = {"transform": panels[0].get_yaxis_transform(), "fontsize": 8, "color": "#444444"}
        panels[0].text(0.005, target, "final loss of the reference", ha="left", va="bottom", **place)
    for axes, name in zip(panels, scales, strict=True):
        axes.set_xlabel(name)
    panels[0].set_xlabel(f"step (first {skip:.0%} not shown)" if skip else "step")
    if tokens := _tokens_of_step(results):
        times, over = (lambda step: step * tokens), (lambda count: count / tokens)
        panels[0].secondary_xaxis("top", functions=(times, over)).set_xlabel("tokens")
    panels[0].set_ylabel(label)
    figure.suptitle(f"{results['recipe']['name']}, n = {results['n']}", parse_math=False)
    if has_curves:
        panels[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def _tokens_of_step(results: Record) -> int | None:
    settings = results["recipe"]["settings"]
    length, batch = settings.get("task.text.sequence_length"), settings.get("train.batch_size")
    return length * batch if length and batch else None


def _scales(results: Record) -> dict[str, dict[str, float]]:
    """Return what a curve is drawn against, and by arm how much of that a step is; what is not known is left out."""
    arms = {arm["name"]: arm for arm in results["arms"]}
    scales: dict[str, dict[str, float]] = {"step": dict.fromkeys(arms, 1.0)}
    if (tokens := _tokens_of_step(results)) and all(arm["flops_per_token"] for arm in arms.values()):
        scales["training FLOPs"] = {name: 3.0 * tokens * arm["flops_per_token"] for name, arm in arms.items()}
    if all(arm["step_seconds_median"] for arm in arms.values()):
        scales["hours of training"] = {name: arm["step_seconds_median"] / 3600 for name, arm in arms.items()}
    return scales


def _plot_rates(path: Path, results: Record, label: str) -> None:
    """Draw what each arm's learning rate was chosen by: the chosen one ringed, diverged runs as crosses at the top."""
    figure, axes = new_figure(7.0, 4.5)
    tuned = [arm for arm in results["arms"] if arm["tuning"]]
    for index, (arm, colour, style) in enumerate(_lines(tuned)):
        shown = [run for run in arm["tuning"] if arm["head_lr"] in (None, run["head_lr"])]
        scores = [(run["lr"], judged(run, "selection")) for run in shown]
        finite = sorted(point for point in scores if point[1] is not None)
        line: dict[str, Any] = {"color": colour, "linestyle": style, "label": arm["name"]}
        axes.plot(*_columns(finite), marker=_MARKERS[index % len(_MARKERS)], markersize=4, **line)
        # At 0.98 of the axes' height whatever the losses are; nudged by arm so that crosses do not overlap.
        lost = [(rate, 0.98 - 0.025 * index) for rate, score in scores if score is None]
        axes.plot(*_columns(lost), "x", color=colour, markersize=6, transform=axes.get_xaxis_transform())
        if ringed := [point for point in finite if point[0] == arm["lr"]]:
            axes.plot(*_columns(ringed), "o", markersize=11, markerfacecolor="none", color=colour)
    axes.set_xscale("log")
    axes.set_xticks(sorted({run["lr"] for arm in tuned for run in arm["tuning"]}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate (ring: chosen, cross: diverged)")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def _columns(points: Sequence[tuple[float, Any]]) -> tuple[list[float], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]
