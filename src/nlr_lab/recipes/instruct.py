"""Instruction tuning of language models: small on one that `nlr train` made, and the published Llama-3-8B
settings (sine_lowrank.txt, Tables 2, 5, 7, 8; nora.txt, Table 2 and appendix C).

The loss is on the answers alone. bf16, activation checkpointing and the learning rate are set here, not taken
from any trainer's defaults.
"""

from typing import Any

from nlr_lab.tasks.finetune.instructions import InstructionData, InstructionTask
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import EACH_EPOCH, named

_LLAMA = "meta-llama/Meta-Llama-3-8B"
_LARGE = {"bf16": True, "gradient_checkpointing": True}
_FIVE = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")


def instruct_small() -> Recipe:
    """A language model that `nlr train` made learns to write docstrings (or any instructions, `--source FILE`).

    Command: `nlr train llm-demo`, then `nlr finetune instruct-small` or `nlr compare instruct-small`; another
    model by `--checkpoint FOLDER`, other instructions by `--source alpaca.json`.
    Hardware: 2 CPU cores, 2 GB of memory, no network.
    Time: about a minute an arm and seed with the model of llm-demo.
    Expect: with that model, an answer loss that falls by some tenths of a nat a token from where it starts. The
    model is far too small to follow instructions: this shows the arms side by side.
    """
    return named(
        Recipe,
        "instruct-small",
        task=InstructionTask(
            instructions=InstructionData(source="stdlib", rows=1500, max_length=128, eval_rows=64),
            model=Pretrained(checkpoint="runs/llm-demo", targets=("q_proj", "v_proj")),
        ),
        arm="sine-lora:r=4,omega=200,lr=3e-4",
        train=_training(epochs=2, batch_size=16, lr=2e-3, warmup_share=0.05, eval_every=15, save_every=0, log_every=5),
        arms=("lora:r=4", "dora:r=4", "sine-lora:r=4,omega=200,grid=1e-4/3e-4/1e-3", "full"),
        tune_lr=(1e-3, 3e-3, 1e-2),
    )


def llama3_commonsense() -> Recipe:
    """Llama-3-8B on commonsense-170k, as published: sine-LoRA at rank 4 to 32, sine-DoRA at rank 8 to 32.

    Command: `nlr finetune llama3-commonsense --arm sine-lora:r=8,omega=600`, then the eight tests by
    `nlr evaluate`; a local file by `--source commonsense_170k.json`.
    Hardware: one GPU of 80 GB.
    Time: the paper's hours on one H100: LoRA 6, sine-LoRA 7, DoRA and sine-DoRA 11.
    Expect: the paper's mean over eight tests, LoRA 80.04 / 80.79 / 82.90 / 80.82 at rank 4 / 8 / 16 / 32, sine-LoRA
    83.61 / 83.66 / 84.35 / 83.56 (Table 2); DoRA 83.8 / 85.0 / 85.2 at rank 8 / 16 / 32, sine-DoRA 85.2 / 85.3 / 85.3
    (Table 7). Not repeated by us.
    """
    sine_lora, sine_dora = ((4, 800), (8, 600), (16, 200), (32, 200)), ((8, 300), (16, 150), (32, 100))
    return named(
        Recipe,
        "llama3-commonsense",
        task=InstructionTask(
            instructions=InstructionData(source="zwhe99/commonsense_170k", max_length=256, held_out=0.01),
            model=Pretrained(checkpoint=_LLAMA, targets=_FIVE, dtype="bfloat16"),
        ),
        arm="sine-lora:r=8,omega=600,lora_alpha=16",
        # Batch, warm-up, alpha = 2 r and dropout are those of the DoRA code, which the paper says it follows.
        train=_training(**_LARGE, epochs=3, batch_size=16, lr=1e-4, warmup_steps=100, eval_every=1000, log_every=50),
        arms=(
            *(f"lora:r={r},lora_alpha={2 * r},lora_dropout=0.05" for r in (4, 8, 16, 32)),
            *(f"sine-lora:r={r},omega={w},lora_alpha={2 * r}" for r, w in sine_lora),
            *(f"dora:r={r},lora_alpha={2 * r},lora_dropout=0.05" for r in (8, 16, 32)),
            *(f"sine-dora:r={r},omega={w},lora_alpha={2 * r},lr=6e-05" for r, w in sine_dora),
        ),
        seeds=1,
    )


def llama3_alpaca() -> Recipe:
    """Llama-3-8B on 1,000 rows of Alpaca, as published for NoRA++ (cut at 1,024 tokens).

    Command: `nlr finetune llama3-alpaca --arm nora++:r=2,groups=8,lora_r=8`, then MMLU 5-shot by `nlr evaluate`.
    Hardware: one GPU of 80 GB.
    Time: not measured by us.
    Expect: the paper's mean MMLU, 62.8 for LoRA and 63.6 for NoRA++ (Table 2). Not repeated by us; the paper
    prints neither learning rate nor epochs, so those of its training tool's examples (1e-4, 3 epochs) are used.
    """
    settings = {"gradient_accumulation": 8, "warmup_share": 0.1, "schedule": "cosine", "log_every": 5}
    return named(
        Recipe,
        "llama3-alpaca",
        task=InstructionTask(
            instructions=InstructionData(source="tatsu-lab/alpaca", rows=1000, max_length=1024),
            model=Pretrained(checkpoint=_LLAMA, targets=_FIVE, dtype="bfloat16"),
        ),
        arm="nora++:r=2,groups=8,lora_r=8",
        train=_training(**_LARGE, **EACH_EPOCH, epochs=3, batch_size=8, lr=1e-4, **settings),
        arms=("lora:r=8", "nora++:r=2,groups=8,lora_r=8"),
    )


def _training(**settings: Any) -> TrainConfig:
    return TrainConfig(weight_decay=0.0, betas=(0.9, 0.999), **settings)
