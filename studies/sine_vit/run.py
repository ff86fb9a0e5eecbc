"""Sine low-rank weights on a vision transformer, rank x omega: Figure 4 and Table 10 of sine_lowrank.txt in small.

    python -m studies.sine_vit.run CIFAR [--size cpu|gpu] [--stage k1|k5|k20|all] [--seeds N] [--threads N]
                                         [--work FOLDER]

CIFAR is CIFAR-10 as a .npz file (also .npz.xz), as `nlr train --source` takes it. Both linears of every MLP are
factored. Each stage is a rank: the dense model, plain low rank at both Kaiming inits, the sine at three frequencies,
and at the lowest of them with the wider init; at rank 1 also the ReLU and the sigmoid of the product. (Every frequency
is shown, none is chosen by the scored images.)

Each arm's learning rate is the best of three on seed 0, judged on held-out training images (at the edge of its grid
the grid grows, at most twice), then three other seeds. Finished runs are kept in FOLDER and used again; records,
reports and pictures are copied beside this file. `--smoke` takes a few steps of everything and copies nothing.
"""

from dataclasses import replace
from pathlib import Path

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask, VitBackbone
from nlr_lab.tasks.images.sources import ImageSource
from nlr_lab.training import Arm, Recipe, TrainConfig
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
MLPS = r"include=.*mlp\.fc[12]"
RANKS = {"k1": 1, "k5": 5, "k20": 20}
OMEGAS = (100, 300, 500)
RATES = {"cpu": (1e-3, 3e-3, 9e-3), "gpu": (3e-4, 1e-3, 3e-3)}


def recipe(source: Path, size: str, threads: int | None) -> Recipe:
    """The setting of all stages."""
    small = size == "cpu"
    images = ImageSource(
        source=str(source), size=32, train_rows=10_000 if small else None, test_rows=2000 if small else None
    )
    if small:
        backbone = VitBackbone(layers=4, width=96, heads=3, hidden=384, patch=8)
        train = TrainConfig(epochs=3, batch_size=64, lr=1e-3, eval_every=0, save_every=0)
    else:
        backbone = VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=4)
        train = TrainConfig(epochs=200, batch_size=512, lr=1e-3, eval_every=0, save_every=0)
        train = replace(train, bf16=True, compile=True, dataloader_workers=12)
    return Recipe(
        name=f"sine_vit-{size}",
        description=f"a ViT of width {backbone.width} and {backbone.layers} layers from scratch on CIFAR-10",
        task=ImagePretrainingTask(
            images=images,
            backbone=backbone,
            augmentation=Augmentation(crop="shift", flip=True, randaugment=0, mixup=0.0, cutmix=0.0),
            plain_rows=1000 if small else 5000,
        ),
        train=replace(
            train,
            weight_decay=0.05,
            betas=(0.9, 0.999),
            warmup_share=0.05,
            schedule="cosine",
            tracker="none",
            threads=threads,
            eval_batch_size=250,
        ),
    )


def arms(rank: int) -> list[Arm]:
    """Baselines first."""
    low, wide = f"rank={rank},{MLPS}", "init=kaiming_zero"
    others = [f"relu-low-rank:{low},name=relu", f"sigmoid-low-rank:{low},omega={OMEGAS[1]},name=sigmoid-{OMEGAS[1]}"]
    texts = [
        "baseline",
        f"low-rank:{low},name=low-rank",
        f"low-rank:{low},{wide},name=low-rank-wide",
        *(others if rank == 1 else ()),
        *(f"sine-lowrank:{low},omega={omega},name=sine-{omega}" for omega in OMEGAS),
        f"sine-lowrank:{low},omega={OMEGAS[0]},{wide},name=sine-{OMEGAS[0]}-wide",
    ]
    return [Arm.parse(text) for text in texts]


def main() -> None:
    parser = study_parser(__doc__, "sine_vit", "cifar", sized=True)
    parser.add_argument("--stage", choices=(*RANKS, "all"), default="all")
    given = parser.parse_args()
    base = recipe(given.cifar, given.size, given.threads if given.size == "cpu" else None)
    for stage in RANKS if given.stage == "all" else [given.stage]:
        name = f"{given.size}-{stage}"
        with one_line_errors(stage):
            run_study(
                base,
                given.work / name,
                HERE,
                name,
                smoke=given.smoke,
                arms=arms(RANKS[stage]),
                seeds=given.seeds,
                tune_lr=RATES[given.size],
                timing_rounds=30 if stage == "k5" else 0,
                max_extensions=2,
                command=f"python -m studies.sine_vit.run CIFAR --size {given.size} --stage {stage} "
                f"--seeds {given.seeds}",
            )


if __name__ == "__main__":
    main()
