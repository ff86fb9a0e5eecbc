"""What a comparison says: the console tables and `report.md`, both made from `results.json` alone.

Every sentence is generated from the numbers. A difference is claimed only where its 95 % interval excludes
zero (a ratio: one); anything else reads "no difference shown", with the n.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]
_SAME = 1.002  # norms and biases alone are no larger model
_NONE = "-"


# --- numbers as text -----------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """`+5.70 %`, or a dash where nothing was measured."""
    return _NONE if value is None else f"{value:+.2f} %"


def p_text(value: float | None) -> str:
    if value is None:
        return _NONE
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


def _time_text(time: Record | None) -> str:
    if time is None:
        return _NONE
    low, high = 100 * (time["lower_quartile"] - 1), 100 * (time["upper_quartile"] - 1)
    return f"{100 * (time['median'] - 1):+.1f} % [{low:+.1f}, {high:+.1f}]"


def _rate(arm: Record) -> str:
    return _NONE if arm["lr"] is None else f"{arm['lr']:g}"


def _score_text(arm: Record, seeds: Collection[int]) -> str:
    """The mean; or why there is none; and how many of the runs behind it diverged, though to a finite loss."""
    score = arm.get("score", arm["final_loss"])
    if score["mean"] is None:
        return str(score["note"])
    lost = sum(run["seed"] in seeds and run.get("diverged_at") is not None for run in arm["runs"])
    return f"{score['mean']:.4f}" + (f" (diverged in {lost} of {score['n']} seeds)" if lost else "")


# Records from before there were other scores than the loss.
_LOSS = {"name": "loss", "higher_is_better": False, "unit": "nats per token"}


def _metric(results: Record) -> Record:
    return results.get("metric", _LOSS)


def _by_loss(results: Record) -> bool:
    return _metric(results)["name"] == "loss"


def _has_speed(results: Record) -> bool:
    """Whether speedups can be read: losses, and more of each curve than its end."""
    return _by_loss(results) and any(len(run["curve"]) > 1 for arm in results["arms"] for run in arm["runs"])


def _is_tuning(results: Record) -> bool:
    """Whether pretrained models are tuned: then what counts is how many parameters are trained."""
    return any((arm.get("trainable") or arm["parameters"]) < arm["parameters"] for arm in results["arms"])


def chosen_by(run: Record) -> float | None:
    """What a run of the tuning is judged by."""
    selection = run.get("selection")
    return run["final_loss"] if selection is None or run["final_loss"] is None else selection


def judged(run: Record) -> float | None:
    """What a run is compared by."""
    score = run.get("score")
    return run["final_loss"] if score is None or run["final_loss"] is None else score


# --- tables --------------------------------------------------------------------------------------------------

_DELTA_HEAD = ("delta [95 %]", "p", "p (Holm)")
_TIME_HEAD = ("arm", "step time [quartiles]")
_SPEED_HEAD = ("arm", "step time [quartiles]", "step speedup [95 %]", "p", "wall-clock speedup [95 %]", "p")
_MATCHED_HEAD = ("arm", "matched speedup, steps [95 %]", "p", "wall clock [95 %]", "p")


def _rows(results: Record) -> Iterator[tuple[Record, Record | None]]:
    pairs = results["against"].get(results["reference"], {})
    for arm in results["arms"]:
        yield arm, pairs.get(arm["name"])


def score_head(results: Record) -> tuple[str, ...]:
    """The columns of the main table."""
    cost = ("trainable",) if _is_tuning(results) else ("params", "FLOPs")
    return ("arm", "rate", *cost, score_name(results), *(() if _by_loss(results) else ("best step",)), *_DELTA_HEAD)


def score_rows(results: Record) -> list[tuple[str, ...]]:
    """The rows under `score_head`, one for each arm."""
    rows: list[tuple[str, ...]] = []
    for arm, pair in _rows(results):
        if _is_tuning(results):
            cost: tuple[str, ...] = (f"{arm['trainable']:,}",)
        else:
            cost = (percent(arm["parameters_percent"]), percent(arm["flops_percent"]))
        if pair is None:
            tail = ("reference", _NONE, _NONE) if arm["name"] == results["reference"] else (_NONE,) * 3
        else:
            tail = (delta_text(pair["delta"]), p_text(pair["delta"]["p_value"]), p_text(pair["p_holm"]))
        best = arm.get("best_score")
        shown = () if _by_loss(results) else (_NONE if best is None else f"{best:.4f}",)
        rows.append((arm["name"], _rate(arm), *cost, _score_text(arm, results["seeds"]), *shown, *tail))
    return rows


def speed_rows(results: Record) -> list[tuple[str, ...]]:
    """The rows under `_SPEED_HEAD`: time of a step, step speedup and wall-clock speedup.

    Under `_TIME_HEAD` where there is no curve to read a speed from (`_has_speed`).
    """
    rows: list[tuple[str, ...]] = []
    for arm, pair in _rows(results):
        if pair is not None and not _has_speed(results):
            rows.append((arm["name"], _time_text(arm["step_time_ratio"])))
        elif pair is not None:
            steps, wall = pair["step_speedup"], pair["wall_clock_speedup"]
            tail = (ratio_text(steps), p_text(steps["p_value"]), ratio_text(wall), p_text(wall["p_value"]))
            rows.append((arm["name"], _time_text(arm["step_time_ratio"]), *tail))
    return rows


def matched_rows(results: Record) -> list[tuple[str, ...]]:
    """The rows under `_MATCHED_HEAD`: the speedup that also exists for arms slower than the reference."""
    rows: list[tuple[str, ...]] = []
    for arm, pair in _rows(results):
        if pair is not None:
            steps, wall = pair["matched_speedup"], pair["matched_wall_clock_speedup"]
            tail = (ratio_text(steps), p_text(steps["p_value"]), ratio_text(wall), p_text(wall["p_value"]))
            rows.append((arm["name"], *tail))
    return rows


_TRAINING_HEAD = ("arm", "as trained", "delta [95 %]", "p", "without augmentation", "delta [95 %]", "p")


def training_rows(results: Record) -> list[tuple[str, ...]]:
    """The rows under `_TRAINING_HEAD`; none where the training examples are not augmented."""

    def cells(arm: Record, which: str) -> tuple[str, str, str]:
        loss, delta = arm[f"{which}_loss"], arm.get(f"{which}_delta")
        text = str(arm["final_loss"]["note"]) or _NONE if loss is None else f"{loss:.4f}"
        if delta is None:
            return text, "reference" if arm["name"] == results["reference"] else _NONE, _NONE
        return text, delta_text(delta), p_text(delta["p_value"])

    arms = results["arms"] if any(arm.get("plain_loss") is not None for arm in results["arms"]) else []
    return [(arm["name"], *cells(arm, "train"), *cells(arm, "plain")) for arm in arms]


def _some_not_reached(results: Record) -> bool:
    return _has_speed(results) and any(pair is not None and pair["reached"] < pair["n"] for _, pair in _rows(results))


def render_tables(results: Record) -> Group:
    """The console's tables, for `rich.print`."""
    n, reference = results["n"], results["reference"]
    sections = [
        (f"{_metric(results)['name'].capitalize()} against {reference} (n = {n})", *_score_table(results)),
    ]
    if _has_speed_rows(results):
        sections.append((f"Speed against {reference} (n = {n})", *_speed_table(results)))
    if training_rows(results):
        sections.append(("Training loss", _TRAINING_HEAD, training_rows(results)))
    if _some_not_reached(results):
        title = "Speed at the lowest loss that both reach (below 1x: slower)"
        sections.append((title, _MATCHED_HEAD, matched_rows(results)))
    tables = []
    for title, head, rows in sections:
        table = Table(title=Text(title), title_justify="left")
        for index, name in enumerate(head):
            table.add_column(_cell(name), justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(_cell, row))
        tables.append(table)
    return Group(*tables)


def _score_table(results: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return score_head(results), score_rows(results)


def _speed_table(results: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return (_SPEED_HEAD if _has_speed(results) else _TIME_HEAD), speed_rows(results)


def _has_speed_rows(results: Record) -> bool:
    """Whether anything about speed was measured."""
    return any(cell != "-" for row in speed_rows(results) for cell in row[1:])


def _cell(text: str) -> Text:
    """Intervals on a line of their own. Text, not str: rich reads square brackets as markup."""
    return Text(text.replace(" [", "\n["))


def score_name(results: Record) -> str:
    """Of the number that runs are compared by."""
    return "final loss" if _by_loss(results) else _metric(results)["name"]


def markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table as Markdown has it; the cells' bars are escaped."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "---|" * len(head)
    return "\n".join([line(head), rule, *(line(row) for row in rows)])


# --- sentences -----------------------------------------------------------------------------------------------


def _delta_sentence(name: str, reference: str, pair: Record, metric: Record) -> str:
    delta, n = pair["delta"], pair["n"]
    if delta["value"] is None:
        return f"`{name}`: no {metric['name']} difference from `{reference}` can be given ({delta['note']})."
    size = f"{abs(delta['value']):.4f} {metric['unit'] or 'of ' + metric['name']}"
    if delta["low"] is None:
        side = "lower" if delta["value"] < 0 else "higher"
        return (
            f"`{name}`: {size} {side} than `{reference}` in what was run, but {delta['note']} "
            f"(n = {n}), so no difference is shown."
        )
    interval = f"95 % interval {delta['low']:+.4f} to {delta['high']:+.4f}, {_p_clause(delta['p_value'])}"
    if not delta["shown"]:
        return f"`{name}`: no difference from `{reference}` shown at n = {n} (delta {delta['value']:+.4f}, {interval})."
    side = "lower" if delta["value"] < 0 else "higher"
    worth = "" if not metric["higher_is_better"] else ", better" if delta["value"] > 0 else ", worse"
    text = f"`{name}` ended {size} **{side}** than `{reference}`{worth} ({interval}, n = {n})."
    if pair["p_holm"] is not None and pair["p_holm"] >= 0.05:
        text += f" After Holm's correction for the number of arms {_p_clause(pair['p_holm'])}: a hint, not a finding."
    return text


def _speed_sentence(name: str, reference: str, pair: Record) -> str:
    steps, matched, n = pair["step_speedup"], pair["matched_speedup"], pair["n"]
    if pair["diverged"] or not pair["seeds"]:
        return ""
    if pair["reached"] < n:
        text = f"It reached the final loss of `{reference}` in {pair['reached']} of {n} seeds: no step speedup."
        if matched["value"] is None:
            return text
        return f"{text} At the lowest loss that both reach, its speed in steps is {ratio_text(matched)}."
    if steps["value"] is None:
        return f"No step speedup: {steps['note']}."
    if steps["shown"]:
        word = "faster" if steps["value"] > 1 else "slower"
        text = f"It reached that model's final loss {ratio_text(steps)} as fast in steps: **{word}**."
    else:
        text = f"Step speedup {ratio_text(steps)}: no difference shown."
    wall = pair["wall_clock_speedup"]
    if wall["value"] is None:
        return f"{text} Hours: {wall['note']}."
    if wall["shown"]:
        word = "faster" if wall["value"] > 1 else "slower"
        return f"{text} In hours {ratio_text(wall)}: **{word}**."
    return f"{text} In hours {ratio_text(wall)}: no difference shown."


def caution_sentence(cautions: Sequence[str]) -> str:
    """Stands behind a claim; empty where there is nothing to say."""
    return f" **Caution**: {'; '.join(cautions)}." if cautions else ""


def _cautioned(text: str, pair: Record) -> str:
    claims = (pair[name]["shown"] for name in ("delta", "step_speedup", "wall_clock_speedup"))
    return text + (caution_sentence(pair.get("cautions", ())) if any(claims) else "")


def findings(results: Record) -> list[str]:
    """What was found, one item for each arm that is not a control, then what clouds it."""
    metric = _metric(results)
    lines = []
    arms = {arm["name"]: arm for arm in results["arms"]}
    if results["n"] == 0:
        lines.append("No seed was finished by all arms: there is nothing to compare yet.")
    elif results["n"] == 1:
        lines.append("One seed was run (n = 1): no interval and no p-value, so nothing is shown either way.")
    controls = [arm for arm in results["arms"] if arm["control"] and _mean(arm) is not None]
    best = min(controls, key=lambda arm: -_mean(arm) if metric["higher_is_better"] else _mean(arm), default=None)
    for name, pair in results["against"].get(results["reference"], {}).items():
        if results["n"] == 0:
            break
        text = _delta_sentence(name, results["reference"], pair, metric)
        speed = _speed_sentence(name, results["reference"], pair) if _has_speed(results) else ""
        if speed:
            text += " " + speed
        lines.append(_cautioned(text, pair))
        # The gain over the strongest control is what the branch itself brings.
        if best is not None and not arms[name]["control"] and best["name"] != results["reference"]:
            second = results["against"][best["name"]].get(name)
            if second is not None:
                strongest = _delta_sentence(name, best["name"], second, metric)
                speed = _speed_sentence(name, best["name"], second) if _has_speed(results) else ""
                lines.append(_cautioned(f"Against the strongest control: {strongest} {speed}".rstrip(), second))
    return lines + list(results["notes"]) + _cautions(results)


def _mean(arm: Record) -> Any:
    return arm.get("score", arm["final_loss"])["mean"]


def _cautions(results: Record) -> list[str]:
    """What a reader must hold against a gain: rates that were not tuned, an init or a size without its control."""
    lines = []
    untuned = [arm["name"] for arm in results["arms"] if arm["lr"] is not None and not arm["tuning"]]
    if untuned and results["n"]:
        who = "Rates were not tuned" if len(untuned) == len(results["arms"]) else f"Not tuned: {', '.join(untuned)}"
        lines.append(f"{who}: a rate that suits one arm better can pass for a gain of the method (--tune-lr).")
    if _is_tuning(results):
        return lines
    own = results["recipe"]["settings"].get("task.backbone.dense_init")
    inits = {arm["settings"]["dense_init"] or own for arm in results["arms"] if arm["control"]}
    if any("noble" in arm["settings"]["method"].split("+") for arm in results["arms"]) and "noble" not in inits:
        lines.append("No control has NOBLE's dense init (baseline:init=noble): part of a difference may be the init's.")
    largest = max((arm["parameters"] for arm in results["arms"] if arm["control"]), default=0)
    larger = [arm["name"] for arm in results["arms"] if not arm["control"] and arm["parameters"] > _SAME * largest]
    if larger:
        lines.append(
            f"No control has as many parameters as {', '.join(larger)} (wide-mlp:match={larger[-1]}): part of a "
            "difference may be theirs."
        )
    return lines


# --- the report ----------------------------------------------------------------------------------------------

_TRAINING_TEXT = """\
Nats an image; means over seeds. As trained: on augmented images, over the last tenth of the steps. Without \
augmentation: on some of the training images as they are, after the last step. A delta (paired by seed) below 0 fits \
them better."""

_SEEDS = """\
- Seeds are the sample: the intervals speak of other seeds of this recipe, not of other texts, sizes or \
lengths of training."""

_SCORES = """\
- Delta: paired t-test over seeds on the {metric} after the last step, on examples that nothing was chosen by \
unless a line above says so. Every seed gives all arms the same batches in the same order and the same new head.
- Best step: chosen by the held-out examples, then scored; means over seeds, no test."""

_LOSSES = """\
- Delta: paired t-test over seeds on the loss at the last step. Every seed gives all arms the same batches in \
the same order and the same evaluation text."""

_SPEEDS = """\
- Step speedup: steps of the reference / steps of the arm to the first crossing of the reference's final loss \
on the linearly interpolated evaluation curve; geometric mean over seeds, t-test on logs. It is a number only \
when every seed reached that loss. A curve that rises again at its end flatters it.
- Matched speedup: the step speedup where it exists; where an arm never came down to the reference's final \
loss, the steps the reference took to the arm's final loss / the steps of the arm, which is below 1.
- Wall-clock speedup: speedup in steps / step-time ratio. Its error is bootstrapped and combined with that of \
the seeds on the log scale, so the interval is never narrower than that of the steps."""

_COMMON = """\
- Diverged: the loss was no longer a number, or the training loss rose by more than a quarter of what it had fallen, \
and stayed up for a twentieth of the run or to its end; the step is that of the first logged loss that was up. A \
finite loss is in the averages all the same.
- Step time: the median of paired ratios of interleaved training steps (all arms in turn, same batch) on the \
machine named below, quartiles in brackets; evaluation, loading and checkpoints are not in it.
- p (Holm) is corrected for the number of arms in the table. Speedups are not corrected.
- Learning rates are tuned on a seed of their own, which is not used in the comparison; a single tuning seed \
leaves the best rate uncertain by about one step of the grid."""


def _limits(results: Record) -> str:
    own = _LOSSES if _by_loss(results) else _SCORES.format(metric=_metric(results)["name"])
    speeds = (_SPEEDS,) if _has_speed(results) else ()
    return "\n".join((_SEEDS, own, *speeds, _COMMON))


def render_report(results: Record) -> str:
    """`report.md` from the record in `results.json`."""
    n, reference = results["n"], results["reference"]
    parts = [f"# {results['recipe']['name']}: {len(results['arms'])} arms, n = {n}", results["recipe"]["summary"]]
    parts += ["## What was found", "\n".join(f"- {line}" for line in findings(results))]
    parts += [*_score_section(results), markdown_table(*_score_table(results))]
    if training_rows(results):
        parts += ["## Training loss", _TRAINING_TEXT, markdown_table(_TRAINING_HEAD, training_rows(results))]
    if _has_speed_rows(results):
        parts += ["## Speed", markdown_table(*_speed_table(results))]
    if _some_not_reached(results):
        parts += ["At the lowest loss that both reach (below 1x is slower):"]
        parts += [markdown_table(_MATCHED_HEAD, matched_rows(results))]
    parts += ["![evaluation curves](curves.png)", _curve_caption(results)]
    others = [name for name in results["against"] if name != reference]
    if others:
        parts += ["## Against each control"]
        speeds = ("step speedup [95 %]", "matched speedup [95 %]") if _has_speed(results) else ()
        parts += [markdown_table(("arm", "against", *_DELTA_HEAD, *speeds), list(_control_rows(results, others)))]
    if any(arm["tuning"] for arm in results["arms"]):
        parts += [
            "## Learning rates",
            _tuning_text(results),
            f"![{_metric(results)['name']} against learning rate](rates.png)",
        ]
    parts += ["## Every run", markdown_table(*_run_table(results))]
    parts += ["## Settings", _settings_text(results)]
    parts += ["## How to repeat", f"```\n{results['command']}\n```"]
    again = " with `--resume`" if str(results["command"]).startswith("nlr ") else ""
    parts += [f"The same command{again} goes on where it stopped and reuses every finished run."]
    parts += ["## How to read it, and limits", _limits(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _score_section(results: Record) -> list[str]:
    metric, reference = _metric(results), results["reference"]
    if _by_loss(results):
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


def _control_rows(results: Record, others: list[str]) -> Iterator[tuple[str, ...]]:
    for other in others:
        for name, pair in results["against"][other].items():
            delta = pair["delta"]
            yield (
                name,
                other,
                delta_text(delta),
                p_text(delta["p_value"]),
                p_text(pair["p_holm"]),
                *((ratio_text(pair[f"{kind}_speedup"]) for kind in ("step", "matched")) if _has_speed(results) else ()),
            )


def _tuning_text(results: Record) -> str:
    rates = sorted({run["lr"] for arm in results["arms"] for run in arm["tuning"]})
    head = ("arm", *(f"{rate:g}" for rate in rates), "chosen")
    rows = []
    for arm in results["arms"]:
        losses = {run["lr"]: chosen_by(run) for run in arm["tuning"]}
        cells = []
        for rate in rates:
            loss = losses.get(rate, _NONE)
            text = "diverged" if loss is None else loss if isinstance(loss, str) else f"{loss:.4f}"
            cells.append(f"**{text}**" if rate == arm["lr"] and losses else text)
        rows.append((arm["name"], *cells, f"{_rate(arm)} ({arm['lr_source']})"))
    what = "Final loss" if _by_loss(results) else f"{_metric(results)['name'].capitalize()} on held-out examples"
    intro = f"{what} on the tuning seed ({results['tuning_seed']}) by learning rate; the best is in bold."
    return intro + "\n\n" + markdown_table(head, rows)


def _run_table(results: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    seeds = sorted({run["seed"] for arm in results["arms"] for run in arm["runs"]})
    rows = []
    for arm in results["arms"]:
        runs = {run["seed"]: run for run in arm["runs"]}
        cells = []
        for seed in seeds:
            run = runs.get(seed)
            loss = None if run is None else judged(run)
            if run is None:
                cells.append("not run")
            else:
                step = run["steps"] if loss is None else run.get("diverged_at")
                ended = "" if loss is None else f"{loss:.4f}, "
                cells.append(f"{loss:.4f}" if step is None else f"{ended}diverged at step {step}")
        sd = arm.get("score", arm["final_loss"])["sd"]
        rows.append((arm["name"], *cells, _NONE if sd is None else f"{sd:.4f}"))
    return (score_name(results), *(f"seed {seed}" for seed in seeds), "sd"), rows


def _settings_text(results: Record) -> str:
    lines = [f"- arm {arm['name']}: `{arm['settings']}`" for arm in results["arms"]]
    lines += [f"- {key}: `{value}`" for key, value in results["recipe"]["settings"].items()]
    lines += [f"- data.{key}: `{value}`" for key, value in results["data"].items()]
    lines += [f"- {key}: `{value}`" for key, value in results["machine"].items()]
    lines += [f"- {key}: `{value}`" for key, value in results["versions"].items()]
    return (
        "<details><summary>every setting, version and the machine</summary>\n\n" + "\n".join(lines) + ("\n\n</details>")
    )
