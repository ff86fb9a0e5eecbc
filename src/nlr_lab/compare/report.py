"""Reports, made from `results.json` alone: what all kinds share, and the report of model trainings.

A difference is claimed only where its 95 % interval excludes zero (a ratio: one); anything else reads "no difference
shown", with the n.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]
Row = tuple[str, ...]
Section = tuple[str, Row, list[Row]]
"""Title, head and rows of a table."""
NONE = "-"
DELTA_HEAD = ("delta [95 %]", "p", "p (Holm)")
_SAME = 1.002  # norms and biases alone are no larger model
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


def delta_text(estimate: Record) -> str:
    """`-0.0402 [-0.0511, -0.0293]`; without an interval the reason stands in its place."""
    return _estimate(estimate, "+.4f", "")


def ratio_text(estimate: Record) -> str:
    """`1.26x [1.18, 1.35]`; without an interval the reason stands in its place."""
    return _estimate(estimate, ".3f", "x")


def _estimate(estimate: Record, form: str, unit: str) -> str:
    if estimate["value"] is None:
        return str(estimate["note"])
    text = format(estimate["value"], form) + unit
    if estimate["low"] is None:
        return text + (" (n = 1)" if estimate["n"] == 1 else " (no interval)")
    return f"{text} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def lr_text(arm: Record) -> str:
    return NONE if arm["lr"] is None else f"{arm['lr']:g}"


def delta_cells(pair: Record) -> Row:
    """The cells under `DELTA_HEAD`."""
    return delta_text(pair["delta"]), p_text(pair["delta"]["p_value"]), p_text(pair["p_holm"])


def judged(run: Record, name: str = "score") -> float | None:
    """Return what a run is compared by; "selection": chosen by."""
    return run["final_loss"] if run[name] is None or run["final_loss"] is None else run[name]


def by_loss(results: Record) -> bool:
    return results["metric"]["name"] == "loss"


def score_name(results: Record) -> str:
    """Name of the number that runs are compared by."""
    return "final loss" if by_loss(results) else results["metric"]["name"]


# --- tables --------------------------------------------------------------------------------------------------


def console_tables(sections: Sequence[Section]) -> Group:
    """The console's tables, for `rich.print`; intervals on a line of their own."""

    def text(cell: str) -> Text:  # not str: rich reads square brackets as markup
        return Text(cell.replace(" [", "\n["))

    tables = []
    for title, head, rows in sections:
        table = Table(title=Text(title), title_justify="left")
        for index, name in enumerate(head):
            table.add_column(text(name), justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(text, row))
        tables.append(table)
    return Group(*tables)


def markdown_table(head: Row, rows: Sequence[Row]) -> str:
    """A table as Markdown has it; the cells' bars are escaped."""

    def line(cells: Row) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *(line(row) for row in rows)])


def run_table(results: Record) -> str:
    """Every run's score, by arm and seed."""
    seeds = sorted({run["seed"] for arm in results["arms"] for run in arm["runs"]})

    def cell(run: Record | None) -> str:
        if run is None:
            return "not run"
        score = judged(run)
        if score is None:
            return f"diverged at step {run['steps']}"
        return f"{score:.4f}" + ("" if run["diverged_at"] is None else f", diverged at step {run['diverged_at']}")

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
        f"The same command{again} goes on where it stopped and reuses every finished run.",
    ]


# --- sentences -----------------------------------------------------------------------------------------------


def delta_sentence(name: str, reference: str, pair: Record, metric: Record) -> str:
    """Say what the difference from the reference shows."""
    delta, n = pair["delta"], pair["n"]
    if delta["value"] is None:
        return f"`{name}`: no {metric['name']} difference from `{reference}` can be given ({delta['note']})."
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


def cautioned(text: str, pair: Record) -> str:
    """The text, followed by what its curves do not bear where it claims something."""
    claims = any(pair[name]["shown"] for name in ("delta", "step_speedup", "wall_clock_speedup"))
    return text + (f" **Caution**: {'; '.join(pair['cautions'])}." if claims and pair["cautions"] else "")


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


def score_table(results: Record) -> tuple[Row, list[Row]]:
    """The main table, a row for each arm."""
    tuning, with_best = _is_tuning(results), not by_loss(results)
    costs = ("trainable",) if tuning else ("params", "FLOPs")
    best_head = ("best step",) if with_best else ()
    rows: list[Row] = []
    for arm in results["arms"]:
        pair = _main_pairs(results).get(arm["name"])
        cost: Row = (percent(arm["parameters_percent"]), percent(arm["flops_percent"]))
        if tuning:
            cost = (f"{arm['trainable']:,}",)
        tail: Row = ("reference" if arm["name"] == results["reference"] else NONE, NONE, NONE)
        if pair is not None:
            tail = delta_cells(pair)
        best = arm["best_score"]
        shown = (NONE if best is None else f"{best:.4f}",) if with_best else ()
        rows.append((arm["name"], lr_text(arm), *cost, _score_text(arm, results), *shown, *tail))
    return ("arm", "lr", *costs, score_name(results), *best_head, *DELTA_HEAD), rows


def _score_text(arm: Record, results: Record) -> str:
    """The mean; or why there is none; and how many of the runs behind it diverged, though to a finite loss."""
    score = arm["score"]
    if score["mean"] is None:
        return str(score["note"])
    lost = sum(run["seed"] in results["seeds"] and run["diverged_at"] is not None for run in arm["runs"])
    return f"{score['mean']:.4f}" + (f" (diverged in {lost} of {score['n']} seeds)" if lost else "")


def _time_text(time: Record | None) -> str:
    if time is None:
        return NONE
    low, high = 100 * (time["lower_quartile"] - 1), 100 * (time["upper_quartile"] - 1)
    return f"{100 * (time['median'] - 1):+.1f} % [{low:+.1f}, {high:+.1f}]"


def _ratio_cells(pair: Record, *names: str) -> Row:
    return tuple(cell for name in names for cell in (ratio_text(pair[name]), p_text(pair[name]["p_value"])))


def training_rows(results: Record) -> list[Row]:
    """The rows under `_TRAINING_HEAD`; none where the training examples are not augmented."""

    def cells(arm: Record, which: str) -> Row:
        loss, delta = arm[f"{which}_loss"], arm[f"{which}_delta"]
        text = str(arm["final_loss"]["note"]) or NONE if loss is None else f"{loss:.4f}"
        if delta is None:
            return text, "reference" if arm["name"] == results["reference"] else NONE, NONE
        return text, delta_text(delta), p_text(delta["p_value"])

    if all(arm["plain_loss"] is None for arm in results["arms"]):
        return []
    return [(arm["name"], *cells(arm, "train"), *cells(arm, "plain")) for arm in results["arms"]]


def _sections(results: Record) -> dict[str, Section]:
    """The tables that there are numbers for."""
    n, reference, pairs, speeds = results["n"], results["reference"], _main_pairs(results), _has_speed(results)
    title = f"{results['metric']['name'].capitalize()} against {reference} (n = {n})"
    found: dict[str, Section] = {"score": (title, *score_table(results))}
    if training := training_rows(results):
        found["training"] = ("Training loss", _TRAINING_HEAD, training)
    times = {arm["name"]: _time_text(arm["step_time_ratio"]) for arm in results["arms"]}
    names = ("step_speedup", "wall_clock_speedup") if speeds else ()
    rows = [(name, times[name], *_ratio_cells(pair, *names)) for name, pair in pairs.items()]
    if any(cell != NONE for row in rows for cell in row[1:]):
        found["speed"] = (f"Speed against {reference} (n = {n})", _SPEED_HEAD if speeds else _SPEED_HEAD[:2], rows)
    if speeds and any(pair["reached"] < pair["n"] for pair in pairs.values()):
        rows = [(name, *_ratio_cells(p, "matched_speedup", "matched_wall_clock_speedup")) for name, p in pairs.items()]
        found["matched"] = ("Speed at the lowest loss that both reach (below 1x: slower)", _MATCHED_HEAD, rows)
    return found


def render_tables(results: Record) -> Group:
    """The console's tables, for `rich.print`."""
    return console_tables(list(_sections(results).values()))


# --- sentences -----------------------------------------------------------------------------------------------


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
        text = f"It reached that model's final loss {ratio_text(steps)} as fast in steps: {_faster(steps)}."
    if wall["value"] is None:
        return f"{text} Hours: {wall['note']}."
    return f"{text} In hours {ratio_text(wall)}: {_faster(wall) if wall['shown'] else 'no difference shown'}."


def _faster(ratio: Record) -> str:
    return "**faster**" if ratio["value"] > 1 else "**slower**"


def findings(results: Record) -> list[str]:
    """Say what was found, an item for each arm that is not a control, then what clouds it."""
    metric, reference, n = results["metric"], results["reference"], results["n"]
    lines = []
    if n == 0:
        lines.append("No seed was finished by all arms: there is nothing to compare yet.")
    elif n == 1:
        lines.append("One seed was run (n = 1): no interval and no p-value, so nothing is shown either way.")

    def verdict(name: str, other: str, pair: Record, before: str = "") -> str:
        speed = _speed_sentence(pair, other) if _has_speed(results) else ""
        return cautioned(f"{before}{delta_sentence(name, other, pair, metric)} {speed}".rstrip(), pair)

    controls = {arm["name"]: arm["score"]["mean"] for arm in results["arms"] if arm["control"]}
    controls = {name: mean for name, mean in controls.items() if mean is not None}
    choose: Callable[..., Any] = max if metric["higher_is_better"] else min
    best = choose(controls, key=controls.__getitem__, default=reference)
    arms = {arm["name"]: arm for arm in results["arms"]}
    for name, pair in _main_pairs(results).items() if n else ():
        lines.append(verdict(name, reference, pair))
        # The gain over the strongest control is what the branch itself brings.
        if best != reference and not arms[name]["control"]:
            lines.append(verdict(name, best, results["against"][best][name], "Against the strongest control: "))
    return lines + list(results["notes"]) + _clouds(results)


def _clouds(results: Record) -> list[str]:
    """Say what clouds a gain: learning rates that were not tuned, an init or a size without its control."""
    lines = []
    arms = results["arms"]
    untuned = [arm["name"] for arm in arms if arm["lr"] is not None and not arm["tuning"]]
    if untuned and results["n"]:
        who = "Learning rates were not tuned" if len(untuned) == len(arms) else f"Not tuned: {', '.join(untuned)}"
        lines.append(f"{who}: one that suits one arm better can pass for a gain of the method (--tune-lr).")
    if _is_tuning(results):
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


# --- the report ----------------------------------------------------------------------------------------------


def render_report(results: Record) -> str:
    """`report.md` from the record in `results.json`."""
    n, metric, sections = results["n"], results["metric"], _sections(results)

    def table(name: str, *before: str) -> list[str]:
        return [*before, markdown_table(*sections[name][1:])] if name in sections else []

    parts = [f"# {results['recipe']['name']}: {len(results['arms'])} arms, n = {n}", results["recipe"]["summary"]]
    parts += ["## What was found", "\n".join(f"- {line}" for line in findings(results))]
    parts += table("score", *_score_intro(results))
    parts += table("training", "## Training loss", _TRAINING_TEXT)
    parts += table("speed", "## Speed")
    parts += table("matched", "At the lowest loss that both reach (below 1x is slower):")
    parts += ["![evaluation curves](curves.png)", _curve_caption(results)]
    controls = [each for each in pairs_of(results) if each[1] != results["reference"]]
    if controls:
        speeds = ("step_speedup", "matched_speedup") if _has_speed(results) else ()
        rows = [
            (name, other, *delta_cells(p), *(ratio_text(p[each]) for each in speeds)) for name, other, p in controls
        ]
        head = ("arm", "against", *DELTA_HEAD, *(f"{each.replace('_', ' ')} [95 %]" for each in speeds))
        parts += ["## Against each control", markdown_table(head, rows)]
    if any(arm["tuning"] for arm in results["arms"]):
        picture = f"![{metric['name']} against learning rate](rates.png)"
        parts += ["## Learning rates", *_tuning_text(results), picture]
    limits = (_SEEDS, *(() if by_loss(results) else (_SCORES,)), *((_SPEEDS,) if _has_speed(results) else ()), _COMMON)
    parts += [*last_sections(results), "## How to read it, and limits", "\n".join(limits)]
    return "\n\n".join(parts) + "\n"


def _score_intro(results: Record) -> list[str]:
    metric, reference = results["metric"], results["reference"]
    if by_loss(results):
        return ["## Loss", f"Reference: `{reference}`. Loss in {metric['unit']}; a delta below 0 is better."]
    side = "above" if metric["higher_is_better"] else "below"
    return [
        f"## {metric['name'].capitalize()}",
        f"Reference: `{reference}`. {metric['name'].capitalize()} after the last step; a delta {side} 0 is better. "
        "Best step: the score at the evaluation at which the held-out examples scored best.",
    ]


def _curve_caption(results: Record) -> str:
    band = " Lines are means over seeds, bands run from the lowest to the highest seed." if results["n"] > 1 else ""
    longest = max((len(run["curve"]) for arm in results["arms"] for run in arm["runs"]), default=0)
    skipped = "; the first 20 % of the steps are not shown" if longest >= 10 else ""
    return f"Baselines dashed, other arms solid{skipped}.{band}"


def _tuning_text(results: Record) -> list[str]:
    rates = sorted({run["lr"] for arm in results["arms"] for run in arm["tuning"]})
    rows = []
    for arm in results["arms"]:
        tried = {run["lr"]: judged(run, "selection") for run in arm["tuning"]}
        cells = [NONE if lr not in tried else "diverged" if tried[lr] is None else f"{tried[lr]:.4f}" for lr in rates]
        bold = [f"**{cell}**" if lr == arm["lr"] and tried else cell for lr, cell in zip(rates, cells, strict=True)]
        rows.append((arm["name"], *bold, f"{lr_text(arm)} ({arm['lr_source']})"))
    what = "Final loss" if by_loss(results) else f"{results['metric']['name'].capitalize()} on held-out examples"
    intro = f"{what} on the tuning seed ({results['tuning_seed']}) by learning rate; the best is in bold."
    return [intro, markdown_table(("arm", *(f"{lr:g}" for lr in rates), "chosen"), rows)]


_TRAINING_TEXT = """\
Nats an image; means over seeds. As trained: on augmented images, over the last tenth of the steps. Without \
augmentation: on some of the training images as they are, after the last step. A delta (paired by seed) below 0 fits \
them better."""

_SEEDS = """\
- Seeds are the sample: the intervals speak of other seeds of this recipe, not of other texts, sizes or lengths of \
training. A delta is tested by the paired t-test over seeds, after the last step. Every seed gives all arms the same \
batches in the same order and the same evaluation data."""

_SCORES = """\
- Scored are examples that nothing was chosen by, unless a line above says so. Best step: chosen by the held-out \
examples, then scored; means over seeds, no test."""

_SPEEDS = """\
- Step speedup: steps of the reference / steps of the arm to the first crossing of the reference's final loss on the \
linearly interpolated evaluation curve; geometric mean over seeds, t-test on logs; a number only when every seed \
reached that loss. A curve that rises again at its end flatters it.
- Matched speedup: the step speedup where it exists; where an arm never came down to that loss, the steps that the \
reference took to the arm's final loss / the steps of the arm, which is below 1.
- Wall-clock speedup: speedup in steps / step-time ratio; the errors of both add on the log scale."""

_COMMON = """\
- Diverged: the loss was no longer a number, or the training loss rose by more than a quarter of what it had fallen, \
and stayed up for a twentieth of the run or to its end; the step is that of the first logged loss that was up. A \
finite loss is in the averages all the same.
- Step time: the median of paired ratios of interleaved training steps (all arms in turn, same batch) on the \
machine named above, quartiles in brackets; evaluation, loading and checkpoints are not in it.
- p (Holm) is corrected for the number of arms in the table. Speedups are not corrected.
- Learning rates are tuned on one seed of their own, so the best one is uncertain by about one step of the grid."""
