"""Vision transformers with sine low-rank MLPs (sine_lowrank.txt, section 4.2 and appendix A.2.2).

Both linears of every MLP are factored. Beside the sine, at the paper's frequency for the rank, stand the dense model,
the sigmoid and the ReLU of the low-rank product, and plain low rank; sine and plain low rank at both Kaiming inits: the
init moves results as much as the sine does, and the paper names none.
The optimizer's other settings and the augmentation are not printed either; they are those of our ViT recipes.
"""

from ..tasks.image_augmentation import Augmentation
from ..tasks.image_backbones import VitBackbone
from ..tasks.image_data import ImageSource
from ..tasks.image_pretraining import ImagePretrainingTask
from ..training.recipe import Arm, Recipe, TrainConfig
from . import RECIPES

_MLPS = r".*mlp\.fc[12]"


def sine_vit_demo() -> Recipe:
    """A small vision transformer with sine low-rank MLPs, on scikit-learn's embedded digits.

    Command: `nlr compare sine-vit-demo --max-minutes 9`, or `nlr train sine-vit-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.08 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is no evidence.
    """
    return Recipe(
        name="sine-vit-demo",
        description=RECIPES["sine-vit-demo"].summary,
        task=ImagePretrainingTask(
            images=ImageSource(source="digits", size=8),
            backbone=VitBackbone(layers=4, width=64, heads=4, hidden=256, patch=2, channels=1),
            augmentation=Augmentation(crop="shift", randaugment=0, mixup=0.0, cutmix=0.0),
        ),
        arm=weight_arm("sine-lowrank", 2, _MLPS, "omega=300"),
        train=TrainConfig(
            epochs=20,
            batch_size=64,
            lr=2e-3,
            weight_decay=0.05,
            warmup_share=0.05,
            schedule="cosine",
            eval_every=40,
            save_every=200,
            log_every=10,
        ),
        arms=weight_arms(2, 300, _MLPS),
        seeds=3,
    )


def sine_vit_cifar100() -> Recipe:
    """ViT-Small with patches of 4 on CIFAR-100: 21,376,996 parameters, and 7,267,300 at rank 1.

    Command: `nlr compare sine-vit-cifar100`, or `nlr train sine-vit-cifar100`; another rank by its arm, as in
    `nlr train sine-vit-cifar100 --arm 'sine-lowrank:rank=5,omega=500,include=.*mlp\\.fc[12]'`; a local copy by
    `--source cifar100.npz`.
    Hardware: one GPU of 24 GB.
    Time: not measured by us.
    Expect: the paper's top-1 at rank 1 by omega: 55.0 (100), 56.8 (300), 58.1 (500), 57.5 (700). Not repeated by us.
    """
    return Recipe(
        name="sine-vit-cifar100",
        description=RECIPES["sine-vit-cifar100"].summary,
        task=ImagePretrainingTask(
            images=ImageSource(source="uoft-cs/cifar100", size=32),
            backbone=VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=4),
            augmentation=Augmentation(crop="shift", flip=True, randaugment=0, mixup=0.0, cutmix=0.0),
            meta_classes=100,
        ),
        arm=weight_arm("sine-lowrank", 1, _MLPS, "omega=500"),
        train=training(epochs=200, batch_size=512, lr=1e-3),
        arms=weight_arms(1, 500, _MLPS),
        seeds=3,
    )


def sine_vit_base() -> Recipe:
    """ViT-Base with patches of 16 on ImageNet-1k, both linears of every MLP at rank 150.

    Command: `torchrun --nproc-per-node 8 -m nonlinear_lowrank.cli train sine-vit-base`; other ranks by the arm
    (`omega=vit-base-imagenet` takes the paper's frequency for the rank).
    Hardware: the paper's is not printed; several GPUs, and 16 CPU cores for each to decode and vary the images.
    Time: not measured by us.
    Expect: the paper shows curves and prints no numbers for this model. Not repeated by us.
    """
    return Recipe(
        name="sine-vit-base",
        description=RECIPES["sine-vit-base"].summary,
        task=ImagePretrainingTask(
            images=ImageSource(
                source="ILSVRC/imagenet-1k",
                held_out=0.0,
                size=224,
                mean=(0.485, 0.456, 0.406),
                std=(0.229, 0.224, 0.225),
            ),
            backbone=VitBackbone(layers=12, width=768, heads=12, hidden=3072, patch=16),
            augmentation=Augmentation(crop="resized", flip=True),
            shorter=256,
            meta_classes=1000,
        ),
        arm=weight_arm("sine-lowrank", 150, _MLPS, "omega=150"),
        train=training(epochs=300, batch_size=1024, lr=3e-4),
        arms=weight_arms(150, 150, _MLPS),
        seeds=1,
    )


def weight_arm(method: str, rank: int, where: str, *more: str) -> Arm:
    """One arm on the linears that match `where`, named by its settings."""
    words = [each.partition("=")[2] for each in more]
    settings = ",".join((f"rank={rank}", *more, f"include={where}"))
    return Arm.parse(f"{method}:{settings},name={'-'.join((method, f'r{rank}', *words))}")


def weight_arms(rank: int, omega: int, where: str) -> tuple[str, ...]:
    """The dense model; plain low rank and the sine at both inits; sigmoid and ReLU of the low-rank product."""
    other = "init=kaiming_zero"
    low = [weight_arm("low-rank", rank, where, init) for init in ("init=kaiming_sqrt5", other)]
    controls = [
        weight_arm("sigmoid-low-rank", rank, where, f"omega={omega}"),
        weight_arm("relu-low-rank", rank, where),
    ]
    sine = [weight_arm("sine-lowrank", rank, where, f"omega={omega}", *more) for more in ((), (other,))]
    return ("baseline", *map(str, (*low, *controls, *sine)))


def training(*, epochs: float, batch_size: int, lr: float) -> TrainConfig:
    """What the paper's sizes share here."""
    return TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=0.05,
        betas=(0.9, 0.999),
        warmup_share=0.025,
        schedule="cosine",
        bf16=True,
        compile=True,
        eval_every=0,
        save_every=0,
        log_every=50,
        dataloader_workers=16,
    )
