"""Draws docs/front.png, the README's picture: evaluation loss over training time, of a short and of a longer run.

    python tools/front_picture.py

The curves are those of studies/llm_small as recorded at commit a0e2d46. A step's time is the median of the 500-step
study, also in the longer run, whose own was not measured.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RAW = "a0e2d46:studies/llm_small/{}.json"
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
    seconds = {arm["name"]: arm["step_seconds_median"] for arm in _raw("cpu-table")["arms"]}
    for place, (part, title) in enumerate(PARTS.items(), start=1):
        axes = figure.add_subplot(1, 2, place)
        for arm in _raw(part)["arms"]:
            if arm["name"] not in ARMS:
                continue
            label, color, style = ARMS[arm["name"]]
            curves = [dict(run["curve"]) for run in arm["runs"]]
            steps = [step for step in curves[0] if step >= max(curves[0]) * 0.2]
            minutes = [step * seconds[arm["name"]] / 60 for step in steps]
            losses = [[curve[step] for curve in curves] for step in steps]
            axes.plot(minutes, [sum(each) / len(each) for each in losses], style, color=color, label=label)
            axes.fill_between(
                minutes, *zip(*((min(each), max(each)) for each in losses), strict=True), color=color, alpha=0.15, lw=0
            )
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("minutes of training, one CPU thread")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("evaluation loss, nats a token")
    figure.axes[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "front.png", dpi=110)


def _raw(part: str) -> dict[str, Any]:
    found = subprocess.run(["git", "show", RAW.format(part)], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


if __name__ == "__main__":
    main()
