"""The table of nonlinear_queries.md ("Key Experimental Results") in small, with every arm at its own learning rate.

    python -m studies.nonlinear_query.run DATA [--steps 400] [--seeds 2] [--threads 1] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`, held out by novel. An OPT backbone of width 192
with 4 layers on sequences of 256. The arms:

    baseline                   a linear query
    nonlinear-query            (x + f(x)) / 2
    identity-query             x: no query weights at all
    residual-linear-query      the nonlinear query's parameters and norms, without GELU
    wide-mlp-4.75              the document's wider baseline: 12.5 % more parameters outside the embeddings
    wide-mlp-4.75-scaled-lr    the same, its rates 4 / 4.75 of the others'
    qk-norm                    a linear query with normed queries and keys, which closed the gap in an audit

Each arm's rate is the best of three on seed 0 (at the edge of its grid the grid is extended, at most twice); then the
other seeds. The command continues where it was interrupted, also with more seeds, and is the same on a GPU; the record,
the report and the pictures are copied beside this file.
"""

from pathlib import Path

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import OptBackbone, OptLanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
RATES = (1e-3, 2e-3, 4e-3)
SCALED = "/".join(f"{rate * 4 / 4.75:.4g}" for rate in RATES)
ARMS = (
    "baseline",
    "nonlinear-query",
    "identity-query",
    "residual-linear-query",
    "wide-mlp:ratio=4.75",
    f"wide-mlp:ratio=4.75,grid={SCALED},name=wide-mlp-4.75-scaled-lr",
    "qk-norm",
)


def recipe(data: Path, steps: int, threads: int | None) -> Recipe:
    """Return the recipe that all arms share."""
    return Recipe(
        name="nonlinear_query",
        description="OPT of width 192 and 4 layers on 19th-century English novels",
        task=OptLanguageModelTask(
            text=TextData(
                source=str(data / "train.txt.xz"),
                valid_source=str(data / "valid.txt.xz"),
                vocab_size=512,
                sequence_length=256,
                eval_sequences=64,
            ),
            backbone=OptBackbone(layers=4, width=192, heads=6, hidden=768),
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=8,
            lr=RATES[1],
            weight_decay=0.1,
            betas=(0.9, 0.95),
            warmup_steps=max(1, steps // 10),
            schedule="cosine",
            eval_every=max(1, steps // 20),
            save_every=max(1, steps // 2),
            log_every=10,
            threads=threads,
            eval_batch_size=16,
            tracker="none",
        ),
    )


def main() -> None:
    parser = study_parser(__doc__, "nonlinear_query", "data", seeds=2)
    parser.add_argument("--steps", type=int, default=400)
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
            command=f"python -m studies.nonlinear_query.run DATA --steps {given.steps} --seeds {given.seeds}",
        )


if __name__ == "__main__":
    main()
