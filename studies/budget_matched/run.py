"""Is NOBLE's gain more than more parameters, more arithmetic, or another init?

    python -m studies.budget_matched.run DATA [--steps 500] [--seeds 3] [--threads 1] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`, held out by novel. The setting is that of
studies/llm_small: a GLM backbone of width 128 with 4 layers, embeddings of standard deviation 1. The arms:

    baseline                        transformers' init
    baseline-init-noble             NOBLE's dense init and no branch
    noble-r8                        branches of rank 8
    noble-r8-share_down-qkv         the same, one down projection for query, key and value
    wide-mlp-as-noble-r8            MLPs so wide that the model has noble-r8's parameters, with transformers' init
    ...-init-noble                  the same with NOBLE's dense init
    wide-mlp-as-noble-r8-flops-...  MLPs so wide that it has noble-r8's FLOPs, with NOBLE's dense init

A matched width is the smallest that is not below (`nlr_lab.compare.model_trials`); the report has it with both
counts. Each arm's learning rate is the best of three on seed 0 (a grid whose best is at its edge is extended, at most
twice); then the other seeds. The command continues where it was interrupted, also with more seeds, and is the same on a
GPU; the record, the report and the pictures are copied beside this file.
"""

from pathlib import Path

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
RATES = (2e-3, 4e-3, 8e-3)
ARMS = (
    "baseline",
    "baseline:init=noble",
    "noble:rank=8",
    "noble:rank=8,share_down=qkv",
    "wide-mlp:match=noble-r8",
    "wide-mlp:match=noble-r8,init=noble",
    "wide-mlp:match=noble-r8,by=flops,init=noble",
)


def recipe(data: Path, steps: int, threads: int | None) -> Recipe:
    """Return the recipe that all arms share."""
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
    parser = study_parser(__doc__, "budget_matched", "data")
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    with one_line_errors():
        run_study(
            recipe(given.data, given.steps, given.threads),
            given.work,
            HERE,
            "table",
            arms=[Arm.parse(text) for text in ARMS],
            seeds=given.seeds,
            tune_lr=RATES,
            max_extensions=2,
            command=f"python -m studies.budget_matched.run DATA --steps {given.steps} --seeds {given.seeds}",
        )


if __name__ == "__main__":
    main()
