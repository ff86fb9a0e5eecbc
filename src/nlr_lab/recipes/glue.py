"""GLUE: small on a packaged encoder, and the published DeBERTa-v3-base settings (sine_lowrank.txt, Tables 1 and 4).

Adapters go on the query and value projections. At its zero start the gradient of sine-LoRA's up factor is
omega / sqrt(d_in) times LoRA's, and a step of Adam moves the weight that many times as far: the learning rates that
suit LoRA do not suit it, so arms have learning-rate grids of their own. In the small recipe the new head has one
learning rate in all of them, or it would learn little beside the arms with low ones.

Table 4 prints learning rates and epochs without the tasks' names. Its rows are taken in the order CoLA, SST-2, MRPC,
QQP, STS-B, MNLI, QNLI, RTE, the only usual one in which all large sets get 10 epochs, small ones 20, and RTE
1.2e-3 for 50, as other work on this model has it.
"""

from collections.abc import Callable
from typing import Any

from nlr_lab.tasks.finetune.classification import GLUE, GlueData, GlueTask
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import EACH_EPOCH, named

# Table 1: what is scored, LoRA's and sine-LoRA's scores at rank 1, 2, 4 and 8. Table 4: learning rate and epochs.
_PUBLISHED = {
    "cola": ("Matthews correlation", "66.31 / 68.38 / 68.56 / 68.62", "67.99 / 68.93 / 68.93 / 68.54", 8e-5, 20),
    "sst2": ("accuracy", "94.70 / 95.02 / 95.25 / 95.25", "94.79 / 94.81 / 95.25 / 95.11", 1e-4, 10),
    "mrpc": ("accuracy", "90.15 / 89.42 / 89.69 / 89.82", "90.44 / 90.79 / 90.86 / 90.22", 1e-4, 20),
    "qqp": ("accuracy", "87.61 / 88.57 / 88.70 / 88.83", "87.90 / 88.70 / 89.18 / 89.38", 3e-4, 10),
    "stsb": ("correlation", "90.15 / 89.19 / 88.79 / 89.50", "90.85 / 90.94 / 90.87 / 90.85", 1e-4, 20),
    "mnli": ("accuracy (matched)", "88.18 / 89.15 / 89.78 / 89.86", "88.35 / 88.26 / 89.68 / 89.69", 3e-4, 10),
    "qnli": ("accuracy", "93.06 / 93.32 / 93.53 / 93.56", "92.76 / 93.29 / 93.53 / 93.58", 3e-4, 10),
    "rte": ("accuracy", "78.80 / 78.27 / 80.39 / 80.37", "78.05 / 79.10 / 82.00 / 81.82", 1.2e-3, 50),
}


def glue_minilm() -> Recipe:
    """MiniLM, a sentence encoder of 22.6M parameters, on the task of GLUE whose folder --source is.

    Command: `nlr compare glue-minilm --source FOLDER`, or `nlr finetune glue-minilm --source FOLDER`, where
    FOLDER holds GLUE's .tsv files; without --source they come from the hub. Of a folder of several tasks, and of the
    hub's, it is CoLA; `--glue.task stsb` chooses another.
    Hardware: 2 CPU cores, 2 GB of memory; pip install 'nonlinear-lowrank[demo]' brings the encoder.
    Time: about 4 minutes of one AVX2 core an arm and seed, for CoLA's 3 epochs; the whole grid is many hours.
    Expect: a Matthews correlation of 0.18 to 0.22 on CoLA's development set (n = 3, studies/glue_minilm; most other
    arms 0.08 to 0.16), far below what large encoders reach (0.66 to 0.69): it shows the arms side by side, at equal
    numbers of parameters.
    """
    grid = "omega=200,grid=3e-4/1e-3/3e-3"
    return named(
        Recipe,
        "glue-minilm",
        task=GlueTask(
            glue=GlueData(task="auto", max_length=128),
            model=Pretrained(checkpoint="minilm", targets=("query", "value")),
        ),
        arm="sine-lora:r=4,omega=200,lr=1e-3",
        train=_training(epochs=3, lr=1e-3, head_lr=1e-3, group_by_length=True, log_every=20),
        arms=(
            *("lora:r=1", "lora:r=4", f"sine-lora:r=1,{grid}", f"sine-lora:r=4,{grid}", "dora:r=1"),
            *(f"sine-dora:r=1,{grid}", "peanut:r=1", "nora:r=2,groups=8", "nora++:r=2,groups=8,lora_r=1", "head"),
        ),
        tune_lr=(3e-4, 1e-3, 3e-3),
    )


def _published(task: str, metric: str, lora: str, sine_lora: str, lr: float, epochs: int) -> Callable[[], Recipe]:
    """Make the recipe of a task: rank 1, 2, 4, 8 on q and v, omega 200. Batch and warm-up are not printed.

    The whole training set is used, and the development set is what is scored, as is usual: a best step is then
    chosen on the scored examples, and the report says so. `--held-out 0.1` holds some out instead.
    """

    def recipe() -> Recipe:
        ranks = (1, 2, 4, 8)
        return named(
            Recipe,
            f"glue-{task}",
            task=GlueTask(
                glue=GlueData(task=task, max_length=256, held_out=0.0),
                model=Pretrained(checkpoint="microsoft/deberta-v3-base", targets=("query_proj", "value_proj")),
            ),
            arm="sine-lora:r=4,omega=200",
            train=_training(epochs=epochs, lr=lr, bf16=True, log_every=50),
            arms=(*(f"lora:r={r}" for r in ranks), *(f"sine-lora:r={r},omega=200" for r in ranks)),
        )

    recipe.__doc__ = f"""DeBERTa-v3-base on {GLUE[task].folder}, as published.

    Command: `nlr finetune glue-{task}`, or `nlr compare glue-{task}`; other ranks by `--arm sine-lora:r=1,omega=200`.
    Hardware: one GPU of 16 GB.
    Time: not measured by us.
    Expect: the paper's {metric}, LoRA {lora} at rank 1 / 2 / 4 / 8, sine-LoRA
    {sine_lora} (Table 1). Not repeated by us.
    """
    return recipe


def _training(**settings: Any) -> TrainConfig:
    return TrainConfig(batch_size=32, weight_decay=0.0, betas=(0.9, 0.999), warmup_share=0.06, **EACH_EPOCH, **settings)


globals().update({f"glue_{task}": _published(task, *row) for task, row in _PUBLISHED.items()})
