"""NoRA's first draw: both readings of the paper's N(0, 0.02), and the authors' released parametrisation.

    python -m studies.nora_init.run DATA [--seeds 3] [--threads 1] [--work FOLDER]

MiniLM on STS-B (one epoch, Pearson correlation on GLUE's development set), as `studies/glue_minilm` has it: DATA holds
GLUE's files, a new head learns at 1e-3 in every arm. "N(0, 0.02)" is a standard deviation of 0.02, or a variance and
then 0.1414. For every arm three learning rates are tried on one seed and the best is taken on a tenth held out of the
training data; where it is at the edge, the grid is extended once. Then it runs with three other seeds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.recipes import get_recipe
from nlr_lab.training import Arm
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
GRID = "grid=1e-4/3e-4/1e-3"
ARMS = (
    f"nora:r=2,groups=8,init_std=0.02,{GRID},name=std-0.02",
    f"nora:r=2,groups=8,init_std=0.1414,{GRID},name=std-0.14",
    f"nora:r=3,groups=8,tuning=shared,{GRID},name=released",
    f"nora:r=2,groups=8,init_std=0.02,fit_range=3,{GRID},name=std-0.02-range-3",
    "head:lr=1e-3",
)


def main() -> None:
    arguments = study_parser(__doc__, "nora_init", "data").parse_args()
    recipe = get_recipe("glue-minilm")
    glue: Any = recipe.task
    recipe = replace(
        recipe,
        task=replace(glue, glue=replace(glue.glue, task="stsb", source=str(arguments.data))),
        train=replace(recipe.train, epochs=1, threads=arguments.threads, tracker="none"),
    )
    with one_line_errors("nora_init"):
        run_study(
            recipe,
            arguments.work,
            HERE,
            "stsb",
            arms=[Arm.parse(text) for text in ARMS],
            seeds=arguments.seeds,
            timing_rounds=0,
            max_extensions=1,
            command=f"python -m studies.nora_init.run DATA --seeds {arguments.seeds}",
        )


if __name__ == "__main__":
    main()
