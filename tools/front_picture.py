"""Draw docs/front.png, the README's picture: the ladder's largest rung over time, and the lead by width.

    python tools/front_picture.py

Minutes are steps times the arm's median step time, by the interleaved timing of its rung. The curves are those of the
runs that studies/ladder/runs.tar.xz keeps, the differences those of its results.json.
"""

import json
import tarfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
LADDER = ROOT / "studies" / "ladder"
ARMS = {
    "plain": ("plain", "0.1", "--"),
    "wide": ("wider MLP of NOBLE's FLOPs", "#e69f00", "-."),
    "noble": ("NOBLE", "#0072b2", "-"),
}
FIRST_SHOWN = 0.25  # of the steps: before it the curves fall too steeply to be told apart


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, by_width = figure.subplots(1, 2)
    rungs = json.loads((LADDER / "results.json").read_text(encoding="utf-8"))["rungs"]
    rungs = sorted((rung for rung in rungs if rung["tokens"] == 20), key=lambda rung: rung["width"])
    draw_curves(over_time, rungs[-1])
    draw_differences(by_width, rungs)
    for axes in (over_time, by_width):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "front.png", dpi=110)


def draw_curves(axes, rung: dict) -> None:
    """Draw the evaluation loss of every arm over minutes: the mean of its seeds, with their range."""
    with tarfile.open(LADDER / "runs.tar.xz") as runs:
        for name in [name for name in ARMS if name in rung["arms"]]:
            arm = rung["arms"][name]
            curves = []
            for seed in rung["seeds"]:
                path = f"{rung['rung']}/runs/{name}/lr-{arm['lr']:g}/seed-{seed}/result.json"
                curves.append(json.load(runs.extractfile(path))["curve"])
            points = [(step, losses) for step, losses in by_step(curves) if step >= FIRST_SHOWN * rung["steps"]]
            minutes = [step * arm["step_seconds"] / 60 for step, _ in points]
            label, color, style = ARMS[name]
            axes.plot(minutes, [sum(losses) / len(losses) for _, losses in points], style, color=color, label=label)
            lowest, highest = zip(*((min(losses), max(losses)) for _, losses in points), strict=True)
            axes.fill_between(minutes, lowest, highest, color=color, alpha=0.15, lw=0)
    axes.set_title(f"width {rung['width']}, {rung['steps']:,} steps, n = {rung['n']}", fontsize=11)
    axes.set_xlabel("minutes of training, one CPU thread")
    axes.set_ylabel("evaluation loss, nats a token")


def by_step(curves: list) -> list:
    """Return (step, the losses of all curves) for the steps of the first."""
    return [(points[0][0], [loss for _, loss in points]) for points in zip(*curves, strict=True)]


def draw_differences(axes, rungs: list) -> None:
    """Draw what every arm's final loss is below the plain model's, by width, with its 95 % interval."""
    for place, (name, (label, color, style)) in enumerate(list(ARMS.items())[1:]):
        known = [rung for rung in rungs if name in rung["arms"]]
        deltas = [rung["arms"][name]["against"]["delta"] for rung in known]
        axes.errorbar(
            [rung["width"] * (1 + 0.02 * place) for rung in known],
            [delta["value"] for delta in deltas],
            yerr=[
                [delta["value"] - delta["low"] for delta in deltas],
                [delta["high"] - delta["value"] for delta in deltas],
            ],
            fmt="o" + style,
            ms=5,
            capsize=3,
            color=color,
            label=label,
        )
    label, color, style = ARMS["plain"]
    axes.axhline(0, color=color, ls=style, label=label)
    axes.set_title(f"all widths, 20 tokens a parameter, n = {rungs[-1]['n']}", fontsize=11)
    axes.set_xscale("log")
    widths = [rung["width"] for rung in rungs]
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width")
    axes.set_ylabel("final loss less the plain model's")
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    main()
