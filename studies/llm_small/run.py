"""The language-model table, figure and ablation of noble.txt (section 4.1.1 and Table 5) in small.

    python -m studies.llm_small.run DATA [--size cpu|gpu] [--stage table|ablation|long|setting|all] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`, novels joined by lines of
'<|endoftext|>', held out by novel. Every stage continues where it was interrupted; what is finished is
copied to this folder: `<size>-<stage>.json`, its picture and its report. Stages:

    table     baseline with three dense inits and NOBLE at three ranks, at embedding std 1; learning rates tuned
              for each arm; 3 seeds
    ablation  every bottleneck of Table 5 at CosNet's rank and its best learning rate; 3 seeds
    long      the best control and the smallest NOBLE for four times as many steps, at the learning rates of `table`;
              3 seeds
    setting   the controls and the smallest NOBLE at embedding std 0.02, learning rates tuned for each arm; 1 seed

Size "cpu" is what two cores manage in about four hours; "gpu" is the same design at width 512, and runs
unchanged on one GPU. Width / rank is 16, 8 and 4 in both, as in the paper.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig
from nonlinear_lowrank import UserError
from studies.study import one_line_errors, run_study

HERE = Path(__file__).parent
CONTROLS = ("baseline", "baseline:init=noble", "baseline:init=kaiming")
RANKS = {"cpu": (8, 16, 32), "gpu": (32, 64, 128)}
RATES = {"cpu": (2e-3, 4e-3, 8e-3), "gpu": (1e-3, 2e-3, 4e-3)}
BOTTLENECKS = (
    *(
        f"activation={activation},depth={depth}"
        for activation in ("tanh", "leaky_relu", "gelu", "silu")
        for depth in (1, 2)
    ),
    *(f"activation=cosine,depth={depth}" for depth in (1, 2, 3)),
)


def recipe(data: Path, size: str) -> Recipe:
    """The setting all stages share."""
    small = size == "cpu"
    text = TextData(
        source=str(data / "train.txt.xz"),
        valid_source=str(data / "valid.txt.xz"),
        vocab_size=512 if small else 8192,
        sequence_length=128 if small else 512,
        eval_sequences=128 if small else 512,
    )
    if small:
        backbone = GlmBackbone(layers=4, width=128, heads=4, hidden=352, embedding_std=1.0)
        train = TrainConfig(
            steps=500,
            batch_size=8,
            lr=2e-3,
            warmup_steps=50,
            eval_every=25,
            save_every=250,
            threads=1,
            eval_batch_size=32,
            tracker="none",
        )
    else:
        backbone = GlmBackbone(layers=6, width=512, heads=8, hidden=1376, embedding_std=1.0)
        train = TrainConfig(
            steps=4000,
            batch_size=32,
            lr=1e-3,
            warmup_steps=400,
            eval_every=200,
            save_every=1000,
            bf16=True,
            compile=True,
            tracker="none",
        )
    return Recipe(
        name=f"llm_small-{size}",
        description=f"GLM of width {backbone.width} and {backbone.layers} layers on 19th-century English novels",
        task=LanguageModelTask(text=text, backbone=backbone),
        train=train,
    )


def run(stage: str, recipe: Recipe, size: str, work: Path, arms: Sequence[Arm], **options: Any) -> None:
    """One stage."""
    how = f"python -m studies.llm_small.run DATA --size {size} --stage {stage}"
    name = f"{size}-{stage}"
    run_study(recipe, work / name, HERE, name, arms=arms, command=how, **options)


def table_arms(size: str, work: Path) -> dict[str, dict[str, Any]]:
    """Return what `table` found, by the arm's name: its learning rate, its final loss and the rest of its record."""
    record = work / f"{size}-table" / "results.json"
    if not record.exists():
        raise UserError("this stage takes its learning rates from the stage 'table'; run that first")
    return {arm["name"]: arm for arm in json.loads(record.read_text())["arms"]}


def setting(base: Recipe, size: str, work: Path) -> None:
    """Embedding std 0.02, transformers' own: one seed, each arm at its best learning rate."""
    task = replace(base.task, backbone=replace(base.task.backbone, embedding_std=0.02))
    arms = [Arm.parse(text) for text in (*CONTROLS, f"noble:rank={RANKS[size][0]}")]
    run("setting", replace(base, task=task), size, work, arms, seeds=1, tune_lr=RATES[size], timing_rounds=0)


def table(base: Recipe, size: str, work: Path) -> None:
    """Table 1 and Figure 3 in small."""
    arms = [Arm.parse(text) for text in (*CONTROLS, *(f"noble:rank={rank}" for rank in RANKS[size]))]
    run("table", base, size, work, arms, seeds=3, tune_lr=RATES[size])


def ablation(base: Recipe, size: str, work: Path) -> None:
    """Table 5 in small, at the learning rate that `table` found best for CosNet of the same rank."""
    rank = RANKS[size][0]
    lr = table_arms(size, work)[f"noble-r{rank}"]["lr"]
    texts = ["baseline:init=noble,name=baseline", *(f"noble:rank={rank},{each}" for each in BOTTLENECKS)]
    arms = [Arm.parse(text) for text in texts]
    base = replace(base, train=replace(base.train, lr=lr))
    run("ablation", base, size, work, arms, seeds=3, timing_rounds=0)


def long(base: Recipe, size: str, work: Path) -> None:
    """Train longer to see whether the difference lasts: four times the steps of `table`."""
    tuned = table_arms(size, work)
    controls = [tuned[Arm.parse(text).name] for text in CONTROLS]
    best = min(controls, key=lambda arm: arm["final_loss"]["mean"])["name"]
    arms = [Arm.parse(text) for text in (*CONTROLS, f"noble:rank={RANKS[size][0]}")]
    arms = [replace(arm, lr=tuned[arm.name]["lr"]) for arm in arms if arm.name == best or arm.method == "noble"]
    steps, warmup = 4 * base.train.steps, 4 * base.train.warmup_steps
    base = replace(
        base, train=replace(base.train, steps=steps, warmup_steps=warmup, eval_every=4 * base.train.eval_every)
    )
    run("long", base, size, work, arms, seeds=3, timing_rounds=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--stage", choices=("table", "ablation", "long", "setting", "all"), default="all")
    parser.add_argument("--work", type=Path, default=Path("runs/llm_small"))
    arguments = parser.parse_args()
    base = recipe(arguments.data, arguments.size)
    stages = {"table": table, "ablation": ablation, "long": long, "setting": setting}
    for name, stage in stages.items():
        if arguments.stage in (name, "all"):
            with one_line_errors(name):
                stage(base, arguments.size, arguments.work)


if __name__ == "__main__":
    main()
