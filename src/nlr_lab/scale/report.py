"""A ladder's page and picture, made from its record alone."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from nlr_lab.compare.grade import grade_cell
from nlr_lab.compare.report import NONE, estimate_text, markdown_table, p_text, ratio_text
from nlr_lab.runtime.tables import COLOURS, GREYS, new_panels, save

from .joint import CONSTANTS, LEAST

Record = Mapping[str, Any]
REPORT, PICTURE = "report.md", "ladder.png"
SPEEDS = ("steps", "FLOPs", "hours")
_ENDS = ("value", "low", "high")


def render(results: Record) -> str:
    """Return the whole page."""
    parts = ["# Ladder", *tables(results)]
    if any(law["rungs"] > 1 for law in results["laws"]):
        parts.append(f"![losses, differences and speeds by size]({PICTURE})")
    notes = [f"- {rung['rung']}: {note}" for rung in results["rungs"] for note in (*_limits(rung), *rung["notes"])]
    parts += ["## Notes", "\n".join(notes)] if notes else []
    machines = sorted({str(rung["machine"]["processor"]) for rung in results["rungs"]})
    settings = ", ".join(f"{name} {value}" for name, value in results["settings"].items())
    parts += ["## Settings", f"{settings}. On {', '.join(machines)}. To repeat: `{results['command']}`"]
    return "\n\n".join(parts) + "\n"


def tables(results: Record) -> list[str]:
    """Return headings and tables, in the order of the page."""
    parts: list[str] = []
    for tokens in sorted({rung["tokens"] for rung in results["rungs"]}):
        rungs = [rung for rung in results["rungs"] if rung["tokens"] == tokens]
        names = list(dict.fromkeys(name for rung in rungs for name in rung["arms"]))
        reference = rungs[0]["reference"]
        others = [name for name in names if name != reference]
        head = ("arm", *(f"width {rung['width']}" for rung in rungs))

        def rows(cell: Any, of: Sequence[str], rungs: Sequence[Record] = rungs) -> list[tuple[str, ...]]:
            return [(name, *(_cell(cell, rung, name) for rung in rungs)) for name in of]

        parts += [f"## {tokens:g} tokens a parameter", "Final loss, standard deviation over seeds, n:"]
        parts += [markdown_table(head, rows(_loss, names))]
        parts += [f"Less that of `{reference}`, paired by seed, with 95 % interval, p after Holm, grade of a claim:"]
        parts += [markdown_table(head, rows(_delta, others))]
        parts += [
            f"Speedup to a common loss with `{reference}` (below 1: slower), in steps, in FLOPs and in hours, along "
            "the runs' own curves:",
            markdown_table(head, rows(_speed, others)),
        ]
        parts += [
            "Best learning rates, and FLOPs a token over the reference's:",
            markdown_table(head, rows(_rate, names)),
        ]
        laws = [law for law in results["laws"] if law["tokens"] == tokens]
        parts += _law_table(laws, reference, any(rung["n"] == 2 for rung in rungs))
    return parts + _joint_table(results) + _predicted_tables(results["predicted"])


def _cell(cell: Any, rung: Record, name: str) -> str:
    arm = rung["arms"].get(name)
    return NONE if arm is None else str(cell(arm, rung))


def _loss(arm: Record, rung: Record) -> str:
    if arm["mean"] is None:
        return "diverged"
    return f"{arm['mean']:.4f}" + (f" +- {arm['sd']:.4f}" if arm["sd"] is not None else "") + f" ({rung['n']})"


def _delta(arm: Record, rung: Record) -> str:
    if (pair := arm["against"]) is None:
        return NONE
    shown = f", grade {grade_cell(pair['grade'])}" if pair["delta"]["shown"] else ", no difference shown"
    return f"{estimate_text(pair['delta'])}, p {p_text(pair['p_holm'])}{shown}"


def _speed(arm: Record, rung: Record) -> str:
    if (pair := arm["against"]) is None or pair["matched_speedup"]["value"] is None:
        return NONE if pair is None else str(pair["matched_speedup"]["note"])
    return " / ".join(map(ratio_text, _speeds(arm, rung).values()))


def _speeds(arm: Record, rung: Record) -> dict[str, Record]:
    """Return estimates of the speedup to a common loss in steps, FLOPs and hours.

    FLOPs a token are counted, not measured: the interval of FLOPs is that of the steps.
    """
    pair, mine = arm["against"], arm["flops_per_token"]
    steps, other = pair["matched_speedup"], rung["arms"][rung["reference"]]["flops_per_token"]
    counts = {key: steps[key] and steps[key] * other / mine if other and mine else None for key in _ENDS}
    flops = {**steps, "note": steps["note"] or NONE, **counts}
    return dict(zip(SPEEDS, (steps, flops, pair["matched_wall_clock_speedup"]), strict=True))


def _rate(arm: Record, rung: Record) -> str:
    other = rung["arms"][rung["reference"]]["flops_per_token"]
    flops = f", {arm['flops_per_token'] / other:.3f}" if other and arm["flops_per_token"] else ""
    return NONE if arm["lr"] is None else f"{arm['lr']:g}{flops}"


def _law_table(laws: Sequence[Record], reference: str, few: bool) -> list[str]:
    if not laws:
        return ["No law yet: it needs two widths."]
    two = any("E" not in law["form"] for law in laws)
    said = " Two rungs do not tell E, which is 0 in their rows." if two else ""
    rows = [
        (
            law["arm"],
            *(_interval(law[key]) for key in ("E", "A", "b")),
            _interval(law["multiplier"], "x"),
            str(law["rungs"]),
        )
        for law in laws
    ]
    head = ("arm", "E", "A", "b", "FLOPs multiplier", "rungs")
    text = (
        f"Loss = E + A C^-b, C in training FLOPs of the arm's first rung.{said} The multiplier: FLOPs at which the law "
        f"of `{reference}`, over the rungs that both have, has the arm's loss at its largest rung, over the arm's own "
        "(above 1: the arm needs fewer)."
    )
    if few:
        text += " With two seeds a rung its interval holds about 77 %, in simulations."
    return [text, markdown_table(head, rows)]


def _joint_table(results: Record) -> list[str]:
    if not results["rungs"]:
        return []
    title, joint = "## All sizes and lengths", results["joint"]
    arms = joint["arms"] if joint else {}
    missing = [name for name, law in arms.items() if law is None]
    said = "" if joint and not missing else f"No joint law{' of ' if joint else ''}{', '.join(missing)}: {LEAST}."
    if not joint:
        return [title, said]
    head = ("arm", *CONSTANTS, "parameters", "tokens a parameter", "loss", "FLOPs speed", "rungs")
    keys = (*CONSTANTS, "size", "tokens_per_parameter", "loss", "speed")
    rows = [(name, *(_interval(law[key]) for key in keys), str(law["rungs"])) for name, law in arms.items() if law]
    text = (
        "Loss = E + A (N/N1)^-a + B (D/D1)^-b: N parameters of the plain model outside embeddings, D tokens, N1 and D1 "
        f"the first rung's. {joint['compute']:.3g} training FLOPs, the largest run's, are best spent on so many "
        "parameters and tokens a parameter; FLOPs speed: those of "
        f"`{results['rungs'][0]['reference']}` for the loss there, over these. Outside the sizes and lengths that were "
        "run it is an extrapolation."
    )
    return [title, text, markdown_table(head, rows), *([said] if said else [])]


def _interval(interval: Record | None, unit: str = "") -> str:
    """A number with its interval; infinity is null in a record."""
    if interval is None:
        return NONE
    value, low, high = ("inf" if each is None else f"{each:.4g}" for each in map(interval.get, _ENDS))
    if interval["low"] is None and interval["high"] is None:
        return value + unit
    return f"{value}{unit} [{low}, {high}]"


def _predicted_tables(predicted: Record) -> list[str]:
    parts: list[str] = []
    for name, each in sorted(predicted.items(), key=lambda pair: (pair[1]["tokens"], pair[1]["width"])):
        rows = []
        for arm, guesses in each["losses"].items():
            cells = [arm]
            for key in ("loss", "delta"):
                guess = guesses.get(key)
                cells += [_interval(guess), *_measured(guess)]
            rows.append(tuple(cells))
        rates = [
            f"{arm} {rate['lr']:g}"
            + ("" if "best" not in rate else ", held" if rate["held"] else f", best was {rate['best']:g}")
            for arm, rate in each["rates"].items()
        ]
        said = [*each["losses"].values(), *each["rates"].values()]
        times = ", ".join(dict.fromkeys(one["time"] for one in said))
        rungs = ", ".join(dict.fromkeys(name for one in said for name in one["rungs"]))
        parts += [f"## Predicted: {name}", f"Written {times} from {rungs}, before it was run."]
        head = ("arm", "loss [95 %]", "measured", "", "less the reference's [95 %]", "measured", "")
        parts += [markdown_table(head, rows)] if rows else []
        parts += [f"Learning rates: {'; '.join(rates)}."] if rates else []
    return parts


def _measured(guess: Record | None) -> tuple[str, str]:
    if guess is None or "verdict" not in guess:
        return NONE, NONE
    return f"{guess['measured']:.4f}" if "measured" in guess else NONE, f"**{guess['verdict']}**"


def _limits(rung: Record) -> Iterator[str]:
    """Yield what the reader must know of a rung."""
    if rung["text_tokens"] and rung["trained_tokens"] > rung["text_tokens"]:
        yield f"the text was seen {rung['trained_tokens'] / rung['text_tokens']:.2f} times."
    if rung["n"] == 1:
        yield "one seed: no interval and no claim."


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(path: Path, results: Record) -> None:
    """Draw each arm's losses over training FLOPs with its law, and its difference and speeds against the width.

    Shows the tokens a parameter with most rungs. Bars are standard deviations of losses, and 95 % intervals elsewhere.
    """
    by_tokens: dict[float, list[Record]] = {}
    for rung in results["rungs"]:
        by_tokens.setdefault(rung["tokens"], []).append(rung)
    if not by_tokens:
        return
    tokens, rungs = max(by_tokens.items(), key=lambda pair: len(pair[1]))
    figure, (losses, deltas, legend, *speeds) = new_panels(4.6, 3.8, 3, rows=2, share=False)
    laws = {law["arm"]: law for law in results["laws"] if law["tokens"] == tokens}
    reference, names = rungs[0]["reference"], list(dict.fromkeys(name for rung in rungs for name in rung["arms"]))
    colours, markers = cycle(COLOURS), cycle("osD^vP*X<")
    for index, name in enumerate(names):
        colour, marker = (GREYS[0] if name == reference else next(colours)), next(markers)
        style: dict[str, Any] = {"fmt": marker, "color": colour, "ms": 4, "capsize": 2, "label": name}
        mine = [(rung, rung["arms"][name]) for rung in rungs if name in rung["arms"]]
        _draw_losses(losses, [arm for _, arm in mine], laws.get(name), style)
        paired = [(rung, arm) for rung, arm in mine if arm["against"]]
        x = [rung["width"] * (1 + 0.02 * (index - len(names) / 2)) for rung, _ in paired]  # bars side by side
        _draw_estimates(deltas, x, [arm["against"]["delta"] for _, arm in paired], style)
        for axes, kind in zip(speeds, SPEEDS, strict=True):
            _draw_estimates(axes, x, [_speeds(arm, rung)[kind] for rung, arm in paired], style)
    losses.set(
        xscale="log", xlabel=f"training FLOPs ({tokens:g} tokens a parameter)", ylabel="final loss, nats a token"
    )
    legend.axis("off")
    legend.legend(*losses.get_legend_handles_labels(), loc="center left", frameon=False)
    _finish(deltas, rungs, 0, f"final loss less that of {reference}")
    for axes, kind in zip(speeds, SPEEDS, strict=True):
        _finish(axes, rungs, 1, f"speedup in {kind}, to a common loss")
    save(figure, path)


def _draw_losses(axes: Any, arms: Sequence[Record], law: Record | None, style: Record) -> None:
    known = [arm for arm in arms if arm["mean"] is not None and arm["compute"]]
    if not known:
        return
    x, y = [arm["compute"] for arm in known], [arm["mean"] for arm in known]
    axes.errorbar(x, y, [arm["sd"] or 0 for arm in known], **style)
    if law:
        line = np.geomspace(min(x), 2 * max(x), 100)
        fitted = law["E"]["value"] + law["A"]["value"] * (line / law["first_compute"]) ** -law["b"]["value"]
        axes.plot(line, fitted, color=style["color"], lw=1)


def _draw_estimates(axes: Any, x: Sequence[float], estimates: Sequence[Record], style: Record) -> None:
    """Draw estimates with their intervals, where they have any."""
    for place, each in zip(x, estimates, strict=True):
        if (value := each["value"]) is not None:
            bars = None if each["low"] is None else [[value - each["low"]], [each["high"] - value]]
            axes.errorbar(place, value, bars, **style)


def _finish(axes: Any, rungs: Sequence[Record], null: float, label: str) -> None:
    """Name the axes, and let intervals that are far wider than what they are of run off the picture."""
    widths = [rung["width"] for rung in rungs]
    values = [null, *(value for drawn in axes.containers for value in drawn.lines[0].get_ydata())]
    axes.axhline(null, color=GREYS[0], lw=0.8, ls=":")
    axes.set(xscale="log", xlabel="width", ylabel=label)
    axes.set_xticks(widths, map(str, widths))
    axes.set_xticks([], minor=True)
    least, most, margin = min(values), max(values), 1.5 * (max(values) - min(values))
    if margin:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, least - margin), min(high, most + margin))
