"""Seconds for which training waits for a checkpoint.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_pause.py

A GLM of 20,800,000 parameters trains on a CPU with AdamW on sequences of 32 tokens, with a checkpoint in every fifth of
30 steps; two are kept. The disk is that of the temporary folder. The last line is JSON.
"""

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.recipes import get_recipe
from nlr_lab.training import Arm, run_training
from nlr_lab.training.trainer import RunTrainer


def main() -> None:
    recipe = get_recipe("llm-demo")
    task = replace(recipe.task, text=replace(recipe.task.text, sequence_length=32))
    task = replace(task, backbone=replace(task.backbone, layers=6, width=512, heads=8, hidden=1346))
    train = replace(recipe.train, steps=30, warmup_steps=2, batch_size=4, save_every=5, eval_every=30, tracker="none")
    pauses: list[float] = []
    save = RunTrainer._save_checkpoint

    def timed(*args: Any) -> None:
        started = time.perf_counter()
        save(*args)
        pauses.append(time.perf_counter() - started)

    RunTrainer._save_checkpoint = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm.parse("baseline")
        result = run_training(replace(recipe, task=task, arm=arm, train=train), Path(folder) / "run", quiet=True)
    found = {"parameters": result.parameters, "checkpoints": len(pauses), "pause": round(statistics.median(pauses), 3)}
    print(json.dumps({**found, "pauses": [round(each, 3) for each in pauses], "run": round(result.seconds, 1)}))


if __name__ == "__main__":
    main()
