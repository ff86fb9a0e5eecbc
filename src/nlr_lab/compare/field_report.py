"""What a comparison of fields says: the console table and `report.md`, both made from `results.json` alone.

A difference is claimed only where its 95 % interval excludes zero; anything else reads "no difference shown".
"""

import io
import shutil
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .field_pictures import metric_name, omega_sweeps, score_label
from .report import caution_sentence, delta_text, markdown_table, p_text

Record = Mapping[str, Any]
_NONE = "-"


def render_table(results: Record) -> str:
    """The table and what was found, for the console."""
    table = Table(title=Text(f"{results['problem']}, n = {results['n']}"), title_justify="left")
    head, rows = _arms(results, all_metrics=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index < 7)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=max(110, shutil.get_terminal_size((130, 40)).columns))
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join([console.file.getvalue(), *(f"- {line}" for line in findings(results))])


def render_report(results: Record) -> str:
    """`report.md`."""
    score = score_label(results)
    parts = [
        f"# {results['recipe']}: {results['problem']}",
        f"Score: {score}, mean and standard deviation over n = {results['n']} seeds ({_seeds(results)}). "
        f"Where an arm had a choice of init and learning rate, it runs at its best of seed {results['tuning_seed']}. "
        f"`late` is what the last {_late_share(results)} % of the steps added to the score. "
        f"Sizes are shares of the dense network's {results['dense_parameters']:,} parameters.",
        markdown_table(*_arms(results)),
        "## Sine against plain low rank, at equal parameters",
        markdown_table(*_pairs(results)) if results["pairs"] else "No rank has both.",
        "\n".join(f"- {line}" for line in findings(results)),
        "![score against size](rate.png)",
        *(["![score against omega](omega.png)"] if omega_sweeps(results) else []),
        f"![ground truth and fits, seed {results['seeds'][0] if results['seeds'] else _NONE}](strip.png)",
        "## How",
        f"`{results['command']}`",
        markdown_table(("setting", "value"), [(name, str(value)) for name, value in results["settings"].items()]),
        ", ".join(f"{name} {value}" for name, value in results["versions"].items())
        + f"; {results['machine']['processor']}, {results['machine']['device']}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def findings(results: Record) -> list[str]:
    """Sentences, each made from the numbers."""
    unit = f" {results['unit']}" if results["unit"] else ""
    lines = []
    for pair in results["pairs"]:
        delta = pair["delta"]
        if delta["value"] is None:
            said = f"no difference to give ({delta['note']})"
        elif delta["low"] is None:
            said = f"{delta['value']:+.3g}{unit}, n = {delta['n']} ({delta['note']})"
        elif delta["shown"]:
            said = f"{'above' if delta['value'] > 0 else 'below'} by {abs(delta['value']):.3g}{unit}"
            said += f" [{delta['low']:+.3g}, {delta['high']:+.3g}], n = {delta['n']}"
        else:
            said = f"no difference shown, {delta['value']:+.3g}{unit} [{delta['low']:+.3g}, {delta['high']:+.3g}]"
        caution = caution_sentence(pair.get("cautions", ())) if delta["shown"] else ""
        lines.append(f"{pair['sine']} against {pair['low_rank']}: {said}.{caution}")
    curves = results["rate_distortion"]
    score = "BD-PSNR" if results["score"] == "psnr" else f"BD-{results['score']}"
    for key, name, form, of in (("bd_rate", "BD-rate", "+.2f", " %"), ("bd_score", score, "+.3g", unit)):
        if not (curves["low-rank"] and curves["sine"]):
            continue
        if curves[key] is None:
            lines.append(f"{name} of sine over low rank: none, since {curves[f'{key}_note']}.")
            continue
        seeds = curves[f"{key}_by_seed"]
        each = ", ".join(_NONE if value is None else format(value, form) for value in seeds)
        spread = f" (seed by seed: {each})" if len(seeds) > 1 else ""
        lines.append(f"{name} of sine over low rank: {curves[key]:{form}}{of}{spread}.")
    return lines + list(results["notes"])


def _arms(results: Record, *, all_metrics: bool = True) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    others = [name for name in _metrics(results) if all_metrics and name != results["score"]]
    timed = results["step_time_base"]
    sines = any(arm["omega"] is not None for arm in results["arms"])
    head = ("arm", "init", "lr", "parameters", "%", score_label(results), "n", "late", *map(metric_name, others))
    head += (f"step time over {timed}'s",) if timed else ()
    head = (head[0], "omega", *head[1:]) if sines else head
    rows = []
    for arm in results["arms"]:
        row = [
            arm["name"],
            arm["init"] or _NONE,
            _NONE if arm["lr"] is None else f"{arm['lr']:g}",
            f"{arm['parameters']:,}",
            f"{arm['percent']:.3g}",
            _score(arm),
            str(arm["n"]),
            _NONE if arm["late_gain"] is None else f"{arm['late_gain']:+.2g}",
            *(f"{arm['metrics'][name]:.4g}" if name in arm["metrics"] else _NONE for name in others),
        ]
        if timed:
            row.append(f"{arm['step_time']['median']:.3f}")
        if sines:
            row.insert(1, _NONE if arm["omega"] is None else f"{arm['omega']:g}")
        rows.append(tuple(row))
    return head, rows


def _pairs(results: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    for pair in results["pairs"]:
        delta = pair["delta"]
        values = (delta_text(delta), p_text(delta["p_value"]), p_text(pair["p_holm"]))
        rows.append((pair["sine"], pair["low_rank"], *values))
    return ("arm", "over", f"delta of {score_label(results)} [95 %]", "p", "p (Holm)"), rows


def _score(arm: Record) -> str:
    if arm["mean"] is None:
        return f"diverged in {len(arm['diverged'])}" if arm["diverged"] else "diverged" if arm["lr"] is None else _NONE
    return f"{arm['mean']:.4g}" + ("" if arm["sd"] is None else f" +- {arm['sd']:.2g}")


def _metrics(results: Record) -> list[str]:
    return list(next((arm["metrics"] for arm in results["arms"] if arm["metrics"]), {}))


def _late_share(results: Record) -> str:
    """Records from before there were shares have fifths."""
    shares = [arm.get("late_share", 0.2) for arm in results["arms"] if arm["late_gain"] is not None]
    return f"{100 * max(shares, default=0.2):.0f}"


def _seeds(results: Record) -> str:
    return ", ".join(map(str, results["seeds"])) or "none yet"
