"""Adapters on a small language model of our own that learns to answer instructions.

    python -m studies.instruct_small.run TEXT INSTRUCTIONS [--seeds 3] [--threads 1] [--work FOLDER]

A GLM of 1.3M parameters is trained on TEXT (a file of documents), 1,500 steps of 16 x 256 tokens, as `nlr train` does
it; then every arm tunes it on INSTRUCTIONS (JSON in Alpaca's form) for one epoch, on the answers alone. What is
compared is the loss on the answers of a tenth of the rows that is held out. Every arm's learning rate is the best of
three on one seed (at the edge of its grid the grid is extended, at most twice); then three other seeds.

Finished runs are kept in FOLDER and used again; record, report and pictures are copied beside this file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.recipes import get_recipe
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
# Around the best learning rates of a first run on the tuning seed: one epoch is 113 steps; low ones hardly move.
ARMS = (
    "lora:r=4",
    "dora:r=4",
    "sine-lora:r=4,omega=50",
    "sine-lora:r=4,omega=200,grid=3e-3/1e-2/3e-2",
    "sine-dora:r=4,omega=200,grid=3e-3/1e-2/3e-2",
    "peanut:r=4",
    "nora:r=2,groups=8",
    "nora++:r=2,groups=8,lora_r=4",
    "noble-adapter:r=4",
    "full:grid=1e-3/3e-3/1e-2",
)


def language_model(source: Path, threads: int, work: Path) -> Path:
    """The model that is tuned, trained now unless it is there."""
    text = TextData(source=str(source), vocab_size=2048, sequence_length=256, eval_sequences=64)
    recipe = Recipe(
        name="instruct-small-base",
        task=LanguageModelTask(text=text, backbone=GlmBackbone(layers=4, width=128, heads=4, hidden=344)),
        arm=Arm.parse("baseline"),
        train=TrainConfig(
            steps=1500,
            batch_size=16,
            lr=4e-3,
            warmup_steps=150,
            eval_every=250,
            save_every=250,
            eval_batch_size=32,
            tracker="none",
            threads=threads,
        ),
    )
    out = work / "base"
    result = run_training(recipe, out, resume=out.exists())
    print(f"trained on {source}: loss {result.final_loss:.4f}")
    return out / "model"


def study(checkpoint: Path, source: Path, seeds: int, threads: int, work: Path) -> None:
    """All arms."""
    recipe = get_recipe("instruct-small")
    task: Any = recipe.task
    data = replace(task.instructions, source=str(source), rows=None, held_out=0.1, eval_rows=200, max_length=256)
    recipe = replace(
        recipe,
        description="GLM of 1.3M parameters, trained on English novels, on instructions in Alpaca's form",
        task=replace(task, instructions=data, model=replace(task.model, checkpoint=str(checkpoint))),
        train=replace(recipe.train, epochs=1, eval_every=0, threads=threads, tracker="none"),
    )
    run_study(
        recipe,
        work / "tuned",
        HERE,
        "tuned",
        arms=[Arm.parse(text) for text in ARMS],
        seeds=seeds,
        tune_lr=(1e-2, 3e-2, 1e-1),
        timing_rounds=0,
        max_extensions=2,
        command=f"python -m studies.instruct_small.run TEXT INSTRUCTIONS --seeds {seeds}",
    )


def main() -> None:
    arguments = study_parser(__doc__, "instruct_small", "text", "instructions").parse_args()
    with one_line_errors():
        checkpoint = language_model(arguments.text, arguments.threads, arguments.work)
        study(checkpoint, arguments.instructions, arguments.seeds, arguments.threads, arguments.work)


if __name__ == "__main__":
    main()
