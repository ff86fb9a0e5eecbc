"""NOBLE, a wider MLP and experts at the same FLOPs per token.

    python -m studies.moe.run [--seeds 3] [--threads 1] [--work FOLDER]

The setting is `llm-moe-demo`'s: a GLM backbone of width 128 with 4 layers on the running Python's own library sources,
300 steps of 8 x 128 tokens. NOBLE's dense init in all arms:

    baseline-init-noble             the plain model
    noble-r16                       branches of rank 16
    wide-mlp-as-noble-r16-flops-... MLPs so wide that the model has noble-r16's FLOPs
    moe-2of8-as-noble-r16-...       8 experts, 2 a token, so wide that it has noble-r16's FLOPs

Each arm's learning rate is the best of three on seed 0 (a grid whose best is at its edge is extended, at most twice);
then the other seeds. The command continues where it was interrupted, also with more seeds; the record, the report and
the pictures are copied beside this file.
"""

from dataclasses import replace
from pathlib import Path

from nlr_lab.recipes import get_recipe
from nlr_lab.training import Arm
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
RATES = (2e-3, 4e-3, 8e-3)


def main() -> None:
    given = study_parser(__doc__, "moe").parse_args()
    recipe = get_recipe("llm-moe-demo")
    recipe = replace(recipe, train=replace(recipe.train, threads=given.threads, tracker="none"))
    with one_line_errors():
        run_study(
            recipe,
            given.work,
            HERE,
            "table",
            arms=[Arm.parse(text) for text in recipe.arms],
            seeds=given.seeds,
            tune_lr=RATES,
            max_extensions=2,
            command=f"python -m studies.moe.run --seeds {given.seeds}",
        )


if __name__ == "__main__":
    main()
