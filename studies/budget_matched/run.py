"""Is NOBLE's gain more than more parameters, more arithmetic, or another init?

    python studies/budget_matched/run.py DATA [--steps 500] [--seeds 3] [--threads 1] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`, held out by novel. The setting is that of
studies/llm_small: a GLM backbone of width 128 with 4 layers, embeddings of standard deviation 1. The arms:

    baseline                        transformers' init
    baseline-init-noble             NOBLE's dense init and no branch
    noble-r8                        branches of rank 8
    wide-mlp-as-noble-r8            MLPs so wide that the model has noble-r8's parameters, with transformers' init
    ...-init-noble                  the same with NOBLE's dense init
    wide-mlp-as-noble-r8-flops-...  MLPs so wide that it has noble-r8's FLOPs, with NOBLE's dense init

A matched width is the smallest that is not below (`nonlinear_lowrank.compare.matching`); the report has it with both
counts. Each arm's rate is the best of three on seed 0 (at the edge of its grid the grid is extended, at most twice);
then the other seeds. The command continues where it was interrupted, also with more seeds, and is the same on a GPU;
the record, the report and the pictures are copied beside this file.
"""

import argparse
from pathlib import Path

from nonlinear_lowrank import UserError
from nonlinear_lowrank.compare import compare
from nonlinear_lowrank.tasks.language_model import GlmBackbone, LanguageModelTask
from nonlinear_lowrank.tasks.text import TextData
from nonlinear_lowrank.training import Arm, Recipe, TrainConfig

HERE = Path(__file__).parent
RATES = (2e-3, 4e-3, 8e-3)
ARMS = (
    "baseline",
    "baseline:init=noble",
    "noble:rank=8",
    "wide-mlp:match=noble-r8",
    "wide-mlp:match=noble-r8,init=noble",
    "wide-mlp:match=noble-r8,by=flops,init=noble",
)


def recipe(data: Path, steps: int, threads: int | None) -> Recipe:
    """What all arms share."""
    return Recipe(
        name="budget_matched",
        description="GLM of width 128 and 4 layers on 19th-century English novels",
        task=LanguageModelTask(
            text=TextData(
                source=str(data / "train.txt.xz"),
                valid_source=str(data / "valid.txt.xz"),
                vocab_size=512,
                sequence_length=128,
                eval_sequences=128,
            ),
            backbone=GlmBackbone(layers=4, width=128, heads=4, hidden=352, embedding_std=1.0),
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=8,
            lr=RATES[1],
            warmup_steps=max(1, steps // 10),
            eval_every=max(1, steps // 20),
            save_every=max(1, steps // 2),
            log_every=10,
            threads=threads,
            eval_batch_size=32,
            tracker="none",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3, help="beside the one that rates are tuned on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/budget_matched"))
    arguments = parser.parse_args()
    try:
        found = compare(
            recipe(arguments.data, arguments.steps, arguments.threads),
            arguments.work,
            arms=[Arm.parse(text) for text in ARMS],
            seeds=arguments.seeds,
            tune_lr=RATES,
            resume=arguments.work.exists(),
            max_extensions=2,
            command=f"python studies/budget_matched/run.py DATA --steps {arguments.steps} --seeds {arguments.seeds}",
        )
    except UserError as error:
        raise SystemExit(f"{error}") from None
    found.copy_to(HERE, "table")
    print(found)


if __name__ == "__main__":
    main()
