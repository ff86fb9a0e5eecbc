"""The report of neural fields: score by rank and size, sine against plain low rank, and the curves' distance."""

from rich.console import Group

from nlr_lab.compare.report import (
    DELTA_HEAD,
    NONE,
    Record,
    Row,
    cautioned,
    console_tables,
    delta_cells,
    last_sections,
    lr_text,
    markdown_table,
    pairs_of,
)

from .pictures import metric_name, omega_sweeps, score_label


def render_tables(results: Record) -> Group:
    """The console's table, for `rich.print`."""
    title = f"{results['problem']}, n = {results['n']}"
    return console_tables([(title, *_arm_table(results, all_metrics=False))])


def render_report(results: Record) -> str:
    """`report.md` from the record in `results.json`."""
    shares = [arm["late_share"] for arm in results["arms"] if arm["late_share"] is not None]
    seeds = ", ".join(map(str, results["seeds"])) or "none yet"
    rows = [(name, other, *delta_cells(pair)) for name, other, pair in pairs_of(results)]
    parts = [
        f"# {results['recipe']['name']}: {results['problem']}",
        f"Score: {score_label(results)}, mean and standard deviation over n = {results['n']} seeds ({seeds}). "
        f"Where an arm had a choice of init and learning rate, it runs at its best of seed {results['tuning_seed']}. "
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
    """Sentences, each made from the numbers."""
    unit = f" {results['metric']['unit']}" if results["metric"]["unit"] else ""
    lines = []
    for name, other, pair in pairs_of(results):
        delta = pair["delta"]
        if delta["value"] is None:
            text = f"no difference to give ({delta['note']})."
        elif delta["low"] is None:
            text = f"{delta['value']:+.3g}{unit}, n = {delta['n']} ({delta['note']})."
        else:
            interval = f"[{delta['low']:+.3g}, {delta['high']:+.3g}], n = {delta['n']}."
            text = f"no difference shown, {delta['value']:+.3g}{unit} {interval}"
            if delta["shown"]:
                side = "above" if delta["value"] > 0 else "below"
                text = f"{side} by {abs(delta['value']):.3g}{unit} {interval}"
        lines.append(cautioned(f"{name} against {other}: {text}", pair))
    return lines + _distance_sentences(results, unit) + list(results["notes"])


def _distance_sentences(results: Record, unit: str) -> list[str]:
    curves, score = results["rate_distortion"], results["metric"]["name"]
    if not (curves["low-rank"] and curves["sine"]):
        return []
    lines = []
    bd_score = "BD-PSNR" if score == "psnr" else f"BD-{score}"
    for key, name, form, of in (("bd_rate", "BD-rate", "+.2f", " %"), ("bd_score", bd_score, "+.3g", unit)):
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
