"""NoRA on a small vision transformer: Tables 1, 3, 4, 5 and Figure 2 of nora.txt in small.

    python -m studies.nora_vit.run CIFAR MNIST [--stage STAGE|all] [--work FOLDER]

A vision transformer of the size of ViT-Tiny (12 layers, width 192; 32 pixels in patches of 8) is trained on CIFAR-10
by `pretrain`, and adapted to handwritten digits: 900 images to train on, 100 to choose on, 2,000 to score. CIFAR
and MNIST are .npz files as `nlr finetune --source` takes them. Stages:

    pretrain     all weights on CIFAR-10, 5 epochs, cropped and mirrored; one seed
    methods      Table 1: all weights, the new head alone, LoRA and DoRA on all linears, NoRA, NoRA++
    groups       Figure 2: NoRA at rank 3 with 8, 16, 32 and 64 groups
    start        the shift's first draw and scale: "N(0, 0.02)" as a standard deviation (NORA's) or a variance, and the
                 parametrisation of the authors' code; two of them also fitted on [-3, 3]
    activations  Table 3: other learnable activations
    tuning       Tables 4 and 5: other ways to train rational ones, one side alone

The head of every arm is new, from one draw, and learns at 3e-2; the arm `head` is that head alone, at its own rate.
Every arm's own learning rate is the best of three on one seed, judged on held-out images (at the edge of its grid the
grid is extended, at most twice); then three other seeds. Finished runs are kept in FOLDER and used again; records,
reports and pictures are copied beside this file.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

from nlr_lab.tasks.finetune.classification import ImageData, ImageTask
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
LOW = "grid=1e-4/3e-4/1e-3"  # of arms that train many numbers
NORA = "nora:r=2,groups=8"
# A head alone is best at 0.1; at 3e-3 it holds every arm back that changes little else.
HEAD_LR = 3e-2
STAGES = {
    "methods": (
        f"lora:r=8,lora_alpha=16,{LOW}",
        f"dora:r=8,lora_alpha=16,{LOW}",
        f"full:{LOW}",
        "head:grid=1e-2/3e-2/1e-1",
        NORA,
        f"nora++:r=2,groups=8,lora_r=8,lora_alpha=16,{LOW}",
    ),
    "groups": tuple(f"nora:r=3,groups={groups}" for groups in (8, 16, 32, 64)),
    "start": (
        NORA,
        "nora:r=2,groups=8,init_std=0.1414,name=std-0.14",
        "nora:r=3,groups=8,tuning=shared,name=released",
        "nora:r=2,groups=8,fit_range=3,name=range-3",
        "nora:r=3,groups=8,tuning=shared,fit_range=3,name=released-range-3",
    ),
    "activations": (NORA, *(f"activations:{name},name={name}" for name in ("prelu", "arelu", "elu"))),
    "tuning": (
        NORA,
        *(f"nora:groups=8,tuning={tuning}" for tuning in ("rational", "zero_init", "gelu_init", "constants")),
        "nora:r=2,groups=8,numerator_only=true,name=numerator-only",
        "nora:r=2,groups=8,denominator_only=true,name=denominator-only",
    ),
}


def pretrained(source: Path, threads: int, work: Path) -> Path:
    """The model that is adapted, trained now unless it is there."""
    start, out = work / "random", work / "pretrained"
    if not (start / "config.json").is_file():
        torch.manual_seed(0)
        config = ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=12,
            num_attention_heads=3,
        )
        ViTForImageClassification(config).save_pretrained(start)
    recipe = Recipe(
        name="nora-vit-pretrain",
        task=ImageTask(
            images=ImageData(source=str(source), augment="crop-flip"), model=Pretrained(checkpoint=str(start))
        ),
        arm=Arm.parse("full"),
        train=TrainConfig(
            epochs=5,
            batch_size=64,
            lr=1e-3,
            weight_decay=0.05,
            betas=(0.9, 0.999),
            warmup_share=0.1,
            schedule="cosine",
            eval_every=0,
            save_every=0,
            log_every=50,
            tracker="none",
            threads=threads,
            eval_batch_size=250,
        ),
    )
    result = run_training(recipe, out, resume=out.exists())
    print(f"pretrained on {source}: {result.metric} {result.score:.4f}")
    return out / "model"


def stage(name: str, checkpoint: Path, source: Path, seeds: int, threads: int, work: Path) -> None:
    """One table."""
    recipe = Recipe(
        name=f"nora-vit-{name}",
        description="a ViT of Tiny's size, trained on CIFAR-10, on handwritten digits",
        task=ImageTask(
            images=ImageData(source=str(source), train_rows=1000),
            model=Pretrained(checkpoint=str(checkpoint), targets=LINEARS),
        ),
        train=TrainConfig(
            epochs=5,
            batch_size=32,
            lr=1e-3,
            head_lr=HEAD_LR,
            weight_decay=0.05,
            betas=(0.9, 0.999),
            warmup_share=0.1,
            schedule="cosine",
            eval_every=0,
            save_every=0,
            log_every=10,
            tracker="none",
            threads=threads,
            eval_batch_size=250,
        ),
    )
    run_study(
        recipe,
        work / name,
        HERE,
        name,
        arms=[Arm.parse(text) for text in STAGES[name]],
        seeds=seeds,
        tune_lr=(1e-3, 3e-3, 1e-2),
        timing_rounds=0,
        max_extensions=2,
        command=f"python -m studies.nora_vit.run CIFAR MNIST --stage {name} --seeds {seeds}",
    )


def main() -> None:
    parser = study_parser(__doc__, "nora_vit", "cifar", "mnist")
    parser.add_argument("--stage", choices=("pretrain", *STAGES, "all"), default="all")
    arguments = parser.parse_args()
    chosen: Any = STAGES if arguments.stage == "all" else [arguments.stage] if arguments.stage in STAGES else []
    with one_line_errors():
        checkpoint = pretrained(arguments.cifar, arguments.threads, arguments.work)
        for name in chosen:
            stage(name, checkpoint, arguments.mnist, arguments.seeds, arguments.threads, arguments.work)


if __name__ == "__main__":
    main()
