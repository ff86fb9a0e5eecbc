"""NOBLE on a vision transformer with and without Mixup and CutMix: Table 3 of noble.txt (section 4.2.1) in small.

    python -m studies.vit_small.run CIFAR [--size cpu|gpu] [--stage mixed|plain|all] [--seeds N] [--threads N]
                                          [--work FOLDER]

CIFAR is CIFAR-10 as a .npz file (also .npz.xz), as `nlr train --source` takes it. Stages:

    mixed   RandAugment(2, 9), Mixup 0.8, CutMix 1.0
    plain   RandAugment(2, 9) alone

Each reports accuracy, the training loss as it is trained, and that of training images without any augmentation, which
is what Table 3 is about. Arms: the baseline with three dense inits, a wider baseline with the parameters of NOBLE's
branches, and NOBLE at the paper's width / rank of 6. Each arm's learning rate is the best of three on seed 0, judged on
held-out training images (at the edge of its grid the grid grows, at most twice), then three other seeds. Finished runs
are kept in FOLDER and used again; records, reports and pictures are copied beside this file. `--smoke` takes a few
steps of everything and copies nothing.
"""

from dataclasses import replace
from pathlib import Path

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask, VitBackbone
from nlr_lab.tasks.images.sources import ImageSource
from nlr_lab.training import Recipe, TrainConfig
from studies.study import noble_arms, one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
STAGES = {"mixed": {"mixup": 0.8, "cutmix": 1.0}, "plain": {"mixup": 0.0, "cutmix": 0.0}}
RANK = {"cpu": 16, "gpu": 64}
RATES = {"cpu": (1e-3, 2e-3, 4e-3), "gpu": (3e-4, 6e-4, 1.2e-3)}
# The branches have the parameters of so much more MLP: (its width) / (the model's).
WIDER = {"cpu": 5.594, "gpu": 5.586}


def recipe(source: Path, size: str, stage: str, threads: int | None) -> Recipe:
    """The setting of a stage."""
    small = size == "cpu"
    images = ImageSource(
        source=str(source), size=32, train_rows=10_000 if small else None, test_rows=2000 if small else None
    )
    if small:
        backbone = VitBackbone(layers=4, width=96, heads=3, hidden=384, patch=8)
        train = TrainConfig(epochs=5, batch_size=64, lr=2e-3, eval_every=0, save_every=0)
    else:
        backbone = VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=4)
        train = TrainConfig(epochs=90, batch_size=512, lr=6e-4, eval_every=0, save_every=0)
        train = replace(train, bf16=True, compile=True, dataloader_workers=12)
    return Recipe(
        name=f"vit_small-{size}-{stage}",
        description=f"a ViT of width {backbone.width} and {backbone.layers} layers from scratch on CIFAR-10",
        task=ImagePretrainingTask(
            images=images,
            backbone=backbone,
            augmentation=Augmentation(crop="shift", flip=True, **STAGES[stage]),
            plain_rows=1000 if small else 5000,
        ),
        train=replace(
            train,
            weight_decay=0.05,
            warmup_share=5 / 90,
            schedule="cosine",
            tracker="none",
            threads=threads,
            eval_batch_size=250,
        ),
    )


def main() -> None:
    parser = study_parser(__doc__, "vit_small", "cifar", sized=True)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    given = parser.parse_args()
    for stage in STAGES if given.stage == "all" else [given.stage]:
        base = recipe(given.cifar, given.size, stage, given.threads if given.size == "cpu" else None)
        name = f"{given.size}-{stage}"
        with one_line_errors(stage):
            run_study(
                base,
                given.work / name,
                HERE,
                name,
                smoke=given.smoke,
                arms=noble_arms(WIDER[given.size], [RANK[given.size]]),
                seeds=given.seeds,
                tune_lr=RATES[given.size],
                timing_rounds=30 if stage == "mixed" else 0,
                max_extensions=2,
                command=f"python -m studies.vit_small.run CIFAR --size {given.size} --stage {stage} "
                f"--seeds {given.seeds}",
            )


if __name__ == "__main__":
    main()
