"""The common parts of reports: numbers as text, tables, and sentences made from `results.json` alone.

A difference is claimed only where its 95 % interval excludes zero (a ratio: one); anything else reads "no difference
shown", with the n.
"""

from collections.abc import Iterator, Mapping, Sequence
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


def judged(run: Record) -> float | None:
    """Return what a run is compared by."""
    return run["final_loss"] if run["score"] is None or run["final_loss"] is None else run["score"]


def by_loss(results: Record) -> bool:
    return results["metric"]["name"] == "loss"


def score_name(results: Record) -> str:
    """Name of the number that runs are compared by."""
    return "final loss" if by_loss(results) else results["metric"]["name"]


# --- tables --------------------------------------------------------------------------------------------------


def console_tables(sections: Sequence[Section]) -> Group:
    """The console's tables, for `rich.print`; intervals on a line of their own."""
    tables = []
    for title, head, rows in sections:
        table = Table(title=Text(title), title_justify="left")
        for index, name in enumerate(head):
            table.add_column(_cell(name), justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(_cell, row))
        tables.append(table)
    return Group(*tables)


def _cell(text: str) -> Text:
    """Text, not str: rich reads square brackets as markup."""
    return Text(text.replace(" [", "\n["))


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
