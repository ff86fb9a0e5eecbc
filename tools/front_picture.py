"""Draw docs/front.png, the README's picture: evaluation loss over training time, of a short and of a longer run.

    python tools/front_picture.py

The curves are those that studies/llm_small/results.json keeps for it. A step's time is the median of the 500-step
study, also in the longer run, whose own was not measured.
"""

import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "llm_small" / "results.json"
ARMS = {
    "baseline": ("transformers' own init", "0.45", "--"),
    "baseline-init-kaiming": ("best baseline", "0.1", "--"),
    "noble-r8": ("NOBLE, rank 8", "#0072b2", "-"),
}
PARTS = {"cpu-table": "500 steps, n = 3", "cpu-long": "2,000 steps, n = 2"}


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    seconds = {arm["name"]: arm["step_seconds_median"] for arm in results["cpu-table"]["arms"]}
    for place, (part, title) in enumerate(PARTS.items(), start=1):
        axes = figure.add_subplot(1, 2, place)
        for name, curve in results["curves"][part].items():
            label, color, style = ARMS[name]
            # By step, the losses of all seeds; the first fifth is not shown.
            points = zip(curve["steps"], zip(*curve["losses"], strict=True), strict=True)
            shown = [(step, losses) for step, losses in points if step >= curve["steps"][-1] * 0.2]
            minutes = [step * seconds[name] / 60 for step, _ in shown]
            axes.plot(minutes, [sum(each) / len(each) for _, each in shown], style, color=color, label=label)
            ends = zip(*((min(each), max(each)) for _, each in shown), strict=True)
            axes.fill_between(minutes, *ends, color=color, alpha=0.15, lw=0)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("minutes of training, one CPU thread")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("evaluation loss, nats a token")
    figure.axes[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "front.png", dpi=110)


if __name__ == "__main__":
    main()
