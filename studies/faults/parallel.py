"""Several processes against one: the same losses, whatever is sharded, and on with another number of processes.

    python studies/faults/parallel.py [--steps 60]

tests/lab/training/test_distributed.py, larger: a NOBLE language model of four layers of width 128 (dropout 0),
sine-LoRA and NoRA on a small Llama; DDP and FSDP2 over 2 and 4 gloo processes on this machine, in float64. The last row
of each number of processes is the NOBLE run with its first third on one process, the second on several, the last on one
again. The largest relative difference of any logged or evaluated loss from one process's goes into parallel.json and
parallel.md.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "helpers"), str(HERE)]

ADAPTERS = {"sine-lora": "sine-lora:r=4,omega=200", "nora": "nora:r=2,groups=8"}

SCRIPT = """
import os, sys
import torch
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
import processes_helpers
if os.environ.get("ACCELERATE_USE_FSDP"):
    processes_helpers.shard_on_cpus()
sys.path.insert(0, {here!r})
import parallel
parallel.train(*sys.argv[1:])
"""


def recipe_of(root: Path, name: str, steps: int) -> tuple[Any, Any]:
    """The recipe and its prepared data, if they are not the task's own."""
    import finetune_helpers
    from training_helpers import FakeText, make_recipe

    shared = {
        "steps": steps,
        "batch_size": 8,
        "eval_every": steps // 6,
        "save_every": steps // 3,
        "keep_checkpoints": 9,
    }
    if name in ADAPTERS:
        return finetune_helpers.recipe(finetune_helpers.instruction_task(root), ADAPTERS[name], **shared), None
    # At 1e-2 this model is chaotic: rounding (its norms are in float32) doubles each step from the thirtieth on.
    recipe = make_recipe("noble:rank=16", dropout=0.0, log_every=2, lr=1e-3, **shared)
    backbone = replace(recipe.task.backbone, layers=4, width=128, heads=4, hidden=352)
    return replace(recipe, task=replace(recipe.task, backbone=backbone)), FakeText(train=400, valid=40)


def train(root: str, mode: str, steps: str, *names: str) -> None:
    """Train into root/mode, in a process of a group."""
    from nlr_lab.training import run_training

    for name in names:
        recipe, prepared = recipe_of(Path(root), name, int(steps))
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "LlamaDecoderLayer" if name in ADAPTERS else "GlmDecoderLayer"
        out = Path(root, mode, name)
        run_training(recipe, out, prepared=prepared, quiet=True, resume=(out / "checkpoints").exists())


def losses(root: Path, mode: str, name: str) -> list[tuple[int, float]]:
    """Return the losses of training and evaluation, by step."""
    result = json.loads((root / mode / name / "result.json").read_text())
    return [(step, loss) for kind in ("curve", "train_curve") for step, loss in result[kind]]


def largest_difference(found: list[tuple[int, float]], want: list[tuple[int, float]]) -> float:
    """Return the largest relative difference over all steps."""
    assert [step for step, _ in found] == [step for step, _ in want]
    return max(abs(one - other) / abs(other) for (_, one), (_, other) in zip(found, want, strict=True))


def main() -> int:
    """Return 1 if a difference is above 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    import finetune_helpers
    from processes_helpers import fsdp_environment, run_processes
    from training_helpers import cut_back

    names = ("noble", *ADAPTERS)
    script = SCRIPT.format(here=str(HERE))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        finetune_helpers.instruction_task(root)
        AutoModelForCausalLM.from_pretrained(root / "llama").double().save_pretrained(root / "llama")

        def run(mode: str, count: int, *which: str) -> None:
            (root / mode).mkdir(exist_ok=True)
            run_processes(script, root, mode, options.steps, *which, count=count, timeout=7200)

        def note(engine: str, processes: str, name: str, mode: str) -> None:
            difference = largest_difference(losses(root, mode, name), losses(root, "alone", name))
            rows.append({"engine": engine, "processes": processes, "run": name, "difference": difference})
            print(rows[-1], flush=True)
            write(rows, options.steps)

        run("alone", 1, *names)
        for count in (2, 4):
            run(f"ddp-{count}", count, *names)
            for name in names:
                note("DDP", str(count), name, f"ddp-{count}")
            os.environ.update(fsdp_environment(""))
            run(f"fsdp2-{count}", count, *names)
            for key in fsdp_environment(""):
                del os.environ[key]
            for name in names:
                note("FSDP2", str(count), name, f"fsdp2-{count}")
            chain, third = f"chain-{count}", options.steps // 3
            done = root / "alone" / "noble"
            for processes, step in ((count, third), (1, 2 * third)):
                mode = f"{chain}-{step}"
                done = cut_back(done, root / mode / "noble", step)
                run(mode, processes, "noble")
            note("DDP", f"1, {count}, 1", "noble", mode)
    return int(any(row["difference"] > 1e-6 for row in rows))


def write(rows: list[dict[str, Any]], steps: int) -> None:
    """The record and the table."""
    about = f"{steps} steps, float64, {platform.system()}, CPU, torch {version('torch')}"
    (HERE / "parallel.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = ["| engine | processes | run | largest relative difference of a loss |", "|---|---|---|---|"]
    lines += [f"| {each['engine']} | {each['processes']} | {each['run']} | {each['difference']:.1e} |" for each in rows]
    (HERE / "parallel.md").write_text("\n".join([*lines, "", f"{about}."]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
