"""A run of an hour: does its memory grow?

    python studies/faults/soak.py [--minutes 60]

A small NOBLE language model (two layers of width 32, data read by a process of its own) trains, is evaluated and writes
a checkpoint every 200 steps. From outside, every 10 seconds: its resident memory with its children's, threads and open
files. Into soak.json and soak.png beside this file.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "helpers"))
EVERY, WARM = 10, 10
"""Seconds between looks; minutes before which memory may grow."""


def train(out: str) -> None:
    """Far more steps than there is time for."""
    import torch

    from nlr_lab.training import run_training
    from training_helpers import FakeText, make_recipe

    torch.set_num_threads(1)
    recipe = make_recipe(
        steps=10_000_000, save_every=200, eval_every=200, log_every=50, dataloader_workers=1, schedule="constant"
    )
    run_training(recipe, Path(out), prepared=FakeText(train=2000, valid=50), quiet=True)


def look(process: psutil.Process) -> dict[str, float]:
    """Return memory, threads and files of a process and its children."""
    family = [process, *process.children(recursive=True)]
    return {
        "mib": sum(each.memory_info().rss for each in family) / 2**20,
        "threads": sum(each.num_threads() for each in family),
        "files": sum(each.num_fds() for each in family),
    }


def main() -> int:
    """Return 1 if it ended early."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    seen: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=train, args=(f"{folder}/run",))
        process.start()
        began = time.monotonic()
        while process.is_alive() and time.monotonic() - began < 60 * options.minutes:
            time.sleep(EVERY)
            try:
                seen.append({"minute": (time.monotonic() - began) / 60, **look(psutil.Process(process.pid))})
            except psutil.NoSuchProcess:  # a child that has just ended
                continue
        ended_early = not process.is_alive()
        checkpoints = sorted(int(each.name[5:]) for each in Path(folder, "run", "checkpoints").glob("step-*"))
        process.terminate()
        process.join()
    (HERE / "soak.json").write_text(json.dumps(summary(seen, checkpoints, ended_early), indent=1) + "\n")
    draw(seen)
    print((HERE / "soak.json").read_text()[:600])
    return int(ended_early)


def summary(seen: list[dict[str, float]], checkpoints: list[int], ended_early: bool) -> dict:
    """The numbers; growth is a line's slope after the first minutes."""
    later = [each for each in seen if each["minute"] >= WARM] or seen
    minutes, mib = np.array([[each["minute"], each["mib"]] for each in later]).T
    slope = float(np.polyfit(minutes, mib, 1)[0] * 60) if len(later) > 2 else None
    return {
        "minutes": round(seen[-1]["minute"], 1),
        "steps": max(checkpoints, default=0),
        "ended_early": ended_early,
        "mib_after_warm_up": round(float(mib[0]), 1),
        "mib_at_the_end": round(float(mib[-1]), 1),
        "mib_most": round(float(mib.max()), 1),
        "mib_an_hour": None if slope is None else round(slope, 2),
        **{
            f"{name}_least_and_most": [min(each[name] for each in later), max(each[name] for each in later)]
            for name in ("threads", "files")
        },
        "machine": f"{platform.system()}, CPU, Python {platform.python_version()}, torch {version('torch')}",
        "looks": [[round(each["minute"], 2), round(each["mib"], 1)] for each in seen],
    }


def draw(seen: list[dict[str, float]]) -> None:
    """The curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.plot([each["minute"] for each in seen], [each["mib"] for each in seen])
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None))
    figure.savefig(HERE / "soak.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
